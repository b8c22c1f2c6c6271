//! `ferrite-bench bare`: the copies of a load on `null:` in a bare loop. The difference to `ferrite-bench null:` is the
//! cost of the path from ring to ring.

use std::io::{BufRead as _, BufReader, Read as _, Write as _, stdin, stdout};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use ferrite_host::clock::{Clock, SystemClock};
use ferrite_loopback::bare::Bare;
use ferrite_loopback::front::GuestSpace;
use ferrite_loopback::{GuestHandle, GuestOptions};
use ferrite_xen::hypervisor::{DomId, PAGE_SIZE};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use super::cli::BareArgs;
use super::measure::CpuTime;
use ferrite::exit::Failure;

/// Rounds between two readings of the clock.
const ROUNDS: u32 = 64;
/// The time before any count: pages get touched, caches warm.
const RAMP: Duration = Duration::from_millis(100);

/// One run of bare copies; the fields of its JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    copy_with: String,
    pages: u32,
    batch: u32,
    seconds: f64,
    pub(crate) pages_per_s: f64,
    pub(crate) us_per_page: f64,
    pub(crate) cpu_us_per_page: f64,
}

/// Measures and prints JSON; or acts as the guest that has the memory.
pub(crate) fn run(args: &BareArgs) -> Result<(), Failure> {
    let outcome = match &args.guest {
        Some(guest) => be_guest(guest, args.pages),
        None => measure(args),
    };
    let help = "check the limits of this process (ulimit -a)";
    outcome.map_err(|e| Failure::new("cannot measure bare copies", format!("{e:#}"), help))
}

/// The guest's process, which ends when this is dropped.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn measure(args: &BareArgs) -> anyhow::Result<()> {
    let options = GuestOptions { frames: args.pages, grants: args.pages + 8, ports: 1 };
    let guest = GuestHandle::create(DomId(1), options)?;
    let _process = start_guest(&guest, args.pages)?;
    let bare = Bare::new(&guest, args.pages)?;
    let batch = args.batch as usize;
    let run = |how_long: Duration| -> std::io::Result<(u64, u64)> {
        let start_ns = SystemClock.now_ns();
        let (mut rounds, mut took_ns) = (0, 0);
        while took_ns < how_long.as_nanos() as u64 {
            (0..ROUNDS).try_for_each(|_| bare.round(args.copy_with, batch))?;
            rounds += u64::from(ROUNDS);
            took_ns = SystemClock.now_ns() - start_ns;
        }
        Ok((rounds, took_ns))
    };
    run(RAMP)?;
    let cpu = CpuTime::now();
    let (rounds, took_ns) = run(Duration::from_secs_f64(args.seconds))?;
    let us_per_page = took_ns as f64 / 1000.0 / (rounds * u64::from(args.pages)) as f64;
    let report = Report {
        copy_with: args.copy_with.to_string(),
        pages: args.pages,
        batch: args.batch,
        seconds: args.seconds,
        pages_per_s: (1e6 / us_per_page).round(),
        us_per_page,
        cpu_us_per_page: us_per_page * cpu.rate_until_now(),
    };
    Ok(writeln!(stdout().lock(), "{}", serde_json::to_string_pretty(&report)?)?)
}

fn start_guest(guest: &GuestHandle, pages: u32) -> anyhow::Result<Guest> {
    let mut command = Command::new(std::env::current_exe()?);
    let text = guest.share().pass_to(&mut command);
    command.args(["bare", "memcpy", "--guest", &text, "--pages", &pages.to_string()]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut guest = Guest(child.context("cannot start the guest's process")?);
    let out = guest.0.stdout.as_mut().context("its output was asked to be a pipe")?;
    let mut line = String::new();
    BufReader::new(out).read_line(&mut line)?;
    anyhow::ensure!(line == "ready\n", "the guest's process said {line:?}");
    Ok(guest)
}

/// Maps the memory, and touches every page.
fn be_guest(guest: &str, pages: u32) -> anyhow::Result<()> {
    // Nothing else ends a guest whose parent was killed.
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot bind to the starter")?;
    let space = GuestSpace::attach(&GuestHandle::from_arg(guest)?)?;
    let buffer = space.buffer(pages as usize)?;
    buffer.fill(0, pages as usize * PAGE_SIZE, 0xA5);
    writeln!(stdout().lock(), "ready")?;
    stdin().lock().read_to_end(&mut Vec::new())?;
    Ok(())
}
