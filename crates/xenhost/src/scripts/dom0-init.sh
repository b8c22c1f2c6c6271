#!/bin/bash
# The lab's dom0: bring Xen's services up, then serve commands from the host for ever.
export PATH=/lab/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/xen-@XEN@/bin
export HOME=/root LC_ALL=C RUST_BACKTRACE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
for module in xenfs xen-gntdev xen-evtchn xen-gntalloc "xen-blkback max_queues=4" loop virtio_console virtio-rng; do
    modprobe $module
done
mount -t xenfs xenfs /proc/xen
dmesg -n 4
# Servers and other daemons in dom0 are reached at 127.0.0.1, as on a real host.
ip link set lo up
mkdir -p /run/lock /run/xen /run/xenstored /run/agent /var/lib/xen /var/log/xen/console
xenstored --pid-file /run/xenstored.pid
for _ in $(seq 100); do [ -S /run/xenstored/socket ] && break; sleep 0.1; done
# Nothing may write to /local/domain/0 before this, or it takes dom0 for set up already.
xen-init-dom0
xenconsoled --log=guest --log-dir=/var/log/xen/console --timestamp=none

for entry in /sys/class/virtio-ports/*/name; do
    read -r name <"$entry"
    [ "$name" = ferrite.lab ] || continue
    port=${entry%/name}
    exec /lab/agent "/dev/${port##*/}"
done
echo "lab: no control port"
sleep 1000000
