//! `ferrite trace`: the requests of a disk, one by one.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use ferrite_seeing::trace::live::{self, Bounds};
use ferrite_seeing::trace::model::{Fit, fits, text};
use ferrite_seeing::trace::{MOST_REQUESTS, Trace, export, file, report};
use ferrite_serve::blkif::lifecycle::run_dir_name;
use serde::Serialize;

use super::args::seconds;
use crate::cli::RunDirArgs;
use crate::exit::{Code, Failure};
use crate::guests::GuestDisk;
use crate::plain::one_line;
use crate::signals;

/// The arguments of `ferrite trace`.
#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

/// The commands of `ferrite trace`.
#[derive(Debug, Subcommand)]
enum TraceCommand {
    /// Record the requests of a disk into a file.
    Record {
        /// The disk. GUEST is a name, UUID or number, DEV a name or number: web1/xvda, 3/51712.
        #[arg(value_name = "GUEST/DEV")]
        disk: GuestDisk,
        /// The file.
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
        #[command(flatten)]
        live: LiveArgs,
    },
    /// Write requests for other programs.
    Export {
        /// A recording, or a disk that is recorded first.
        #[arg(value_name = "FILE|DISK")]
        source: Source,
        /// perfetto: JSON that ui.perfetto.dev and chrome://tracing load; csv: one line per request; spans: one line
        /// for each activity of the disk's threads and the guest meanwhile.
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Format,
        /// The output file; default: standard output.
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
        #[command(flatten)]
        live: LiveArgs,
    },
    /// Draw diagrams: one page of HTML, which needs no network.
    Report {
        /// A recording, or a disk that is recorded first.
        #[arg(value_name = "FILE|DISK")]
        source: Source,
        /// The file of the page.
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
        #[command(flatten)]
        live: LiveArgs,
    },
    /// Estimate the cost of a request: time = X + Y x size, stage by stage, with 95 % intervals.
    Model {
        /// A recording, or a disk that is recorded first.
        #[arg(value_name = "FILE|DISK")]
        source: Source,
        /// Print JSON instead of a table.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        live: LiveArgs,
    },
}

/// Options of a recording.
#[derive(Debug, Args)]
struct LiveArgs {
    /// Record a disk for so long, or until Ctrl-C.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10")]
    seconds: Duration,

    /// End after so many requests; at most 2000000.
    #[arg(long, value_name = "N", default_value_t = MOST_REQUESTS as u64,
          value_parser = clap::value_parser!(u64).range(1..=MOST_REQUESTS as u64))]
    requests: u64,

    #[command(flatten)]
    places: RunDirArgs,
}

/// The source of the requests.
#[derive(Clone, Debug)]
enum Source {
    Disk(GuestDisk),
    File(PathBuf),
}

impl FromStr for Source {
    type Err = String;

    /// A text that is the name of a disk is a disk; `./3/xvda` is a file.
    fn from_str(text: &str) -> Result<Source, String> {
        Ok(text.parse().map_or_else(|_| Source::File(text.into()), Source::Disk))
    }
}

/// The format of an export.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Perfetto,
    Csv,
    Spans,
}

/// A model, as JSON.
#[derive(Serialize)]
struct Model<'a> {
    schema: u32,
    disk: &'a str,
    requests: usize,
    lost_requests: u64,
    rows: &'a [Fit],
}

