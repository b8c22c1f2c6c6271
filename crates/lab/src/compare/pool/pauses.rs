//! The longest time that a guest waits for an answer when a process of its disk is gone. It has one request at a time, so that
//! nothing else is between.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::super::Setup;
use super::super::result::{Measurement, Target};
use super::net::child;
use super::servers::{Ends, Pool, sample, wait_for_socket};
use super::worst;
use crate::run::host::RUN_DIRS;

const DISK: &str = "pauses";
pub(super) const LOAD: &str = "--mode randwrite --block 4K --depth 1";
/// A run, and how long after its start something happens. The rest is more than twice the longest pause that is allowed.
pub(super) const SECONDS: f64 = 14.0;
const HAPPENS: Duration = Duration::from_secs(3);
/// The most rounds: each takes a minute.
pub(super) const MOST_ROUNDS: u32 = 3;

/// A change of a running disk, which is undone.
type Act<'a> = &'a mut dyn FnMut(&mut Pool<'_>, u32) -> Result<()>;

/// Runs all measurements.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let mut pool = Pool::start(setup, 2, None)?;
    pool.create(DISK, 64, &["--replicas", "2"])?;
    let rounds = setup.runs.min(MOST_ROUNDS);
    let mut row = |what: &str, most: f64, act: Act<'_>, undo: Act<'_>| {
        let pauses = (0..rounds).map(|_| {
            let pause = around(&mut pool, act)?;
            undo(&mut pool, 0)?;
            pool.repair(DISK)?;
            Ok(pause)
        });
        pauses.collect::<Result<Vec<f64>>>().map(|all| pause_row(what, most, &all))
    };
    let mut rows = vec![
        row("a server is killed", 1.0, &mut |pool, _| pool.kill(1), &mut |p, _| p.serve(1))?,
        row(
            "a server is silent",
            5.0,
            &mut |pool, _| pool.server(1)?.signal(Signal::STOP),
            &mut |pool, _| pool.server(1)?.signal(Signal::CONT),
        )?,
        row(
            "the disk's own process is killed",
            2.0,
            &mut |_, guest| kill(child(guest, "own")?),
            &mut |_, _| Ok(()),
        )?,
    ];
    for (what, is_silent) in
        [("the disk is stolen by another host", false), ("the same, and a server is silent", true)]
    {
        let all = (0..rounds).map(|_| stolen(&mut pool, is_silent));
        rows.push(pause_row(what, 5.0, &all.collect::<Result<Vec<_>>>()?));
    }
    Ok(rows)
}

pub(super) fn pause_row(what: &str, most: f64, all: &[f64]) -> Measurement {
    worst(format!("{what}: longest answer of the rounds"), "s", all).target(Target::AtMost(most))
}

pub(super) fn kill(pid: u32) -> Result<()> {
    let pid = Pid::from_raw(pid.cast_signed()).context("a process has a number")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// Runs a guest, and does something to it after some time. The longest time that it has waited, in seconds.
fn around(pool: &mut Pool<'_>, act: Act<'_>) -> Result<f64> {
    let guest = pool.guest(&pool.name(DISK), SECONDS, LOAD).spawn()?;
    longest(guest, |pid| act(pool, pid))
}

/// The longest time that this guest has waited, in seconds. `act` is called after some time.
pub(super) fn longest(guest: Child, act: impl FnOnce(u32) -> Result<()>) -> Result<f64> {
    sleep(HAPPENS);
    let (happened, acted) = (Instant::now(), act(guest.id()));
    let output = guest.wait_with_output()?;
    acted?;
    let took = happened.elapsed().as_secs_f64();
    // An answer behind the end is not counted, and its guest ends late: its start takes a second, not three.
    let rest = SECONDS - HAPPENS.as_secs_f64();
    ensure!(took < rest + 3.0, "the guest had no answer until the end of the run");
    Ok(sample(&output)?.max_us / 1e6)
}

/// A host ends with all that it does, and another one takes its disk. From then to the first answered write, in seconds.
fn stolen(pool: &mut Pool<'_>, is_silent: bool) -> Result<f64> {
    let mut lost = Ends(pool.guest(&pool.name(DISK), SECONDS, LOAD).spawn()?);
    sleep(HAPPENS);
    // Its host is gone, and with it maybe a server. The guest's backend starts no other process, and gives nothing back.
    let owner = child(lost.id(), "own")?;
    lost.signal(Signal::STOP)?;
    kill(owner)?;
    kill(lost.id())?;
    lost.0.wait()?;
    remove_run_dir(lost.id())?;
    if is_silent {
        pool.server(1)?.signal(Signal::STOP)?;
    }
    let socket = pool.dir.path().join("elsewhere");
    let block = pool.dir.path().join("block");
    std::fs::write(&block, [7; 4096])?;
    let mut there = elsewhere(pool)?;
    there.arg(pool.setup.ferrite.program()).args(["export", "nbd", &pool.name(DISK), "--socket"]);
    let began = Instant::now();
    pool.steal(DISK)?;
    let there = there.arg(&socket).stdout(Stdio::null()).stderr(Stdio::null());
    let there = Ends(there.spawn()?);
    wait_for_socket(&socket)?;
    write_block(&block, &socket)?;
    let took = began.elapsed().as_secs_f64();
    there.signal(Signal::TERM)?;
    let mut there = there;
    there.0.wait()?;
    if is_silent {
        pool.server(1)?.signal(Signal::CONT)?;
    }
    pool.repair(DISK)?;
    Ok(took)
}

/// Removes what a guest's backend leaves that is killed.
fn remove_run_dir(pid: u32) -> Result<()> {
    for folder in RUN_DIRS.iter().flat_map(std::fs::read_dir).flatten() {
        let folder = folder?;
        let name = folder.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(&format!("ferrite-bench-{pid}-"))) {
            std::fs::remove_dir_all(folder.path())?;
        }
    }
    Ok(())
}

/// What begins a command line of another host: one with a name and a `/run` of its own.
fn elsewhere(pool: &Pool<'_>) -> Result<Command> {
    let name = pool.dir.path().join("hostname");
    std::fs::write(&name, "elsewhere\n")?;
    let script = "mount -t tmpfs t /run; mount --bind \"$0\" /etc/hostname; exec \"$@\"";
    let mut command = pool.command("unshare");
    command.args(["-m", "sh", "-ec", script]).arg(name);
    Ok(command)
}

fn write_block(block: &Path, socket: &Path) -> Result<()> {
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let mut command = Command::new("nbdcopy");
    ferrite_xenhost::steps::output(command.arg(block).arg(uri)).map(drop)
}
