//! The checks that take hours. `cargo xtask test` has the quick and most important ones.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::ValueEnum as _;

use crate::outcome::{Outcome, check, summary};
use crate::xentests::krbd;
use crate::{
    checks, dist, fuzz, mutants, needs, night_checks, peers, powercuts, sanitizer, truth, upgrade,
    vhost,
};
use ferrite_xenhost::packages;
use ferrite_xenhost::root::{BOOKWORM, TRIXIE};
use ferrite_xenhost::steps;

/// Options of `cargo xtask nightly`.
#[derive(clap::Args)]
pub(crate) struct NightlyArguments {
    /// The total time: power cuts and fuzz targets share the time that the other parts leave.
    #[arg(default_value_t = 8.0)]
    hours: f64,
    /// Run only these parts.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    only: Vec<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Every test on a real Xen host, on Xen 4.20 (Debian 13).
    XenTrixie,
    /// Every test on a real Xen host, on Xen 4.17 (Debian 12).
    XenBookworm,
    /// All tests with all their rounds, of which each commit has a fifth.
    Rounds,
    /// The tests of the disks, the backend and the programs on Linux AIO.
    Aio,
    /// Instructions per request, compared with the recorded figures.
    Instructions,
    /// The code that accesses rings, under valgrind.
    Valgrind,
    /// Every test of the data path under AddressSanitizer.
    Sanitizer,
    /// The tar and the Debian package.
    Packages,
    /// The packages with a statically linked program.
    Static,
    /// Images of both releases in a store, compared with an independent count.
    Truth,
    /// A disk that is parked a thousand times in each format, and the pauses of its guest.
    Parking,
    /// The process of a store with ten guests, killed hundreds of times.
    Store,
    /// A thousand random sequences of changes and deaths of a running disk.
    Changes,
    /// Mirrors of a running disk whose workers and keepers die, and that are cancelled while they copy.
    Mirrors,
    /// Migrations to another host, whose daemons die at each step, and whose network is cut.
    Migrate,
    /// Backups of running disks that are killed, interrupted and cut off, and a thousand stories of them.
    Backups,
    /// Taps in random orders of verbs, deaths and upgrades, for ten minutes; VHDs on volumes of LVM.
    Taps,
    /// Guests whose disks are on another host: deaths of all processes, and a server that is stopped.
    Remotes,
    /// Disks on a Ceph cluster of three OSDs, whose processes are killed.
    Rbd,
    /// A guest on Xen whose disk is an image of a Ceph cluster by domain 0's kernel.
    Krbd,
    /// Disks of pools: histories of their rules, and real servers that are cut off.
    Pool,
    /// Two hundred disks on one host: attached at once, beside ten that hang, and upgraded.
    Host,
    /// Programs of others against the NBD server, as far as they are installed.
    Peers,
    /// Guests of QEMU whose disks are exports by vhost-user: ours, killed ten times, that of a daemon's
    /// disk, and the one of qemu-storage-daemon.
    Vhost,
    /// The processes of an older commit, upgraded to this one under guests.
    Upgrade,
    /// All mutants.
    Mutants,
    /// The simulator's fixed stories, then new ones.
    PowerCuts,
    /// The fuzz targets.
    Fuzz,
}

/// The parts that run until their time is over.
const OPEN_ENDED: [Part; 2] = [Part::PowerCuts, Part::Fuzz];

impl Part {
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Runs the parts, also after a failure, and ends with a table of their times.
pub(crate) fn nightly(arguments: &NightlyArguments) -> Result<ExitCode> {
    let wanted = |part: &Part| arguments.only.is_empty() || arguments.only.contains(part);
    let chosen: Vec<Part> = Part::value_variants().iter().copied().filter(wanted).collect();
    // The peers are those that are installed, and Ceph's programs have a list of their own.
    if chosen != [Part::Peers] && chosen != [Part::Rbd] {
        packages::ensure(&[packages::XEN_HOST, needs::DIST, needs::CHECKS])?;
    }
    let (mut parts, mut cases) = (Vec::new(), Vec::new());
    for (i, part) in chosen.iter().enumerate() {
        let share = share_s(arguments.hours, &chosen[i..]);
        parts.push(check(&part.name(), || run(*part, share, &mut cases)));
    }
    // The parts are the end of the table: their cases are details.
    cases.extend(parts);
    Ok(summary(&cases))
}

/// Seconds for the first of these parts, if it is open-ended: its share of the remaining time.
fn share_s(hours: f64, to_run: &[Part]) -> u64 {
    let shares = to_run.iter().filter(|part| OPEN_ENDED.contains(part)).count();
    let left_s = (hours * 3600.0 - steps::elapsed_s()).max(0.0);
    (left_s / shares.max(1) as f64) as u64
}

/// Runs one part; each test on the Xen host is added to `cases`.
fn run(part: Part, share_s: u64, cases: &mut Vec<Outcome>) -> Result<()> {
    match part {
        Part::XenTrixie => xen(TRIXIE.name, cases),
        Part::XenBookworm => xen(BOOKWORM.name, cases),
        Part::Rounds => night_checks::all_rounds(),
        Part::Aio => night_checks::tests_on_aio(),
        Part::Instructions => night_checks::instructions(),
        Part::Valgrind => night_checks::valgrind(),
        Part::Sanitizer => sanitizer::of_data_path(),
        Part::Packages => dist::check(),
        Part::Static => dist::check_static(),
        Part::Truth => truth::test(&[TRIXIE, BOOKWORM]),
        Part::Parking => night_checks::parking(),
        Part::Store => night_checks::killed_store(),
        Part::Changes => night_checks::changes(),
        Part::Mirrors => night_checks::mirrors(),
        Part::Migrate => night_checks::migrations(),
        Part::Backups => night_checks::backups(),
        Part::Taps => night_checks::random_taps(),
        Part::Remotes => night_checks::remotes(),
        Part::Rbd => night_checks::rbd(),
        Part::Krbd => krbd::test(),
        Part::Pool => night_checks::pool(),
        Part::Host => night_checks::host(),
        Part::Peers => peers::test(cases),
        Part::Vhost => vhost::test(cases),
        Part::Upgrade => upgrade::test(),
        Part::Mutants => passed(mutants::nightly()?, "a mutant was not noticed"),
        Part::PowerCuts => {
            powercuts::test()?;
            passed(powercuts::nightly(share_s)?, "a story ended badly")
        }
        Part::Fuzz => {
            night_checks::fuzz_targets()?;
            passed(fuzz::nightly(share_s)?, "a fuzz target found something")
        }
    }
}

fn passed(good: bool, otherwise: &str) -> Result<()> {
    if !good {
        bail!("{otherwise}: see above");
    }
    Ok(())
}

fn xen(release: &str, cases: &mut Vec<Outcome>) -> Result<()> {
    let ended = checks::xen_of(release)?;
    let failed = ended.iter().filter(|case| case.failure.is_some()).count();
    cases.extend(ended);
    passed(failed == 0, &format!("{failed} tests failed"))
}