/// Runs `ferrite trace`.
pub(crate) fn run(args: &TraceArgs) -> Result<(), Failure> {
    match &args.command {
        TraceCommand::Record { disk, output, live } => {
            let to = create(output)?;
            let trace = record(disk, live)?;
            file::write(&trace, &to).map_err(|e| cannot_write(output, e))?;
            let (all, seconds) = (trace.requests.len(), seconds_of(&trace));
            print(
                format!("{all} requests of {} in {seconds:.1} s are in ", trace.disk).as_bytes(),
            )?;
            print(format!("{}\n", one_line(&output.to_string_lossy())).as_bytes())
        }
        TraceCommand::Export { source, format, output, live } => {
            let to = output.as_deref().map(create).transpose()?;
            let trace = source.trace(live)?;
            let mut text = Vec::new();
            let written = match format {
                Format::Perfetto => export::perfetto(&trace, &mut text),
                Format::Csv => export::csv(&trace, &mut text),
                Format::Spans => export::csv_of_spans(&trace, &mut text),
            };
            written.map_err(|e| cannot_write(Path::new("the text"), e))?;
            match (to, output) {
                (Some(mut to), Some(path)) => {
                    to.write_all(&text).map_err(|e| cannot_write(path, e))
                }
                _ => print(&text),
            }
        }
        TraceCommand::Report { source, output, live } => {
            let to = create(output)?;
            let trace = source.trace(live)?;
            report::html(&trace, &to).map_err(|e| cannot_write(output, e))
        }
        TraceCommand::Model { source, json, live } => {
            let trace = source.trace(live)?;
            let rows = fits(&trace);
            if !*json {
                return print(text(&rows).as_bytes());
            }
            let (requests, lost_requests) = (trace.requests.len(), trace.lost_requests);
            let (schema, disk) = (1, trace.disk.as_str());
            let model = Model { schema, disk, requests, lost_requests, rows: &rows };
            let line = serde_json::to_string(&model).map_err(|e| {
                Failure::new("cannot write JSON", e, "report this as a bug in ferrite")
            })?;
            print((line + "\n").as_bytes())
        }
    }
}

impl Source {
    fn trace(&self, live: &LiveArgs) -> Result<Trace, Failure> {
        match self {
            Source::Disk(disk) => record(disk, live),
            Source::File(path) => file::read(path).map_err(|problem| {
                let code = match &problem {
                    file::Problem::Io(e) if e.kind() == io::ErrorKind::NotFound => Code::NOT_FOUND,
                    _ => Code::FAILED,
                };
                let help = "name a file that ferrite trace record has made, or a disk: 3/xvda";
                let what = format!("cannot read {}", path.display());
                Failure::new(what, problem, help).with_code(code)
            }),
        }
    }
}

fn record(disk: &GuestDisk, args: &LiveArgs) -> Result<Trace, Failure> {
    let stop = signals::flag()?;
    let disk = disk.find()?;
    let name = run_dir_name(disk.domain, disk.device);
    let run_dir = args.places.run_dir.join(&name);
    let bounds = Bounds { time: args.seconds, requests: args.requests as usize };
    let mut has_begun = false;
    // Requests after the first check are all recorded.
    let stop = || {
        if !std::mem::replace(&mut has_begun, true) {
            let _ = writeln!(io::stderr().lock(), "recording {name}; Ctrl-C ends it");
        }
        stop.load(Ordering::Relaxed)
    };
    let trace = live::record(&run_dir, bounds, stop).map_err(|e| {
        let code = match &e {
            live::Failure::NotThere(_) => Code::NOT_FOUND,
            live::Failure::Queue(..) => Code::FAILED,
        };
        let help = "a disk has a trace, which is root's, while a guest or an NBD client is connected; \
                    ferrite stat shows the disks";
        Failure::new(format!("cannot record {name}"), e, help).with_code(code)
    })?;
    if trace.lost_requests > 0 || trace.lost_spans > 0 {
        let _ = writeln!(
            io::stderr().lock(),
            "ferrite: {} requests and {} spans were overwritten before they were read",
            trace.lost_requests,
            trace.lost_spans
        );
    }
    Ok(trace)
}

fn seconds_of(trace: &Trace) -> f64 {
    trace.until_ns.saturating_sub(trace.from_ns) as f64 / 1e9
}

/// Creates the file for this user only: it tells what a guest did.
fn create(path: &Path) -> Result<File, Failure> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.map_err(|e| cannot_write(path, e))
}

fn cannot_write(path: &Path, e: io::Error) -> Failure {
    Failure::new(format!("cannot write {}", path.display()), e, "name another file with -o")
}

fn print(text: &[u8]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        // The reader has closed standard output.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => {
            printed.map_err(|e| Failure::new("cannot print", e, "check where standard output goes"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_names_a_disk_is_one_and_all_else_is_a_file() {
        let is_disk = |text: &str| matches!(text.parse(), Ok(Source::Disk(_)));
        assert!(is_disk("3/xvda") && is_disk("vbd-3-51712"));
        for file in ["slow.trace", "./3/xvda", "/tmp/vbd-3-51712", "3/x.trace"] {
            assert!(!is_disk(file), "{file}");
        }
    }
}
