#!/usr/bin/env bash
# Finding: the size of a VHD depends on the letters of the program that made it, for QEMU only.
# Versions: dissect.hypervisor 3.16, libvhdi-python 20260901 (PyPI, pinned below), qemu-img 7.2.22.
# Seen: 3481600 bytes for "vpc " and "qemu", 4194304 for others and for other readers.
set -euo pipefail

# The size of a VHD depends on the four letters of the program that made it, but only for one reader.
#
# A VHD's footer has its size twice: in bytes (current size), and as cylinders, heads and sectors. The two differ when the
# size is not a whole number of cylinders. The footer also names the program that made the file (creator application).
# These five files are the same but for these letters and the checksum.
#
# Guessed before the first run: libvhdi and dissect always take the bytes; qemu-img takes the geometry for "qemu" and
# "vpc ", and the bytes for the others.
# Seen: as guessed. qemu-img 7.2.22 shows 3481600 bytes for "qemu" and "vpc ", and 4194304 for "win ", "tap" and "d2v ";
#       libvhdi-python 20260901 and dissect.hypervisor 3.16 show 4194304 for all.
# So a program that writes VHDs and signs them as "vpc " loses the end of its disks in QEMU, which reads no byte behind
# the geometry's end and says nothing. Writers: choose letters of your own, never another program's.
#
# Needs python3 with venv, and qemu-img. Ends with 1 if the behaviour has changed.

dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cd "$dir"
python3 -m venv v
v/bin/pip install -q --disable-pip-version-check dissect.hypervisor==3.16 libvhdi-python==20260901
qemu-img --version | head -n 1
cat > ask.py <<'P'
import json, struct, subprocess
import pyvhdi
from dissect.hypervisor.disk import vhd
def with_sum(b, at):
    return b[:at] + struct.pack('>I', ~sum(b) & 0xffffffff) + b[at + 4:]
size, block = 4 << 20, 2 << 20
for made_by in b'vpc ', b'qemu', b'win ', b'tap\0', b'd2v ':
    foot = struct.pack('>8sIIQI4sI4sQQHBBI', b'conectix', 2, 0x10000, 512, 0, made_by, 0x10003, b'Wi2k', size, size, 100, 4, 17, 3)
    foot = with_sum((foot + bytes(4) + bytes(range(16))).ljust(512, b'\0'), 64)
    head = struct.pack('>8sQQIII', b'cxsparse', 2**64 - 1, 1536, 0x10000, size // block, block)
    head = with_sum(head.ljust(1024, b'\0'), 36)
    open('a.vhd', 'wb').write(foot + head + b'\xff' * 512 + foot)
    info = subprocess.run(['qemu-img', 'info', '-f', 'vpc', '--output=json', 'a.vhd'], capture_output=True, check=True)
    f = pyvhdi.file(); f.open('a.vhd')
    print(made_by.strip(b'\0 ').decode(), 'qemu-img', json.loads(info.stdout)['virtual-size'],
          'libvhdi', f.get_media_size(), 'dissect', vhd.VHD(open('a.vhd', 'rb')).size)
    f.close()
P
v/bin/python ask.py | tee seen
cat > expected <<'X'
vpc qemu-img 3481600 libvhdi 4194304 dissect 4194304
qemu qemu-img 3481600 libvhdi 4194304 dissect 4194304
win qemu-img 4194304 libvhdi 4194304 dissect 4194304
tap qemu-img 4194304 libvhdi 4194304 dissect 4194304
d2v qemu-img 4194304 libvhdi 4194304 dissect 4194304
X
diff expected seen
echo "as stated"
