#!/bin/bash
# Runs the host's commands. In: "ID SECONDS COMMAND" on one line, backslash and newline escaped.
# Out: "ID STATUS LENGTH", a newline, then LENGTH bytes of standard output and error together.
# Shell builtins only: under emulation each program started costs a tenth of a second and more.
exec 3<>"$1"
mkfifo /run/agent.done
exec 4<>/run/agent.done
# Job control: each command gets a process group, so that all of it can be ended.
set -m
echo ready >&3
while true; do
    while read -r id limit rest <&3; do
        printf -v command %b "$rest"
        ( (set +m; eval "$command") >/run/agent.out 2>&1 </dev/null 3>&- 4>&-; echo "$id $?" >&4 ) &
        group=$!
        status=
        deadline=$((SECONDS + limit))
        while [ -z "$status" ]; do
            left=$((deadline - SECONDS))
            if [ "$left" -le 0 ] || ! read -r -t "$left" done_id done_status <&4; then
                kill -KILL -- "-$group"
                status=124
            elif [ "$done_id" = "$id" ]; then
                status=$done_status
            fi
        done
        wait "$group" 2>/dev/null
        output=$(</run/agent.out)
        printf '%s %s %s\n%s' "$id" "$status" "${#output}" "$output" >&3
    done 2>/dev/null
    read -r -t 0.5 <&4
done
