//! Manual pages and completions, from a command line's own description.

use std::io;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::exit::Failure;

mod configuration;
mod examples;
mod page;
mod roff;

/// Functions that complete the names of attached disks, behind what clap makes.
const BASH_DISKS: &str = include_str!("generate/disks.bash");
const FISH_DISKS: &str = include_str!("generate/disks.fish");

/// Writes `man/*.1`, `man/*.8` and `man/*.5`, and completions for each shell, into a directory that is there.
///
/// # Errors
/// The directory cannot be written to.
pub fn run<Cli: CommandFactory>(directory: &Path) -> Result<(), Failure> {
    write(Cli::command(), directory).map_err(|e| cannot(directory, &e))
}

/// Writes manual pages and completions of both programs, and the pages that only `ferrite` has.
pub(crate) fn run_for_package(programs: [Command; 2], directory: &Path) -> Result<(), Failure> {
    let [ferrite, tap_ctl] = programs;
    let pages = || -> io::Result<()> {
        write(ferrite, directory)?;
        page::write_all(tap_ctl, &directory.join("man"))?;
        std::fs::write(directory.join("man/ferrite.toml.5"), configuration::page())?;
        for (file, more) in [("ferrite.bash", BASH_DISKS), ("ferrite.fish", FISH_DISKS)] {
            let path = directory.join(file);
            let text = std::fs::read_to_string(&path)? + more;
            std::fs::write(path, text)?;
        }
        Ok(())
    };
    pages().map_err(|e| cannot(directory, &e))
}

fn cannot(directory: &Path, e: &io::Error) -> Failure {
    let what = format!("cannot write to {}", directory.display());
    Failure::new(what, e, "name a directory that may be written to")
}

fn write(command: Command, directory: &Path) -> io::Result<()> {
    let man = directory.join("man");
    std::fs::create_dir_all(&man)?;
    let mut shown = visible(&command);
    page::write_all(command, &man)?;
    let name = shown.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut shown, &name, directory)?;
    }
    Ok(())
}

/// The command without hidden commands and options, which clap would complete as well.
fn visible(command: &Command) -> Command {
    // clap takes names that live as long as the program, and gives out others.
    let name: &'static str = Box::leak(command.get_name().into());
    let mut shown = Command::new(name)
        .disable_help_flag(command.is_disable_help_flag_set())
        .args(command.get_arguments().filter(|arg| !arg.is_hide_set()).cloned())
        .subcommands(command.get_subcommands().filter(|sub| !sub.is_hide_set()).map(visible));
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    match command.get_version() {
        Some(_) => shown.version(env!("CARGO_PKG_VERSION")),
        None => shown,
    }
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    #[test]
    fn what_is_hidden_is_not_completed() {
        let flag = |name: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue);
        let inner = Command::new("inner").arg(flag("seen")).arg(flag("unseen").hide(true));
        let hidden = Command::new("hidden").hide(true);
        let shown = visible(&Command::new("outer").about("All.").subcommands([inner, hidden]));
        let names: Vec<_> = shown.get_subcommands().map(Command::get_name).collect();
        assert_eq!(names, ["inner"]);
        let inner = shown.find_subcommand("inner").unwrap();
        let options: Vec<_> = inner.get_arguments().filter_map(Arg::get_long).collect();
        assert_eq!((options, shown.get_about().is_some()), (vec!["seen"], true));
    }
}
