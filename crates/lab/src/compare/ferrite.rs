//! Runs of `ferrite-bench`, built for this machine.

use super::rounds::Sample;
use crate::report::Report;
use crate::run::{bare, bound};
use anyhow::{Context, Result, ensure};
use ferrite_xenhost::release::PROGRAMS;
use ferrite_xenhost::steps::{self, cargo, fresh_log, run_logged, step};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs.
pub(crate) struct Ferrite {
    program: PathBuf,
    bench: PathBuf,
    /// The duration of each run.
    seconds: f64,
    is_built: bool,
}

impl Ferrite {
    /// Builds the programs.
    ///
    /// # Errors
    /// It cannot be built.
    pub(crate) fn build(seconds: f64) -> Result<Ferrite> {
        step("build ferrite (release)", || {
            let mut command = cargo();
            command.args(["build", "--locked", "--release"]).args(PROGRAMS);
            run_logged(&mut command, &fresh_log("bench-build")?)
        })?;
        let program = steps::target_dir().join("release/ferrite");
        let bench = program.with_file_name("ferrite-bench");
        Ok(Ferrite { program, bench, seconds, is_built: true })
    }

    /// Builds a further program beside these, if they were built.
    ///
    /// # Errors
    /// It cannot be built, or is not there.
    pub(crate) fn build_beside(&self, name: &str) -> Result<()> {
        if self.is_built {
            step(&format!("build {name} (release)"), || {
                let mut command = cargo();
                command.args(["build", "--locked", "--release", "--package", name]);
                run_logged(&mut command, &fresh_log("bench-build-beside")?)
            })?;
        }
        let file = self.program.with_file_name(name);
        ensure!(file.is_file(), "{} is not there", file.display());
        Ok(())
    }

    /// The programs in the folder of this one.
    ///
    /// # Errors
    /// They are not there.
    pub(crate) fn beside(seconds: f64) -> Result<Ferrite> {
        let this = std::env::current_exe().context("cannot find this program's own file")?;
        Ferrite::at(&this, seconds)
    }

    /// The programs in the folder in which `file` is.
    ///
    /// # Errors
    /// They are not there.
    pub(crate) fn at(file: &Path, seconds: f64) -> Result<Ferrite> {
        let (program, bench) =
            (file.with_file_name("ferrite"), file.with_file_name("ferrite-bench"));
        ensure!(
            bench.is_file(),
            "{} is not there: install Ferrite's package, or build it: \
             cargo build --release --package ferrite --package ferrite-lab",
            bench.display()
        );
        Ok(Ferrite { program, bench, seconds, is_built: false })
    }

    /// One run on `image`, with these options, separated by spaces.
    ///
    /// # Errors
    /// It failed, or its result is invalid.
    pub(crate) fn bench(&self, image: &str, options: &str) -> Result<Sample> {
        self.bench_for(self.seconds, image, options)
    }

    /// One run of this duration.
    ///
    /// # Errors
    /// As [`bench`](Self::bench).
    pub(crate) fn bench_for(&self, seconds: f64, image: &str, options: &str) -> Result<Sample> {
        parse(&steps::output(&mut self.bench_command(seconds, image, options))?)
    }

    /// The command of such a run, which prints its report at the end.
    pub(crate) fn bench_command(&self, seconds: f64, image: &str, options: &str) -> Command {
        let mut command = Command::new(&self.bench);
        command.args([image, "--json", "--seconds", &seconds.to_string()]);
        command.args(options.split_whitespace());
        command
    }

    /// `ferrite-bench` itself.
    pub(crate) fn bench_program(&self) -> &Path {
        &self.bench
    }

    /// `ferrite` itself.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// A run of the same load by the least pipeline of two processes.
    ///
    /// # Errors
    /// As [`bench`](Self::bench).
    pub(crate) fn bound(&self, image: &str, options: &str) -> Result<Sample> {
        let mut command = Command::new(&self.bench);
        command.args(["bound", image, "--seconds", &self.seconds.to_string()]);
        parse_bound(&steps::output(command.args(options.split_whitespace()))?)
    }

    /// A run of the same copies in a bare loop; a request is a page.
    ///
    /// # Errors
    /// As [`bench`](Self::bench).
    pub(crate) fn bare(&self, copy_with: &str, batch: u32) -> Result<Sample> {
        let mut command = Command::new(&self.bench);
        command.args(["bare", copy_with, "--seconds", &self.seconds.to_string()]);
        parse_bare(&steps::output(command.args(["--batch", &batch.to_string()]))?)
    }
}

