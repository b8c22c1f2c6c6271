#!/bin/busybox sh
# The guest's first process: it measures its disks in turn, and writes the figures to its console.
/bin/busybox mkdir -p /proc /sys /dev /run
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev 2>/dev/null
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
busybox() { /bin/busybox "$@"; }
say() { echo "GUEST $*"; }
end() { say "$*"; echo o >/proc/sysrq-trigger; busybox sleep 60; }
exec </dev/console >/dev/console 2>&1
echo 4 >/proc/sys/kernel/printk
modprobe virtio_pci || end "FAILED: no virtio_pci"
modprobe virtio_blk || end "FAILED: no virtio_blk"
turns=0
while [ ! -b /dev/vdd ]; do
    busybox sleep 1
    turns=$((turns + 1))
    [ "$turns" -lt 120 ] || end "FAILED: there are not four disks"
done
for disk in vda vdb vdc vdd; do
    say "serial $disk $(busybox cat /sys/block/$disk/serial)"
done
# NAME DISK MODE BLOCK DEPTH MILLISECONDS
measure() {
    fio --name="$1" --filename="/dev/$2" --rw="$3" --bs="$4" --iodepth="$5" --runtime="${6}ms" --time_based \
        --ioengine=libaio --direct=1 --norandommap --minimal --output=/run/fio ||
        { busybox cat /run/fio; end "FAILED: fio"; }
    say "figure $1 $2 $(busybox cut -d ';' -f 7,8,48,49 /run/fio)"
}
for disk in vda vdb vdc vdd; do
    measure warm $disk randread 4k 8 500
done
round=1
while [ "$round" -le @ROUNDS@ ]; do
    while read -r name mode block depth; do
        for disk in vda vdb vdc vdd; do
            measure "$name" $disk "$mode" "$block" "$depth" @MS@ </dev/null
        done
    done <<LOADS
@LOADS@
LOADS
    round=$((round + 1))
done
end "DONE"
