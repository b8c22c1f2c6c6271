//! Stories of disks on machines whose power fails (`ferrite-sim`): a fixed set and two minutes of
//! new ones with the tests, hours of new ones by night.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::checks::fresh_log;
use crate::packages;
use crate::steps::{self, cargo, run_logged, say, step};

/// Seeds of the fixed set, from 1 on; each is a story of every scenario, format and medium.
const FIXED_SEEDS: u64 = 40;

/// Of these stories every step is cut; together they have all that changes metadata: creating, first
/// writes to a block, bits, snapshot, coalescing, growing, discard.
const STEP_BY_STEP: [&str; 4] = ["operations", "first-writes", "bitmaps", "discards"];

/// Short with each of them, and its operations are one of each kind.
const STEPS_SEED: &str = "3";

/// Seconds of new ones.
const FRESH_S: &str = "120";

/// The fixed set, every step of some short stories, and new stories, on two processors where there
/// are two.
pub(crate) fn test() -> Result<()> {
    let program = build()?;
    let runs = steps::cpus().clamp(1, 2);
    let share = |i: usize| -> Result<()> {
        let log = fresh_log(&format!("power-cuts-{i}"))?;
        let run = |arguments: &[&str]| run_logged(told_by(&program).args(arguments), &log);
        let seeds = FIXED_SEEDS / runs as u64;
        run(&["--seed", &(1 + i as u64 * seeds).to_string(), "--seeds", &seeds.to_string()])?;
        for format in ["vhd", "qcow2"].into_iter().skip(i).step_by(runs) {
            for scenario in STEP_BY_STEP {
                let story = ["--scenario", scenario, "--format", format, "--medium", "file"];
                run(&[&["--steps", "--seed", STEPS_SEED], &story[..]].concat())?;
            }
        }
        run(&["--seconds", FRESH_S])?;
        say(format!("the stories are counted in {}", log.display()));
        Ok(())
    };
    std::thread::scope(|scope| {
        let share = &share;
        let runs: Vec<_> = (0..runs).map(|i| scope.spawn(move || share(i))).collect();
        runs.into_iter().try_for_each(|run| run.join().expect("a run that does not panic"))
    })
}

/// New stories on every processor; what is found stays in the build folder. False: something was.
pub(crate) fn nightly(seconds: u64) -> Result<bool> {
    packages::ensure(&[packages::CHECKS])?;
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

/// The simulator; what it has images checked with was installed.
fn told_by(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("FERRITE_TEST_REQUIRE_PEERS", "1");
    command
}

fn build() -> Result<PathBuf> {
    step("build ferrite-sim (release)", || {
        let mut command = cargo();
        command.args(["build", "--locked", "--release", "--package", "ferrite-sim"]);
        run_logged(&mut command, &fresh_log("power-cuts-build")?)
    })?;
    Ok(steps::target_dir().join("release/ferrite-sim"))
}
