#!/usr/bin/env bash
# Finding: Xen Orchestra's reader of qcow2 gives old data where a guest has written zeros.
# Versions: @xen-orchestra/qcow2 1.3.1, @xen-orchestra/disk-transform 1.3.3 (npm, pinned below), qemu-img 7.2.22.
# Seen: "aa aa aa aa" for an image and for a chain whose second cluster reads as zeros.
set -euo pipefail

# Bit 0 of an L2 entry (version 3) says that the cluster reads as zeros. QEMU sets it for a guest's "write zeroes", and for
# discards in an image with a parent. Such an entry may keep the place of the old cluster, or have none.
#
# Guessed before the first run: without a place the cluster counts as absent, so a chain shows the parent's data. With a
#   place the old data are returned.
# Seen: as guessed, and no error in either case. qemu-io reads zeros from both.
# So a copy of a chain that was made with this library brings back data that the guest has deleted, and its hash differs from
# qemu-img's. Compare such a copy with `qemu-img compare` before the source is deleted.
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
cp parent.qcow2 alone.qcow2
qemu-io -c 'write -z 64k 64k' alone.qcow2 > /dev/null
qemu-img create -q -f qcow2 -b parent.qcow2 -F qcow2 child.qcow2
qemu-io -c 'write -z 64k 64k' child.qcow2 > /dev/null
for image in alone child; do
    qemu-img check -q $image.qcow2
    if qemu-io -c 'read -P 0 64k 64k' -c 'read -P 0xaa 128k 64k' $image.qcow2 | grep -q 'verification failed'; then exit 1; fi
done
alone=$(node read.mjs alone.qcow2)
chain=$(node read.mjs parent.qcow2 child.qcow2)
echo "one image: $alone"
echo "a chain:   $chain"
[ "$alone" = "aa aa aa aa" ] && [ "$chain" = "aa aa aa aa" ]
