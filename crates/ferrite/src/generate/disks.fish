
# Attached disks, as GUEST/DEV, where a command takes one.
complete -c ferrite -n "__fish_seen_subcommand_from show detach wait upgrade stat top record" -f \
    -a "(ferrite disk list 2>/dev/null | awk 'NR > 1 && /^[0-9]/ { print \$2 }')"
