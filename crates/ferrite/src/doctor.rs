//! `ferrite doctor`: what this machine offers, what would be used, and why. It changes nothing.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use ferrite_daemon::config::{CONFIGURED_BY, Config, DiskOptions, PATH};
use ferrite_disk::Fencing;
use ferrite_io::engines::{EngineChoice, EngineKind};
use serde::Serialize;

use crate::backup::live::{self, LeftBackup};
use crate::cli::DoctorArgs;
use crate::disk::pause::{PausedDisk, paused_disks};
use crate::exit::Failure;
use crate::guests::Names;
use crate::plain::one_line;
use crate::pool::health::{self, Finding};

mod kernel;
mod network;
mod xen;

/// How good a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// As it should be.
    Ok,
    /// Works, but could be better.
    Warn,
    /// Missing.
    No,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    area: &'static str,
    name: &'static str,
    state: State,
    /// The finding.
    found: String,
    /// The consequence: what is used, or what to do.
    means: String,
}

/// The report as JSON.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    /// The engine for disk I/O; `None`: none works here.
    engine: Option<&'static str>,
    /// Whether guests can be served here.
    xen: bool,
    checks: Vec<Check>,
}

/// Prints all findings. It fails where guests cannot be served.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let report = examine(&args.places.run_dir);
    let text = if args.json { json(&report)? } else { table(&report) };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new("cannot print the report", e, "check where standard output goes"))
        }
        _ => verdict(&report),
    }
}

fn verdict(report: &Report) -> Result<(), Failure> {
    if report.xen && report.engine.is_some() {
        return Ok(());
    }
    let missing = report.checks.iter().filter(|c| c.state == State::No).map(|c| c.name);
    let why = format!("missing: {}", missing.collect::<Vec<_>>().join(", "));
    let help =
        "the report says of each what follows from that; images can be worked on without Xen";
    Err(Failure::new("guests cannot be served on this machine", why, help))
}

/// The disks that are paused.
fn paused(run: &Path, names: &Names) -> Vec<Check> {
    let disks = paused_disks(run, names);
    let check = |disk: PausedDisk| Check {
        area: "disks",
        name: "paused",
        state: if disk.is_short { State::Ok } else { State::Warn },
        found: one_line(&disk.text()).into_owned(),
        means: one_line(&disk.help()).into_owned(),
    };
    disks.into_iter().map(check).collect()
}

/// The snapshots that interrupted backups have left.
fn left_backups(run: &Path) -> Vec<Check> {
    let check = |left: LeftBackup| {
        let LeftBackup { name, snapshot, folder } = left;
        let (snapshot, folder) = (snapshot.display(), folder.display());
        let found = format!("a backup of {name} was interrupted; its snapshot is {snapshot}");
        let means = format!("to go on, or to merge that: ferrite backup create {name} {folder}");
        Check {
            area: "disks",
            name: "backup",
            state: State::Warn,
            found: one_line(&found).into_owned(),
            means: one_line(&means).into_owned(),
        }
    };
    live::left_backups(run, &Names::read()).into_iter().map(check).collect()
}

/// The LUNs whose target forgets which host may write.
fn weak_fences(config: &Config) -> Vec<Check> {
    let weak = |(image, options): (&PathBuf, &DiskOptions)| {
        let is_weak = options.fence == Fencing::WeakReservation;
        is_weak.then(|| Check {
            area: "disks",
            name: "fence",
            state: State::Warn,
            found: one_line(&format!("{} has fence = \"weak-reservation\"", image.display()))
                .into_owned(),
            means: "two hosts may write to it when its target has started again".to_owned(),
        })
    };
    config.images.iter().filter_map(weak).collect()
}

/// The pools of servers that the configuration names.
fn pools(config: &Config) -> Vec<Check> {
    let check = |Finding { is_good, found, means }| Check {
        area: "disks",
        name: "pool",
        state: if is_good { State::Ok } else { State::Warn },
        found: one_line(&found).into_owned(),
        means: one_line(&means).into_owned(),
    };
    health::of_configured(config).into_iter().map(check).collect()
}

fn examine(run: &Path) -> Report {
    let chosen = EngineChoice::Auto.decide().ok().map(|chosen| chosen.kind);
    let mut checks = kernel::checks(chosen);
    checks.extend(xen::checks());
    let names = Names::read();
    checks.extend(paused(run, &names));
    checks.extend(network::checks(run, &names));
    checks.extend(left_backups(run));
    let named = std::env::var_os(CONFIGURED_BY).map(PathBuf::from);
    let file = named.clone().unwrap_or_else(|| PATH.into());
    let config = Config::load(&file, named.is_some());
    checks.extend(config.iter().flat_map(weak_fences));
    checks.extend(config.iter().flat_map(pools));
    let none_missing = |names: &[&str]| {
        names.iter().all(|n| checks.iter().any(|c| c.name == *n && c.state != State::No))
    };
    Report {
        schema: 1,
        engine: chosen.map(EngineKind::name),
        xen: none_missing(&xen::REQUIRED),
        checks,
    }
}

fn json(report: &Report) -> Result<String, Failure> {
    serde_json::to_string_pretty(report).map(|text| text + "\n").map_err(|e| {
        Failure::new("cannot print the report as JSON", e, "run ferrite doctor without --json")
    })
}

fn table(report: &Report) -> String {
    let mut text = String::new();
    let width = report.checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    let mut area = "";
    for check in &report.checks {
        if check.area != area {
            area = check.area;
            let _ = writeln!(text, "{area}");
        }
        let state = match check.state {
            State::Ok => "OK  ",
            State::Warn => "WARN",
            State::No => "NO  ",
        };
        let _ = writeln!(text, "  {state}  {:width$}  {}", check.name, check.found);
        if !check.means.is_empty() {
            let _ = writeln!(text, "        {:width$}  -> {}", "", check.means);
        }
    }
    let engine = match report.engine {
        Some(engine) => format!("disk I/O goes through {engine}"),
        None => "no disk I/O is possible (see NO above)".into(),
    };
    let xen = match report.xen {
        true => "guests can be served",
        false => "guests cannot be served (see NO above)",
    };
    let _ = writeln!(text, "\nOn this machine {engine}, and {xen}.");
    text
}

/// The content of a small file of the kernel, without the newline at its end.
fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &'static str, state: State) -> Check {
        Check { area: "area", name, state, found: "this".into(), means: "that".into() }
    }

    #[test]
    fn the_table_has_a_line_a_check_and_a_conclusion() {
        let checks = vec![check("one", State::Ok), check("three", State::No)];
        let report = Report { schema: 1, engine: Some("io_uring"), xen: false, checks };
        assert_eq!(
            table(&report),
            "area\n  OK    one    this\n               -> that\n  NO    three  this\n               \
             -> that\n\nOn this machine disk I/O goes through io_uring, and guests cannot be \
             served (see NO above).\n"
        );
    }

    #[test]
    fn the_examination_works_on_every_machine() {
        let dir = tempfile::tempdir().unwrap();
        let report = examine(dir.path());
        assert!(report.checks.iter().any(|c| c.area == "kernel"));
        assert!(report.checks.iter().any(|c| c.area == "xen"));
        assert!(report.checks.iter().all(|c| !c.found.is_empty()));
        assert!(xen::REQUIRED.iter().all(|n| report.checks.iter().any(|c| c.name == *n)));
    }
}
