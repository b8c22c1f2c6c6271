//! Guests whose disks are LUNs with fence = "reservation" (docs/internals/locks.md). Domain 0 is the target and two hosts at once:
//! its initiator has two names, so the target sees two ports, and each has a block device of the one LUN.

use super::toolstack::{USE, running_guest, xl_knows_us};
use super::{Bench, Case, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::guest::Guest;
use ferrite_xenhost::steps;

pub(super) const CASES: &[Case] = &[
    ferrite("shared/a-fenced-lun-of-lio-is-kept-through-deaths-and-lost-to-who-takes-it", of_lio),
    ferrite("shared/a-lun-of-tgt-is-refused-since-tgt-forgets", of_tgt),
];

/// fio in the guest, which reads what it has written, until it gets an error.
const LOAD: &str = "until [ -b /dev/xvdb ]; do sleep 0.2; done; \
     fio --name=fenced --filename=/dev/xvdb --size=48m --ioengine=libaio --direct=1 --rw=randrw --bs=4k-64k \
     --iodepth=8 --fsync=32 --randrepeat=1 --verify=crc32c --verify_fatal=1 --verify_backlog=64 --time_based \
     --runtime=1000 --minimal";

pub(super) const TARGET: &str = "iqn.2026-01.example:lun";

/// The initiator with two names, and the sessions of both.
pub(super) const LOGINS: &str = "
modprobe -a iscsi_tcp sd_mod
ip link set lo up
mkdir -p /run/lock/iscsi /etc/iscsi
echo InitiatorName=iqn.2026-01.example:a >/etc/iscsi/initiatorname.iscsi
pgrep -x iscsid || iscsid
iscsiadm -m iface -I b -o new
iscsiadm -m iface -I b -o update -n iface.initiatorname -v iqn.2026-01.example:b
iscsiadm -m discovery -t st -p 127.0.0.1 -I default -I b
iscsiadm -m node -o update -n node.session.timeo.replacement_timeout -v 60
iscsiadm -m node --login
for i in $(seq 100); do [ $(ls /sys/class/iscsi_session/*/device/target*/*/block/ 2>/dev/null | grep -c ^sd) = 2 ] && break; sleep 0.3; done
";
pub(super) const LOGOUTS: &str = "
iscsiadm -m node --logout; iscsiadm -m node -o delete; iscsiadm -m iface -I b -o delete
kill $(pgrep -x iscsid)
rm -rf /lab/lun /lab/b-records /var/lib/ferrite/fences
";

/// LIO, by its folders in configfs. When it comes again, it is told the registrations that it has written, as its tools
/// do: before the LUN has a target, since LIO takes them at no other time.
pub(super) const LIO: &str = "
modprobe -a target_core_file iscsi_target_mod
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
c=/sys/kernel/config/target
mkdir -p $(cat $c/dbroot)/pr
mkdir -p $c/core/fileio_0/lun
echo fd_dev_name=/lab/lun,fd_dev_size=$((64 << 20)) >$c/core/fileio_0/lun/control
echo 8fd24b1e-0001 >$c/core/fileio_0/lun/wwn/vpd_unit_serial
echo 1 >$c/core/fileio_0/lun/enable
for file in $(cat $c/dbroot)/pr/aptpl_*; do
    [ -f $file ] || continue
    awk '/^PR_REG_START/ { text = \"\"; next } /^PR_REG_END/ { print text; next } { text = text $0 \",\" }' $file |
        while read -r text; do echo \"$text\" >$c/core/fileio_0/lun/pr/res_aptpl_metadata; done
done
t=$c/iscsi/TARGET/tpgt_1
mkdir -p $c/iscsi/TARGET/tpgt_1
mkdir $t/lun/lun_0
ln -s $c/core/fileio_0/lun $t/lun/lun_0/lun
for set in generate_node_acls=1 demo_mode_write_protect=0 authentication=0 cache_dynamic_acls=1; do
    echo ${set#*=} >$t/attrib/${set%=*}
done
mkdir $t/np/127.0.0.1:3260
echo 1 >$t/enable
";
pub(super) const LIO_AWAY: &str = "
c=/sys/kernel/config/target
t=$c/iscsi/TARGET/tpgt_1
echo 0 >$t/enable
rmdir $t/np/*
rm $t/lun/lun_0/lun
rmdir $t/lun/lun_0 $t $c/iscsi/TARGET
rmdir $c/core/fileio_0/lun $c/core/fileio_0
";

const TGT: &str = "
truncate -s 64M /lab/lun
setsid tgtd -f --iscsi portal=127.0.0.1:3260 </dev/null >/tmp/tgtd.log 2>&1 &
for i in $(seq 50); do tgtadm --op show --mode sys >/dev/null 2>&1 && break; sleep 0.2; done
tgtadm --lld iscsi --op new --mode target --tid 1 -T TARGET
tgtadm --lld iscsi --op new --mode logicalunit --tid 1 --lun 1 -b /lab/lun
tgtadm --lld iscsi --op bind --mode target --tid 1 -I ALL
";

/// The block device of the session of this initiator.
pub(super) fn device(bench: &mut Bench<'_>, initiator: &str) -> Result<String> {
    let find = format!(
        "for s in /sys/class/iscsi_session/session*; do grep -qx iqn.2026-01.example:{initiator} $s/initiatorname && \
         ls -d $s/device/target*/*/block/sd*; done | head -n 1"
    );
    let found = bench.xenhost.sh(&find)?;
    let name = found.trim().rsplit('/').next().filter(|name| name.starts_with("sd"));
    Ok(format!("/dev/{}", name.with_context(|| format!("no LUN of initiator {initiator}"))?))
}

