
# Attached disks, as GUEST/DEV, where a command takes one.
_ferrite_with_disks() {
    _ferrite "$@"
    local current=${COMP_WORDS[COMP_CWORD]} disks
    [[ $current == -* ]] && return
    case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
    "disk show" | "disk detach" | "disk wait" | "upgrade "* | "stat "* | "top "* | "trace record") ;;
    *) return ;;
    esac
    disks=$(ferrite disk list 2>/dev/null | awk 'NR > 1 && /^[0-9]/ { print $2 }')
    COMPREPLY+=($(compgen -W "$disks" -- "$current"))
}
complete -F _ferrite_with_disks -o nosort -o bashdefault -o default ferrite
