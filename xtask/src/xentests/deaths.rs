//! A disk's processes are killed, one by one and all at once: its guest sees only a pause.

use super::guests::{begin_verifying, has_migrated, stop_verifying, wait_for_requests};
use super::store;
use super::toolstack::xl_knows_us;
use super::xl::{PROCESSES, wait_for_none};
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::disk::{Disk, ended};
use ferrite_xenhost::guest::{Follow, Guest, GuestOptions, Job};

pub(super) const CASES: &[Case] = &[
    ferrite("deaths/each-process-and-all-at-once-under-verify", on_a_clone),
    ferrite("deaths/each-process-many-times-and-all-at-once-under-verify", |bench| {
        let image = bench.image(256)?;
        of_each(bench, &MANY, &image)
    }),
    ferrite("deaths/workers-die-while-their-guest-migrates", while_migrating).on_amd(),
];

/// How often each process is killed.
struct Deaths {
    /// Requests of the guest between two kills.
    between: u32,
    worker: u32,
    keeper: u32,
    daemon: u32,
    /// The worker, while there is no daemon.
    alone: u32,
    all: u32,
}

const FEW: Deaths = Deaths { between: 16, worker: 2, keeper: 1, daemon: 1, alone: 1, all: 1 };
const MANY: Deaths = Deaths { between: 64, worker: 20, keeper: 3, daemon: 5, alone: 3, all: 3 };

/// A second program file, for an upgrade.
const NEXT: &str = "/lab/next/ferrite";

fn keeper(disk: &Disk) -> String {
    format!("$(xenstore-read {}/kthread-pid)", disk.backend_dir())
}

/// Kills processes, and waits until the disk has another worker.
fn kill(bench: &mut Bench<'_>, disk: &Disk, pids: &str, what: &str) -> Result<()> {
    let old = begin_death(bench, disk, pids)?;
    wait_for_next(bench, disk, &old, what)
}

/// The worker before the kill.
fn begin_death(bench: &mut Bench<'_>, disk: &Disk, pids: &str) -> Result<String> {
    let old = bench.xenhost.sh(&format!("old=$({}); kill -9 {pids}; echo $old", disk.worker()))?;
    if old.is_empty() {
        bail!("no process serves the disk");
    }
    Ok(old)
}

fn wait_for_next(bench: &mut Bench<'_>, disk: &Disk, old: &str, what: &str) -> Result<()> {
    let next = format!("new=$({}); [ -n \"$new\" ] && [ $new != {old} ]", disk.worker());
    bench.xenhost.wait_until(what, &next, 60)
}

/// A guest that verifies its writes until it is told to stop.
fn verifying_guest(
    bench: &mut Bench<'_>,
    options: &GuestOptions,
    image: &str,
) -> Result<(Guest, Disk, Job)> {
    bench.start_daemon()?;
    let (mut guest, disk) = bench.guest_of_xl(options, image)?;
    let under_way = begin_verifying(bench, &mut guest)?;
    Ok((guest, disk, under_way))
}

/// The disk is a clone of a snapshot in a store, and the guest writes over data of the snapshot.
fn on_a_clone(bench: &mut Bench<'_>) -> Result<()> {
    let source = store::make_store_of(bench, 128, 63)?;
    of_each(bench, &FEW, &format!("store:{}#a", store::STORE))?;
    store::check_store(bench, &source)
}

fn of_each(bench: &mut Bench<'_>, deaths: &Deaths, image: &str) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    let (mut guest, disk, under_way) = verifying_guest(bench, &GuestOptions::default(), image)?;
    let guest = &mut guest;
    let kept = keeper(&disk);
    let first = bench.xenhost.sh(&format!("echo {kept}"))?;
    let mut files = None;
    for _ in 0..deaths.worker {
        disk.kill_worker(bench.xenhost)?;
        wait_for_requests(bench, guest, deaths.between)?;
        let now = open_files(bench, &first)?;
        if now > *files.get_or_insert(now) {
            bail!("the keeper had {files:?} files open, and now {now}");
        }
    }
    expect_eq(
        "the keeper of all these workers",
        &bench.xenhost.sh(&format!("echo {kept}"))?,
        &first,
    )?;
    let daemon = bench.daemon.context("a daemon")?.to_string();
    let before = open_files(bench, &daemon)?;
    for _ in 0..deaths.keeper {
        kill(bench, &disk, &kept, "the next keeper's worker")?;
        wait_for_requests(bench, guest, deaths.between)?;
    }
    let after = open_files(bench, &daemon)?;
    if after > before {
        bail!("the daemon had {before} files open, and after some keepers {after}");
    }
    for _ in 0..deaths.daemon {
        let old = bench.xenhost.sh(&disk.worker())?;
        let daemon = bench.daemon.context("a daemon")?.to_string();
        restart_daemon(bench, &daemon)?;
        wait_for_requests(bench, guest, deaths.between)?;
        let now = bench.xenhost.sh(&disk.worker())?;
        expect_eq("the worker while the daemon died", &now, &old)?;
    }
    for _ in 0..deaths.alone {
        without_a_daemon(bench, guest, &disk, deaths.between)?;
    }
    for _ in 0..deaths.all {
        let old = bench.xenhost.sh(&disk.worker())?;
        restart_daemon(bench, &format!("$({PROCESSES})"))?;
        wait_for_next(bench, &disk, &old, "a worker after the death of all")?;
        wait_for_requests(bench, guest, deaths.between)?;
    }
    upgrade(bench, &disk)?;
    stop_verifying(bench, guest, &under_way)?;
    nothing_is_left(bench, &disk)?;
    guest.destroy(bench.xenhost)?;
    wait_for_none(bench, "the end of the disk")?;
    bench.xenhost.sh("rm -r /lab/next").map(drop)
}

