//! The verbs that drive taps.

use std::io::{self, Write as _};

use ferrite_daemon::Paths;
use ferrite_daemon::control::protocol::{
    MinorParams, Nothing, TapDone, TapParams, TapRow, TapRows, TapStatistics,
};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::{Daemon, Options, WITHIN_S, xl};
use crate::compat::Refusal;
use crate::plain::one_line;

/// tapdisk's numbers of image types.
const TYPES: [(&str, u32); 3] = [("aio", 0), ("vhd", 4), ("qcow2", 6)];

/// Lists taps, and disks that xl has attached.
pub(super) fn list(daemon: &Daemon, options: &Options) -> Result<(), Refusal> {
    let TapRows { taps, disks } = daemon.call("tap.list", &Nothing {}, 0)?;
    let disks = match disks {
        Some(disks) => disks,
        None => daemon.disks()?,
    };
    let mut lines: Vec<String> =
        taps.iter().filter(|row| is_wanted(row, options)).map(line).collect();
    lines.extend(xl::list(daemon, disks, options)?);
    let mut out = io::stdout().lock();
    for line in lines {
        let _ = writeln!(out, "{line}");
    }
    Ok(())
}

fn is_wanted(row: &TapRow, options: &Options) -> bool {
    let named = row.args.as_deref().and_then(|args| args.split_once(':'));
    let is_of = |pid: u32| row.pid == Some(pid) || row.worker == Some(pid);
    options.pid.is_none_or(is_of)
        && options.minor.is_none_or(|minor| row.minor == Some(minor))
        && options.kind.as_deref().is_none_or(|kind| named.is_some_and(|(found, _)| found == kind))
        && options.file.as_deref().is_none_or(|file| named.is_some_and(|(_, found)| found == file))
}

