#!/bin/busybox sh
# A lab guest: drivers as the kernel command line says, then commands from the console.
/bin/busybox --install /bin
export PATH=/bin LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
# What the kernel says stays in its log, and out of the answers on the console.
dmesg -n 1
parameters=$(sed -n 's/.*lab\.blkfront=\([^ ]*\).*/\1/p' /proc/cmdline | tr , ' ')
for list in xen-blkfront ext4; do
    for module in $(cat /lib/modules/$list.list); do
        case $module in
            xen-blkfront.ko) insmod /lib/modules/$module $parameters ;;
            *) insmod /lib/modules/$module ;;
        esac
    done
done
exec 3<>/dev/hvc0
stty raw -echo <&3
# In: "ID SECONDS COMMAND" on one line, escaped. Out: "@@ID STATUS", the output, "@@ID end".
run() {
    printf %b "$3" >/tmp/$1.sh
    timeout -k 2 "$2" sh /tmp/$1.sh >/tmp/$1.out 2>&1 </dev/null 3>&-
    status=$?
    exec 9>/tmp/lock
    flock 9
    { printf '@@%s %s\n' "$1" "$status"; cat /tmp/$1.out; printf '\n@@%s end\n' "$1"; } >&3
    rm -f /tmp/$1.sh /tmp/$1.out
}
echo "@@ready" >&3
while true; do
    while read -r id limit rest <&3; do run "$id" "$limit" "$rest" & done
    sleep 1
done
