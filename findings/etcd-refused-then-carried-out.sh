#!/usr/bin/env bash
# Finding: etcd carries out a transaction that it has answered with HTTP 503.
# Version: etcd 3.4.23 (Debian 12, etcd-server 3.4.23-4+b4 or a later build of it; pinned below by version).
# Seen: "503, absent, then made" for a transaction sent while two of three servers were stopped.
set -euo pipefail

# HTTP 503 and gRPC's "unavailable" are commonly taken for "not done, try again". etcd says them, too, when its leader cannot
# reach a quorum in time. The entry stays in the leader's log then.
#
# Guessed before the first run: it is carried out once there is a quorum again; a note on 3.5.16 said so of that version.
# Seen: as guessed. The key is absent while there is no quorum, and exists as soon as there is one, without another request.
# So "read the key again" proves nothing after a 503. A client settles it by another transaction with the same comparison: if
# that one wins, the first is lost for ever.
#
# Needs curl, python3 and Debian's package archive. Ends with 1 if the behaviour has changed.

for tool in curl python3 apt-get dpkg-deb; do command -v $tool > /dev/null || { echo "$tool is missing"; exit 1; }; done
dir=$(mktemp -d); pids=(); trap 'kill -9 "${pids[@]}" 2> /dev/null || true; wait 2> /dev/null || true; rm -rf "$dir"' EXIT; cd "$dir"
chmod 755 .
version=$(apt-cache madison etcd-server | awk '$3 ~ /^3\.4\.23/ {print $3; exit}')
[ -n "$version" ] || { echo "etcd-server 3.4.23 is not in the package archive"; exit 1; }
apt-get download -qq "etcd-server=$version"
dpkg-deb -x etcd-server_*.deb .
./usr/bin/etcd --version | head -n 1
read -r -a ports < <(python3 - <<'P'
import socket
all = [socket.socket() for _ in range(6)]
for s in all: s.bind(('127.0.0.1', 0))
print(*[s.getsockname()[1] for s in all])
P
)
cluster=$(for i in 0 1 2; do printf 'n%d=http://127.0.0.1:%d,' $i "${ports[$((i + 3))]}"; done)
for i in 0 1 2; do
    client=http://127.0.0.1:${ports[$i]} peer=http://127.0.0.1:${ports[$((i + 3))]}
    ./usr/bin/etcd --name n$i --data-dir d$i --listen-client-urls $client --advertise-client-urls $client \
        --listen-peer-urls $peer --initial-advertise-peer-urls $peer --initial-cluster "${cluster%,}" > log$i 2>&1 &
    pids+=($!)
done
ask() { curl -s -m 20 -o body -w '%{http_code}' "http://127.0.0.1:${ports[$1]}/v3/$2" -d "$3"; }
for _ in $(seq 100); do [ "$(ask 0 kv/range '{"key":"YQ=="}')" = 200 ] && break; sleep 0.3; done
# The server that leads: its own identifier is that of the leader.
leader=$(for i in 0 1 2; do
    ask $i maintenance/status '{}' > /dev/null
    python3 -c 'import json; s = json.load(open("body")); print(s["leader"] == s["header"]["member_id"])' | grep -q True && echo $i
done)
others=$(for i in 0 1 2; do [ $i = $leader ] || echo $i; done)
for i in $others; do kill -STOP "${pids[$i]}"; done
# "disk" is made if it does not exist.
status=$(ask $leader kv/txn '{"compare":[{"key":"ZGlzaw==","target":"MOD","result":"EQUAL","mod_revision":"0"}],
    "success":[{"request_put":{"key":"ZGlzaw==","value":"bWFkZQ=="}}],"failure":[]}')
cat body; echo
ask $leader kv/range '{"key":"ZGlzaw==","serializable":true}' > /dev/null
before=absent; grep -q '"kvs"' body && before=there
for i in $others; do kill -CONT "${pids[$i]}"; done
after=absent
for _ in $(seq 100); do
    ask $leader kv/range '{"key":"ZGlzaw=="}' > /dev/null
    if grep -q '"value":"bWFkZQ=="' body; then after=made; break; fi
    sleep 0.2
done
echo "$status, $before, then $after"
[ "$status, $before, then $after" = "503, absent, then made" ]
