//! Stories of disks on machines whose power fails (`ferrite-sim`): a fixed set, and new ones for hours.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};

use crate::needs;
use crate::programs::Programs;
use ferrite_xenhost::packages;
use ferrite_xenhost::steps::{self, fresh_log, run_logged, say, step};

/// Seeds of the fixed set, from 1 on; each is a story of every scenario, format and medium.
const FIXED_SEEDS: u64 = 8;

/// Stories of which every step is cut: scenario, medium, seed, in VHD and in qcow2. They are short, and together they
/// have all changes of metadata: creating, first writes to a block, bits, snapshot, coalescing, growing, discard.
const STEP_BY_STEP: [(&str, &str, &str); 4] = [
    ("operations", "file", "3"),
    ("first-writes", "file", "3"),
    ("bitmaps", "file", "3"),
    ("discards", "file", "3"),
];

/// Such stories of stores: use, recovery and closing; snapshots, rollbacks and passes.
const STORE_STEPS: [(&str, &str, &str); 2] =
    [("close", "file", "3"), ("operations", "device", "6")];

/// Stories of which those steps are cut that belong to a rare path of a format (`ferrite_disk::Rare`): format,
/// scenario, medium, seed. They must take all rare paths.
const RARE: [(&str, &str, &str, &str); 8] = [
    ("vhd", "emptied", "device", "4"),
    ("vhd", "failures", "device", "1"),
    ("vhd", "growth", "file", "13"),
    ("vhd", "growth", "device", "2"),
    ("vhd", "chains", "file", "8"),
    ("qcow2", "failures", "device", "6"),
    ("qcow2", "growth", "file", "1"),
    ("qcow2", "full", "device", "1"),
];

/// Seconds of new stories.
const FRESH_S: &str = "30";

/// Runs the fixed set, every step of some short stories, and new stories, on two processors if there are two.
pub(crate) fn test() -> Result<()> {
    let program = build()?;
    let runs = steps::cpus().clamp(1, 2);
    let paths = Mutex::new(Vec::new());
    let share = |i: usize| -> Result<()> {
        let log = fresh_log(&format!("power-cuts-{i}"))?;
        let run = |arguments: &[&str]| run_logged(told_by(&program).args(arguments), &log);
        let seeds = FIXED_SEEDS / runs as u64;
        run(&["--seed", &(1 + i as u64 * seeds).to_string(), "--seeds", &seeds.to_string()])?;
        for story in step_by_step().into_iter().skip(i).step_by(runs) {
            run(&story)?;
        }
        let text = fs::read_to_string(&log)?;
        paths.lock().unwrap_or_else(PoisonError::into_inner).extend(cut_paths(&text));
        run(&["--seconds", FRESH_S])?;
        say(format!("the stories are counted in {}", log.display()));
        Ok(())
    };
    std::thread::scope(|scope| {
        let share = &share;
        let runs: Vec<_> = (0..runs).map(|i| scope.spawn(move || share(i))).collect();
        runs.into_iter().try_for_each(|run| run.join().expect("a run that does not panic"))
    })?;
    all_taken(&paths.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The arguments for stories of which every step is cut, and for those of which some are.
fn step_by_step() -> Vec<Vec<&'static str>> {
    let usual = STEP_BY_STEP.iter().flat_map(|(scenario, medium, seed)| {
        ["vhd", "qcow2"].map(|format| ("--steps", format, *scenario, *medium, *seed))
    });
    let stores = STORE_STEPS
        .iter()
        .map(|(scenario, medium, seed)| ("--steps", "store", *scenario, *medium, *seed));
    let rare = RARE
        .map(|(format, scenario, medium, seed)| ("--rare-steps", format, scenario, medium, seed));
    let words = |(cut, format, scenario, medium, seed)| {
        let story = ["--format", format, "--scenario", scenario, "--medium", medium];
        [&[cut, "--seed", seed], &story[..]].concat()
    };
    usual.chain(stores).chain(rare).map(words).collect()
}

/// Names of the rare paths, and how often they were cut at each step, from the simulator's output.
fn cut_paths(log: &str) -> Vec<(String, u64)> {
    let told = log.lines().filter_map(|line| line.strip_prefix("paths cut at each step: "));
    let paths = told.flat_map(|line| line.split(", ")).filter_map(|path| {
        let (name, times) = path.split_once(' ')?;
        Some((name.to_owned(), times.parse().ok()?))
    });
    paths.collect()
}

/// Reports how often each path was cut, and fails if one never was.
fn all_taken(paths: &[(String, u64)]) -> Result<()> {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, times) in paths {
        *sums.entry(name).or_default() += times;
    }
    let told: Vec<String> = sums.iter().map(|(name, times)| format!("{name} {times}")).collect();
    say(format!("rare paths cut at each of their steps: {}", told.join(", ")));
    let never: Vec<&str> = sums.iter().filter(|(_, n)| **n == 0).map(|(name, _)| *name).collect();
    ensure!(!sums.is_empty(), "ferrite-sim has not told of its paths");
    ensure!(
        never.is_empty(),
        "no story that is cut at each step takes {}: find a seed that does (ferrite-sim --cut \
         ROUND:18446744073709551615:death tells what a round takes)",
        never.join(", ")
    );
    Ok(())
}

/// Runs new stories on every processor; failures are kept in the build folder. `false`: there is one.
pub(crate) fn nightly(seconds: u64) -> Result<bool> {
    packages::ensure(&[needs::CHECKS])?;
    let program = build()?;
    let kept = steps::target_dir().join("power-cuts");
    let runs = (0..steps::cpus()).map(|i| -> Result<_> {
        let keep = kept.join(i.to_string());
        let mut command = told_by(&program);
        command.args(["--seconds", &seconds.to_string(), "--keep"]).arg(keep);
        command.spawn().with_context(|| format!("cannot start {}", program.display()))
    });
    let runs = runs.collect::<Result<Vec<_>>>()?;
    let mut good = true;
    for mut run in runs {
        if !run.wait()?.success() {
            say(format!("a story ended badly; its files are in {}", kept.display()));
            good = false;
        }
    }
    Ok(good)
}

/// The simulator; the programs for its checks are installed.
fn told_by(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("FERRITE_TEST_REQUIRE_PEERS", "1");
    command
}

fn build() -> Result<PathBuf> {
    step("build ferrite-sim", || Programs::build(&[])?.binary("sim", "ferrite-sim"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_no_story_takes_fails_the_run() {
        let log = "paths: a 9, b 9\npaths cut at each step: a 1, b 0\n";
        assert!(all_taken(&cut_paths(log)).unwrap_err().to_string().contains("takes b"));
        let more = log.to_owned() + "paths cut at each step: a 0, b 2\n";
        all_taken(&cut_paths(&more)).unwrap();
        assert!(all_taken(&[]).is_err());
    }
}
