#!/bin/bash
# Runs the host's commands. In: "ID SECONDS COMMAND" on one line, backslash and newline escaped.
# Out: "ID STATUS LENGTH", a newline, then LENGTH bytes of standard output and error together.
exec 3<>"$1"
run() {
    local command status
    printf -v command %b "$3"
    timeout -k 2 "$2" bash -c "$command" >"/run/agent/$1" 2>&1 </dev/null 3>&-
    status=$?
    exec 9>/run/agent/lock
    flock 9
    # The length is that of what is sent, even when a background process still writes to the file.
    cp "/run/agent/$1" "/run/agent/$1.out"
    printf '%s %s %s\n' "$1" "$status" "$(stat -c %s "/run/agent/$1.out")" >&3
    cat "/run/agent/$1.out" >&3
    rm -f "/run/agent/$1" "/run/agent/$1.out"
}
echo ready >&3
while true; do
    # Each command in a process of its own: one that hangs does not take the lab with it.
    while read -r id limit rest <&3; do run "$id" "$limit" "$rest" & done
    sleep 0.5
done
