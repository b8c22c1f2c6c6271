//! `ferrite stat`: statistics of disks, one line per disk and interval.

use std::ffi::c_int;
use std::io::{self, Write as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ferrite_seeing::rates::Rates;
use serde::Serialize;
use signal_hook::low_level::emulate_default_handler;

use super::args::StatArgs;
use super::table::table;
use super::{Watch, tell};
use crate::disk::pause::PausedDisk;
use crate::exit::Failure;
use crate::plain::one_line;
use crate::signals;

/// A report, as JSON.
#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    disks: &'a [Rates],
    /// Disks whose guests wait, as they are paused.
    #[serde(skip_serializing_if = "<[PausedDisk]>::is_empty")]
    paused: &'a [PausedDisk],
}

/// Reports until it is interrupted, standard output is closed, or the last report is made.
pub(crate) fn run(args: &StatArgs) -> Result<(), Failure> {
    let interval = args.interval.unwrap_or(Duration::from_secs(1));
    let count = args.count.or(args.interval.is_none().then_some(1));
    let end = heard(&[])?;
    let mut watch = Watch::new(&args.watched)?;
    let mut next = Instant::now();
    for report in 1.. {
        let look = watch.look()?;
        tell(&look.problems);
        let missing = watch.missing(&look);
        if report == 1 && !missing.is_empty() {
            // A single report fails if the disk is missing. Repeated reports wait for it.
            let failure = watch.is_missing(&missing);
            match count {
                Some(1) => return Err(failure),
                _ => drop(failure.report()),
            }
        } else if report == 1 && look.rates.is_empty() && !args.json {
            tell_none(&watch);
        }
        let paused = watch.paused();
        let text = match args.json {
            true => json(&look.rates, &paused)?,
            false => text(report, &look.rates, &paused),
        };
        match print(&text) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            printed => printed.map_err(|e| {
                Failure::new("cannot print the report", e, "check where standard output goes")
            })?,
        }
        if count == Some(report) {
            return Ok(());
        }
        next += interval;
        // After the process was stopped for long, it does not catch up on reports.
        next = next.max(Instant::now());
        match end.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(_) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
    Ok(())
}

fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn tell_none(watch: &Watch) {
    let folder = watch.folder.path().display();
    let _ = writeln!(io::stderr().lock(), "ferrite: no disk has counters in {folder} now");
}

fn text(report: u64, rates: &[Rates], paused: &[PausedDisk]) -> String {
    let gap = if report == 1 { "" } else { "\n" };
    let note =
        |it: &PausedDisk| format!("    {}: {}\n", one_line(&it.text()), one_line(&it.help()));
    format!("{gap}{}{}", table(rates), paused.iter().map(note).collect::<String>())
}

fn json(disks: &[Rates], paused: &[PausedDisk]) -> Result<String, Failure> {
    let line = serde_json::to_string(&Report { schema: 1, disks, paused })
        .map_err(|e| Failure::new("cannot write JSON", e, "report this as a bug in ferrite"))?;
    Ok(line + "\n")
}

/// How long a program that was asked to end may take, before the signal kills it.
const LAST: Duration = Duration::from_secs(5);

/// Receives the signals that ask this program to end, and `more`. A program that waits for a reader or a terminal that
/// is gone does not read its signals: some seconds later the signal ends it as by default.
pub(crate) fn heard(more: &[c_int]) -> Result<Receiver<c_int>, Failure> {
    let (sender, receiver) = channel();
    let (mut signals, ends) = (signals::listen()?, signals::ending());
    for signal in more {
        signals.add_signal(*signal).map_err(signals::cannot)?;
    }
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for signal in signals.forever() {
                // A receiver that is gone is about to end.
                let _ = sender.send(signal);
                if ends.contains(&signal) {
                    std::thread::sleep(LAST);
                    let _ = emulate_default_handler(signal);
                }
            }
        })
        .map_err(signals::cannot)?;
    Ok(receiver)
}
