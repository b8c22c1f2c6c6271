//! The commands of dom0, which is all hosts at once: a server is an address of its loopback, 127.0.0.2 or 127.0.0.3.

/// Bytes a second of each server's link, in each direction, and of the local disk. At 112 MiB, as of the trial, this host's processor would
/// be the limit: it moves some 150 MB/s of a pool's disk without any.
pub(super) const LINK_BYTES_S: u64 = 28 << 20;
/// The size of each disk.
pub(super) const DISK_MIB: u32 = 48;
/// The size of each RAM disk: of two disks' copies on one of them, and of a LUN, which has a header and the state of its copy.
const RAM_MIB: u32 = 3 * DISK_MIB + 24;
/// What the daemon and the commands are told of the pool.
pub(super) const POOL: &str =
    "[pool.lab]\netcd = [\"http://127.0.0.1:2379\"]\nplain = true\nexperimental = true\n";

/// The LUNs by target, `a` or `b`, their number there, and their RAM disk. The first is in no pool.
const LUNS: [(&str, u32, u32); 6] =
    [("a", 0, 3), ("a", 1, 4), ("a", 2, 5), ("b", 0, 6), ("a", 3, 7), ("b", 1, 8)];

/// RAM disks: the local one, one of each server, those of the LUNs, and two of DRBD.
pub(super) fn ram() -> String {
    format!(
        "set -e; modprobe brd rd_nr=11 rd_size={}; for s in a b; do n=$((n + 1)); mkfs.ext4 -q -m 0 -O ^has_journal /dev/ram$n; \
         mkdir -p /lab/server-$s; mount /dev/ram$n /lab/server-$s; rmdir /lab/server-$s/lost+found; done",
        RAM_MIB << 10
    )
}

/// etcd, the pool, and its two servers.
pub(super) const SERVERS: &str = "
setsid etcd --data-dir /tmp/etcd </dev/null >/tmp/etcd.log 2>&1 &
for i in $(seq 100); do ferrite pool init lab --json >/tmp/pool.json 2>/tmp/init.log && break; sleep 0.5; done
cat /tmp/init.log
id=$(grep -oE '[0-9a-f]{32}' /tmp/pool.json)
n=1
for s in a b; do
    n=$((n + 1))
    setsid ferrite pool serve /lab/server-$s --name $s --pool $id --listen 127.0.0.$n:10811 --plain \
        --etcd http://127.0.0.1:2379 --etcd-plain --experimental </dev/null >/tmp/server-$s.log 2>&1 &
done
for i in $(seq 100); do [ $(ferrite pool status lab | grep -c 'server [ab]: 127') = 2 ] && exit 0; sleep 0.3; done
cat /tmp/server-*.log; ferrite pool status lab; exit 1
";

