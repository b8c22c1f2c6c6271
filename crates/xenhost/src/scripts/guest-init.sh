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
insmod /lib/modules/xen-blkfront.ko $parameters
# In: "ID COMMAND" on one line, escaped. Out: "@@ID STATUS", the output, "@@ID end".
run() {
    output=$(eval "$2" 2>&1 </dev/null 3>&-)
    status=$?
    printf '@@%s %s\n%s\n@@%s end\n' "$1" "$status" "$output" "$1" >&3
}
exec 3<>/dev/hvc0
stty raw -echo <&3
echo "@@ready" >&3
while true; do
    # Each command in a process of its own: some run beside others.
    while read -r id rest <&3; do run "$id" "$(printf %b "$rest")" & done
    sleep 1
done
