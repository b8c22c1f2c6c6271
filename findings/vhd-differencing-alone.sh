#!/usr/bin/env bash
# Finding: a differencing VHD without its parent is read as a disk with zeros by two readers of three.
# Versions: dissect.hypervisor 3.16, libvhdi-python 20260901 (PyPI, pinned below).
# Seen: dissect and qemu-img give zeros for the parent, libvhdi raises an error.
set -euo pipefail

# A differencing VHD read without its parent: which readers say that something is missing?
#
# A differencing VHD (type 4) has only the data written since it was made; the rest is in its parent. Here the parent is
# not there at all. The child has one block of two, the parent would have the other.
#
# Guessed before the first run: libvhdi raises an error at a read, dissect opens it and gives zeros. QEMU: no guess.
# Seen: libvhdi-python 20260901 raises an error at the first read, also where the child has the data.
#       dissect.hypervisor 3.16 opens it without a word and gives zeros for the parent's part.
#       qemu-img 7.2.22 converts it without a word, exit status 0, zeros for the parent's part.
# So a chain of Hyper-V or XenServer that is "converted" by its leaf alone ends as a disk with holes in it, and
# nothing says so. Ask for the disk's type (footer, bytes 60 to 63: 4 is differencing) before either is trusted.
#
# Needs python3 with venv; qemu-img is asked where it is installed. Ends with 1 if the behaviour has changed.

dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cd "$dir"
python3 -m venv v
v/bin/pip install -q --disable-pip-version-check dissect.hypervisor==3.16 libvhdi-python==20260901
cat > make.py <<'P'
import struct
def with_sum(b, at):
    return b[:at] + struct.pack('>I', ~sum(b) & 0xffffffff) + b[at + 4:]
size, block = 4 << 20, 2 << 20
foot = struct.pack('>8sIIQI4sI4sQQHBBI', b'conectix', 2, 0x10000, 512, 0, b'tap\0', 0x10003, b'Wi2k', size, size, 120, 4, 17, 4)
foot = with_sum((foot + bytes(4) + bytes(range(16))).ljust(512, b'\0'), 64)
head = struct.pack('>8sQQIIII16sII', b'cxsparse', 2**64 - 1, 1536, 0x10000, size // block, block, 0, bytes(range(16, 32)), 0, 0)
head = with_sum((head + 'parent.vhd'.encode('utf-16-be')).ljust(1024, b'\0'), 36)
table = struct.pack('>II', 2048 // 512, 0xffffffff).ljust(512, b'\xff')
open('child.vhd', 'wb').write(foot + head + table + b'\xff' * 512 + b'\xaa' * block + foot)
P
v/bin/python make.py
cat > read.py <<'P'
import pyvhdi
from dissect.hypervisor.disk import vhd
d = vhd.VHD(open('child.vhd', 'rb'))
child = d.read(4096); d.seek(3 << 20); parent = d.read(4096)
print("dissect: the child's part", hex(child[0]) + ", the parent's part", hex(parent[0]))
f = pyvhdi.file(); f.open('child.vhd')
for part, at in ("the child's part", 0), ("the parent's part", 3 << 20):
    try:
        f.seek_offset(at, 0); f.read_buffer(4096); print('libvhdi:', part, 'was read')
    except OSError as e:
        print('libvhdi:', part, 'is an error,', 'missing parent' if 'missing parent' in str(e) else 'another')
P
v/bin/python read.py | tee seen
cat > expected <<'X'
dissect: the child's part 0xaa, the parent's part 0x0
libvhdi: the child's part is an error, missing parent
libvhdi: the parent's part is an error, missing parent
X
diff expected seen
if command -v qemu-img > /dev/null; then
    qemu-img --version | head -n 1
    qemu-img convert -f vpc -O raw child.vhd a.raw 2> error
    [ ! -s error ]
    part=$(od -An -tx1 -N1 -j 3145728 a.raw | tr -d ' ')
    echo "qemu-img: converted without a message, the parent's part 0x$part"
    [ "$part" = 00 ]
fi
echo "as stated"
