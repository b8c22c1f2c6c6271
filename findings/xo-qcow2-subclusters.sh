#!/usr/bin/env bash
# Finding: Xen Orchestra's reader of qcow2 knows extended L2 entries, and loses the parent's data in a cluster of which
#   a part was written.
# Versions: @xen-orchestra/qcow2 1.3.1, @xen-orchestra/disk-transform 1.3.3 (npm, pinned below), qemu-img 7.2.22.
# Seen: "00+bb aa aa aa", where the first cluster has 4 KiB of bb and 60 KiB of the parent's aa.
set -euo pipefail

# With extended L2 entries (incompatible feature, bit 4) an entry has 16 bytes: the place of the cluster, and two bits for
# each of its 32 subclusters, "it is here" and "it reads as zeros". A subcluster with neither is the parent's.
#
# Guessed before the first run: the reader opens the image, steps over the second half of each entry, and takes the whole
#   cluster as written, so the rest of it is zeros.
# Seen: as guessed, without an error. qemu-io reads 4 KiB of the child's and 60 KiB of the parent's data.
# The feature exists for images with parents, so that a small write need not copy a whole cluster. Read such a chain
# through qemu-nbd if this library is to copy it.
#
# Needs node 20, npm and qemu-utils. Ends with 1 if the behaviour has changed.

for tool in node npm qemu-img qemu-io; do command -v $tool > /dev/null || { echo "$tool is missing"; exit 1; }; done
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cd "$dir"
echo '{}' > package.json
npm install --silent --no-audit --no-fund @xen-orchestra/qcow2@1.3.1 @xen-orchestra/disk-transform@1.3.3 @vates/read-chunk@1.2.1
qemu-img --version | head -n 1
cat > read.mjs <<'P'
import fs from 'node:fs/promises'
import { QCowAccessor } from '@xen-orchestra/qcow2'
import { DiskChain } from '@xen-orchestra/disk-transform'

function open(path) {
  let file
  return new QCowAccessor({
    isEncrypted: false,
    openFile: async () => { file = await fs.open(path); return 1 },
    closeFile: async () => file.close(),
    getSize: async () => (await fs.stat(path)).size,
    read: async (_, buffer, at) => ({ bytesRead: (await file.read(buffer, 0, buffer.length, at)).bytesRead, buffer }),
  }, path)
}
// The images of a chain, the oldest first.
const chain = new DiskChain({ disks: process.argv.slice(2).map(open) })
await chain.init()
const blocks = []
for (let i = 0; i < 4; i++) {
  const data = chain.hasBlock(i) ? (await chain.readBlock(i)).data : Buffer.alloc(1)
  blocks.push([...new Set(data)].map(byte => byte.toString(16).padStart(2, '0')).sort().join('+'))
}
console.log(blocks.join(' '))
await chain.close()
P
qemu-img create -q -f qcow2 parent.qcow2 1M
qemu-io -c 'write -P 0xaa 0 256k' parent.qcow2 > /dev/null
qemu-img create -q -f qcow2 -o extended_l2=on -b parent.qcow2 -F qcow2 child.qcow2
qemu-io -c 'write -P 0xbb 0 4k' child.qcow2 > /dev/null
qemu-img check -q child.qcow2
if qemu-io -c 'read -P 0xbb 0 4k' -c 'read -P 0xaa 4k 60k' child.qcow2 | grep -q 'verification failed'; then exit 1; fi
chain=$(node read.mjs parent.qcow2 child.qcow2)
echo "$chain"
[ "$chain" = "00+bb aa aa aa" ]
