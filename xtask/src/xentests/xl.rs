//! What xl does with disks that the daemon serves.

use super::toolstack::{USE, WRITE, running_guest, xl_knows_us};
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::guest::Guest;

pub(super) const CASES: &[Case] =
    &[ferrite("xl/both-scripts-find-every-image-and-say-what-they-do-not", both_scripts)];

/// The disk that these tests attach, as xl and xenstore call it.
const NAME: &str = "xvdb";
const DEVID: u32 = 51728;

/// What xl is told of a disk. Without a script it takes its own block-tap.
fn attach(guest: &Guest, words: &str) -> String {
    format!("xl block-attach {} 'vdev={NAME},backendtype=tap,{words}'", guest.name())
}

fn detach(bench: &mut Bench<'_>, guest: &Guest) -> Result<()> {
    bench.xenhost.sh(&format!("xl block-detach {} {NAME}", guest.name()))?;
    let directory = format!("/local/domain/0/backend/vbd3/{}/{DEVID}", guest.domid());
    bench.xenhost.sh(&format!("! xenstore-exists {directory}"))?;
    let gone = "[ -z \"$(ls /run/ferrite/disks)\" ] && [ -z \"$(ls /run/blktap-control)\" ]";
    bench.xenhost.wait_until("nothing left of the disk", gone, 30)
}

/// The key of the backend's directory.
fn key(bench: &mut Bench<'_>, guest: &Guest, name: &str) -> Result<String> {
    let domid = guest.domid();
    bench.xenhost.sh(&format!("xenstore-read /local/domain/0/backend/vbd3/{domid}/{DEVID}/{name}"))
}

fn both_scripts(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let mut guest = running_guest(bench)?;
    bench
        .xenhost
        .sh("rm -rf /lab/xl; mkdir /lab/xl; cd /lab/xl; truncate -s 64M a.raw a:b.raw && \
         for image in a.vhd a.qcow2 ./a:b.vhd; do ferrite image create $image 64M || exit 1; done")?;
    for (words, kind, image) in [
        ("format=raw,target=/lab/xl/a.raw", "aio", "/lab/xl/a.raw"),
        ("format=vhd,target=/lab/xl/a.vhd", "vhd", "/lab/xl/a.vhd"),
    ] {
        bench.xenhost.sh(&attach(&guest, words))?;
        guest.sh(bench.xenhost, USE, 120)?;
        found_by_tap_ctl(bench, &guest, kind, image)?;
        detach(bench, &guest)?;
    }
    for words in [
        "format=raw,target=/lab/xl/a:b.raw",
        "format=vhd,target=/lab/xl/a:b.vhd",
        "format=raw,target=qcow2:/lab/xl/a.qcow2",
    ] {
        bench.xenhost.sh(&attach(&guest, &format!("script=block-ferrite,{words}")))?;
        guest.sh(bench.xenhost, USE, 120)?;
        detach(bench, &guest)?;
    }
    // Nobody can open it: each script says so in its way, and xl prints what ours says.
    for (words, said) in [
        ("format=raw,target=/lab/xl/none", "Could not allocate minor"),
        ("format=raw,script=block-ferrite,target=/lab/xl/none", "cannot open /lab/xl/none"),
    ] {
        let refused = bench.xenhost.dom0(&format!("{} 2>&1", attach(&guest, words)), 90)?;
        if refused.status == 0 || !refused.stdout.contains(said) {
            bail!("{words}: xl ends with {}: {}", refused.status, refused.stdout);
        }
        // xl leaves it to its caller to take away what it could not attach.
        detach(bench, &guest)?;
    }
    read_only(bench, &mut guest)?;
    drives(bench, &mut guest)?;
    bench.xenhost.sh("rm -r /lab/xl").map(drop)
}

/// block-tap has written what the daemon says of the disk, and QEMU would find its socket.
fn found_by_tap_ctl(bench: &mut Bench<'_>, guest: &Guest, kind: &str, image: &str) -> Result<()> {
    let (pid, minor) = (key(bench, guest, "pid")?, key(bench, guest, "minor")?);
    expect_eq("the keeper", &pid, &key(bench, guest, "kthread-pid")?)?;
    let line = format!("pid={pid} minor={minor} state=0 args={kind}:{image}");
    for filter in ["".to_owned(), format!(" -t {kind} -f {image}"), format!(" -p {pid} -m {minor}")]
    {
        let listed = bench.xenhost.sh(&format!("tap-ctl list{filter}"))?;
        expect_eq(&format!("tap-ctl list{filter}"), &listed, &line)?;
    }
    let path = key(bench, guest, "physical-device-path")?;
    expect_eq("the path", &path, &format!("/run/blktap-control/nbd{pid}.{minor}"))?;
    let socket = format!("/run/ferrite/vbd-{}-{DEVID}/nbd", guest.domid());
    expect_eq("the socket", &bench.xenhost.sh(&format!("readlink {path}"))?, &socket)?;
    // The script of a disk that is attached is not run for its end; who calls it so does no harm.
    let destroy = format!("tap-ctl destroy -p {pid} -m {minor} 2>&1");
    let refused = bench.xenhost.dom0(&destroy, 60)?;
    expect_eq("tap-ctl destroy of an attached disk", &refused.status, &16)
}

fn read_only(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let sum = "sha256sum </lab/xl/a.raw";
    let before = bench.xenhost.sh(sum)?;
    for script in ["", "script=block-ferrite,"] {
        let words = format!("format=raw,access=r,{script}target=/lab/xl/a.raw");
        bench.xenhost.sh(&attach(guest, &words))?;
        let told = "until [ -b /dev/xvdb ]; do sleep 0.2; done; blockdev --getro /dev/xvdb";
        expect_eq("read-only flag", &guest.sh(bench.xenhost, told, 60)?.as_str(), &"1")?;
        if guest.run(bench.xenhost, WRITE, 60)?.status == 0 {
            bail!("a write succeeded on a disk that xl has attached with access=r");
        }
        detach(bench, guest)?;
    }
    expect_eq("the image's checksum", &bench.xenhost.sh(sum)?, &before)
}

/// A drive with a medium, whose `params` are written again as xl does for another medium. One without a
/// medium is refused by xl itself, and nothing is left of it.
fn drives(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let words = "format=raw,devtype=cdrom,access=r,script=block-ferrite,target=/lab/xl/a.raw";
    bench.xenhost.sh(&attach(guest, words))?;
    let read = "until [ -b /dev/xvdb ]; do sleep 0.2; done; \
                dd if=/dev/xvdb bs=64k count=4 iflag=direct 2>/dev/null | sha256sum";
    let data = guest.sh(bench.xenhost, read, 60)?;
    let directory = format!("/local/domain/0/backend/vbd3/{}/{DEVID}", guest.domid());
    for params in ["/lab/xl/other.iso", "", "aio:/lab/xl/a.raw"] {
        bench.xenhost.sh(&format!("xenstore-write {directory}/params '{params}'"))?;
        let same =
            guest.sh(bench.xenhost, read, 60).with_context(|| format!("params {params:?}"))?;
        expect_eq("data after other params", &same, &data)?;
    }
    detach(bench, guest)?;
    let empty = "format=raw,devtype=cdrom,access=r,script=block-ferrite,target=";
    let refused = bench.xenhost.dom0(&format!("{} 2>&1", attach(guest, empty)), 60)?;
    if refused.status == 0 || !refused.stdout.contains("no suitable backend") {
        bail!("an empty drive: xl ends with {}: {}", refused.status, refused.stdout);
    }
    bench.xenhost.sh(&format!("! xenstore-exists {directory}")).map(drop)
}
