#!/usr/bin/env bash
# Finding: three readers disagree on sectors of a dynamic VHD whose bitmap says "no data".
# Versions: dissect.hypervisor 3.16, libvhdi-python 20260901 (PyPI, pinned below).
# Seen: libvhdi gives zeros, dissect and qemu-img give the stored bytes.
set -euo pipefail

# Which bytes a dynamic VHD has where its sector bitmap says "no data", asked of three readers.
#
# Each block of a dynamic VHD begins with a bitmap, a bit for each sector: 0 means that the sector was never written,
# so it reads as zeros. The bytes behind such a bit may be anything, since a program that extends a file need not
# clear it. This image is valid, and its first eight sectors have the bit 0 over bytes 0xaa.
#
# Guessed before the first run: all three ignore the bitmap of a dynamic disk and give 0xaa.
# Seen: libvhdi-python 20260901 gives zeros. dissect.hypervisor 3.16 and qemu-img 7.2.22 give 0xaa.
# So a copy by qemu-img and a copy by libvhdi of the same file differ. This matters to users who compare hashes
# of images, and to programs that write VHDs: readers disagree on an image with old bytes behind a bit 0.
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
foot = struct.pack('>8sIIQI4sI4sQQHBBI', b'conectix', 2, 0x10000, 512, 0, b'tap\0', 0x10003, b'Wi2k', size, size, 120, 4, 17, 3)
foot = with_sum((foot + bytes(4) + bytes(range(16))).ljust(512, b'\0'), 64)
head = struct.pack('>8sQQIII', b'cxsparse', 2**64 - 1, 1536, 0x10000, size // block, block)
head = with_sum(head.ljust(1024, b'\0'), 36)
table = struct.pack('>II', 2048 // 512, 0xffffffff).ljust(512, b'\xff')
bitmap = b'\0' + b'\xff' * 511
open('a.vhd', 'wb').write(foot + head + table + bitmap + b'\xaa' * block + foot)
P
v/bin/python make.py
cat > read.py <<'P'
import pyvhdi
from dissect.hypervisor.disk import vhd
def name(b):
    return 'zeros' if not any(b) else '0xaa' if set(b) == {0xaa} else 'other bytes'
d = vhd.VHD(open('a.vhd', 'rb')).read(8192)
f = pyvhdi.file(); f.open('a.vhd'); l = f.read_buffer(8192)
print('dissect  bit 0:', name(d[:4096]), ' bit 1:', name(d[4096:]))
print('libvhdi  bit 0:', name(l[:4096]), ' bit 1:', name(l[4096:]))
P
v/bin/python read.py | tee seen
cat > expected <<'X'
dissect  bit 0: 0xaa  bit 1: 0xaa
libvhdi  bit 0: zeros  bit 1: 0xaa
X
diff expected seen
if command -v qemu-img > /dev/null; then
    qemu-img --version | head -n 1
    qemu-img convert -f vpc -O raw a.vhd a.raw
    qemu=$(od -An -tx1 -N1 a.raw | tr -d ' ')
    echo "qemu-img bit 0: 0x$qemu"
    [ "$qemu" = aa ]
fi
echo "as stated"
