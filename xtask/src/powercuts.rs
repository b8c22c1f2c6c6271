//! Stories of disks on machines whose power fails (`ferrite-sim`): a fixed set and two minutes of
//! new ones with the tests, hours of new ones by night.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::checks::fresh_log;
use crate::steps::{self, cargo, run_logged, say, step};

/// Seeds of the fixed set, from 1 on; each is a story of every scenario and format.
const FIXED_SEEDS: &str = "150";

/// Seconds of new ones.
const FRESH_S: &str = "120";

/// The fixed set, every step of one story of each kind, and new stories.
pub(crate) fn test() -> Result<()> {
    let log = fresh_log("power-cuts")?;
    let program = build()?;
    let run = |arguments: &[&str]| run_logged(Command::new(&program).args(arguments), &log);
    run(&["--seed", "1", "--seeds", FIXED_SEEDS])?;
    run(&["--seed", "1", "--steps", "--scenario", "bitmaps"])?;
    run(&["--seconds", FRESH_S])?;
    say(format!("the stories are counted in {}", log.display()));
    Ok(())
}

/// New stories on every processor; what is found stays in the build folder. False: something was.
pub(crate) fn nightly(seconds: u64) -> Result<bool> {
    let program = build()?;
    let kept = steps::target_dir().join("power-cuts");
    let runs = (0..steps::cpus()).map(|i| -> Result<_> {
        let keep = kept.join(i.to_string());
        let mut command = Command::new(&program);
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

fn build() -> Result<PathBuf> {
    step("build ferrite-sim (release)", || {
        let mut command = cargo();
        command.args(["build", "--locked", "--release", "--package", "ferrite-sim"]);
        run_logged(&mut command, &fresh_log("power-cuts-build")?)
    })?;
    Ok(steps::target_dir().join("release/ferrite-sim"))
}
