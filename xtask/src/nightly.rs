//! What takes hours: power cuts with new seeds, then the fuzz targets.

use std::process::ExitCode;

use anyhow::Result;

use crate::{fuzz, powercuts};

/// Options of `cargo xtask nightly`.
#[derive(clap::Args)]
pub(crate) struct NightlyArguments {
    /// For how long in all.
    #[arg(default_value_t = 8.0)]
    hours: f64,
    /// Only one of the two.
    #[arg(long, value_enum)]
    only: Option<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The simulator's stories.
    PowerCuts,
    /// The fuzz targets.
    Fuzz,
}

/// Runs both parts, whatever the first of them finds.
pub(crate) fn nightly(arguments: &NightlyArguments) -> Result<ExitCode> {
    let seconds = arguments.hours * 3600.0;
    let share = if arguments.only.is_some() { seconds } else { seconds / 2.0 } as u64;
    let wanted = |part| arguments.only.is_none_or(|only| only == part);
    let mut good = true;
    if wanted(Part::PowerCuts) {
        good &= powercuts::nightly(share)?;
    }
    if wanted(Part::Fuzz) {
        good &= fuzz::nightly(share)?;
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
