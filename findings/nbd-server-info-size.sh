#!/usr/bin/env bash
# Finding: nbd-server answers NBD_OPT_INFO with a size of 0 for every export, and NBD_OPT_GO with the right one.
# Versions: nbd-server 1:3.24-1.1 (Debian 12, pinned below).
# Seen: size 0 by INFO, 1048576 by GO, for a writable and for a read-only export. Flags are right in both.
set -euo pipefail

# A client learns an export's size from NBD_INFO_EXPORT, which a server sends in its answer to NBD_OPT_INFO (a question) and
# to NBD_OPT_GO (the same question, and data follow). The protocol has both give the same information.
#
# Guessed before the first run: both give the size of the file.
# Seen: INFO gives 0, on a connection of its own and on one that goes on with GO. Programs that list a server's exports ask
#       by INFO: `nbdinfo --list` and `qemu-nbd --list` show 0 bytes for each. Programs that use a disk
#       ask by GO, and get the right size.
# So take no size from a list of nbd-server's exports, and no size of 0 for an empty disk.
#
# Needs python3, apt-get and dpkg. Ends with 1 if the behaviour has changed.

dir=$(mktemp -d); cd "$dir"
trap 'kill "$(cat "$dir/pid")" 2> /dev/null || true; rm -rf "$dir"' EXIT
chmod 755 .
apt-get -qq download nbd-server=1:3.24-1.1 2> /dev/null
dpkg -x nbd-server_*.deb p
truncate -s 1M disk.img
cat > config <<C
[generic]
unixsock=$dir/socket
[writable]
exportname=$dir/disk.img
[fixed]
exportname=$dir/disk.img
readonly=true
C
p/bin/nbd-server -C "$dir/config" -p "$dir/pid"
for _ in $(seq 50); do [ -S socket ] && break; sleep 0.1; done
cat > ask.py <<'P'
import socket, struct
OPTIONS = {'INFO': 6, 'GO': 7}
ACK, INFO, INFO_EXPORT = 1, 3, 0

def take(s, n):
    data = b''
    while len(data) < n:
        some = s.recv(n - len(data))
        assert some, 'the server has closed the connection'
        data += some
    return data

def ask(s, option, name):
    """The size and the flags that the server says for an export."""
    data = struct.pack('>I', len(name)) + name + struct.pack('>H', 0)
    s.sendall(b'IHAVEOPT' + struct.pack('>II', option, len(data)) + data)
    said = None
    while True:
        _, _, kind, length = struct.unpack('>QIII', take(s, 20))
        body = take(s, length)
        if kind == INFO and struct.unpack('>H', body[:2])[0] == INFO_EXPORT:
            said = struct.unpack('>QH', body[2:12])
        if kind == ACK:
            return said
        assert kind == INFO, hex(kind)

for name in (b'writable', b'fixed'):
    for options in (['INFO', 'GO'], ['GO']):
        s = socket.socket(socket.AF_UNIX)
        s.connect('socket')
        take(s, 18)
        s.sendall(struct.pack('>I', 3))
        for option in options:
            size, flags = ask(s, OPTIONS[option], name)
            print(f'{name.decode()}, {option} of {"+".join(options)}: size {size}, read-only {flags >> 1 & 1}')
        s.close()
P
python3 ask.py | tee seen
cat > expected <<'X'
writable, INFO of INFO+GO: size 0, read-only 0
writable, GO of INFO+GO: size 1048576, read-only 0
writable, GO of GO: size 1048576, read-only 0
fixed, INFO of INFO+GO: size 0, read-only 1
fixed, GO of INFO+GO: size 1048576, read-only 1
fixed, GO of GO: size 1048576, read-only 1
X
diff expected seen
echo "as seen before: nbd-server says by INFO that each export is empty"