/// Kills these processes, the daemon among them, and starts another daemon.
fn restart_daemon(bench: &mut Bench<'_>, pids: &str) -> Result<()> {
    kill_daemon(bench, pids)?;
    bench.start_daemon()
}

pub(super) fn kill_daemon(bench: &mut Bench<'_>, pids: &str) -> Result<()> {
    let daemon = bench.daemon.take().context("a daemon")?;
    bench.xenhost.sh(&format!("kill -9 {pids}"))?;
    bench.xenhost.wait_until("the daemon's end", &ended(daemon), 60)
}

/// The successor serves the guest without a daemon, and the next daemon keeps it.
fn without_a_daemon(
    bench: &mut Bench<'_>,
    guest: &mut Guest,
    disk: &Disk,
    between: u32,
) -> Result<()> {
    let daemon = bench.daemon.context("a daemon")?.to_string();
    kill_daemon(bench, &daemon)?;
    disk.kill_worker(bench.xenhost)?;
    wait_for_requests(bench, guest, between).context("without a daemon")?;
    let alone = bench.xenhost.sh(&disk.worker())?;
    bench.start_daemon()?;
    wait_for_requests(bench, guest, between)?;
    expect_eq("the worker when a daemon comes", &bench.xenhost.sh(&disk.worker())?, &alone)
}

/// Upgrades the disk to another program, without the guest's participation.
fn upgrade(bench: &mut Bench<'_>, disk: &Disk) -> Result<()> {
    let program = format!("readlink /proc/$({})/exe", disk.worker());
    bench
        .xenhost
        .sh(&format!("mkdir -p /lab/next && cp $(which ferrite) {NEXT} && {NEXT} upgrade"))?;
    expect_eq("the program that serves", &bench.xenhost.sh(&program)?.as_str(), &NEXT)
}

/// One keeper with one worker, and no zombies.
fn nothing_is_left(bench: &mut Bench<'_>, disk: &Disk) -> Result<()> {
    let processes = bench.xenhost.sh(&format!("{PROCESSES} | wc -l"))?;
    expect_eq("daemon, keeper and worker", &processes.as_str(), &"3")?;
    let daemon = bench.daemon.context("a daemon")?;
    let dead = format!(
        "for pid in {daemon} {}; do for child in $(cat /proc/$pid/task/*/children); do \
         grep '^State:.Z' /proc/$child/status; done; done; true",
        keeper(disk)
    );
    expect_eq("zombies of the daemon and the keeper", &bench.xenhost.sh(&dead)?.as_str(), &"")
}

fn open_files(bench: &mut Bench<'_>, pid: &str) -> Result<u32> {
    Ok(bench.xenhost.sh(&format!("ls /proc/{pid}/fd | wc -l"))?.parse()?)
}

/// Kills the source's worker and the target's at various points of the migration.
fn while_migrating(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    let image = bench.image(256)?;
    let (mut guest, mut disk, under_way) = verifying_guest(bench, &GuestOptions::pvh(), &image)?;
    let name = guest.name().to_owned();
    let told = bench.xenhost.sh_for(
        &format!(
            "xl migrate -s '' {name} 'xl migrate-receive' >/tmp/xl.log 2>&1 & deaths=0; \
             while kill -0 $! 2>/dev/null; do \
             deaths=$((deaths + $(pkill -9 -c -f '^ferrite worker'))); sleep 4; done; \
             grep -v progress /tmp/xl.log; rm /tmp/xl.log; echo deaths $deaths"
        ),
        600,
    )?;
    has_migrated(&told)?;
    let deaths = told.lines().last().and_then(|line| line.strip_prefix("deaths "));
    if deaths.and_then(|deaths| deaths.parse().ok()).unwrap_or(0) < 2 {
        bail!("too few workers died:\n{told}");
    }
    bench.follow(&mut guest, &mut disk, Follow::Migrated)?;
    stop_verifying(bench, &mut guest, &under_way)
}
