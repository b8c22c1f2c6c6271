//! Instructions per request of the backend's own code, counted by valgrind: times vary from run to run, and these
//! counts do not. The kernel's part is not counted.

use super::image;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Sample};
use anyhow::{Context, Result, ensure};
use ferrite_xenhost::packages;
use ferrite_xenhost::release;
use ferrite_xenhost::steps::{self, step};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PART: &str = "instructions";
pub(super) const IMAGE_MIB: usize = 256;
/// The recorded figures, which this commit must meet.
const RECORDED: &str = "crates/lab/src/compare/instructions.json";
/// Steps of the short run and of the longer one, of 32 requests each.
const STEPS: (u32, u32) = (200, 1000);
/// The largest ratio of a count to that of another program.
const MOST: f64 = 1.005;
/// The largest ratio of a count with a limit to that without.
const LIMITED: f64 = 1.01;
/// A limit of all that a request is counted for, and that none reaches.
const UNREACHED: &str = "iops=1000000000,bytes=1000000000000";
/// The largest ratio of a count to the recorded one; its inverse is the smallest.
const HELD: f64 = 1.02;

/// Options of the part `instructions`.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of the part instructions")]
pub(super) struct InstructionsArguments {
    /// A `ferrite-bench` of another commit: it is counted in turn with today's.
    #[arg(long, value_name = "PROGRAM")]
    before: Option<PathBuf>,
    /// Fail if a count is not within 2 % of the recorded one, as CI does.
    #[arg(long, conflicts_with = "before")]
    hold: bool,
}

/// Counts 4 KiB random reads, 32 at a time, one queue, events only, on the engine whose system calls valgrind supports.
pub(super) fn run(rounds: u32, arguments: &InstructionsArguments) -> Result<Vec<Measurement>> {
    packages::ensure(&[&[("valgrind", "valgrind")]])?;
    // The same code on every machine, whatever its processor supports.
    let ferrite = release::build_ferrite()?.file;
    let bench = ferrite.with_file_name("ferrite-bench");
    let images = Images::make(&ferrite)?;
    let mut rows = Vec::new();
    for (name, image) in images.all() {
        let counted = |program: PathBuf| {
            let image = image.clone();
            move || by_ring(&program, &image, &[])
        };
        let title = format!("{name}, 4 KiB randread, depth 32: instructions a request");
        let mut plan = Plan::new(&title).add("now", counted(bench.clone()));
        if let Some(before) = &arguments.before {
            plan = plan.add("before", counted(before.clone()));
        }
        let rounds = plan.run(rounds)?;
        let of = |program: &str| rounds.each(|round| round.of(program).instructions);
        let row = Measurement::of_runs(PART, title, "", &of("now"));
        rows.push(match arguments.before {
            Some(_) => row.against_runs("before", &of("before")).target(Target::AtMost(MOST)),
            None => row.against("recorded", recorded()?.of(name)?).target(Target::AtMost(HELD)),
        });
    }
    if arguments.hold {
        hold(&rows)?;
    }
    rows.push(limited(rounds, &bench, &images.file("raw"))?);
    Ok(rows)
}

/// The cost of a limit that is set and not reached.
fn limited(rounds: u32, bench: &Path, image: &str) -> Result<Measurement> {
    let title = "raw, 4 KiB randread, depth 32, with a limit: instructions a request";
    let rounds = Plan::new(title)
        .add("without", || by_ring(bench, image, &[]))
        .add("with", || by_ring(bench, image, &["--limit", UNREACHED]))
        .run(rounds)?;
    let of = |name: &str| rounds.each(|round| round.of(name).instructions);
    let row = Measurement::of_runs(PART, title.to_owned(), "", &of("with"));
    Ok(row.against_runs("without", &of("without")).target(Target::AtMost(LIMITED)))
}

/// The recorded figures, by the names of images.
struct Recorded(BTreeMap<String, f64>);

fn recorded() -> Result<Recorded> {
    let file = steps::repository().join(RECORDED);
    let text = fs::read(&file).with_context(|| format!("cannot read {RECORDED}"))?;
    Ok(Recorded(serde_json::from_slice(&text).with_context(|| format!("{RECORDED} is no JSON"))?))
}

impl Recorded {
    fn of(&self, name: &str) -> Result<f64> {
        self.0.get(name).copied().with_context(|| format!("{RECORDED} has no figure of {name}"))
    }
}

