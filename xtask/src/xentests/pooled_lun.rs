//! A guest's disk in a pool with a copy on a LUN of LIO, which the kernel's initiator has, and one on a server. Domain 0 is all of it,
//! and two hosts: its initiator has two names ([`super::fenced`]).

use anyhow::{Result, bail};

use super::fenced::{LIO, LIO_AWAY, LOGINS, LOGOUTS, TARGET, attach, device, has, says};
use super::pooled;
use super::toolstack::{USE, running_guest, xl_knows_us};
use super::{Bench, Case, ferrite};

pub(super) const CASES: &[Case] = &[ferrite(
    "shared/a-pools-disk-on-a-lun-outlives-its-server-its-target-and-its-host",
    on_a_lun,
)];

/// fio in the guest, which reads what it has written, until it gets an error.
const LOAD: &str = "until [ -b /dev/xvdb ]; do sleep 0.2; done; \
     fio --name=pooled --filename=/dev/xvdb --size=40m --ioengine=libaio --direct=1 --rw=randrw --bs=4k-64k \
     --iodepth=8 --fsync=32 --randrepeat=1 --verify=crc32c --verify_fatal=1 --verify_backlog=64 --time_based \
     --runtime=1000 --minimal";
const OWNER: &str = "kill -KILL $(pgrep -f 'ferrite pool .*own' | head -n 1)";
/// A command as on the other host: its name, its folders, and its device in the place of this host's.
const ELSEWHERE: &str = "mkdir -p /lab/b-state && echo elsewhere >/lab/b-hostname && \
     sed '1i state_folder = \"/lab/b-state\"' /etc/ferrite/ferrite.toml >/lab/b.toml && \
     unshare -m sh -ec 'mount -t tmpfs t /run; mount --bind /lab/b-hostname /etc/hostname; mount --bind THEIRS OURS; \
     export FERRITE_CONFIG=/lab/b.toml; exec COMMAND' 2>&1";

/// The worker, the disk's process, the server and the target end under a guest's verification. Then another host takes the disk: not
/// one write of the guest reaches the LUN from then on.
fn on_a_lun(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? || !has(bench, "iscsiadm")? || !pooled::has_etcd(bench)? {
        return Ok(());
    }
    bench.xenhost.sh_for(&LIO.replace("TARGET", TARGET), 180)?;
    bench.xenhost.sh_for(LOGINS, 120)?;
    let (ours, theirs) = (device(bench, "a")?, device(bench, "b")?);
    bench.start_daemon_with(pooled::TABLE)?;
    pooled::start(bench, &["a"])?;
    bench.xenhost.sh_for(&format!("ferrite pool add-lun lab san1 {ours}"), 180)?;
    bench.xenhost.sh_for("ferrite pool create lab/web1 48M --on san1,a", 120)?;
    let mut guest = running_guest(bench)?;
    bench.xenhost.sh(&attach(&guest, "pool:lab/web1"))?;
    guest.sh(bench.xenhost, USE, 120)?;
    says(bench, &format!("ferrite fence status {ours}"), "reserved    this host")?;
    // The other host cannot write, whatever program it uses.
    let written = format!("dd if=/dev/zero of={theirs} bs=4k count=1 oflag=direct");
    if bench.xenhost.dom0(&written, 60)?.status == 0 {
        bail!("the other host can write to the LUN of a disk that is in use");
    }
    let load = guest.begin(bench.xenhost, LOAD, 1500)?;
    for kill in ["kill -KILL $(pgrep -f 'ferrite worker ' | head -n 1)", OWNER] {
        bench.xenhost.sh(&format!("sleep 4; {kill}"))?;
    }
    bench.xenhost.sh("sleep 4")?;
    pooled::kill(bench, "a")?;
    says(bench, "sleep 6; ferrite pool status lab/web1", ": out")?;
    pooled::serve(bench, "a")?;
    pooled::until_whole(bench)?;
    // The target goes. The server's copy goes on without it, and it gets what it has missed.
    bench.xenhost.sh_for(&LIO_AWAY.replace("TARGET", TARGET), 120)?;
    says(bench, "sleep 8; ferrite pool status lab/web1", ": out")?;
    bench.xenhost.sh_for(&LIO.replace("TARGET", TARGET), 120)?;
    pooled::until_whole(bench)?;
    bench.xenhost.sh("ferrite pool steal lab/web1")?;
    bench.xenhost.sh_for("head -c 48M /dev/urandom >/lab/other", 120)?;
    let elsewhere = |command: &str| {
        ELSEWHERE.replace("THEIRS", &theirs).replace("OURS", &ours).replace("COMMAND", command)
    };
    bench.xenhost.sh_for(&elsewhere("ferrite image convert -n /lab/other pool:lab/web1"), 300)?;
    let ended = guest.finish(bench.xenhost, &load)?;
    if ended.status == 0 {
        bail!("the guest was not told that another host has its disk: {}", ended.stdout);
    }
    bench.xenhost.sh_for(&elsewhere("ferrite image compare /lab/other pool:lab/web1"), 300)?;
    // The LUN's own header and the copy's are before the data.
    bench.xenhost.sh(&format!("cmp -n $((48 << 20)) /lab/other {theirs} 0 $((2 << 20))"))?;
    bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name()))?;
    pooled::stop(bench)?;
    bench.xenhost.dom0(LOGOUTS, 120)?;
    bench.xenhost.sh_for(&LIO_AWAY.replace("TARGET", TARGET), 120)?;
    bench
        .xenhost
        .sh("rm -rf /lab/other /lab/b.toml /lab/b-* $(cat /sys/kernel/config/target/dbroot)/pr/*")
        .map(drop)
}