pub(super) fn has(bench: &mut Bench<'_>, command: &str) -> Result<bool> {
    let found = bench.xenhost.dom0(&format!("command -v {command}"), 30)?.status == 0;
    if !found {
        steps::say(format!("left out: this domain 0 has no {command}"));
    }
    Ok(found)
}

pub(super) fn attach(guest: &Guest, device: &str) -> String {
    let words = "format=raw,vdev=xvdb,access=w,backendtype=tap,script=block-ferrite,target=";
    format!("xl block-attach {} '{words}{device}'", guest.name())
}

fn fenced(device: &str, how: &str) -> String {
    format!("[images.\"{device}\"]\nfence = \"{how}\"\n")
}

/// Fails unless the output of a command has this.
pub(super) fn says(bench: &mut Bench<'_>, command: &str, what: &str) -> Result<()> {
    let said = bench.xenhost.dom0(&format!("{command} 2>&1"), 120)?.stdout;
    if !said.contains(what) {
        bail!("{command} does not say {what:?}: {said}");
    }
    Ok(())
}

/// The worker, the keeper and the target end under a guest's verification. Then the other host takes the LUN: not one write of
/// the guest is executed from then on, and it is told.
fn of_lio(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? || !has(bench, "iscsiadm")? {
        return Ok(());
    }
    bench.xenhost.sh_for(&LIO.replace("TARGET", TARGET), 180)?;
    bench.xenhost.sh_for(LOGINS, 120)?;
    let (ours, theirs) = (device(bench, "a")?, device(bench, "b")?);
    bench.start_daemon_with(&fenced(&ours, "reservation"))?;
    let mut guest = running_guest(bench)?;
    bench.xenhost.sh(&attach(&guest, &ours))?;
    guest.sh(bench.xenhost, USE, 120)?;
    says(bench, &format!("ferrite fence status {ours}"), "reserved    this host")?;
    says(
        bench,
        &format!("ferrite fence status {theirs} --records /lab/b-records"),
        "another host",
    )?;
    // The other host cannot write, whatever program it uses.
    let written = format!("dd if=/dev/zero of={theirs} bs=4k count=1 oflag=direct");
    if bench.xenhost.dom0(&written, 60)?.status == 0 {
        bail!("the other host can write to a LUN that is reserved");
    }
    let load = guest.begin(bench.xenhost, LOAD, 1200)?;
    for kill in ["'ferrite worker '", "'ferrite keeper'", "'ferrite worker '"] {
        bench.xenhost.sh(&format!("sleep 4; kill -KILL $(pgrep -f {kill} | head -n 1)"))?;
    }
    bench.xenhost.sh("sleep 4")?;
    // The target goes, and comes again with what it has in its files.
    bench.xenhost.sh_for(&LIO_AWAY.replace("TARGET", TARGET), 120)?;
    bench.xenhost.sh("sleep 3")?;
    bench.xenhost.sh_for(&LIO.replace("TARGET", TARGET), 120)?;
    bench.xenhost.wait_until(
        "the LUN again",
        &format!("timeout 20 dd if={ours} of=/dev/null bs=4k count=1 iflag=direct"),
        120,
    )?;
    says(bench, &format!("ferrite fence status {ours}"), "reserved    this host")?;
    bench.xenhost.sh("sleep 6")?;
    let stolen = format!("ferrite fence steal {theirs} --records /lab/b-records");
    says(bench, &stolen, "is shut out")?;
    let sum = format!("dd if={theirs} bs=1M iflag=direct 2>/dev/null | sha256sum");
    let first = bench.xenhost.sh(&sum)?;
    let ended = guest.finish(bench.xenhost, &load)?;
    if ended.status == 0 {
        bail!("the guest was not told that another host has its disk: {}", ended.stdout);
    }
    let wrote =
        guest.run(bench.xenhost, "dd if=/dev/zero of=/dev/xvdb bs=4k count=1 oflag=direct", 60)?;
    if wrote.status == 0 || bench.xenhost.sh(&sum)? != first {
        bail!("the guest's writes are executed although another host has the LUN");
    }
    says(bench, "cat /tmp/daemon.log", "has taken the LUN of this disk")?;
    bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name()))?;
    says(bench, &attach(&guest, &ours), "another host has it reserved")?;
    let _ = bench.xenhost.dom0(&format!("xl block-detach {} xvdb", guest.name()), 60)?;
    bench.xenhost.sh(&format!("ferrite fence release {theirs} --records /lab/b-records"))?;
    says(bench, &format!("ferrite fence status {theirs} --records /lab/b-records"), "no host")?;
    bench.xenhost.dom0(LOGOUTS, 120)?;
    bench.xenhost.sh_for(&LIO_AWAY.replace("TARGET", TARGET), 120)?;
    bench.xenhost.sh("rm -f $(cat /sys/kernel/config/target/dbroot)/pr/*").map(drop)
}

