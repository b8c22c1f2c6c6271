//! Instructions of the backend's own code a request, as valgrind counts them: times scatter, and
//! these do not. The kernel's part is not in them.

use super::Setup;
use super::image;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Sample};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::packages;
use ferrite_xenhost::steps::{self, step};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PART: &str = "instructions";
const IMAGE_MIB: usize = 256;
/// The texts around the number of requests in the log.
const REQUESTS: (&str, &str) = ("since the start: ", " requests in ");
/// The most that a count may be of that of another program.
const MOST: f64 = 1.005;

/// Options of the part `instructions`.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of the part instructions")]
pub(super) struct InstructionsArguments {
    /// A `ferrite-bench` of another state of the code, or a `ferrite` that still has `bench`: it is
    /// counted in turn with today's.
    #[arg(long, value_name = "PROGRAM")]
    before: Option<PathBuf>,
}

/// Counts 4 KiB random reads, 32 in flight, one queue, events only, on the engine whose calls
/// valgrind knows.
pub(super) fn run(setup: &Setup, arguments: &InstructionsArguments) -> Result<Vec<Measurement>> {
    packages::ensure(&[&[("valgrind", "valgrind")]])?;
    let images = Images::make(setup)?;
    let mut rows = Vec::new();
    for (name, image) in images.all() {
        let counted = |program: PathBuf| {
            let image = image.clone();
            move || instructions(&program, &image, setup.seconds)
        };
        let title = format!("{name}, 4 KiB randread, depth 32: instructions a request");
        let mut plan = Plan::new(&title).add("now", counted(setup.ferrite.bench_program().into()));
        if let Some(before) = &arguments.before {
            plan = plan.add("before", counted(before.clone()));
        }
        let rounds = plan.run(setup.runs)?;
        let of = |program: &str| rounds.each(|round| round.of(program).instructions);
        let row = Measurement::of_runs(PART, title, "", &of("now"));
        rows.push(match arguments.before {
            Some(_) => row.against_runs("before", &of("before")).target(Target::AtMost(MOST)),
            None => row,
        });
    }
    Ok(rows)
}

/// The same contents in each format, every block written, on tmpfs.
struct Images(PathBuf);

impl Images {
    fn make(setup: &Setup) -> Result<Images> {
        let folder =
            Path::new("/dev/shm").join(format!("ferrite-bench-count-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let images = Images(folder);
        let raw = images.file("raw");
        step(&format!("images of {IMAGE_MIB} MiB on tmpfs"), || {
            image::filled(raw.as_ref(), IMAGE_MIB)?;
            for format in ["vhd", "qcow2"] {
                let mut convert = Command::new(setup.ferrite.program());
                convert.args(["image", "convert", &raw, &images.file(format)]);
                steps::output(&mut convert)?;
            }
            Ok(())
        })?;
        Ok(images)
    }

    fn file(&self, format: &str) -> String {
        self.0.join(format!("full.{format}")).display().to_string()
    }

    fn all(&self) -> [(&'static str, String); 4] {
        [
            ("null", "null:".to_owned()),
            ("raw", self.file("raw")),
            ("VHD", self.file("vhd")),
            ("qcow2", self.file("qcow2")),
        ]
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A short and a longer run differ in nothing but the requests: the beginning and the end are in
/// both.
fn instructions(program: &Path, image: &str, seconds: f64) -> Result<Sample> {
    let (short, few) = count(program, image, seconds / 3.0)?;
    let (long, many) = count(program, image, seconds)?;
    if many <= few {
        bail!("the longer run had {many} requests, and the shorter one {few}: measure for longer");
    }
    Ok(Sample { instructions: (long - short) / (many - few), ..Sample::UNKNOWN })
}

/// The instructions of the whole process, and its requests.
fn count(program: &Path, image: &str, seconds: f64) -> Result<(f64, f64)> {
    let counts = steps::target_dir().join("bench");
    fs::create_dir_all(&counts)?;
    let counts = counts.join("callgrind.out");
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--quiet", "--fair-sched=yes"]);
    command.arg(format!("--callgrind-out-file={}", counts.display())).arg(program);
    if program.file_name().is_some_and(|name| name == "ferrite") {
        command.arg("bench");
    }
    command.args([image, "--engine", "aio", "--poll-us", "0", "-v"]);
    command.args(["--seconds", &seconds.to_string()]).env("NO_COLOR", "1");
    let output = command.stdin(Stdio::null()).output().context("cannot start valgrind")?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{} on {image} ended with {}: {log}", program.display(), output.status);
    }
    let all = number(&fs::read_to_string(&counts)?, ("\ntotals: ", "\n"));
    let all = all.with_context(|| format!("{} has no total", counts.display()))?;
    let requests = number(&log, REQUESTS).with_context(|| format!("no requests in: {log}"))?;
    Ok((all, requests))
}

/// The number between two texts.
fn number(text: &str, (before, after): (&str, &str)) -> Option<f64> {
    let rest = text.split_once(before)?.1;
    rest.split_once(after)?.0.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_instructions_are_found() {
        let log = "INFO connected\nDEBUG serve: since the start: 124624 requests in 7789 sweeps, 0";
        assert_eq!(number(log, REQUESTS), Some(124_624.0));
        assert_eq!(
            number("summary: 9\n\ntotals: 264152561\n", ("\ntotals: ", "\n")),
            Some(264_152_561.0)
        );
        assert_eq!(number("totals", REQUESTS), None);
    }
}
