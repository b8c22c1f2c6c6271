//! The words of the command line, and several disks on one: `ferrite serve IMAGE --xen A IMAGE --xen B`.
//!
//! Options before the first image hold for all disks. Options after an image are that disk's, and replace those for
//! all. So the words are sorted by disk, and each disk's words are parsed as a command with one image.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args as _, Command as Definition, CommandFactory as _, Error, Parser as _};

use crate::cli::{Cli, Command, ServeArgs};
use crate::one;

const SERVE: &str = "serve";
/// The option that names the disk.
const XEN: &str = "xen";
/// Options that bound all disks of the process or of the host: a disk cannot have its own.
const OF_ALL: [&str; 4] = ["cpu", "poll-host", "map-budget-host", "memory-host"];

/// The error without a tip that names a hidden command.
pub(crate) fn without_hidden(mut e: clap::Error, program: &clap::Command) -> clap::Error {
    let is_hidden = |name: &String| {
        let of = |command: &clap::Command| {
            command.find_subcommand(name).is_some_and(clap::Command::is_hide_set)
        };
        of(program) || program.get_subcommands().any(of)
    };
    let tips = match e.get(ContextKind::SuggestedSubcommand) {
        Some(ContextValue::String(tip)) => vec![tip.clone()],
        Some(ContextValue::Strings(tips)) => tips.clone(),
        _ => Vec::new(),
    };
    if tips.iter().any(is_hidden) {
        e.remove(ContextKind::SuggestedSubcommand);
        e.remove(ContextKind::Suggested);
    }
    e
}

/// Parses a command line.
///
/// # Errors
/// Errors of clap, which include the help.
pub(crate) fn parse(words: Vec<OsString>) -> Result<Cli, Error> {
    let Some(sorted) = sort(&words).filter(|sorted| sorted.disks.len() > 1) else {
        return one::parse(&words).map_or_else(|| Cli::try_parse_from(words), Ok);
    };
    sorted.compare()?;
    let mut disks = sorted.disks.iter().map(|disk| sorted.parse(disk));
    // There are at least two.
    let mut cli = disks.next().unwrap_or_else(|| Cli::try_parse_from(&words))?;
    for disk in disks {
        let disk = disk?;
        cli.global.verbose = cli.global.verbose.max(disk.global.verbose);
        if let (Some(args), Some(other)) = (serve(&mut cli.command), disk.command.into_serve()) {
            args.others.push(other);
        }
    }
    Ok(cli)
}

fn serve(command: &mut Command) -> Option<&mut ServeArgs> {
    match command {
        Command::Serve(args) => Some(args),
        _ => None,
    }
}

/// An option with its value, or an image.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    /// An option's long name, or the whole word of a short option. `None`: an image, or a word after `--`.
    option: Option<String>,
    words: Vec<OsString>,
}

/// The words of `serve`, sorted.
struct Sorted {
    /// The program, and the words before the first image.
    all: Vec<Token>,
    /// The words of each disk. The first is its image.
    disks: Vec<Vec<Token>>,
}

/// Sorts the words. `None`: it is another command.
fn sort(words: &[OsString]) -> Option<Sorted> {
    let is_option = |word: &&OsString| word.as_bytes().starts_with(b"-");
    let before = 1 + words.iter().skip(1).take_while(is_option).count();
    if words.get(before)? != SERVE {
        return None;
    }
    let definition = ServeArgs::augment_args(Definition::new(SERVE));
    let head = words[..=before].iter().map(|word| plain(word)).collect();
    let mut sorted = Sorted { all: head, disks: Vec::new() };
    let mut rest = words[before + 1..].iter();
    while let Some(word) = rest.next() {
        let token = match option(word) {
            // No further disk can follow, since no option can.
            _ if word == "--" => Token {
                option: Some("--".to_owned()),
                words: [word].into_iter().chain(rest.by_ref()).cloned().collect(),
            },
            None => {
                sorted.disks.push(Vec::new());
                plain(word)
            }
            Some((name, has_value)) => {
                let value = (!has_value && takes_value(&definition, &name)).then(|| rest.next());
                let words = [word].into_iter().chain(value.flatten()).cloned().collect();
                Token { option: Some(name), words }
            }
        };
        sorted.disks.last_mut().unwrap_or(&mut sorted.all).push(token);
    }
    Some(sorted)
}

