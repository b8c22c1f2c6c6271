//! `cargo xtask bench`: the comparison with other backends, each part a module of its own.
//!
//! It is a program of its own, so that `xtask` links nothing of the product.

mod backup;
mod bound;
pub(crate) mod burners;
mod commands;
mod crowd;
mod disk;
pub(crate) mod ferrite;
pub(crate) mod fio;
mod guests;
mod host;
pub(crate) mod image;
mod images;
mod instructions;
mod kept;
mod loopback;
pub(crate) mod machine;
mod merges;
mod mirror;
pub(crate) mod nbd;
mod network;
mod pool;
pub(crate) mod result;
pub(crate) mod rounds;
mod store;
pub(crate) mod table;
mod vhost;
mod xen;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use ferrite_xenhost::packages::{self, Need};
use ferrite_xenhost::steps;
use result::Measurement;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::experiments;
use crate::experiments::findings::{Findings, Outcome};

/// The folder that `ferrite lab report` reads, inside the given one.
const RESULTS: &str = "lab-results";

/// Compares Ferrite with other backends and with the bare machine.
#[derive(clap::Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct BenchArguments {
    /// The parts to run; by default all.
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Rounds: how often each subject is measured, in turn with its peers. Not for the part xen.
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Seconds that each run measures. Not for the part xen.
    #[arg(long, value_name = "S", default_value_t = 3.0, value_parser = seconds)]
    seconds: f64,
    /// The largest number of guests of the parts persistent and aggregate; each takes up to a minute to start.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    most_guests: u32,
    /// The size of the disk of the part backup, which takes twice that much space in the build folder.
    #[arg(long, value_name = "GIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    backup_gib: u32,
    /// The disks of the part host.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=4000))]
    disks: u32,
    /// The rows of the part pool; by default all.
    #[arg(long, value_name = "ROWS,...", value_enum, value_delimiter = ',')]
    pool_rows: Vec<pool::Rows>,
    /// Measure the programs in this folder instead of building them. For the parts on this machine that start `ferrite`.
    #[arg(long, value_name = "DIR")]
    programs: Option<PathBuf>,
    #[command(flatten)]
    instructions: instructions::InstructionsArguments,
    #[command(flatten)]
    xen: xen::XenArguments,
}

/// A part of the comparison, which can run alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The path from ring to storage, on tmpfs and without storage, compared with fio and bare copies.
    Loopback,
    /// The path to a real disk, compared with fio.
    Disk,
    /// The path to a real disk, compared with the least pipeline of two processes.
    Bound,
    /// VHD and qcow2, full, partly filled, fresh and in chains, compared with raw.
    Images,
    /// `ferrite image`, compared with qemu-img on full, half-empty, fragmented and thin images.
    Commands,
    /// A volume of a store, compared with raw on the same disk.
    Store,
    /// Disks by NBD, compared with qemu-nbd.
    Nbd,
    /// Disks by vhost-user in a guest of QEMU, compared with qemu-storage-daemon's, and with Xen rings by their instructions.
    Vhost,
    /// A merge below the leaf of a disk in use, compared with QEMU's block-commit. It takes root.
    Merges,
    /// Disks with a dirty map, and with a mirror, compared with the same without.
    Mirror,
    /// Disks of a pool of servers and on Ceph: rates, pauses, memory. It takes root.
    Pool,
    /// Backups, compared with copies by qemu-img and nbdcopy.
    Backup,
    /// Many guests, and disks at rest.
    Guests,
    /// Disks with a keeper and a worker each, compared with one process.
    Kept,
    /// A host of many disks: memory, wake-ups, and what each costs. It takes root.
    Host,
    /// Instructions per request of the backend's own code, by valgrind.
    Instructions,
    /// A real Xen host that counts instructions: blkback, qdisk and ferrite on one RAM disk.
    Xen,
    /// The same host: a volume of a store, compared with dm-vdo and blkback.
    Vdo,
    /// A real Xen host that counts instructions: block devices of its domain 0, compared with losetup and qemu-nbd.
    Device,
    /// A Xen host in the emulator: disks on one and two servers, beside a local one and DRBD.
    Stripes,
    /// The same host: the kernel's network backend, from guest to guest.
    Network,
    /// Many guests: persistent grants four ways.
    Persistent,
    /// Many guests: copied data compared with mapped pages.
    Aggregate,
}

impl Part {
    /// Every part, in the order in which they run.
    const ALL: &[Part] = &[
        Part::Loopback,
        Part::Disk,
        Part::Bound,
        Part::Images,
        Part::Commands,
        Part::Store,
        Part::Nbd,
        Part::Vhost,
        Part::Merges,
        Part::Mirror,
        Part::Pool,
        Part::Backup,
        Part::Guests,
        Part::Kept,
        Part::Host,
        Part::Instructions,
        Part::Xen,
        Part::Vdo,
        Part::Device,
        Part::Stripes,
        Part::Network,
        Part::Persistent,
        Part::Aggregate,
    ];

