//! `ferrite net stat`: the interfaces of all switches, one line per interface and interval.

use std::io::{self, Write as _};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use ferrite_seeing::interfaces::{Switch, per_second, read};

use super::NetStatArgs;
use crate::exit::Failure;
use crate::seeing::stat::heard;

/// Reports until it is interrupted, standard output is closed, or the last report is made.
pub(super) fn run(args: &NetStatArgs, is_json: bool) -> Result<(), Failure> {
    let interval = args.interval.unwrap_or(Duration::from_secs(1));
    let count = args.count.or(args.interval.is_none().then_some(1));
    let end = heard(&[])?;
    let mut before: Option<(Vec<Switch>, Instant)> = None;
    for report in 1.. {
        let (switches, at) = (look(args, report == 1)?, Instant::now());
        let text = match &before {
            None => shown(&switches, None, is_json),
            Some((old, then)) => {
                let seconds = (at - *then).as_secs_f64();
                shown(&per_second(&switches, old, seconds), Some(seconds), is_json)
            }
        };
        before = Some((switches, at));
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            printed => printed.map_err(|e| {
                Failure::new("cannot print the report", e, "check where standard output goes")
            })?,
        }
        drop(stdout);
        if count == Some(report) {
            return Ok(());
        }
        match end.recv_timeout(interval) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(_) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
    Ok(())
}

/// Reads the folder. Problems are told once.
fn look(args: &NetStatArgs, tells: bool) -> Result<Vec<Switch>, Failure> {
    let folder = &args.folder.counters;
    let (switches, problems) = read(folder).map_err(|e| {
        let what = format!("cannot look at {}", folder.display());
        Failure::new(what, e, "counters of guests' interfaces are for root")
    })?;
    for problem in problems.iter().filter(|_| tells) {
        let _ = writeln!(io::stderr().lock(), "ferrite: {problem}; it is skipped");
    }
    Ok(switches)
}

fn shown(switches: &[Switch], seconds: Option<f64>, is_json: bool) -> String {
    match (is_json, seconds) {
        (false, None) => table(switches),
        (false, Some(_)) => format!("\n{}", table(switches)),
        (true, None) => serde_json::json!({ "schema": 1, "switches": switches }).to_string() + "\n",
        (true, Some(seconds)) => {
            let report =
                serde_json::json!({ "schema": 1, "seconds": seconds, "per_second": switches });
            report.to_string() + "\n"
        }
    }
}

/// Titles, and one line for each interface.
pub(super) fn table(switches: &[Switch]) -> String {
    let titles = ["sent", "bytes", "received", "bytes", "dropped", "starved", "refused"];
    let mut out = format!("{:<14} {:<14}", "interface", "switch");
    titles.iter().for_each(|title| out += &format!(" {title:>14}"));
    out.push('\n');
    for switch in switches {
        for interface in &switch.interfaces {
            let count = |name: &str| interface.count(name);
            let refused = ["spoofed", "malformed", "failed", "unsupported"].map(count);
            let (name, shown) = (interface.name(), crate::plain::one_line(&switch.switch));
            out += &format!("{name:<14} {shown:<14}");
            for name in ["sent_packets", "sent_bytes", "received_packets", "received_bytes"] {
                out += &format!(" {:>14}", count(name));
            }
            let refused = refused.iter().fold(0_u64, |sum, n| sum.saturating_add(*n));
            for n in [count("dropped"), count("starved"), refused] {
                out += &format!(" {n:>14}");
            }
            out.push('\n');
        }
    }
    out
}
