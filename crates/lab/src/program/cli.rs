//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Runs the published measurements on which Ferrite's design is based, on this machine.
#[derive(Debug, Parser)]
#[command(
    name = "ferrite-lab",
    version,
    after_help = "Guests are processes of this machine, not Xen. docs/lab.md says how to read the figures. \
                  Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no results, 130 interrupted."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List all experiments, what each shows, and its source.
    List,
    /// Run experiments, and write a file of figures for each.
    Run(RunArgs),
    /// Run the experiment `peers`, and compare Ferrite with qemu-nbd, qemu-storage-daemon, nbdkit and fio.
    Peers(Measuring),
    /// Join all results in a folder into one page.
    Report(ReportArgs),
    /// Write the manual page and completions for shells, for packages.
    #[command(hide = true)]
    Generate(GenerateArgs),
}

/// The arguments of `ferrite-lab run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The experiments, by name.
    #[arg(value_name = "NAME", required_unless_present = "all")]
    pub(crate) names: Vec<String>,

    /// Run all experiments that need no Xen; after a failure the others still run.
    #[arg(long, conflicts_with = "names")]
    pub(crate) all: bool,

    #[command(flatten)]
    pub(crate) measuring: Measuring,
}

/// The settings of measurements.
#[derive(Debug, Args)]
pub(crate) struct Measuring {
    /// The folder for results.
    #[arg(long, value_name = "DIR", default_value = "lab-results")]
    pub(crate) results: PathBuf,

    /// The folder for images on a disk, at most 1 GiB; by default that of the results.
    #[arg(long, value_name = "DIR")]
    pub(crate) disk: Option<PathBuf>,

    /// How often each subject is measured, in turn with the others.
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(3..=100))]
    pub(crate) rounds: u32,

    /// Seconds that each run measures.
    #[arg(long, value_name = "S", default_value = "0.5", value_parser = seconds)]
    pub(crate) seconds: f64,

    /// Only test that it works: one short run of each subject, and fewer subjects. The figures are meaningless.
    #[arg(long, conflicts_with_all = ["seconds", "rounds"])]
    pub(crate) quick: bool,
}

/// The arguments of `ferrite-lab report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// The folder with the results.
    #[arg(long, value_name = "DIR", default_value = "lab-results")]
    pub(crate) results: PathBuf,

    /// The page; by default report.html beside the results.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Write two of its charts as pictures into this folder, too.
    #[arg(long, value_name = "DIR")]
    pub(crate) pictures: Option<PathBuf>,

    /// Replace the table of figures in this Markdown document, between its marker lines.
    #[arg(long, value_name = "FILE")]
    pub(crate) table: Option<PathBuf>,
}

/// The arguments of `ferrite-lab generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// The directory in which man/ and the completions are written.
    pub(crate) directory: PathBuf,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=60.0).contains(&seconds) => Ok(seconds),
        _ => Err("it must be a number from 0.1 to 60".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn nobody_runs_nothing_or_all_and_some() {
        for (words, right) in [
            (&["run"][..], false),
            (&["run", "--all"], true),
            (&["run", "polling"], true),
            (&["run", "--all", "polling"], false),
            (&["run", "--all", "--rounds", "2"], false),
            (&["peers", "--rounds", "4"], true),
            (&["peers", "polling"], false),
        ] {
            let words = std::iter::once("ferrite-lab").chain(words.iter().copied());
            assert_eq!(Cli::try_parse_from(words).is_ok(), right);
        }
    }
}
