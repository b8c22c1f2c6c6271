//! Guests with hardware virtualisation.

use super::recovery::{Load, killed_under_verify};
use super::toolstack::xl_knows_us;
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::disk::Disk;
use ferrite_xenhost::guest::{Follow, Guest, GuestOptions, Job};

pub(super) const CASES: &[Case] = &[
    ferrite("pvh/killed-three-times-under-verify", killed).on_amd(),
    ferrite("pvh/saved-restored-paused-and-rebooted", saved_and_rebooted).on_amd(),
    ferrite("pvh/migrated-under-verify", |bench| migrated(bench, 1)).on_amd(),
    ferrite("pvh/migrated-three-times-under-verify", |bench| migrated(bench, 3)).on_amd(),
];

/// Each exit of such a guest is emulated: it does half as much as a PV guest in the same time.
const THREE_KILLS: Load = Load { kills: 3, options: "", large: "--bs=128k --size=8m" };

/// A command that writes an area, and verifies it.
pub(super) fn verifying(node: &str, more: &str) -> String {
    format!(
        "fio --name=verify --ioengine=libaio --direct=1 --rw=randwrite --bs=16k --size=2m \
         --offset=64m --iodepth=32 --randrepeat=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --filename={node} --minimal {more}"
    )
}

fn killed(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, mut disk) = bench.guest_with_image(&GuestOptions::pvh(), 256)?;
    killed_under_verify(bench, &mut guest, &mut disk, &THREE_KILLS)
}

/// Data written before are there after each of these, and are verified by the writers.
fn saved_and_rebooted(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let image = bench.image(256)?;
    let (mut guest, mut disk) = bench.guest_of_xl(&GuestOptions::pvh(), &image)?;

    let under_way = guest.begin(bench.xenhost, &verifying("/dev/xvda", "--loops=3"), 600)?;
    wait_for_requests(bench, &mut guest, 64)?;
    let name = guest.name().to_owned();
    bench.xenhost.sh(&format!("xl pause {name}; xl unpause {name}"))?;
    let file = "/lab/guest.save";
    bench.xenhost.sh_for(&format!("xl save {name} {file} 2>&1"), 300)?;
    bench.xenhost.sh_for(&format!("xl restore {file} 2>&1"), 300)?;
    bench.follow(&mut guest, &mut disk, Follow::Restored)?;
    guest.finish_ok(bench.xenhost, &under_way).context("fio, saved and restored")?;

    rebooted(bench, &mut guest, &mut disk)
}

/// Data written and verified before a reboot are there after it.
pub(super) fn rebooted(bench: &mut Bench<'_>, guest: &mut Guest, disk: &mut Disk) -> Result<()> {
    let node = disk.node();
    let mark = format!(
        "echo ferrite-was-here | dd of={node} bs=512 seek=262144 conv=sync,notrunc oflag=direct \
         2>/dev/null && sync"
    );
    guest.sh(bench.xenhost, &mark, 60)?;
    // It does not answer this command.
    let _gone = guest.begin(bench.xenhost, "sync; reboot -f", 60)?;
    bench.follow(guest, disk, Follow::Booted)?;
    let read =
        format!("dd if={node} bs=512 skip=262144 count=1 iflag=direct 2>/dev/null | tr -d '\\0'");
    let text = guest.sh(bench.xenhost, &read, 60)?;
    expect_eq("what was written before", &text.as_str(), &"ferrite-was-here")?;
    guest.sh(bench.xenhost, &verifying(&node, "--verify_only=1"), 400).map(drop)
}

/// The guest repeatedly writes its first disk and verifies it, until [`stop_verifying`]. It has begun when this
/// returns.
pub(crate) fn begin_verifying(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<Job> {
    let verify = verifying("/dev/xvda", "");
    let until_told = format!("until [ -e /tmp/stop ]; do {verify} || exit 1; done");
    let under_way = guest.begin(bench.xenhost, &until_told, 1500)?;
    wait_for_requests(bench, guest, 64)?;
    Ok(under_way)
}

/// Checks that it has made progress since, and that all was correct.
pub(crate) fn stop_verifying(
    bench: &mut Bench<'_>,
    guest: &mut Guest,
    under_way: &Job,
) -> Result<()> {
    wait_for_requests(bench, guest, 64)?;
    guest.sh(bench.xenhost, "touch /tmp/stop", 60)?;
    guest.finish_ok(bench.xenhost, under_way).context("fio that verifies")?;
    guest.check_blkfront(bench.xenhost)
}

/// `xl` migrates the guest to this same host, with all steps of a migration. The source is still there, suspended and
/// connected, when the target gets the disk.
pub(crate) fn migrate(bench: &mut Bench<'_>, guest: &mut Guest, disk: &mut Disk) -> Result<()> {
    let name = guest.name();
    let migrate = format!("xl migrate -s '' {name} 'xl migrate-receive' 2>&1 | grep -v progress");
    has_migrated(&bench.xenhost.sh_for(&migrate, 600)?)?;
    bench.follow(guest, disk, Follow::Migrated)
}

/// Checks the output of `xl`.
pub(super) fn has_migrated(told: &str) -> Result<()> {
    if !told.contains("Migration successful.") || told.contains("unable to remove device") {
        bail!("the migration went wrong:\n{told}");
    }
    Ok(())
}

fn migrated(bench: &mut Bench<'_>, times: u32) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let image = bench.image(256)?;
    let (mut guest, mut disk) = bench.guest_of_xl(&GuestOptions::pvh(), &image)?;
    let under_way = begin_verifying(bench, &mut guest)?;
    for _ in 0..times {
        migrate(bench, &mut guest, &mut disk)?;
        wait_for_requests(bench, &mut guest, 64)?;
    }
    stop_verifying(bench, &mut guest, &under_way)?;
    bench
        .xenhost
        .sh("! ls -d /run/ferrite/vbd-* | grep -v vbd-$(xl list | awk 'END {print $2}')")
        .map(drop)
}

/// Waits until the guest has finished so many more requests.
pub(super) fn wait_for_requests(bench: &mut Bench<'_>, guest: &mut Guest, more: u32) -> Result<()> {
    // Without a process for each look, which would take time from the guest's requests.
    let look = "read -r reads _ _ _ writes _ </sys/block/xvda/stat";
    let command = format!(
        "{look}; end=$((reads + writes + {more})); \
         until {look}; [ $((reads + writes)) -ge $end ]; do sleep 0.2; done"
    );
    guest.sh(bench.xenhost, &command, 200).map(drop)
}
