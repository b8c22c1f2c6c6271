//! `ferrite generate`: manual pages and completions, from the command line's own description.

use std::io;
use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::{Cli, GenerateArgs};
use crate::exit::Failure;

/// Writes `man/*.1`, and completions for each shell, into a directory that is there.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    write(&args.directory).map_err(|e| {
        let what = format!("cannot write to {}", args.directory.display());
        Failure::new(what, e, "name a directory that may be written to")
    })
}

fn write(directory: &Path) -> io::Result<()> {
    let man = directory.join("man");
    std::fs::create_dir_all(&man)?;
    clap_mangen::generate_to(Cli::command(), &man)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Cli::command(), "ferrite", directory)?;
    }
    Ok(())
}