fn plain(word: &OsStr) -> Token {
    Token { option: None, words: vec![word.to_owned()] }
}

/// An option's name, and whether its value is in the same word.
fn option(word: &OsStr) -> Option<(String, bool)> {
    let text = word.to_string_lossy();
    match text.strip_prefix("--") {
        Some(long) => {
            let (name, value) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v)));
            Some((name.to_owned(), value.is_some()))
        }
        None => (text.starts_with('-') && text.len() > 1).then(|| (text.into_owned(), true)),
    }
}

fn takes_value(definition: &Definition, name: &str) -> bool {
    let mut options = definition.get_arguments();
    options.any(|arg| arg.get_long() == Some(name) && arg.get_action().takes_values())
}

impl Token {
    fn is(&self, name: &str) -> bool {
        self.option.as_deref() == Some(name)
    }
}

impl Sorted {
    /// Refuses options at places where they have no meaning.
    fn compare(&self) -> Result<(), Error> {
        if self.all.iter().any(|token| token.is(XEN)) {
            return Err(refused("with several images, --xen must follow the IMAGE it applies to"));
        }
        let help = |token: &Token| token.is("help") || token.is("-h");
        for disk in self.disks.iter().filter(|disk| !disk.iter().any(help)) {
            let image = disk[0].words[0].display();
            if !disk.iter().any(|token| token.is(XEN)) {
                return Err(refused(&format!(
                    "the image {image} has no --xen DOMID/DEVID after it"
                )));
            }
            if let Some(name) = OF_ALL.iter().find(|name| disk.iter().any(|token| token.is(name))) {
                return Err(refused(&format!(
                    "--{name} is one number for all disks: it stands before the first IMAGE, and not \
                     behind {image}"
                )));
            }
        }
        Ok(())
    }

    /// Parses the command line of one disk.
    fn parse(&self, disk: &[Token]) -> Result<Cli, Error> {
        let own = |token: &&Token| {
            !token.option.as_deref().is_some_and(|name| disk.iter().any(|own| own.is(name)))
        };
        let tokens = self.all.iter().filter(own).chain(disk);
        Cli::try_parse_from(tokens.flat_map(|token| token.words.iter()))
    }
}

fn refused(why: &str) -> Error {
    let mut definition = Cli::command();
    definition.build();
    let text = format!("{why}\n");
    match definition.find_subcommand_mut(SERVE) {
        Some(serve) => serve.error(ErrorKind::ArgumentConflict, text),
        None => definition.error(ErrorKind::ArgumentConflict, text),
    }
}

#[cfg(test)]
mod tests {
    use ferrite_xen::mover::Mover;

    use super::*;

    fn disks(words: &str) -> Result<(u8, Vec<ServeArgs>), String> {
        let words = format!("ferrite {words}");
        let cli = parse(words.split(' ').map(OsString::from).collect());
        let cli = cli.map_err(|e| e.to_string())?;
        let verbose = cli.global.verbose;
        let mut first = cli.command.into_serve().unwrap();
        let others = std::mem::take(&mut first.others);
        Ok((verbose, [first].into_iter().chain(others).collect()))
    }

    /// Image, device, queues, and whether it is read-only.
    fn told(words: &str) -> Vec<(String, String, u32, bool)> {
        let (_, disks) = disks(words).unwrap();
        let told = |d: &ServeArgs| {
            let image = d.image.to_str().unwrap().to_owned();
            (image, d.xen.to_string(), d.queues, d.read_only)
        };
        disks.iter().map(told).collect()
    }

    fn disk(image: &str, xen: &str, queues: u32, read_only: bool) -> (String, String, u32, bool) {
        (image.to_owned(), xen.to_owned(), queues, read_only)
    }

