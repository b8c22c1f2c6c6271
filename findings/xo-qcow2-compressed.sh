#!/usr/bin/env bash
# Finding: Xen Orchestra's reader of qcow2 gives the compressed bytes as data of the disk.
# Versions: @xen-orchestra/qcow2 1.3.1, @xen-orchestra/disk-transform 1.3.3 (npm, pinned below), qemu-img 7.2.22.
# Seen: four clusters of aa, compressed, are read as streams of deflate with the bytes that follow in the file.
set -euo pipefail

# `qemu-img convert -c` compresses the clusters of an image. Bit 62 of an L2 entry says so: the low bits are the place of the
# stream in the file then, and the bits above its length in sectors. No feature bit of the header tells of it.
#
# Guessed before the first run: an error that names compression.
# Seen: no error. The reader takes the entry for that of a plain cluster, with its place rounded down, and returns 64 KiB of
#       the file from there: the stream, its neighbours, zeros.
# Cloud images are mostly compressed, so "it can be opened and has the right size" says nothing. Convert them by
# `qemu-img convert -O qcow2` (without -c) before this library reads them.
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
qemu-img create -q -f qcow2 plain.qcow2 1M
qemu-io -c 'write -P 0xaa 0 256k' plain.qcow2 > /dev/null
qemu-img convert -c -O qcow2 plain.qcow2 packed.qcow2
qemu-img check -q packed.qcow2
if qemu-io -c 'read -P 0xaa 0 256k' packed.qcow2 | grep -q 'verification failed'; then exit 1; fi
plain=$(node read.mjs plain.qcow2)
packed=$(node read.mjs packed.qcow2)
echo "plain:      $plain"
echo "compressed: $packed"
[ "$plain" = "aa aa aa aa" ] && [[ "$packed" != *aa* ]]