/// The figures of a run, from what it has printed.
///
/// # Errors
/// That is no report.
pub(crate) fn parse(text: &str) -> Result<Sample> {
    let report: Report = serde_json::from_str(text)
        .with_context(|| format!("ferrite-bench printed no report but {text:.300}"))?;
    let known = |value: Option<f64>| value.unwrap_or(f64::NAN);
    let count = |name| report.counts.get(name).map_or(f64::NAN, |count| *count as f64);
    let misses = count("metadata_misses");
    Ok(Sample {
        iops: report.iops,
        cpu_us: report.backend_cpu_us_per_io,
        guest_cpu_us: report.guest_cpu_us_per_io,
        lat_us: report.lat_us.mean,
        p50_us: report.lat_us.p50,
        p99_us: report.lat_us.p99,
        p999_us: report.lat_us.p999,
        max_us: report.lat_us.max,
        open_us: report.open_us,
        wake_up_us: report.wake_up_us,
        misses: misses / (misses + count("metadata_hits")).max(1.0),
        p2m_misses: count("p2m_misses"),
        p2m_hits: count("p2m_hits"),
        operations: count("transfers") / count("requests"),
        segments_per_copy: known(report.segments_per_copy),
        idle_rss_kib: known(report.idle_rss_kib.map(|kib| kib as f64)),
        rest_pss_kib: known(report.rest_pss_kib.map(|kib| kib as f64)),
        idle_switches: known(report.idle.map(|idle| idle.context_switches as f64)),
        ..Sample::UNKNOWN
    })
}

fn parse_bound(text: &str) -> Result<Sample> {
    let report: bound::Report = serde_json::from_str(text)
        .with_context(|| format!("ferrite-bench bound printed no report but {text:.300}"))?;
    Ok(Sample {
        iops: report.iops,
        cpu_us: report.cpu_us_per_io,
        guest_cpu_us: report.guest_cpu_us_per_io,
        lat_us: report.lat_us.mean,
        p50_us: report.lat_us.p50,
        p99_us: report.lat_us.p99,
        p999_us: report.lat_us.p999,
        ..Sample::UNKNOWN
    })
}

fn parse_bare(text: &str) -> Result<Sample> {
    let report: bare::Report = serde_json::from_str(text)
        .with_context(|| format!("ferrite-bench bare printed no report but {text:.300}"))?;
    Ok(Sample {
        iops: report.pages_per_s,
        cpu_us: report.cpu_us_per_page,
        lat_us: report.us_per_page,
        ..Sample::UNKNOWN
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"{"schema": 1, "where": "loopback, not Xen", "iops": 5000.0,
        "mib_per_s": 19.5, "backend_cpu_us_per_io": 2.5, "guest_cpu_us_per_io": 1.5,
        "lat_us": {"mean": 60.25, "p50": 1.0, "p99": 70.0, "p999": 75.0, "max": 80.0}, "idle_rss_kib": null,
        "idle_file_kib": null, "idle": {"seconds": 5.0, "context_switches": 7},
        "wake_up_us": 2.0, "segments_per_copy": null, "ios": 15000, "errors": 0, "mover": "copy",
        "copy_with": "memcpy", "image": "null:", "disk": "null", "direct": false,
        "open_us": 3.5, "engine": "aio", "mode": "randread", "block_bytes": 4096, "guests": 1,
        "queues": 1, "load_queues": 1, "depth": 32, "batch": false, "ring_order": 0,
        "indirect": 256, "guest_poll_us": 50, "poll_us": "auto", "counts": {"requests": 16000},
        "late_us": 1.0, "memory_bytes": 8388608, "seconds": 3.0, "version": "0.1.0"}"#;

    #[test]
    fn a_result_without_its_figures_is_refused() {
        let sample = parse(REPORT).unwrap();
        assert_eq!((sample.iops, sample.cpu_us, sample.lat_us), (5000.0, 2.5, 60.25));
        assert_eq!((sample.guest_cpu_us, sample.p50_us, sample.idle_switches), (1.5, 1.0, 7.0));
        assert!(sample.idle_rss_kib.is_nan() && sample.segments_per_copy.is_nan());
        assert!(parse(&REPORT.replace("\"mean\"", "\"mode\"")).is_err());
        assert!(parse("ferrite: no such file").is_err());
    }

    #[test]
    fn bare_copies_count_pages() {
        let text = r#"{"copy_with": "memcpy", "pages": 32, "batch": 16, "seconds": 2.0,
            "pages_per_s": 2e6, "us_per_page": 0.5, "cpu_us_per_page": 0.4}"#;
        let sample = parse_bare(text).unwrap();
        assert_eq!((sample.iops, sample.lat_us, sample.cpu_us), (2e6, 0.5, 0.4));
        assert!(parse_bare("{}").is_err());
    }
}
