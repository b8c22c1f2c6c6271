//! `ferrite net trace`: the way of each packet through a switch, as a table, JSON or a page.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Args;
use ferrite_net::trace::{End, Problem, Reader, Record, Stage};

use super::{FolderArgs, switch_name, trace_file};
use crate::exit::{Code, Failure};
use crate::seeing::args::seconds;
use crate::signals;

/// The most records of a recording: 400,000 packets are some seconds of a busy switch.
const MOST: usize = 400_000;
/// How often the file is read: it holds 4,096 records, 70 ms of 57,000 packets a second.
const LOOK: Duration = Duration::from_millis(10);

/// `ferrite net trace`.
#[derive(Debug, Args)]
pub(super) struct NetTraceArgs {
    /// The switch.
    #[arg(long, value_name = "NAME", value_parser = switch_name)]
    switch: String,

    /// Record packets for so long, or until Ctrl-C; without it: the last 4096 that were moved.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<Duration>,

    /// Write a page of HTML with the time line instead of a table.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    #[command(flatten)]
    folder: FolderArgs,
}

/// Packets that were recorded.
pub(super) struct Recording {
    pub(super) switch: String,
    /// Oldest first.
    pub(super) records: Vec<Record>,
    pub(super) lost: u64,
}

/// Records, and shows.
pub(super) fn run(args: &NetTraceArgs, is_json: bool) -> Result<(), Failure> {
    let recording = record(args)?;
    if let Some(path) = &args.output {
        let what = || format!("cannot write {}", path.display());
        let failed = |e| Failure::new(what(), e, "name another file with -o");
        // It tells what guests did.
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
        return file
            .and_then(|mut file| file.write_all(super::page::html(&recording).as_bytes()))
            .map_err(failed);
    }
    let text = if is_json { json(&recording) } else { table(&recording) };
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => {
            printed.map_err(|e| Failure::new("cannot print", e, "check where standard output goes"))
        }
    }
}

fn record(args: &NetTraceArgs) -> Result<Recording, Failure> {
    let path = trace_file(&args.folder.counters, &args.switch);
    let failed = |problem: Problem| {
        let code = match &problem {
            Problem::Io(e) if e.kind() == io::ErrorKind::NotFound => Code::NOT_FOUND,
            _ => Code::FAILED,
        };
        let help = "a switch has records while ferrite net serve runs, for root; ferrite net stat shows the switches";
        Failure::new(format!("cannot read {}", path.display()), problem, help).with_code(code)
    };
    let mut reader = Reader::open(&path).map_err(failed)?;
    if let Some(time) = args.seconds {
        let stop = signals::flag()?;
        reader.from_now_on().map_err(failed)?;
        let end = Instant::now() + time;
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            if reader.look().map_err(failed)? >= MOST {
                break;
            }
            std::thread::sleep(LOOK);
        }
    }
    reader.look().map_err(failed)?;
    let (records, lost) = reader.finish();
    Ok(Recording { switch: args.switch.clone(), records, lost })
}

/// A stage of the table: its name, its stage and the one that it is counted from.
pub(super) const INTERVALS: [(&str, Stage, Stage); 9] = [
    ("header fetched", Stage::Fetched, Stage::Seen),
    ("receiver chosen", Stage::Chosen, Stage::Fetched),
    ("copied", Stage::Copied, Stage::Chosen),
    ("receiver answered", Stage::RxAnswered, Stage::Copied),
    ("sender answered", Stage::TxAnswered, Stage::RxAnswered),
    ("receiver notified", Stage::RxNotified, Stage::TxAnswered),
    ("sender notified", Stage::TxNotified, Stage::TxAnswered),
    ("receiver seen to consume", Stage::RxConsumed, Stage::RxAnswered),
    ("sender seen to consume", Stage::TxConsumed, Stage::TxAnswered),
];

/// Times of one interval, of all packets that have both ends, microseconds, sorted.
pub(super) fn times_us(records: &[Record], stage: Stage, since: Stage) -> Vec<f64> {
    let us = |record: &Record| {
        let (to, from) = (record.at_ns(stage)?, record.at_ns(since)?);
        Some(to.saturating_sub(from) as f64 / 1e3)
    };
    let mut times: Vec<f64> = records.iter().filter_map(us).collect();
    times.sort_by(f64::total_cmp);
    times
}

/// The value below which this part of the sorted values is.
pub(super) fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let at = (part * sorted.len() as f64) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied()
}

/// One line for each interval, and the whole.
pub(super) fn rows(records: &[Record]) -> Vec<(&'static str, usize, [f64; 3])> {
    let whole = [("slot seen to sender answered", Stage::TxAnswered, Stage::Seen)];
    let row = |(name, stage, since): (&'static str, Stage, Stage)| {
        let times = times_us(records, stage, since);
        let of = |part| quantile(&times, part);
        Some((name, times.len(), [of(0.5)?, of(0.99)?, times.last().copied()?]))
    };
    INTERVALS.into_iter().chain(whole).filter_map(row).collect()
}

pub(super) fn table(recording: &Recording) -> String {
    let (count, lost) = (recording.records.len(), recording.lost);
    let mut out = format!("{count} packets of the switch {}", recording.switch);
    out += &if lost > 0 { format!(", {lost} more were lost\n") } else { "\n".into() };
    if count > 0 {
        let sum = |of: fn(&Record) -> f64| recording.records.iter().map(of).sum::<f64>();
        let [bytes, together] =
            [sum(|r| f64::from(r.bytes)), sum(|r| f64::from(r.together))].map(|n| n / count as f64);
        out += &format!("in the mean {bytes:.0} bytes, {together:.1} packets in a turn\n");
    }
    out += &format!(
        "{:<30} {:>9} {:>10} {:>10} {:>10}\n",
        "stage, after the one before", "packets", "median us", "p99 us", "most us"
    );
    for (name, n, [median, p99, most]) in rows(&recording.records) {
        out += &format!("{name:<30} {n:>9} {median:>10.1} {p99:>10.1} {most:>10.1}\n");
    }
    out
}

pub(super) fn json(recording: &Recording) -> String {
    let end = |end: End| match end {
        End::Nobody => serde_json::Value::Null,
        End::Uplink => serde_json::json!("uplink"),
        End::Vif { domid, handle, queue } => {
            serde_json::json!({ "domid": domid, "handle": handle, "queue": queue })
        }
    };
    let packet = |record: &Record| {
        let mut packet = serde_json::json!({
            "from": end(record.from), "to": end(record.to), "bytes": record.bytes,
            "segment_bytes": record.segment_bytes, "pages": record.pages,
            "pieces": record.pieces, "together": record.together,
            "outcome": record.outcome.name(), "noticed": record.noticed.name(),
        });
        for stage in Stage::ALL {
            packet[format!("{}_ns", stage.name())] = record.at_ns(stage).into();
        }
        packet
    };
    let packets: Vec<_> = recording.records.iter().map(packet).collect();
    serde_json::json!({
        "schema": 1, "switch": recording.switch, "lost": recording.lost, "packets": packets,
    })
    .to_string()
        + "\n"
}
