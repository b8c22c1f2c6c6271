//! Disks that xl has attached. `block-tap` asks for the process and the number of a disk when it is attached, and waits
//! for its end when it is detached. The daemon serves these by itself, so nothing is made or ended here.

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use ferrite_daemon::control::protocol::{
    Attached, Details, Disk, PhaseName, ShowParams, WaitParams,
};
use ferrite_daemon::directory;
use rustix::io::Errno;

use super::{Daemon, Options};
use crate::compat::Refusal;
use crate::plain::one_line;

/// How long to wait for a disk that is being opened. xl gives its script forty seconds.
const SERVED_S: u32 = 10;
/// How long to wait for a disk that is being closed.
const CLOSED: Duration = Duration::from_secs(30);
/// The pause between those questions.
const ASK_AGAIN: Duration = Duration::from_millis(100);

pub(super) fn not_served() -> Refusal {
    Refusal {
        errno: Errno::OPNOTSUPP,
        why: "the image is not served; ferrite disk list has the reason".to_owned(),
    }
}

/// Reports why the disk is not served. xl prints block-tap's output, which is only "Could not allocate minor" if this
/// step fails. If the next step fails, it is "Could not spawn tapdisk for" and the number of this step. So the number
/// is the reason.
pub(super) fn allocate(daemon: &Daemon, backend: &str) -> Result<(), Refusal> {
    let id = directory::id_of(backend).ok_or_else(not_served)?;
    let disks = daemon.disks()?;
    let disk = disks.into_iter().find(|disk| disk.disk == id).ok_or_else(not_served)?;
    let (why, help) = disk.why.zip(disk.help).ok_or_else(not_served)?;
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "disk {id}: {}; {}", one_line(&why), one_line(&help));
    Ok(())
}

fn is_meant(options: &Options, disk: &Disk) -> bool {
    let format = disk.format.map(|format| format.tapdisk_word());
    options.pid.is_none_or(|pid| disk.pid == Some(pid))
        && options.minor.is_none_or(|minor| disk.minor == minor)
        && options.kind.as_deref().is_none_or(|kind| format == Some(kind))
        && options.file.as_deref().is_none_or(|file| disk.image.as_deref() == Some(file))
}

/// The lines of those of these disks that match. One that is being opened is waited for if its file is named.
pub(super) fn list(
    daemon: &Daemon,
    mut disks: Vec<Disk>,
    wanted: &Options,
) -> Result<Vec<String>, Refusal> {
    let unserved = |disk: &&Disk| is_meant(wanted, disk) && is_to_be_served(disk);
    if wanted.file.is_some() && disks.iter().any(|disk| unserved(&disk)) {
        for disk in disks.iter().filter(unserved) {
            let asked = WaitParams { backend: directory::path(disk.disk), timeout_s: SERVED_S };
            if let Err(e) = daemon.call::<Attached>("attach.wait", &asked, SERVED_S) {
                // A missing disk is no failure, so the script's log has the reason.
                let _ = writeln!(io::stderr(), "disk {}: {}", disk.disk, one_line(&e.to_string()));
            }
        }
        disks = daemon.disks()?;
    }
    Ok(found(disks, wanted).iter().filter_map(line).collect())
}

/// The disks that match. block-tap takes the last line, so that is the disk that it was started for. If that one is not
/// served, no other disk of the same image may replace it.
fn found(mut disks: Vec<Disk>, wanted: &Options) -> Vec<Disk> {
    disks.retain(|disk| is_meant(wanted, disk) && (is_served(disk) || is_to_be_served(disk)));
    disks.sort_by_key(|disk| (disk.since, !is_served(disk)));
    if wanted.file.is_some() && disks.last().is_some_and(is_to_be_served) {
        return Vec::new();
    }
    disks.retain(is_served);
    disks
}

fn is_served(disk: &Disk) -> bool {
    disk.phase == PhaseName::Served
}

/// Whether the disk will be served. A disk that rests is left out: its line comes with a later attachment.
fn is_to_be_served(disk: &Disk) -> bool {
    matches!(disk.phase, PhaseName::Starting | PhaseName::Failed)
}

/// One line, which scripts parse.
fn line(disk: &Disk) -> Option<String> {
    let (pid, format, image) = (disk.pid?, disk.format?, disk.image.as_ref()?);
    // A line break in a name would be another disk's line.
    let image = one_line(image);
    Some(format!("pid={pid} minor={} state=0 args={}:{image}", disk.minor, format.tapdisk_word()))
}

