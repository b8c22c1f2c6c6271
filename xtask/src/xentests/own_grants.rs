//! Pages that dom0 grants to itself: after a kill, and without them.

use super::toolstack::xl_knows_us;
use super::xl::wait_for_none;
use super::{Bench, Case, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::disk::{Disk, DiskOptions};
use ferrite_xenhost::guest::GuestOptions;

pub(super) const CASES: &[Case] = &[
    ferrite("own-grants/a-killed-backend-leaves-none", killed),
    ferrite("own-grants/a-killed-worker-without-rights-leaves-none", killed_workers),
    ferrite("own-grants/a-full-table-and-none-at-all-fall-back", full),
    ferrite("own-grants/switched-off", switched_off),
];

/// The most pages of the whole dom0.
const LIMIT: &str = "/sys/module/xen_gntalloc/parameters/limit";

/// Pages of a new queue, if there are as many.
const FIRST: u64 = 16;

/// Writes and verifies large requests and small ones, from memory at odd offsets.
fn verify(
    bench: &mut Bench<'_>,
    guest: &mut ferrite_xenhost::guest::Guest,
    disk: &Disk,
) -> Result<()> {
    let command = format!(
        "fio --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --iodepth=16 --randrepeat=1 --thread --minimal --filename={} --iomem_align=512 \
         --verify_interval=512 --name=large --rw=write --bs=1m --size=12m --offset=32m \
         --name=odd --rw=randwrite --bsrange=512-64k --blockalign=512 --size=2m",
        disk.node()
    );
    guest.sh(bench.xenhost, &command, 600).map(drop)
}

/// Own pages that the backend has mapped now.
fn pages(bench: &mut Bench<'_>, disk: &Disk) -> Result<u64> {
    match disk.pid() {
        Some(pid) => pages_of(bench, &pid.to_string()),
        None => bail!("no process serves the disk"),
    }
}

/// Own pages of this process, which is a shell expression in dom0.
fn pages_of(bench: &mut Bench<'_>, pid: &str) -> Result<u64> {
    let count = format!(
        "n=0; while read range _ _ _ _ name; do case $name in *xen/gntalloc*) \
         n=$((n + 0x${{range#*-}} - 0x${{range%-*}}));; esac; done </proc/{pid}/maps; echo $((n / 4096))"
    );
    Ok(bench.xenhost.sh(&count)?.parse()?)
}

/// With a limit of as many pages as a new queue takes: a single page that a dead backend has left would be missing for
/// the next one.
fn killed(bench: &mut Bench<'_>) -> Result<()> {
    let options = GuestOptions { queues: Some(1), ..GuestOptions::default() };
    let before = bench.xenhost.sh(&format!("cat {LIMIT}; echo {FIRST} >{LIMIT}"))?;
    let (mut guest, mut disk) = bench.guest_with_image(&options, 64)?;
    for _ in 0..3 {
        let job = guest.begin(bench.xenhost, &load(&disk), 600)?;
        let pid = disk.pid().context("a backend")?.to_string();
        wait_for_pages(bench, &pid)?;
        disk.crash_backend(bench.xenhost)?;
        no_grants_in_use(bench)?;
        disk.start_backend(bench.xenhost)?;
        guest.finish_ok(bench.xenhost, &job)?;
    }
    verify(bench, &mut guest, &disk)?;
    bench.xenhost.sh(&format!("echo {before} >{LIMIT}")).map(drop)
}

/// The same with processes without rights, whose successor starts by itself.
fn killed_workers(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    let before = bench.xenhost.sh(&format!("cat {LIMIT}; echo {FIRST} >{LIMIT}"))?;
    bench.start_daemon()?;
    let image = bench.image(64)?;
    let options = GuestOptions { queues: Some(1), ..GuestOptions::default() };
    let (mut guest, disk) = bench.guest_of_xl(&options, &image)?;
    let until = format!("while [ ! -e /tmp/stop ]; do {} || exit 1; done", load(&disk));
    let job = guest.begin(bench.xenhost, &until, 900)?;
    for _ in 0..3 {
        wait_for_pages(bench, &format!("$({})", disk.worker()))?;
        disk.kill_worker(bench.xenhost)?;
    }
    wait_for_pages(bench, &format!("$({})", disk.worker()))?;
    guest.sh(bench.xenhost, "touch /tmp/stop", 60)?;
    guest.finish_ok(bench.xenhost, &job)?;
    verify(bench, &mut guest, &disk)?;
    guest.destroy(bench.xenhost)?;
    wait_for_none(bench, "the end of the disk")?;
    no_grants_in_use(bench)?;
    bench.xenhost.sh(&format!("echo {before} >{LIMIT}")).map(drop)
}

/// Large requests.
fn load(disk: &Disk) -> String {
    format!(
        "fio --name=load --ioengine=libaio --direct=1 --rw=randrw --bs=1m --iodepth=8 --size=48m \
         --filename={} --minimal",
        disk.node()
    )
}

/// Waits until this process has as many pages as possible.
fn wait_for_pages(bench: &mut Bench<'_>, pid: &str) -> Result<()> {
    let mut had = 0;
    for _ in 0..100 {
        had = pages_of(bench, pid)?;
        if had == FIRST {
            return Ok(());
        }
    }
    bail!("a disk at work has {had} own pages, not {FIRST}")
}

/// By the hypervisor's count.
fn no_grants_in_use(bench: &mut Bench<'_>) -> Result<()> {
    let grants = "xl dmesg -c >/dev/null; xl debug-keys g; sleep 1; xl dmesg >/tmp/grants; \
         grep -q 'for remote d0' /tmp/grants || { cat /tmp/grants; exit 1; }; \
         sed -n '/for remote d0/,/for remote d[1-9]/p' /tmp/grants | grep -c '\\[0x' || true";
    let active = bench.xenhost.sh(grants)?;
    if active != "0" {
        bail!("a killed backend has left {active} grants of the dom0 in use");
    }
    Ok(())
}

fn full(bench: &mut Bench<'_>) -> Result<()> {
    let before = bench.xenhost.sh(&format!("cat {LIMIT}"))?;
    for limit in [0, 7] {
        bench.xenhost.sh(&format!("echo {limit} >{LIMIT}"))?;
        let (mut guest, mut disk) = bench.default_guest(64)?;
        verify(bench, &mut guest, &disk)?;
        let log = disk.backend_log(bench.xenhost)?;
        let told = log.matches("granted by this domain to itself").count();
        if told != 1 {
            bail!("the log says {told} times that there are too few own pages:\n{log}");
        }
        guest.destroy(bench.xenhost)?;
        disk.remove_after_destroy(bench.xenhost)?;
    }
    bench.xenhost.sh(&format!("echo {before} >{LIMIT}")).map(drop)
}

fn switched_off(bench: &mut Bench<'_>) -> Result<()> {
    let image = bench.image(64)?;
    let mut disk = DiskOptions::new(&image, "xvda");
    disk.arguments = "--own-grants=false".into();
    let (mut guest, disk) = bench.guest_with(&GuestOptions::default(), disk)?;
    verify(bench, &mut guest, &disk)?;
    match pages(bench, &disk)? {
        0 => Ok(()),
        pages => bail!("{pages} own pages in spite of --own-grants=false"),
    }
}