/// One line, which scripts parse. It has only what is there.
fn line(row: &TapRow) -> String {
    let state = row.state.map(|state| match state {
        0 => "state=0".to_owned(),
        state => format!("state={state:#x}"),
    });
    let words = [
        row.pid.map(|pid| format!("pid={pid}")),
        row.minor.map(|minor| format!("minor={minor}")),
        state,
        // A line break in a name would be another tap's line.
        row.args.as_deref().map(|args| format!("args={}", one_line(args))),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

pub(super) fn allocate(daemon: &Daemon) -> Result<(), Refusal> {
    println!("{}", allocated(daemon)?.1);
    Ok(())
}

/// Allocates a minor. Returns it with the path of its file.
fn allocated(daemon: &Daemon) -> Result<(u32, String), Refusal> {
    let done: TapDone = daemon.call("tap.allocate", &Nothing {}, 0)?;
    let minor = done.minor.ok_or_else(no_number)?;
    let path = Paths { run: daemon.0.clone() }.allocated_minor(minor);
    Ok((minor, path.display().to_string()))
}

pub(super) fn spawn(daemon: &Daemon) -> Result<(), Refusal> {
    println!("{}", spawned(daemon)?);
    Ok(())
}

fn spawned(daemon: &Daemon) -> Result<u32, Refusal> {
    let done: TapDone = daemon.call("tap.spawn", &Nothing {}, 0)?;
    done.pid.ok_or_else(no_number)
}

fn no_number() -> Refusal {
    Refusal { errno: Errno::PROTO, why: "the daemon has named no number".to_owned() }
}

/// Calls a verb that changes a tap.
pub(super) fn change(
    daemon: &Daemon,
    verb: &str,
    (pid, minor): (u32, u32),
    options: &Options,
) -> Result<(), Refusal> {
    let timeout_s = options.timeout_s.unwrap_or(WITHIN_S);
    let params = TapParams {
        pid,
        minor,
        image: options.image.clone(),
        read_only: options.read_only,
        log: options.log.clone(),
        mirror: options.mirror.clone(),
        force: options.force,
        timeout_s,
    };
    daemon.call::<TapDone>(&format!("tap.{verb}"), &params, timeout_s.max(WITHIN_S))?;
    Ok(())
}

pub(super) fn free(daemon: &Daemon, minor: u32) -> Result<(), Refusal> {
    daemon.call::<TapDone>("tap.free", &MinorParams { minor }, 0)?;
    Ok(())
}

/// Allocates, spawns, attaches and opens. If a later step fails, the earlier ones are undone.
pub(super) fn create(daemon: &Daemon, options: &Options) -> Result<(), Refusal> {
    let (minor, path) = allocated(daemon)?;
    let made = spawned(daemon).and_then(|pid| {
        let attached = change(daemon, "attach", (pid, minor), options);
        let opened = attached.and_then(|()| change(daemon, "open", (pid, minor), options));
        opened.inspect_err(|_| {
            let _ = change(daemon, "detach", (pid, minor), options);
        })
    });
    if let Err(e) = made {
        let _ = free(daemon, minor);
        return Err(e);
    }
    println!("{path}");
    Ok(())
}

/// Closes, detaches and frees a tap. Of a disk that xl has detached, the end is waited for.
pub(super) fn destroy(
    daemon: &Daemon,
    (pid, minor): (u32, u32),
    options: &Options,
) -> Result<(), Refusal> {
    let rows = daemon.call::<TapRows>("tap.list", &Nothing {}, 0)?.taps;
    if !rows.iter().any(|row| row.minor == Some(minor)) {
        return xl::destroy(daemon, pid, minor);
    }
    change(daemon, "close", (pid, minor), options)?;
    change(daemon, "detach", (pid, minor), options)?;
    free(daemon, minor)
}

/// Prints a tap's counters.
pub(super) fn stats(daemon: &Daemon, (_, minor): (u32, u32)) -> Result<(), Refusal> {
    let seen: TapStatistics = daemon.call("tap.stats", &MinorParams { minor }, 0)?;
    println!("{}", statistics(&seen));
    Ok(())
}

/// An image as tapdisk describes it. The leaf's figures have all that is not read from a parent.
fn image(args: &str, hits: [u64; 2], fail: [u64; 2]) -> Option<Value> {
    let (kind, path) = args.split_once(':')?;
    let number = TYPES.iter().find(|(name, _)| *name == kind).map(|(_, number)| number);
    let driver = json!({ "type": number, "name": kind, "status": null });
    Some(json!({ "name": path, "hits": hits, "fail": fail, "driver": driver }))
}

fn statistics(seen: &TapStatistics) -> Value {
    let parents = seen.chain.get(1..).unwrap_or_default();
    let below = parents.iter().fold(0u64, |sum, image| sum.saturating_add(image.read_sectors));
    let [reads, writes] = seen.sectors;
    let leaf = seen.args.as_deref().filter(|_| !seen.is_paused);
    let leaf =
        leaf.and_then(|args| image(args, [reads.saturating_sub(below), writes], seen.errors));
    let parents = parents.iter().filter_map(|of| image(&of.args, [of.read_sectors, 0], [0, 0]));
    let images: Vec<Value> = match leaf {
        Some(leaf) => std::iter::once(leaf).chain(parents).collect(),
        None => Vec::new(),
    };
    json!({
        "name": seen.args.as_deref().unwrap_or("(null)"),
        "secs": seen.sectors,
        "images": images,
        "nbd_mirror_failed": u8::from(seen.mirror_failed),
        "reqs_outstanding": seen.in_flight,
        "FIXME_enospc_redirect_count": 0,
        "read_caching": "false",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_what_is_there_and_no_other_line() {
        let row = TapRow {
            pid: Some(7),
            minor: Some(3),
            state: Some(0x2a),
            args: Some("vhd:/a b:c\nd".to_owned()),
            worker: Some(8),
        };
        assert_eq!(line(&row), "pid=7 minor=3 state=0x2a args=vhd:/a b:c\\nd");
        let only = TapRow { minor: Some(3), ..TapRow::default() };
        assert_eq!(line(&only), "minor=3");
        let closed = TapRow { args: None, state: Some(0), ..row.clone() };
        assert_eq!(line(&closed), "pid=7 minor=3 state=0");
        let wanted = |options: Options| is_wanted(&row, &options);
        assert!(wanted(Options { pid: Some(8), ..Options::default() }));
        assert!(!wanted(Options { pid: Some(9), ..Options::default() }));
        assert!(wanted(Options { file: Some("/a b:c\nd".to_owned()), ..Options::default() }));
        assert!(!wanted(Options { kind: Some("aio".to_owned()), ..Options::default() }));
    }
}