/// Waits for the end of a disk. A disk that is gone already is a success. An attached disk belongs to the toolstack.
pub(super) fn destroy(daemon: &Daemon, pid: u32, minor: u32) -> Result<(), Refusal> {
    let end = Instant::now() + CLOSED;
    loop {
        let disks = daemon.disks()?;
        let is_meant = |disk: &&Disk| disk.pid == Some(pid) && disk.minor == minor;
        let Some(disk) = disks.iter().find(is_meant) else { return Ok(()) };
        let shown: Result<Details, _> =
            daemon.call("disk.show", &ShowParams { disk: disk.disk }, 0);
        let details = match shown {
            Err(e) if e.is_no_disk() => return Ok(()),
            shown => shown?,
        };
        if details.online {
            let why = format!("disk {} is attached: detach it (xl block-detach)", disk.disk);
            return Err(Refusal { errno: Errno::BUSY, why });
        }
        if Instant::now() > end {
            let waits = details.waits_for.unwrap_or_default();
            let why = format!("disk {} is still there; it waits for {waits}", disk.disk);
            return Err(Refusal { errno: Errno::TIMEDOUT, why });
        }
        std::thread::sleep(ASK_AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_daemon::params::Format;
    use ferrite_daemon::state::DiskId;

    fn disk(format: Format, image: &str) -> Disk {
        Disk {
            full: None,
            hangs: None,
            weak: false,
            paused: None,
            guest: None,
            disk: DiskId { domid: 1, devid: 51712 },
            phase: PhaseName::Served,
            since: 1,
            format: Some(format),
            image: Some(image.to_owned()),
            pid: Some(77),
            minor: 3,
            starts: 1,
            why: None,
            help: None,
        }
    }

    #[test]
    fn lines_are_those_that_scripts_of_tapdisk_read() {
        for (format, image, expected) in [
            (Format::Raw, "/srv/a b.img", "pid=77 minor=3 state=0 args=aio:/srv/a b.img"),
            (Format::Vhd, "/srv/a:b.vhd", "pid=77 minor=3 state=0 args=vhd:/srv/a:b.vhd"),
            (Format::Qcow2, "/srv/a", "pid=77 minor=3 state=0 args=qcow2:/srv/a"),
            (Format::Raw, "/a\npid=1", "pid=77 minor=3 state=0 args=aio:/a\\npid=1"),
        ] {
            assert_eq!(line(&disk(format, image)).as_deref(), Some(expected));
        }
        assert_eq!(line(&Disk { pid: None, ..disk(Format::Raw, "/a") }), None);
    }

    #[test]
    fn every_filter_counts() {
        let disk = disk(Format::Raw, "/srv/a");
        let is = |options: Options| is_meant(&options, &disk);
        assert!(is(Options::default()));
        let (kind, file) = (Some("aio".to_owned()), Some("/srv/a".to_owned()));
        assert!(is(Options { pid: Some(77), minor: Some(3), kind, file, ..Options::default() }));
        assert!(!is(Options { pid: Some(78), ..Options::default() }));
        assert!(!is(Options { minor: Some(0), ..Options::default() }));
        assert!(!is(Options { kind: Some("vhd".to_owned()), ..Options::default() }));
        assert!(!is(Options { file: Some("/srv".to_owned()), ..Options::default() }));
    }

    #[test]
    fn a_disk_that_is_not_served_is_not_found_by_another_one_of_its_image() {
        let served = disk(Format::Raw, "/srv/a");
        let mut failed = disk(Format::Raw, "/srv/a");
        (failed.disk.devid, failed.phase) = (51728, PhaseName::Failed);
        let kind = Some("aio".to_owned());
        let named =
            Options { kind: kind.clone(), file: Some("/srv/a".to_owned()), ..Options::default() };
        let found = |disks: &[Disk], wanted| found(disks.to_vec(), wanted).len();
        assert_eq!(found(&[failed.clone(), served.clone()], &named), 0);
        let later = Disk { since: 2, ..served.clone() };
        assert_eq!(found(&[later, failed.clone(), served.clone()], &named), 2);
        assert_eq!(found(&[failed, served], &Options { kind, ..Options::default() }), 1);
    }
}
