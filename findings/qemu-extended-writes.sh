#!/usr/bin/env bash
# Finding: QEMU's NBD client takes extended heads, and then writes without the flag that says that data follow.
# Versions: qemu-utils 1:10.0.13+ds-0+deb13u1 (Debian 13, pinned below).
# Seen: a write of 4,096 bytes comes with flags 0 and 4,096 bytes of data. With FUA its flags are 1.
set -euo pipefail

# With extended heads (NBD_OPT_EXTENDED_HEADERS) a request's length may be that of its data or that of its effect. The
# flag NBD_CMD_FLAG_PAYLOAD_LEN (bit 5) says that it is that of data, and the protocol wants it on each NBD_CMD_WRITE.
#
# Guessed before the first run: QEMU, whose developers wrote that part of the protocol, sets it.
# Seen: it does not. A server that goes by the flag takes the data for further requests: all writes of QEMU fail, and
#       the data of its guest are read as commands. QEMU's own server tolerates it.
# So take a WRITE for one with data, whatever its flags are.
#
# Needs python3, apt-get, dpkg, and Debian 13's packages where this machine gets its own. Ends with 1 if the behaviour has
# changed.

dir=$(mktemp -d); cd "$dir"
trap 'kill "$server" 2> /dev/null || true; rm -rf "$dir"' EXIT
server=
# Debian 13's packages in folders of their own; nothing is installed.
mkdir -p apt/lists/partial apt/cache/archives/partial root
cat /etc/apt/sources.list.d/debian.sources > apt/debian.sources
sed -i -E 's/^Suites: [a-z]+-security/Suites: trixie-security/; s/^Suites: [a-z]+ [a-z]+-updates/Suites: trixie trixie-updates/' \
    apt/debian.sources
: > apt/status
its_apt() {
    apt-get -qq -o Dir::Etc::sourcelist="$dir/apt/debian.sources" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$dir/apt/lists" -o Dir::State::status="$dir/apt/status" \
        -o Dir::Cache="$dir/apt/cache" -o APT::Architecture=amd64 -o APT::Sandbox::User=root "$@"
}
its_apt update
its_apt --download-only --no-install-recommends -y install qemu-utils=1:10.0.13+ds-0+deb13u1 > /dev/null
for package in apt/cache/archives/*.deb; do dpkg -x "$package" root; done

cat > server.py <<'P'
import socket, struct
GO, STRUCTURED, META, EXTENDED = 7, 8, 10, 11
WRITE, DISCONNECT = 1, 2

def take(s, n):
    data = b''
    while len(data) < n:
        some = s.recv(n - len(data))
        if not some:
            raise SystemExit
        data += some
    return data

listener = socket.socket(socket.AF_UNIX)
listener.bind('socket')
listener.listen()
s, _ = listener.accept()
s.sendall(b'NBDMAGICIHAVEOPT' + struct.pack('>H', 3))
take(s, 4)
option = None
while option != GO:
    _, option, length = struct.unpack('>QII', take(s, 16))
    take(s, length)
    def answer(kind, data=b''):
        s.sendall(struct.pack('>QIII', 0x3e889045565a9, option, kind, len(data)) + data)
    if option == GO:
        # 1 MiB; flush and FUA.
        answer(3, struct.pack('>HQH', 0, 1 << 20, 0xd))
    answer(1 if option in (GO, STRUCTURED, META, EXTENDED) else 1 << 31 | 1)
while True:
    magic, flags, command, cookie, offset, length = struct.unpack('>IHHQQQ', take(s, 32))
    assert magic == 0x21e41c71, hex(magic)
    if command == DISCONNECT:
        break
    if command == WRITE:
        data = take(s, length)
        print(f'write of {length} bytes: flags {flags:#x}, data of {len(set(data))} kind: {data[0]:#x}', flush=True)
    s.sendall(struct.pack('>IHHQQQ', 0x6e8a278c, 1, 0, cookie, offset, 0))
P
python3 server.py > seen & server=$!
for _ in $(seq 50); do [ -S socket ] && break; sleep 0.1; done
lib=$dir/root/usr/lib/x86_64-linux-gnu
"$lib/ld-linux-x86-64.so.2" --library-path "$lib" root/usr/bin/qemu-io -t writeback -f raw \
    -c 'write -q -P 0x5a 0 4096' -c 'write -q -f -P 0x5b 8192 512' "nbd+unix:///?socket=$dir/socket"
wait "$server"
cat seen
cat > expected <<'X'
write of 4096 bytes: flags 0x0, data of 1 kind: 0x5a
write of 512 bytes: flags 0x1, data of 1 kind: 0x5b
X
diff expected seen
echo "as seen before: QEMU writes with extended heads, and without the flag of data"
