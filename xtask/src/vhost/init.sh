#!/bin/busybox sh
# The guest: it writes and verifies, and says what it does on its console.
/bin/busybox mkdir -p /proc /sys /dev /mnt /run
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev 2>/dev/null
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
busybox() { /bin/busybox "$@"; }
say() { echo "GUEST $*"; }
end() { say "$*"; busybox sync; echo o >/proc/sysrq-trigger; busybox sleep 60; }
exec </dev/console >/dev/console 2>&1
echo 4 >/proc/sys/kernel/printk
modprobe virtio_pci || end "FAILED: no virtio_pci"
modprobe virtio_blk || end "FAILED: no virtio_blk"
turns=0
while [ ! -b /dev/vda ]; do
    busybox sleep 1
    turns=$((turns + 1))
    [ "$turns" -lt 120 ] || end "FAILED: no disk"
done
busybox grep -q "rounds=" /proc/cmdline
rounds=$(busybox sed 's/.*rounds=\([0-9]*\).*/\1/' /proc/cmdline)
say "queues $(busybox ls /sys/block/vda/mq | busybox wc -l)"
say "serial $(busybox cat /sys/block/vda/serial)"
say "cache $(busybox cat /sys/block/vda/queue/write_cache)"
say "sectors $(blockdev --getsz /dev/vda)"
round=1
while [ "$round" -le "$rounds" ]; do
    say "round $round"
    fio --name=w --filename=/dev/vda --ioengine=libaio --direct=1 --rw=randwrite --bsrange=4k-256k \
        --iodepth=8 --numjobs=2 --offset_increment=24m --size=16m --verify=crc32c --fsync=16 \
        --randseed="$round" --verify_fatal=1 --output=/run/fio ||
        { busybox cat /run/fio; end "FAILED: fio"; }
    round=$((round + 1))
done
say "verified"
blkdiscard -o 33554432 -l 8388608 /dev/vda || end "FAILED: discard"
busybox dd if=/dev/vda bs=1M skip=32 count=8 2>/dev/null | busybox tr -d '\000' | busybox wc -c >/run/rest
[ "$(busybox cat /run/rest)" = 0 ] || end "FAILED: a discarded range does not read as zeros"
say "discarded"
load-ext4
mkfs.ext4 -q -F /dev/vda || end "FAILED: mkfs"
busybox mount -t ext4 /dev/vda /mnt || end "FAILED: mount"
busybox dd if=/dev/urandom of=/mnt/file bs=1M count=8 conv=fsync 2>/dev/null || end "FAILED: write"
busybox sha256sum /mnt/file >/run/sum
busybox umount /mnt
busybox mount -t ext4 /dev/vda /mnt
busybox sha256sum -c /run/sum || end "FAILED: the file has changed"
busybox cat /run/sum
busybox umount /mnt
e2fsck -fn /dev/vda || end "FAILED: fsck"
if busybox grep -q grows=1 /proc/cmdline; then
    before=$(blockdev --getsz /dev/vda)
    say "waits to grow"
    turns=0
    while [ "$(blockdev --getsz /dev/vda)" = "$before" ]; do
        busybox sleep 1
        turns=$((turns + 1))
        [ "$turns" -lt 60 ] || end "FAILED: the disk does not grow"
    done
    say "grown to $(blockdev --getsz /dev/vda)"
fi
end "DONE"
