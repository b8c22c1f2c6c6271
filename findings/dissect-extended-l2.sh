#!/usr/bin/env bash
# Finding: no read of a qcow2 image with extended L2 entries works in dissect.hypervisor, which has code for them.
# Versions: dissect.hypervisor 3.16, libqcow-python 20260703 (PyPI, pinned below).
# Seen: each read raises TypeError, but where a whole L2 table is absent.
set -euo pipefail

# dissect.hypervisor has code for qcow2 images with extended L2 entries, but no read of such an image works.
#
# Extended L2 entries (incompatible feature, bit 4) have 16 bytes: the place of the cluster, and 32 bits for "this
# subcluster is here", 32 for "it reads as zeros". XCP-ng and oVirt make such images. This one has one cluster of 64 KiB
# that is here whole, then nothing.
#
# Guessed before the first run: dissect reads it, since its source names the feature.
# Seen: dissect.hypervisor 3.16 opens the image, and each read raises a TypeError: in a cluster that is there, and in one
#       that is not but whose table exists. Only a whole table that is absent is read (as zeros).
#       libqcow-python 20260703 says at opening that it does not know the feature, as the format asks for.
# So for these images try a read before a tool that stands on dissect is chosen; that it opens them says nothing.
#
# Needs python3 with venv; qemu-img checks the image where it is installed. Ends with 1 if the behaviour has changed.

dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cd "$dir"
python3 -m venv v
v/bin/pip install -q --disable-pip-version-check dissect.hypervisor==3.16 libqcow-python==20260703
cat > make.py <<'P'
import struct
C = 65536
# Clusters of the file: 0 header, 1 refcount table, 2 refcounts, 3 L1, 4 L2, 5 data. One L2 table covers 256 MiB.
head = struct.pack('>4sIQIIQIIQQIIQQQQII', b'QFI\xfb', 3, 0, 0, 16, 512 << 20, 0, 2, 3 * C, C, 1, 0, 0, 1 << 4, 0, 0, 4, 104)
table = lambda b: b.ljust(C, b'\0')
entry = struct.pack('>QQ', 1 << 63 | 5 * C, 0xffffffff)
open('a.qcow2', 'wb').write(table(head) + table(struct.pack('>Q', 2 * C)) + table(struct.pack('>6H', *[1] * 6))
    + table(struct.pack('>QQ', 1 << 63 | 4 * C, 0)) + table(entry) + b'\xaa' * C)
P
v/bin/python make.py
if command -v qemu-img > /dev/null; then
    qemu-img --version | head -n 1
    qemu-img check -q a.qcow2
    qemu-img dd -O raw bs=65536 count=1 if=a.qcow2 of=a.raw
    [ "$(od -An -tx1 -N1 a.raw | tr -d ' ')" = aa ]
fi
cat > read.py <<'P'
import pyqcow
from dissect.hypervisor.disk import qcow2
for what, at in ('a cluster that is there', 0), ('a cluster that is not', 65536), ('no table', 256 << 20):
    image = qcow2.QCow2(open('a.qcow2', 'rb'))
    stream = image.open() if hasattr(image, 'open') else image
    stream.seek(at)
    try:
        said = hex(stream.read(4096)[0])
    except Exception as e:
        said = type(e).__name__
    print('dissect,', what + ':', said)
try:
    f = pyqcow.file(); f.open('a.qcow2'); print('libqcow opens it')
except OSError as e:
    print('libqcow:', 'unsupported incompatible features' if 'unsupported incompatible features' in str(e) else e)
P
v/bin/python read.py | tee seen
cat > expected <<'X'
dissect, a cluster that is there: TypeError
dissect, a cluster that is not: TypeError
dissect, no table: 0x0
libqcow: unsupported incompatible features
X
diff expected seen
echo "as stated"
