//! The backend is killed and restarted; the guest sees only a pause.

use super::{Bench, Case, ferrite};
use anyhow::{Context, Result};
use ferrite_xenhost::disk::Disk;
use ferrite_xenhost::guest::{Guest, GuestOptions, Job};

pub(super) const CASES: &[Case] = &[
    ferrite("recovery/killed-three-times-under-verify", killed),
    ferrite("recovery/stopped-and-started-under-verify", stopped),
];

/// The load of a guest whose backend is killed: how often, the options of all jobs, and the large requests among them.
pub(super) struct Load {
    pub(super) kills: u32,
    pub(super) options: &'static str,
    pub(super) large: &'static str,
}

/// Three kills, while all is written and verified again.
pub(super) const THREE_KILLS: Load =
    Load { kills: 3, options: "--loops=2", large: "--bs=128k --size=24m" };

/// Writes and verifies, in large and small concurrent requests.
fn verify_job(bench: &mut Bench<'_>, guest: &mut Guest, disk: &Disk, load: &Load) -> Result<Job> {
    let (options, large) = (load.options, load.large);
    let command = format!(
        "fio --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --iodepth=32 {options} --randrepeat=1 --thread --minimal --filename={} \
         --name=small --rw=randwrite --bs=4k --size=3m --offset=0 \
         --name=large --rw=randwrite {large} --offset=64m",
        disk.node()
    );
    guest.begin(bench.xenhost, &command, 600)
}

/// Requests that the guest has finished so far.
fn finished(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<u64> {
    let command = "awk '{print $1+$5}' /sys/block/xvda/stat";
    Ok(guest.sh(bench.xenhost, command, 30)?.parse()?)
}

/// Waits until the guest has finished `more` requests after `from`.
fn wait_for_progress(
    bench: &mut Bench<'_>,
    guest: &mut Guest,
    from: u64,
    more: u64,
) -> Result<u64> {
    let target = from + more;
    let command = format!(
        "until [ $(awk '{{print $1+$5}}' /sys/block/xvda/stat) -ge {target} ]; do sleep 0.1; done"
    );
    guest.sh(bench.xenhost, &command, 200).context("the guest's requests do not go on")?;
    finished(bench, guest)
}

fn killed(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, mut disk) = bench.guest_with_image(&GuestOptions::default(), 256)?;
    killed_under_verify(bench, &mut guest, &mut disk, &THREE_KILLS)
}

/// A guest that verifies its writes, and whose backend is killed meanwhile.
pub(super) fn killed_under_verify(
    bench: &mut Bench<'_>,
    guest: &mut Guest,
    disk: &mut Disk,
    load: &Load,
) -> Result<()> {
    let job = verify_job(bench, guest, disk, load)?;
    let mut done = finished(bench, guest)?;
    for _ in 0..load.kills {
        done = wait_for_progress(bench, guest, done, 300)?;
        disk.crash_backend(bench.xenhost)?;
        disk.start_backend(bench.xenhost)?;
    }
    guest.finish_ok(bench.xenhost, &job).context("fio, with its backend killed")?;
    disk.wait_connected(bench.xenhost)
}

fn stopped(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, mut disk) = bench.guest_with_image(&GuestOptions::default(), 256)?;
    let job = verify_job(bench, &mut guest, &disk, &THREE_KILLS)?;
    let done = finished(bench, &mut guest)?;
    wait_for_progress(bench, &mut guest, done, 300)?;
    disk.stop_backend(bench.xenhost)?;
    disk.start_backend(bench.xenhost)?;
    guest.finish_ok(bench.xenhost, &job).context("fio, with its backend stopped and started")?;
    disk.wait_connected(bench.xenhost)
}
