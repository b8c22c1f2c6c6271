//! Manual pages and completions, from a command line's own description.

use std::io;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::exit::Failure;

/// Writes `man/*.1`, and completions for each shell, into a directory that is there.
///
/// # Errors
/// The directory cannot be written to.
pub fn run<Cli: CommandFactory>(directory: &Path) -> Result<(), Failure> {
    write::<Cli>(directory).map_err(|e| {
        let what = format!("cannot write to {}", directory.display());
        Failure::new(what, e, "name a directory that may be written to")
    })
}

fn write<Cli: CommandFactory>(directory: &Path) -> io::Result<()> {
    let man = directory.join("man");
    std::fs::create_dir_all(&man)?;
    clap_mangen::generate_to(Cli::command(), &man)?;
    let name = Cli::command().get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Cli::command(), &name, directory)?;
    }
    Ok(())
}