    /// The part's name, in the results and of their file.
    fn name(self) -> &'static str {
        match self {
            Part::Loopback => "loopback",
            Part::Disk => "disk",
            Part::Bound => "bound",
            Part::Images => "images",
            Part::Commands => "commands",
            Part::Store => "store",
            Part::Nbd => "nbd",
            Part::Vhost => "vhost",
            Part::Merges => "merges",
            Part::Mirror => "mirror",
            Part::Pool => "pool",
            Part::Backup => "backup",
            Part::Guests => "guests",
            Part::Kept => "kept",
            Part::Host => "host",
            Part::Instructions => "instructions",
            Part::Xen => "xen",
            Part::Vdo => "vdo",
            Part::Device => "device",
            Part::Stripes => "stripes",
            Part::Network => "network",
            Part::Persistent => "persistent",
            Part::Aggregate => "aggregate",
        }
    }

    fn run(self, arguments: &BenchArguments) -> Result<Vec<Measurement>> {
        match self {
            Part::Loopback => loopback::run(&Setup::new(arguments)?),
            Part::Disk => disk::run(&Setup::new(arguments)?),
            Part::Bound => bound::run(&Setup::new(arguments)?),
            Part::Images => images::run(&Setup::new(arguments)?),
            Part::Commands => commands::run(&Setup::new(arguments)?),
            Part::Store => store::run(&Setup::new(arguments)?),
            Part::Nbd => nbd::run(&Setup::new(arguments)?),
            Part::Vhost => vhost::run(&Setup::new(arguments)?),
            Part::Merges => merges::run(&Setup::new(arguments)?),
            Part::Mirror => mirror::run(&Setup::new(arguments)?),
            Part::Pool => pool::run(&Setup::new(arguments)?, &arguments.pool_rows),
            Part::Backup => backup::run(&Setup::new(arguments)?, arguments.backup_gib),
            Part::Guests => guests::run(&Setup::new(arguments)?),
            Part::Kept => kept::run(&Setup::new(arguments)?),
            Part::Host => host::run(arguments.disks),
            Part::Instructions => instructions::run(arguments.runs, &arguments.instructions),
            Part::Xen => xen::run(&arguments.xen),
            Part::Vdo => xen::vdo::run(&arguments.xen),
            Part::Device => xen::device::run(&arguments.xen),
            Part::Stripes => {
                xen::stripes::run(&arguments.xen, |found| joined("stripes", found).map(drop))?;
                Ok(Vec::new())
            }
            Part::Network if arguments.xen.profile => network::profile(),
            Part::Network => joined("network", network::run(arguments.xen.xen_rounds)?),
            Part::Persistent => joined("xen-persistent", crowd::persistent(arguments.most_guests)?),
            Part::Aggregate => joined("xen-aggregate", crowd::aggregate(arguments.most_guests)?),
        }
    }
}

/// The peers that ferrite is compared with.
const PEERS: &[Need] = &[("fio", "fio"), ("qemu-img", "qemu-utils")];

/// The programs and durations that the parts on this machine share.
struct Setup {
    ferrite: ferrite::Ferrite,
    runs: u32,
    /// The duration of each run.
    seconds: f64,
}

impl Setup {
    fn new(arguments: &BenchArguments) -> Result<Setup> {
        packages::ensure(&[PEERS])?;
        let (runs, seconds) = (arguments.runs, arguments.seconds);
        let ferrite = match &arguments.programs {
            Some(folder) => ferrite::Ferrite::at(&folder.join("ferrite"), seconds)?,
            None => ferrite::Ferrite::build(seconds)?,
        };
        Ok(Setup { ferrite, runs, seconds })
    }
}

/// Writes the results of an experiment on Xen, for `ferrite lab report`. It has no table of its own.
fn joined(name: &str, findings: Findings) -> Result<Vec<Measurement>> {
    let experiment = experiments::find(name).context("there is no such experiment")?;
    let outcome = Outcome::new(experiment, findings, machine::describe(), false);
    let folder = Path::new(RESULTS);
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    steps::say(outcome.write(folder)?.display().to_string());
    Ok(Vec::new())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("it must be a number from 0.1 to 3600".into()),
    }
}

/// Runs the selected parts. Each writes `target/bench/PART.json` and prints its table as soon as it is done; after a
/// failure the others still run.
pub(crate) fn main() -> ExitCode {
    steps::start_clock();
    let arguments = BenchArguments::parse();
    let chosen = |part: &&Part| arguments.parts.is_empty() || arguments.parts.contains(part);
    let mut code = ExitCode::SUCCESS;
    for part in Part::ALL.iter().filter(chosen) {
        if let Err(error) = run_part(*part, &arguments) {
            steps::say(format!("{} failed: {}", part.name(), steps::chain(&error)));
            code = ExitCode::FAILURE;
        }
    }
    code
}

fn run_part(part: Part, arguments: &BenchArguments) -> Result<()> {
    let measurements = part.run(arguments)?;
    if measurements.is_empty() {
        return Ok(()); // a profile leaves the last results alone
    }
    let machine = machine::describe();
    let file = result::write(part.name(), &machine, &measurements)?;
    println!("\n{}\n{machine}", table::markdown(&measurements));
    println!("{}", file.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_comparison_in_the_documentation_is_one_with_these_arguments() {
        let pages = ["", "docs"].map(|folder| steps::repository().join(folder).read_dir().unwrap());
        let mut seen = 0;
        for page in pages.into_iter().flatten().map(|entry| entry.unwrap().path()) {
            if page.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let text = std::fs::read_to_string(&page).unwrap();
            for line in text.lines().filter_map(|line| line.strip_prefix("cargo xtask bench")) {
                let command = line.split(" #").next().unwrap_or(line);
                let words = command.split('"').enumerate().flat_map(|(i, part)| match i % 2 {
                    0 => part.split_whitespace().map(str::to_owned).collect(),
                    _ => vec![part.to_owned()],
                });
                let words = std::iter::once("bench".to_owned()).chain(words);
                let parsed = BenchArguments::try_parse_from(words);
                assert!(parsed.is_ok(), "{}: {line}: {}", page.display(), parsed.err().unwrap());
                seen += 1;
            }
        }
        assert!(seen > 5, "only {seen} comparisons were found");
    }
}
