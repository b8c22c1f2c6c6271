//! Measurements. One run of a load against the backend on the loopback (`run/`) gives a report (`report.rs`).
//! Comparisons (`compare/`) consist of many such runs, and of runs of peers. So do the published experiments
//! (`experiments/`), whose results make a page (`page/`).

#![forbid(unsafe_code)]

mod compare;
mod experiments;
mod page;
mod program;
mod report;
mod run;
mod statistics;
mod whole;

use std::process::ExitCode;

/// The program `ferrite-bench`.
pub fn run() -> ExitCode {
    run::main()
}

/// The program `ferrite-compare`, which `cargo xtask bench` runs.
pub fn compare() -> ExitCode {
    compare::main()
}

/// The program `ferrite-lab`.
pub fn experiment() -> ExitCode {
    program::main()
}
