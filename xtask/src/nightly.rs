//! The checks that take hours: every test on real Xen of two releases, mutants, every test under
//! AddressSanitizer, images of two releases in a store, a disk that is parked a thousand times, a
//! store's process that is killed hundreds of times, the program for any libc, power cuts with new
//! seeds, fuzz targets.

use std::process::ExitCode;

use anyhow::Result;

use crate::{checks, dist, fast_checks, fuzz, mutants, powercuts, truth};
use ferrite_xenhost::root::{BOOKWORM, TRIXIE};
use ferrite_xenhost::steps::{self, say, step};

/// Options of `cargo xtask nightly`.
#[derive(clap::Args)]
pub(crate) struct NightlyArguments {
    /// For how long in all.
    #[arg(default_value_t = 8.0)]
    hours: f64,
    /// Only one of the eight.
    #[arg(long, value_enum)]
    only: Option<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Every test on a real Xen host, on Xen 4.20 and on 4.17.
    Xen,
    /// Images of both releases in a store, beside a count by hand.
    Truth,
    /// Mutants, as long as that takes.
    Mutants,
    /// Every test of the data path under AddressSanitizer.
    Sanitizer,
    /// A disk that is parked a thousand times in each format, and how long its guest waits.
    Parking,
    /// The process of a store with ten guests, killed hundreds of times.
    Store,
    /// The packages whose program is linked statically.
    Static,
    /// The simulator's stories.
    PowerCuts,
    /// The fuzz targets.
    Fuzz,
}

/// Runs all parts, whatever those before have found. Those of a fixed length come first; what they
/// leave of the time is for the other two.
pub(crate) fn nightly(arguments: &NightlyArguments) -> Result<ExitCode> {
    let wanted = |part| arguments.only.is_none_or(|only| only == part);
    let mut good = true;
    if wanted(Part::Xen) {
        for release in ["trixie", "bookworm"] {
            good &= checks::xen_of(release)?;
        }
    }
    if wanted(Part::Truth) {
        let truth = step("a store beside a count", || truth::test(&[TRIXIE, BOOKWORM]));
        good &= truth.inspect_err(|error| say(steps::chain(error))).is_ok();
    }
    if wanted(Part::Mutants) {
        good &= mutants::nightly()?;
    }
    if wanted(Part::Sanitizer) {
        let every =
            step("every test under AddressSanitizer", fast_checks::address_sanitizer_of_all);
        good &= every.inspect_err(|error| say(steps::chain(error))).is_ok();
    }
    if wanted(Part::Parking) {
        let parked = step("a disk that is parked a thousand times", fast_checks::parking);
        good &= parked.inspect_err(|error| say(steps::chain(error))).is_ok();
    }
    if wanted(Part::Store) {
        let killed = step("a store whose process is killed", fast_checks::killed_store);
        good &= killed.inspect_err(|error| say(steps::chain(error))).is_ok();
    }
    if wanted(Part::Static) {
        let packages = step("the packages for any libc", dist::check_static);
        good &= packages.inspect_err(|error| say(steps::chain(error))).is_ok();
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
