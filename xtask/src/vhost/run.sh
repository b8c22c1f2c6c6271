# A Linux guest of QEMU (TCG) with a disk by vhost-user. Environment: SERVER (ours, daemon,
# peer), FERRITE, FORMAT, KILLS, ROUNDS,
# KERNEL, INITRD and BASE (archives of a RAM disk), INIT (the guest's first process), DIR (an empty folder).
set -eu
cd "$DIR"
export XDG_STATE_HOME="$DIR/state" XDG_RUNTIME_DIR="$DIR/run"
mkdir -p state run
chmod 700 run
image=$DIR/disk.$FORMAT socket=$DIR/vhost.sock
qemu-img create -q -f "$FORMAT" "$image" 96M
mkdir root
cp "$INIT" root/init
chmod 755 root/init
(cd root && echo init | cpio --quiet -o -H newc -R 0:0) >init.cpio
# An archive that is not packed begins at a multiple of four bytes.
: >initrd
for part in "$INITRD" "$BASE" init.cpio; do
    cat "$part" >>initrd
    truncate -s %4 initrd
done

server=
run=$DIR/run/ferrite
disk() { "$FERRITE" disk "$@" --run-dir "$run"; }
daemon() {
    "$FERRITE" daemon --run-dir "$run" --config ferrite.toml >>server.log 2>&1 &
    server=$!
    # Without Xen "disk list" does not succeed.
    until ./tap-ctl list --run-dir "$run" >/dev/null 2>&1; do sleep 0.1; done
}
worker() { pgrep -f "worker .*$run" | head -n 1; }
serve() {
    case $SERVER in
        daemon)
            echo "state_folder = \"$DIR/state\"" >ferrite.toml
            ln -s "$FERRITE" tap-ctl
            daemon
            ./tap-ctl create -a "$FORMAT:$image" --run-dir "$run"
            disk export tap/0 --vhost-user "$socket" --queues 4 --name lab-disk
            return
            ;;
        ours)
            "$FERRITE" export vhost-user "$image" --socket "$socket" --queues 4 --serial lab-disk >>server.log 2>&1 &
            ;;
        peer)
            qemu-storage-daemon --blockdev "driver=file,node-name=file,filename=$image,discard=unmap" \
                --blockdev "driver=$FORMAT,node-name=disk,file=file,discard=unmap" \
                --export "type=vhost-user-blk,id=x,node-name=disk,addr.type=unix,addr.path=$socket,num-queues=4,writable=on" \
                >>server.log 2>&1 &
            ;;
    esac
    server=$!
}
serve
emulator=
# Kills what serves. Of a daemon it is the worker, and now and then the daemon, or an upgrade.
end_server() {
    if [ "$SERVER" != daemon ]; then
        kill -9 $server
        wait $server 2>/dev/null || true
        serve
        return
    fi
    case $1 in
        3 | 7) kill -9 $server; wait $server 2>/dev/null || true; kill -9 "$(worker)"; daemon ;;
        5) "$FERRITE" upgrade --run-dir "$run" ;;
        *) kill -9 "$(worker)" ;;
    esac
}
trap 'kill -9 $server $emulator $(pgrep -f "(worker|relay|keeper) .*$run") 2>/dev/null || true' EXIT
for _ in $(seq 100); do
    [ -S "$socket" ] && break
    sleep 0.1
done
grows=0
[ "$SERVER" = ours ] && [ "$FORMAT" = raw ] && grows=1
qemu-system-x86_64 -machine q35 -accel tcg -cpu Westmere -smp 2 -m 640 -nographic -no-reboot \
    -object memory-backend-memfd,id=mem,size=640M,share=on -numa node,memdev=mem \
    -chardev socket,id=disk,path="$socket",reconnect=1 \
    -device vhost-user-blk-pci,chardev=disk,num-queues=4 -net none \
    -kernel "$KERNEL" -initrd initrd \
    -append "console=ttyS0 rdinit=/init mitigations=off clearcpuid=cx16 rounds=$ROUNDS grows=$grows quiet" \
    </dev/null >console.log 2>&1 &
emulator=$!

said() { grep -q "GUEST.*$1" console.log; }
await() {
    for _ in $(seq "$2"); do
        said "$1" && return 0
        if said FAILED; then tail -20 console.log; exit 1; fi
        kill -0 $emulator 2>/dev/null || { tail -20 console.log; echo "the guest has ended"; exit 1; }
        sleep 0.5
    done
    tail -20 console.log
    echo "the guest does not say '$1'"
    exit 1
}
await "round 1" 600
killed=0
while [ "$killed" -lt "$KILLS" ]; do
    sleep 3
    said verified && break
    end_server $killed
    killed=$((killed + 1))
done
echo "killed $killed times"
[ "$killed" = "$KILLS" ] || { echo "the guest was done before $KILLS kills: give it more rounds"; exit 1; }
await verified 2400
if [ $grows = 1 ]; then
    await "waits to grow" 1200
    truncate -s 128M "$image"
    await "grown to 262144" 120
fi
await DONE 1200
wait $emulator || true
emulator=
if [ "$SERVER" = daemon ]; then
    disk exports
    disk unexport tap/0
    pid=$(./tap-ctl list --run-dir "$run" | sed 's/pid=\([0-9]*\) .*/\1/')
    ./tap-ctl destroy -p "$pid" -m 0 --run-dir "$run"
fi
kill $server
wait $server || { tail server.log; echo "the server ends badly"; exit 1; }
server=
# A killed server may leave space that nothing refers to (3), and no other fault.
[ "$FORMAT" = raw ] || qemu-img check -q "$image" || [ $? = 3 ]
grep -a GUEST console.log
# The guest has as many queues as processors.
grep -q "GUEST queues 2" console.log
if [ "$SERVER" != peer ]; then
    grep -q "GUEST serial lab-disk" console.log
    grep -q "GUEST cache write back" console.log
fi
if grep -q "panicked" server.log; then tail server.log; exit 1; fi
