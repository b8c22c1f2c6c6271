//! Parses a command line by the definition of its own command alone.
//!
//! The definition of all commands takes most of a short command's time and memory, and storage managers, backups and
//! tests call such commands by the thousand.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;

use clap::{Args, Command as Definition, FromArgMatches as _};

use crate::backup::args::BackupArgs;
use crate::cli::{Cli, DaemonArgs, DiskArgs, GlobalArgs, ServeArgs};
use crate::export::args::ExportArgs;
use crate::image::args::ImageArgs;
use crate::job::args::JobArgs;
use crate::pool::args::PoolArgs;
use crate::seeing::args::StatArgs;
use crate::store::args::StoreArgs;

/// Parses a valid command line of a command that is called often. `None`: it is of another command, or it asks for help,
/// or it is not valid. The definition of all commands parses it, and has the messages.
pub(crate) fn parse(words: &[OsString]) -> Option<Cli> {
    // The options before a command have no values.
    let is_option = |word: &&OsString| word.as_bytes().starts_with(b"-");
    let name = words.iter().skip(1).find(|word| !is_option(word))?;
    let (name, own): (_, fn(Definition) -> Definition) = match name.to_str()? {
        "backup" => ("backup", BackupArgs::augment_args),
        "daemon" => ("daemon", DaemonArgs::augment_args),
        "disk" => ("disk", DiskArgs::augment_args),
        "export" => ("export", ExportArgs::augment_args),
        "image" => ("image", ImageArgs::augment_args),
        "job" => ("job", JobArgs::augment_args),
        "pool" => ("pool", PoolArgs::augment_args),
        "serve" => ("serve", ServeArgs::augment_args),
        "stat" => ("stat", StatArgs::augment_args),
        "store" => ("store", StoreArgs::augment_args),
        _ => return None,
    };
    let definition = GlobalArgs::augment_args(Definition::new("ferrite"));
    let definition = definition.subcommand(own(Definition::new(name)));
    Cli::from_arg_matches(&definition.try_get_matches_from(words).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    /// The program's name and these words.
    fn words(line: &str) -> Vec<OsString> {
        ["ferrite"].into_iter().chain(line.split_whitespace()).map(OsString::from).collect()
    }

    /// `generate/examples.rs` compares the lines of all manual pages.
    #[test]
    fn options_of_all_commands_stand_before_and_behind_a_command() {
        for line in [
            "image info a.vhd",
            "-q image info a.vhd",
            "--json -vv image info a.vhd",
            "image -v info --json a.vhd",
            "store list p.store -q",
            "serve a.img --xen 3/xvda -v",
        ] {
            let one = parse(&words(line)).unwrap_or_else(|| panic!("{line}"));
            let all = Cli::try_parse_from(words(line)).unwrap();
            assert_eq!(format!("{one:?}"), format!("{all:?}"), "{line}");
        }
    }

    #[test]
    fn what_has_to_be_told_is_left_to_the_definition_of_all_commands() {
        for line in [
            "",
            "--version",
            "image",
            "image --help",
            "image info",
            "image info a.vhd --bad",
            "images",
            "-x image info a.vhd",
            "doctor",
        ] {
            assert!(parse(&words(line)).is_none(), "{line}");
        }
    }
}
