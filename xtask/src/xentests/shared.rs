//! Guests whose disks are devices of domain 0's kernel that have copies or paths: DRBD, and LVM on iSCSI with multipath
//! (docs/distributed.md). Domain 0 is server and client at once. Only a domain 0 with their tools has them.

use super::toolstack::{USE, running_guest, xl_knows_us};
use super::{Bench, Case, ferrite};
use anyhow::{Context, Result};
use ferrite_xenhost::steps;

pub(super) const CASES: &[Case] = &[
    ferrite("shared/a-guest-on-drbd-loses-a-copy-and-its-worker", on_drbd),
    ferrite("shared/a-guest-on-iscsi-loses-a-path-its-server-and-its-worker", on_iscsi),
];

/// fio in the guest, which reads what it has written.
pub(super) const LOAD: &str = "until [ -b /dev/xvdb ]; do sleep 0.2; done; \
     fio --name=shared --filename=/dev/xvdb --size=48m --ioengine=libaio --direct=1 --rw=randrw --bs=4k-64k \
     --iodepth=16 --fsync=32 --randrepeat=1 --verify=crc32c --verify_fatal=1 --verify_backlog=64 --time_based \
     --runtime=40 --minimal";

pub(super) const KILL_WORKER: &str = "kill -KILL $(pgrep -f 'ferrite worker ' | head -n 1)";

/// Two resources of one host, each the other's peer, by drbdsetup: drbdadm takes no host for two. The second one's device is what
/// another host would have. DRBD asks a program before it synchronises, and gives up the
/// connection if that fails: drbdadm does, as no file has these resources. The rate of a synchronisation is fixed, since DRBD begins with
/// 250 KiB/s.
const DRBD_UP: &str = "
modprobe drbd usermode_helper=disabled
ip link set lo up
for i in 1 2; do
    p=$((3 - i))
    truncate -s 96M /lab/drbd$i
    losetup /dev/loop$((i + 40)) /lab/drbd$i
    drbdmeta --force $i v08 /dev/loop$((i + 40)) internal create-md
    drbdsetup new-resource copy$i
    drbdsetup new-minor copy$i $i 0
    drbdsetup attach $i /dev/loop$((i + 40)) /dev/loop$((i + 40)) internal --c-plan-ahead=0 --resync-rate=200M
    drbdsetup connect copy$i ipv4:127.0.0.1:778$i ipv4:127.0.0.1:778$p --protocol=C
done
drbdsetup primary 1 --force
";
const DRBD_DOWN: &str = "
drbdsetup down copy1
drbdsetup down copy2
losetup -d /dev/loop41 /dev/loop42
rm -f /lab/drbd1 /lab/drbd2
";
/// Both copies are in sync.
const DRBD_SYNCED: &str = "drbdsetup dstate 1 | grep -q UpToDate/UpToDate";
const DRBD_LOSE: &str = "drbdsetup disconnect ipv4:127.0.0.1:7782 ipv4:127.0.0.1:7781";
const DRBD_AGAIN: &str =
    "drbdsetup connect copy2 ipv4:127.0.0.1:7782 ipv4:127.0.0.1:7781 --protocol=C";