/// The kernel's targets, tuned for large requests, and its initiator with a session for each. The data of a write
/// are sent without being asked for, as far as both sides allow.
pub(super) fn targets() -> String {
    let mut text = "set -e
modprobe -a target_core_iblock iscsi_target_mod iscsi_tcp sd_mod
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
c=/sys/kernel/config/target
mkdir -p $(cat $c/dbroot)/pr
"
    .to_owned();
    for (name, address) in [("a", 2), ("b", 3)] {
        let luns = LUNS.iter().filter(|(target, ..)| *target == name);
        text += &format!(
            "t=$c/iscsi/iqn.2026-01.example:{name}/tpgt_1\nmkdir -p ${{t%/*}}\nmkdir $t\n"
        );
        for (_, number, ram) in luns {
            text += &format!(
                "mkdir -p $c/core/iblock_{ram}/lun\necho udev_path=/dev/ram{ram} >$c/core/iblock_{ram}/lun/control\n\
                 echo 8fd24b1e-{ram:04} >$c/core/iblock_{ram}/lun/wwn/vpd_unit_serial\necho 1 >$c/core/iblock_{ram}/lun/enable\n\
                 mkdir $t/lun/lun_{number}\nln -s $c/core/iblock_{ram}/lun $t/lun/lun_{number}/lun\n"
            );
        }
        text += &format!(
            "for set in generate_node_acls=1 demo_mode_write_protect=0 authentication=0 cache_dynamic_acls=1; do \
             echo ${{set#*=}} >$t/attrib/${{set%=*}}; done
for set in InitialR2T=No ImmediateData=Yes MaxRecvDataSegmentLength=1048576 MaxXmitDataSegmentLength=1048576 \
MaxBurstLength=1048576 FirstBurstLength=524288 MaxOutstandingR2T=8; do echo ${{set#*=}} >$t/param/${{set%=*}}; done
mkdir $t/np/127.0.0.{address}:3260
echo 1 >$t/enable
"
        );
    }
    text + "mkdir -p /run/lock/iscsi /etc/iscsi
echo InitiatorName=iqn.2026-01.example:host >/etc/iscsi/initiatorname.iscsi
iscsid
for n in 2 3; do iscsiadm -m discovery -t st -p 127.0.0.$n; done
iscsiadm -m node -o update -n node.conn[0].iscsi.MaxRecvDataSegmentLength -v 1048576
iscsiadm -m node -o update -n node.session.iscsi.FirstBurstLength -v 524288
iscsiadm -m node -o update -n node.session.iscsi.MaxBurstLength -v 1048576
iscsiadm -m node --login
for i in $(seq 100); do [ $(ls -d /sys/class/iscsi_session/*/device/target*/*/block/sd* 2>/dev/null | wc -l) = 6 ] && exit 0; sleep 0.3; done
ls -d /sys/class/iscsi_session/*/device/target*/*/block/*; exit 1
"
}

/// A command that prints the device of a LUN, by its target and its number there.
pub(super) fn device(target: &str, number: u32) -> String {
    format!(
        "for s in /sys/class/iscsi_session/session*; do \
         if grep -qx iqn.2026-01.example:{target} $s/targetname; then ls $s/device/target*/*:{number}/block; fi; done"
    )
}

/// The pool's LUNs, and all disks.
pub(super) const DISKS: &str = "set -e
create() { ferrite pool create lab/$1 SIZE --replicas $2 --stripes $3 --on $4; }
create one 1 1 a
create striped 1 2 a,b
create mirrored 2 1 a,b
create lun 1 1 san1
create luns-striped 1 2 san2,san3
create luns-mirrored 2 1 san4,san5
";

/// A command that takes a LUN into the pool.
pub(super) fn add(at: usize, device: &str) -> String {
    let (target, ..) = LUNS[at];
    format!("ferrite pool add-lun lab san{at} /dev/{device} --array {target}")
}

/// The LUNs, by target and number.
pub(super) fn luns() -> impl Iterator<Item = (&'static str, u32)> {
    LUNS.iter().map(|(target, number, _)| (*target, *number))
}

/// Two resources of DRBD on one host, each the other's peer. The program that DRBD asks before it synchronises would refuse: no file
/// has these resources.
pub(super) const DRBD: &str = "set -e
modprobe drbd usermode_helper=disabled
for i in 1 2; do
    drbdmeta --force $i v08 /dev/ram$((i + 8)) internal create-md
    drbdsetup new-resource copy$i
    drbdsetup new-minor copy$i $i 0
    drbdsetup attach $i /dev/ram$((i + 8)) /dev/ram$((i + 8)) internal --size=SIZE --c-plan-ahead=0 --resync-rate=200M
    drbdsetup connect copy$i ipv4:127.0.0.1:778$i ipv4:127.0.0.1:778$((3 - i)) --protocol=C
done
drbdsetup primary 1 --force
for i in $(seq 300); do drbdsetup dstate 1 | grep -q UpToDate/UpToDate && exit 0; sleep 0.2; done
drbdsetup dstate 1; exit 1
";

/// A group for the daemon and its processes, in which the local disk can be limited.
pub(super) fn group(daemon: u32) -> String {
    format!(
        "set -e; mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup; echo +io >/sys/fs/cgroup/cgroup.subtree_control; \
         mkdir -p /sys/fs/cgroup/disks; echo {daemon} >/sys/fs/cgroup/disks/cgroup.procs"
    )
}

/// Sets the limits of both servers' links, one in each direction, and that of the local disk.
pub(super) fn limit() -> String {
    format!(
        "set -e; modprobe -a sch_htb cls_u32; tc qdisc add dev lo root handle 1: htb; n=10; \
         for a in 2 3; do for side in dst src; do \
         tc class add dev lo parent 1: classid 1:$n htb rate {bits}bit burst 256k cburst 256k quantum 131072; \
         tc filter add dev lo parent 1: protocol ip prio 1 u32 match ip $side 127.0.0.$a/32 flowid 1:$n; n=$((n + 1)); done; done; \
         echo \"1:0 rbps={LINK_BYTES_S} wbps={LINK_BYTES_S}\" >/sys/fs/cgroup/disks/io.max",
        bits = LINK_BYTES_S * 8
    )
}

pub(super) const NO_LIMIT: &str =
    "tc qdisc del dev lo root && echo '1:0 rbps=max wbps=max' >/sys/fs/cgroup/disks/io.max";