    #[test]
    fn what_stands_before_the_first_image_is_for_all_disks_and_the_rest_for_its_own() {
        let words =
            "serve --queues 2 a --xen 1/xvda b --read-only --xen=2/5 --queues=3 c --xen 1/9";
        let expected = [disk("a", "1/51712", 2, false), disk("b", "2/5", 3, true)];
        assert_eq!(told(words)[..2], expected);
        assert_eq!(told(words)[2..], [disk("c", "1/9", 2, false)]);
        let words =
            "serve --read-only --own-grants false a --xen 1/1 b --own-grants true --xen 1/2";
        let (_, both) = disks(words).unwrap();
        assert_eq!([both[0].own_grants, both[1].own_grants], [false, true]);
        assert!(both.iter().all(|disk| disk.read_only));
        // An option that may be given several times is replaced like others.
        let words = "serve --parents x --mover map a --xen 1/1 b --parents y --parents z --xen 1/2";
        let (_, both) = disks(words).unwrap();
        assert_eq!(both[0].parents.named().len(), 1);
        assert_eq!(both[1].parents.named().len(), 2);
        assert_eq!([both[0].mover, both[1].mover], [Mover::Map; 2]);
    }

    #[test]
    fn with_one_image_all_is_as_it_always_was() {
        let expected = [disk("a", "1/51712", 2, true)];
        for words in [
            "serve a --xen 1/xvda --queues 2 --read-only",
            "serve --queues 2 --xen 1/xvda --read-only a",
            "serve --xen 1/xvda a --queues=2 --read-only --cpu 50",
            "-v serve --read-only --queues 2 --xen 1/xvda -- a",
        ] {
            assert_eq!(told(words), expected, "{words}");
        }
        assert!(disks("serve --xen 1/xvda --queues 2 --queues 3 a").is_err());
        assert!(disks("serve a").unwrap_err().contains("--xen"));
    }

    #[test]
    fn the_documented_example_is_understood_as_it_says() {
        let text = include_str!("../../../docs/serve.md");
        let example = text.lines().find_map(|line| line.strip_prefix("ferrite serve --memory "));
        let words = format!("serve --memory {}", example.unwrap());
        let (_, disks) = disks(&words).unwrap();
        assert!(disks.iter().all(|disk| disk.memory.memory.bytes() == 16 << 20));
        let read_only: Vec<_> = disks.iter().map(|disk| disk.read_only).collect();
        assert_eq!(read_only, [false, true, false]);
        let queues: Vec<_> = disks.iter().map(|disk| disk.queues).collect();
        assert_eq!(queues, [4, 4, 1]);
    }

    #[test]
    fn how_much_is_told_may_stand_anywhere() {
        for words in ["-vv serve a --xen 1/1 b --xen 1/2", "serve a --xen 1/1 b -vv --xen 1/2"] {
            let (verbose, both) = disks(words).unwrap();
            assert_eq!((verbose, both.len()), (2, 2), "{words}");
        }
    }

    #[test]
    fn what_belongs_to_no_disk_or_to_all_is_refused_where_it_means_nothing() {
        for (words, why) in [
            ("serve --xen 1/1 a --xen 1/2 b", "--xen must follow the IMAGE it applies to"),
            ("serve a b --xen 1/2", "the image a has no --xen DOMID/DEVID"),
            ("serve a --xen 1/1 b", "the image b has no --xen DOMID/DEVID"),
            ("serve a --xen 1/1 --cpu 5 b --xen 1/2", "--cpu is one number for all"),
            ("serve a --xen 1/1 b --xen 1/2 --poll-host=1", "--poll-host is one number"),
            ("serve a --xen 1/1 b --xen 1/2 --xen 1/3", "--xen"),
            ("serve --queues 1 --queues 2 a --xen 1/1 b --xen 1/2", "--queues"),
            ("serve a --xen 1/1 b --xen 1/2 --frobnicate", "--frobnicate"),
            ("serve a --xen 1/1 b --xen 1/2 -- c", "'c'"),
        ] {
            let told = disks(words).unwrap_err();
            assert!(told.contains(why), "{words}: {told}");
        }
        assert!(disks("serve --cpu 5 a --xen 1/1 b --xen 1/2").is_ok());
        assert!(disks("serve a --xen 1/1 b --help").unwrap_err().contains("Usage:"));
    }
}
