//! `ferrite disk limit` and `ferrite disk set`: what changes on a running disk.

use clap::Args;
use ferrite_daemon::config::{DiskOptions, nearest};
use ferrite_daemon::control::protocol::{LimitParams, Limited, SetDone, SetParams};
use ferrite_serve::path::limit::{Limits, NAMES, Rate};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{ANSWER, call, id, of_disk, setting, tell};
use crate::cli::{DiskArg, RunDirArgs};
use crate::exit::{Code, Failure};
use crate::image::args::bytes;

/// The help of `disk limit` after its options.
pub(crate) const HELP: &str = "\
The limits that are named are all limits that the disk has afterwards. They hold for all queues of the guest
and for NBD clients together, from now on until the disk is detached, also after an upgrade. A discard counts
as one write without bytes, and a flush does not count. What a disk has from its attachment on is the key
limit of the configuration.";

/// The help of `disk set` after its options.
pub(crate) const SET_HELP: &str = "\
on_full=error|wait, poll_us=auto|N and cpu=PERCENT (0: no limit) change at once, and stay until the disk is
detached, also after an upgrade. Other keys of the configuration need more, and the command says what.";

/// `ferrite disk limit`.
#[derive(Debug, Args)]
#[group(id = "limits", required = true, multiple = true, args = ["iops", "bytes", "none"])]
pub(crate) struct LimitArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// Most requests in a second: of both directions together, or of one. It may be repeated.
    #[arg(long, value_name = "N[:read|:write]", value_parser = |text: &str| limit(text, 0, number))]
    pub(crate) iops: Vec<Limit>,

    /// Most bytes in a second, such as 10M: of both directions together, or of one. It may be repeated.
    #[arg(long, value_name = "SIZE[:read|:write]", value_parser = |text: &str| limit(text, 3, bytes))]
    pub(crate) bytes: Vec<Limit>,

    /// What may pass at once after a rest: as much as the limits bring in so many milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 100, conflicts_with = "none",
          value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub(crate) burst: u64,

    /// Remove all limits.
    #[arg(long, conflicts_with_all = ["iops", "bytes"])]
    pub(crate) none: bool,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite disk set`.
#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// A setting: on_full=wait, say.
    #[arg(value_name = "KEY=VALUE", required = true)]
    pub(crate) settings: Vec<String>,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// One limit: its index in [`NAMES`], and what passes in a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    index: usize,
    per_s: u64,
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "it takes a number of requests".to_owned())
}

/// A limit with its direction. `first` is the index of the limit of both directions.
fn limit(
    text: &str,
    first: usize,
    amount: impl Fn(&str) -> Result<u64, String>,
) -> Result<Limit, String> {
    let (per_s, of) = match text.rsplit_once(':') {
        None => (text, 0),
        Some((per_s, "read")) => (per_s, 1),
        Some((per_s, "write")) => (per_s, 2),
        Some((_, other)) => return Err(format!("{other} is no direction: use read or write")),
    };
    Ok(Limit { index: first + of, per_s: amount(per_s)? })
}

/// `ferrite disk limit`.
pub(super) fn run(args: &LimitArgs) -> Result<(), Failure> {
    let limits = limits(args)?;
    let disk = args.disk.disk.find()?;
    let asked = LimitParams { disk: id(disk), limits };
    let done: Limited = call(&args.places.run_dir, "disk.limit", &asked, ANSWER)
        .map_err(|e| of_disk("cannot limit disk", disk, &e))?;
    tell(args.json, &done, || match done.limits.is_none() {
        true => println!("disk {disk} has no limit"),
        false => println!("disk {disk} is limited: {} a second", done.limits),
    })
}

fn limits(args: &LimitArgs) -> Result<Limits, Failure> {
    let what = "cannot understand the limits";
    let usage = |why: String, help: &str| Failure::new(what, why, help).with_code(Code::USAGE);
    let mut limits = Limits::default();
    for Limit { index, per_s } in args.iops.iter().chain(&args.bytes) {
        let burst = (u128::from(*per_s) * u128::from(args.burst) / 1000).max(1);
        let burst = (args.burst != 100).then(|| u64::try_from(burst).unwrap_or(u64::MAX));
        match limits.rate_mut(*index) {
            Some(rate @ None) => *rate = Some(Rate { per_s: *per_s, burst }),
            _ => {
                let why = format!("{} is named twice", NAMES[*index]);
                return Err(usage(why, "name each limit once"));
            }
        }
    }
    limits.check().map_err(|why| usage(why, "see ferrite disk limit --help"))?;
    Ok(limits)
}

/// `ferrite disk set`.
pub(super) fn set(args: &SetArgs) -> Result<(), Failure> {
    let disk = args.disk.disk.find()?;
    let asked = params(args, disk)?;
    let done: SetDone = call(&args.places.run_dir, "disk.set", &asked, ANSWER)
        .map_err(|e| of_disk("cannot change disk", disk, &e))?;
    tell(args.json, &done, || {
        println!("disk {disk}");
        done.settings.iter().for_each(|made| print!("{}", setting(made)));
    })
}

fn params(args: &SetArgs, disk: crate::vdev::Vbd) -> Result<SetParams, Failure> {
    let mut asked = SetParams { disk: id(disk), on_full: None, poll_us: None, cpu: None };
    for text in &args.settings {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        match key {
            "on_full" => asked.on_full = Some(take(key, value, "error or wait")?),
            "poll_us" => asked.poll_us = Some(take(key, value, "auto, or microseconds")?),
            "cpu" => {
                let percent = value.parse::<u32>().ok().filter(|percent| *percent <= 6400);
                let allowed = "percent of a processor from 0 to 6400; 0 is no limit";
                asked.cpu = Some(percent.ok_or_else(|| invalid(key, value, allowed))?);
            }
            _ => return Err(needs_more(key)),
        }
    }
    Ok(asked)
}

fn take<T: DeserializeOwned>(key: &str, value: &str, allowed: &str) -> Result<T, Failure> {
    serde_json::from_value(Value::String(value.to_owned()))
        .map_err(|_| invalid(key, value, allowed))
}

fn invalid(key: &str, value: &str, allowed: &str) -> Failure {
    let why = format!("{value:?} is not valid for {key}");
    Failure::new("cannot understand the setting", why, format!("it takes {allowed}"))
        .with_code(Code::USAGE)
}

/// The failure for a key that does not change on a running disk. It says how the key changes.
fn needs_more(key: &str) -> Failure {
    let what = "cannot set it on a running disk";
    let (why, help) = match key {
        "limit" => ("limits have a command of their own".to_owned(), "use ferrite disk limit"),
        _ if DiskOptions::keys().any(|known| known == key) => (
            format!("{key} is read when the disk is attached"),
            "set it in /etc/ferrite/ferrite.toml, restart the daemon (systemctl restart ferrite), \
             then detach the disk and attach it again",
        ),
        _ => {
            let meant = nearest(key, DiskOptions::keys());
            let meant = meant.map_or(String::new(), |meant| format!("; did you mean {meant}?"));
            let help = "on_full, poll_us and cpu can be set; docs/operations.md has all keys";
            (format!("there is no key {key:?}{meant}"), help)
        }
    };
    Failure::new(what, why, help).with_code(Code::USAGE)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command, DiskCommand};

    fn understood(words: &str) -> Option<DiskCommand> {
        let words = format!("ferrite disk {words}");
        match Cli::try_parse_from(words.split_whitespace()).ok()?.command {
            Command::Disk(args) => Some(args.command),
            _ => None,
        }
    }

    fn limits_of(words: &str) -> Option<Result<Limits, String>> {
        match understood(&format!("limit 3/xvda {words}"))? {
            DiskCommand::Limit(args) => Some(limits(&args).map_err(|failure| failure.why)),
            _ => None,
        }
    }

    #[test]
    fn limits_are_told_by_direction_with_sizes_and_one_burst() {
        for (words, said) in [
            ("--none", "none"),
            ("--iops 500", "iops=500"),
            ("--iops 500:read --bytes 10M:write", "iops_read=500,bytes_write=10485760"),
            (
                "--bytes 1G --iops 2:write --burst 2000",
                "iops_write=2:4,bytes=1073741824:2147483648",
            ),
            ("--iops 1 --burst 1", "iops=1:1"),
        ] {
            assert_eq!(limits_of(words).unwrap().unwrap().to_string(), said, "{words}");
        }
        for (words, why) in [
            ("--iops 5 --iops 6", "iops is named twice"),
            ("--bytes 1K", "bytes is 1024 a second; it takes 65536 to 1099511627776"),
            ("--iops 0:read", "iops_read is 0 a second; it takes 1 to 1099511627776"),
        ] {
            assert_eq!(limits_of(words).unwrap().unwrap_err(), why, "{words}");
        }
        for words in
            ["", "--burst 5", "--iops 5:both", "--iops M", "--none --iops 5", "--none --burst 5"]
        {
            assert_eq!(limits_of(words), None, "{words}");
        }
    }

    #[test]
    fn the_commands_that_the_manual_shows_are_understood() {
        let manual = include_str!("../../../../docs/operations.md");
        let lines = manual.lines().filter_map(|line| line.strip_prefix("ferrite disk "));
        let mut seen = 0;
        for line in lines.map(|line| line.split('#').next().unwrap_or_default()) {
            match line.split(' ').next() {
                Some("limit" | "set") => seen += 1,
                _ => continue,
            }
            match understood(line) {
                Some(DiskCommand::Limit(args)) => drop(limits(&args).unwrap()),
                Some(DiskCommand::Set(args)) => {
                    params(&args, "3/51712".parse().unwrap()).unwrap();
                }
                other => panic!("{line}: {other:?}"),
            }
        }
        assert_eq!(seen, 8);
    }

    #[test]
    fn a_key_that_needs_more_than_this_command_is_told_what() {
        let asked = |settings: &str| match understood(&format!("set 3/xvda {settings}")) {
            Some(DiskCommand::Set(args)) => {
                let disk = "3/51712".parse().unwrap();
                params(&args, disk).map_err(|failure| format!("{}; {}", failure.why, failure.help))
            }
            other => panic!("{other:?}"),
        };
        let all = asked("on_full=wait poll_us=auto cpu=0").unwrap();
        let value = serde_json::to_value(&all).unwrap();
        assert_eq!((&value["on_full"], &value["poll_us"]), (&"wait".into(), &"auto".into()));
        assert_eq!(all.cpu, Some(0));
        assert_eq!(asked("poll_us=30").unwrap().on_full, None);
        for (settings, why) in [
            ("queues=2", "queues is read when the disk is attached"),
            ("limit=none", "limits have a command of their own; use ferrite disk limit"),
            ("on_ful=wait", "there is no key \"on_ful\"; did you mean on_full?"),
            ("on_full=stop", "\"stop\" is not valid for on_full; it takes error or wait"),
            ("poll_us=-1", "\"-1\" is not valid for poll_us"),
            ("cpu=6401", "\"6401\" is not valid for cpu"),
            ("cpu", "\"\" is not valid for cpu"),
        ] {
            let said = asked(settings).unwrap_err();
            assert!(said.starts_with(why), "{settings}: {said}");
        }
    }
}
