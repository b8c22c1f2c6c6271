//! `cargo xtask bench`: the comparison with other backends, each part a module of its own.

mod result;
mod table;
mod xen;

use anyhow::Result;
use result::Measurement;
use std::process::ExitCode;

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct BenchArguments {
    /// What to compare; nothing for all of it.
    #[arg(value_enum)]
    parts: Vec<Part>,
    #[command(flatten)]
    xen: xen::XenArguments,
}

/// A part of the comparison, which can run alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// A real Xen host that counts instructions: blkback, qdisk and ferrite on one RAM disk.
    Xen,
}

impl Part {
    /// Every part, in the order in which they run.
    const ALL: &[Part] = &[Part::Xen];

    /// The part's name: in the results, and of their file.
    fn name(self) -> &'static str {
        match self {
            Part::Xen => "xen",
        }
    }

    fn run(self, arguments: &BenchArguments) -> Result<Vec<Measurement>> {
        match self {
            Part::Xen => xen::run(&arguments.xen),
        }
    }
}

/// Runs the parts that were asked for. Each writes `target/bench/PART.json` and prints its table
/// as soon as it is done.
pub(crate) fn run(arguments: &BenchArguments) -> Result<ExitCode> {
    let chosen = |part: &&Part| arguments.parts.is_empty() || arguments.parts.contains(part);
    for part in Part::ALL.iter().filter(chosen) {
        let measurements = part.run(arguments)?;
        let file = result::write(part.name(), &measurements)?;
        println!("\n{}", table::markdown(&measurements));
        println!("{}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}