/// A target of LIO with two portals, by its folders in configfs, and a volume on the device that multipath makes of both sessions.
const ISCSI_UP: &str = "
modprobe -a target_core_file iscsi_target_mod iscsi_tcp dm_multipath
ip link set lo up
mkdir -p /run/lock/iscsi /etc/iscsi
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
c=/sys/kernel/config/target
mkdir -p $c/core/fileio_0/disks
echo fd_dev_name=/lab/iscsi,fd_dev_size=$((256 << 20)) >$c/core/fileio_0/disks/control
echo 8fd24b1e-0002 >$c/core/fileio_0/disks/wwn/vpd_unit_serial
echo 1 >$c/core/fileio_0/disks/enable
t=$c/iscsi/iqn.2026-01.example:disks/tpgt_1
mkdir -p $c/iscsi/iqn.2026-01.example:disks/tpgt_1
mkdir $t/lun/lun_0
ln -s $c/core/fileio_0/disks $t/lun/lun_0/disks
for set in generate_node_acls=1 demo_mode_write_protect=0 authentication=0 cache_dynamic_acls=1; do
    echo ${set#*=} >$t/attrib/${set%=*}
done
mkdir $t/np/127.0.0.1:3260 $t/np/127.0.0.2:3260
echo 1 >$t/enable
printf 'defaults {\\n user_friendly_names yes\\n find_multipaths no\\n no_path_retry 12\\n polling_interval 2\\n}\\n\
blacklist {\\n devnode \"^(vd|xvd|nbd|loop|drbd)\"\\n}\\n' >/etc/multipath.conf
[ -s /etc/iscsi/initiatorname.iscsi ] || echo \"InitiatorName=$(iscsi-iname)\" >/etc/iscsi/initiatorname.iscsi
pgrep -x iscsid || iscsid
pgrep -f systemd-udevd || /usr/lib/systemd/systemd-udevd --daemon
udevadm trigger --subsystem-match=block --action=add; udevadm settle -t 30
pgrep -x multipathd || multipathd
for portal in 127.0.0.1 127.0.0.2; do
    iscsiadm -m discovery -t st -p $portal
    iscsiadm -m node -p $portal -o update -n node.session.timeo.replacement_timeout -v 5
    iscsiadm -m node -p $portal --login
done
for i in $(seq 100); do [ -b /dev/mapper/mpatha ] && break; sleep 0.3; done
pvcreate /dev/mapper/mpatha
vgcreate disks /dev/mapper/mpatha
lvcreate -y -L 64M -n web1 disks
";
const ISCSI_DOWN: &str = "
vgremove -f disks
multipath -F || true
iscsiadm -m node --logout
iscsiadm -m node -o delete
kill $(pgrep -x multipathd) $(pgrep -x iscsid)
c=/sys/kernel/config/target
t=$c/iscsi/iqn.2026-01.example:disks/tpgt_1
echo 0 >$t/enable
rmdir $t/np/*
rm $t/lun/lun_0/disks
rmdir $t/lun/lun_0 $t $c/iscsi/iqn.2026-01.example:disks $c/core/fileio_0/disks $c/core/fileio_0
rm -f /lab/iscsi /etc/multipath.conf
";
const ENABLE: &str = "/sys/kernel/config/target/iscsi/iqn.2026-01.example:disks/tpgt_1/enable";

/// Whether domain 0 has this command; otherwise the test is left out, which is told.
fn has(bench: &mut Bench<'_>, command: &str) -> Result<bool> {
    let found = bench.xenhost.dom0(&format!("command -v {command}"), 30)?.status == 0;
    if !found {
        steps::say(format!("left out: this domain 0 has no {command}"));
    }
    Ok(found)
}

/// Runs fio in a guest on this device, and the commands in domain 0 meanwhile, three seconds apart.
fn under_load(bench: &mut Bench<'_>, device: &str, commands: &[&str]) -> Result<()> {
    bench.start_daemon_with("")?;
    let mut guest = running_guest(bench)?;
    let words = "format=raw,vdev=xvdb,access=w,backendtype=tap,script=block-ferrite,target=";
    bench.xenhost.sh(&format!("xl block-attach {} '{words}{device}'", guest.name()))?;
    guest.sh(bench.xenhost, USE, 120)?;
    let load = guest.begin(bench.xenhost, LOAD, 180)?;
    for command in commands {
        bench.xenhost.sh(&format!("sleep 3; {command}"))?;
    }
    guest.finish_ok(bench.xenhost, &load).context("fio's verification in the guest")?;
    bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name())).map(drop)
}

/// The second copy goes and comes back, and is equal at the end.
fn on_drbd(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? || !has(bench, "drbdadm")? {
        return Ok(());
    }
    bench.xenhost.sh(DRBD_UP)?;
    bench.xenhost.wait_until("both copies", DRBD_SYNCED, 120)?;
    let commands = [DRBD_LOSE, KILL_WORKER, DRBD_AGAIN, KILL_WORKER];
    under_load(bench, "/dev/drbd1", &commands)?;
    bench.xenhost.wait_until("both copies", DRBD_SYNCED, 120)?;
    bench.xenhost.sh("drbdsetup secondary 1 && drbdsetup primary 2 && drbdsetup secondary 2")?;
    // The metadata are behind the data.
    bench.xenhost.sh("cmp -n $((64 << 20)) /lab/drbd1 /lab/drbd2")?;
    bench.xenhost.sh(DRBD_DOWN).map(drop)
}

/// A path fails, then the server is away for a while.
fn on_iscsi(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? || !has(bench, "iscsiadm")? || !has(bench, "multipathd")? {
        return Ok(());
    }
    bench.xenhost.sh(ISCSI_UP)?;
    let path = "path=$(ls /sys/block/dm-*/slaves | grep -m 1 '^sd')";
    let commands = [
        &format!("{path}; echo offline >/sys/block/$path/device/state"),
        KILL_WORKER,
        &format!("{path}; echo running >/sys/block/$path/device/state"),
        &format!("echo 0 >{ENABLE}; sleep 4; echo 1 >{ENABLE}"),
        KILL_WORKER,
    ];
    under_load(bench, "/dev/disks/web1", &commands)?;
    bench.xenhost.sh(ISCSI_DOWN).map(drop)
}