/// Checks that each figure is near the recorded one, in both directions: a gain that is not recorded would hide the
/// next loss.
fn hold(rows: &[Measurement]) -> Result<()> {
    let wrong: Vec<String> = rows.iter().filter_map(deviation).collect();
    ensure!(
        wrong.is_empty(),
        "{}\nIf the change is worth it, write the new figures into {RECORDED}, and into the commit \
         why they changed. What they go to: docs/performance.md, \"Instructions a request\".",
        wrong.join("\n")
    );
    Ok(())
}

fn deviation(row: &Measurement) -> Option<String> {
    let (ratio, recorded) = (row.ratio?, row.peer_value?);
    let percent = 100.0 * (ratio - 1.0);
    let is_held = (2.0 - HELD..=HELD).contains(&ratio);
    (!is_held).then(|| {
        format!("{}: {:.0}, and {recorded:.0} is recorded ({percent:+.1} %)", row.name, row.value)
    })
}

/// The same contents in each format, every block written, on tmpfs.
pub(super) struct Images(PathBuf);

impl Images {
    pub(super) fn make(ferrite: &Path) -> Result<Images> {
        let folder =
            Path::new("/dev/shm").join(format!("ferrite-bench-count-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let images = Images(folder);
        let raw = images.file("raw");
        step(&format!("images of {IMAGE_MIB} MiB on tmpfs"), || {
            image::filled(raw.as_ref(), IMAGE_MIB)?;
            for format in ["vhd", "qcow2"] {
                let mut convert = Command::new(ferrite);
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

    pub(super) fn all(&self) -> [(&'static str, String); 4] {
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

/// A short and a longer run differ only in the number of requests: beginning and end are in both.
pub(super) fn by_ring(program: &Path, image: &str, options: &[&str]) -> Result<Sample> {
    let [(short, few), (long, many)] =
        [count(program, image, options, STEPS.0)?, count(program, image, options, STEPS.1)?];
    ensure!(many > few, "{many} requests in the longer run, and {few} in the shorter one");
    Ok(Sample { instructions: (long - short) / (many - few), ..Sample::UNKNOWN })
}

/// The instructions of the queue's thread, and its requests. The work of other threads depends on time.
fn count(program: &Path, image: &str, options: &[&str], steps: u32) -> Result<(f64, f64)> {
    let counts = tempfile::tempdir().context("cannot make a folder for the counts")?;
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--quiet", "--fair-sched=yes", "--separate-threads=yes"]);
    let file = counts.path().join("counts");
    command.arg(format!("--callgrind-out-file={}", file.display())).arg(program);
    command.args([image, "--engine", "aio", "--poll-us", "0"]).args(options);
    command.args(["--steps", &steps.to_string()]).env("NO_COLOR", "1");
    let said = steps::output(&mut command)?;
    let requests = number(&said, ("", " requests")).with_context(|| format!("it said {said}"))?;
    let mut most = None;
    for file in fs::read_dir(counts.path())? {
        let total = number(&fs::read_to_string(file?.path())?, ("\ntotals: ", "\n"));
        most = most.max(total.map(|total| total as u64));
    }
    Ok((most.context("valgrind wrote no total")? as f64, requests))
}

/// The number between two texts.
pub(super) fn number(text: &str, (before, after): (&str, &str)) -> Option<f64> {
    let rest = text.split_once(before)?.1;
    rest.split_once(after)?.0.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_instructions_are_found() {
        assert_eq!(number("124624 requests\n", ("", " requests")), Some(124_624.0));
        assert_eq!(
            number("summary: 9\n\ntotals: 264152561\n", ("\ntotals: ", "\n")),
            Some(264_152_561.0)
        );
        assert_eq!(number("totals", ("\ntotals: ", "\n")), None);
    }

    fn row(value: f64) -> Measurement {
        Measurement::new(PART, "raw", value, "").against("recorded", 2500.0)
    }

    #[test]
    fn a_figure_that_is_not_the_recorded_one_is_refused_and_the_text_says_what_to_do() {
        hold(&[row(2451.0), row(2549.0)]).unwrap();
        let worse = hold(&[row(2500.0), row(2551.0)]).unwrap_err().to_string();
        assert!(worse.contains("raw: 2551, and 2500 is recorded (+2.0 %)"), "{worse}");
        assert!(worse.contains(RECORDED), "{worse}");
        assert!(hold(&[row(2449.0)]).is_err(), "better ones are written down as well");
    }

    #[test]
    fn each_image_has_a_recorded_figure() {
        let recorded = recorded().unwrap();
        let names = Images(PathBuf::new()).all().map(|(name, _)| name);
        assert!(names.iter().all(|name| recorded.of(name).is_ok_and(|figure| figure > 100.0)));
        assert_eq!(recorded.0.len(), names.len());
    }
}
