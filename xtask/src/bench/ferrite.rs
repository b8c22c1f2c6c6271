//! Runs of `ferrite-bench`, built for this machine.

use super::rounds::Sample;
use anyhow::{Context, Result};
use ferrite_xenhost::steps::{self, cargo, fresh_log, run_logged, step};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs.
pub(super) struct Ferrite {
    program: PathBuf,
    bench: PathBuf,
    /// How long each run measures.
    seconds: f64,
}

impl Ferrite {
    /// # Errors
    /// It cannot be built.
    pub(super) fn build(seconds: f64) -> Result<Ferrite> {
        step("build ferrite (release)", || {
            let mut command = cargo();
            command.args([
                "build",
                "--locked",
                "--release",
                "--package",
                "ferrite",
                "--package",
                "ferrite-bench",
            ]);
            run_logged(&mut command, &fresh_log("bench-build")?)
        })?;
        let program = steps::target_dir().join("release/ferrite");
        let bench = program.with_file_name("ferrite-bench");
        Ok(Ferrite { program, bench, seconds })
    }

    /// One run on `image`, with these options, parted by spaces.
    ///
    /// # Errors
    /// It failed, or its result makes no sense.
    pub(super) fn bench(&self, image: &str, options: &str) -> Result<Sample> {
        self.bench_for(self.seconds, image, options)
    }

    /// The same, for so long.
    ///
    /// # Errors
    /// As [`bench`](Self::bench).
    pub(super) fn bench_for(&self, seconds: f64, image: &str, options: &str) -> Result<Sample> {
        let mut command = Command::new(&self.bench);
        command.args([image, "--json", "--seconds", &seconds.to_string()]);
        parse(&steps::output(command.args(options.split_whitespace()))?)
    }

    /// `ferrite` itself.
    pub(super) fn program(&self) -> &Path {
        &self.program
    }

    /// A bare loop of the same copies; a request is a page.
    ///
    /// # Errors
    /// As [`bench`](Self::bench).
    pub(super) fn bare(&self, copy_with: &str, batch: u32) -> Result<Sample> {
        let mut command = Command::new(&self.bench);
        command.args(["bare", copy_with, "--seconds", &self.seconds.to_string()]);
        parse_bare(&steps::output(command.args(["--batch", &batch.to_string()]))?)
    }
}

fn parse(text: &str) -> Result<Sample> {
    let report: Value = serde_json::from_str(text).context("ferrite-bench printed no JSON")?;
    let number = |path: &str| report.pointer(path).and_then(Value::as_f64);
    let needed = |path: &str| {
        number(path).with_context(|| format!("ferrite-bench said nothing of {path}: {report}"))
    };
    Ok(Sample {
        iops: needed("/iops")?,
        cpu_us: needed("/backend_cpu_us_per_io")?,
        guest_cpu_us: needed("/guest_cpu_us_per_io")?,
        lat_us: needed("/lat_us/mean")?,
        p50_us: needed("/lat_us/p50")?,
        p99_us: number("/lat_us/p99").unwrap_or(f64::NAN),
        open_us: number("/open_us").unwrap_or(f64::NAN),
        wake_up_us: number("/wake_up_us").unwrap_or(f64::NAN),
        segments_per_copy: number("/segments_per_copy").unwrap_or(f64::NAN),
        idle_rss_kib: number("/idle_rss_kib").unwrap_or(f64::NAN),
        idle_switches: number("/idle/context_switches").unwrap_or(f64::NAN),
    })
}

fn parse_bare(text: &str) -> Result<Sample> {
    let report: Value = serde_json::from_str(text).context("ferrite-bench bare printed no JSON")?;
    let needed = |key: &str| {
        report[key]
            .as_f64()
            .with_context(|| format!("ferrite-bench bare said nothing of {key}: {report}"))
    };
    Ok(Sample {
        iops: needed("pages_per_s")?,
        cpu_us: needed("cpu_us_per_page")?,
        lat_us: needed("us_per_page")?,
        ..Sample::UNKNOWN
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_without_its_figures_is_refused() {
        let text = r#"{"iops": 5000.0, "backend_cpu_us_per_io": 2.5, "guest_cpu_us_per_io": 1.5,
            "lat_us": {"mean": 60.25, "p50": 1.0}, "idle_rss_kib": null,
            "idle": {"seconds": 5.0, "context_switches": 7}}"#;
        let sample = parse(text).unwrap();
        assert_eq!((sample.iops, sample.cpu_us, sample.lat_us), (5000.0, 2.5, 60.25));
        assert_eq!((sample.guest_cpu_us, sample.p50_us, sample.idle_switches), (1.5, 1.0, 7.0));
        assert!(sample.idle_rss_kib.is_nan() && sample.segments_per_copy.is_nan());
        assert!(parse(&text.replace("\"mean\"", "\"mode\"")).is_err());
        assert!(parse("ferrite: no such file").is_err());
    }

    #[test]
    fn bare_copies_count_pages() {
        let text = r#"{"pages_per_s": 2e6, "us_per_page": 0.5, "cpu_us_per_page": 0.4}"#;
        let sample = parse_bare(text).unwrap();
        assert_eq!((sample.iops, sample.lat_us, sample.cpu_us), (2e6, 0.5, 0.4));
        assert!(parse_bare("{}").is_err());
    }
}