/// tgt forgets reservations when it starts again, and says so.
fn of_tgt(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? || !has(bench, "tgtd")? || !has(bench, "iscsiadm")? {
        return Ok(());
    }
    bench.xenhost.sh_for(&TGT.replace("TARGET", TARGET), 120)?;
    bench.xenhost.sh_for(LOGINS, 120)?;
    let (ours, theirs) = (device(bench, "a")?, device(bench, "b")?);
    bench.start_daemon_with(
        &(fenced(&ours, "reservation") + &fenced(&theirs, "weak-reservation")),
    )?;
    let mut guest = running_guest(bench)?;
    says(bench, &attach(&guest, &ours), "forgets reservations when it starts again")?;
    let _ = bench.xenhost.dom0(&format!("xl block-detach {} xvdb", guest.name()), 60)?;
    says(bench, &format!("ferrite fence status {ours}"), "WEAK")?;
    bench.xenhost.sh(&attach(&guest, &theirs))?;
    guest.sh(bench.xenhost, USE, 120)?;
    says(bench, &format!("ferrite fence status {theirs}"), "reserved    this host")?;
    says(bench, &format!("ferrite disk show {}/xvdb", guest.name()), "weak-reservation")?;
    bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name()))?;
    says(bench, &format!("ferrite fence status {theirs}"), "no host")?;
    bench.xenhost.dom0(LOGOUTS, 120)?;
    bench.xenhost.dom0("kill -KILL $(pgrep -x tgtd); rm -f /lab/lun /tmp/tgtd.log", 60).map(drop)
}
