//! The measured programs, built for any processor.

use crate::Program;
use crate::steps::{self, cargo, fresh_log, run_logged, step};
use anyhow::Result;

/// Cargo's arguments for the serving program and the measuring ones.
pub const PROGRAMS: [&str; 10] = [
    "--package",
    "ferrite",
    "--package",
    "ferrite-lab",
    "--bin",
    "ferrite",
    "--bin",
    "ferrite-bench",
    "--bin",
    "ferrite-lab",
];

/// Builds ferrite's release binary for measurements, on the Xen host or here, and the measuring programs.
pub fn build_ferrite() -> Result<Program> {
    step("build ferrite (release)", || {
        let log = fresh_log("release-build")?;
        let mut command = cargo();
        command.args(["build", "--locked", "--release"]).args(PROGRAMS);
        // The Xen host's processor is a plain x86-64 one, unlike this machine's.
        command.env("RUSTFLAGS", "-C target-cpu=x86-64");
        command.env("CARGO_TARGET_DIR", steps::target_dir().join("lab-build"));
        run_logged(&mut command, &log)
    })?;
    Ok(Program { name: "ferrite", file: steps::target_dir().join("lab-build/release/ferrite") })
}
