//! What takes hours: mutants, then power cuts with new seeds, then the fuzz targets.

use std::process::ExitCode;

use anyhow::Result;

use crate::{fuzz, mutants, powercuts, steps};

/// Options of `cargo xtask nightly`.
#[derive(clap::Args)]
pub(crate) struct NightlyArguments {
    /// For how long in all.
    #[arg(default_value_t = 8.0)]
    hours: f64,
    /// Only one of the three.
    #[arg(long, value_enum)]
    only: Option<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Mutants, as long as that takes.
    Mutants,
    /// The simulator's stories.
    PowerCuts,
    /// The fuzz targets.
    Fuzz,
}

/// Runs all parts, whatever those before have found. Mutants come first; what they leave of the
/// time is for the other two.
pub(crate) fn nightly(arguments: &NightlyArguments) -> Result<ExitCode> {
    let wanted = |part| arguments.only.is_none_or(|only| only == part);
    let mut good = true;
    if wanted(Part::Mutants) {
        good &= mutants::nightly()?;
    }
    let seconds = arguments.hours * 3600.0 - steps::elapsed_s();
    let share = if arguments.only.is_some() { seconds } else { seconds / 2.0 } as u64;
    if wanted(Part::PowerCuts) {
        good &= powercuts::nightly(share)?;
    }
    if wanted(Part::Fuzz) {
        good &= fuzz::nightly(share)?;
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
