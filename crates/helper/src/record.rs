//! The owner's name with which the last helper of this host had a disk, for the next helper: it may take the disk of a
//! dead helper at once. There is a file for each disk on a tmpfs. Its helper has it locked. So a helper that gets that
//! lock knows that the one before has ended.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::process::{geteuid, getppid};

use crate::fault::Fault;

/// One write of so many bytes is there or not when the process is killed.
const BYTES: usize = 512;
/// How long the predecessor, whose starter has gone on already, may take to release its disk.
const PATIENCE: Duration = Duration::from_secs(4);

/// How far a helper is with its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has the disk, or is about to take it.
    Holds,
    /// It gives it back.
    Releases,
    /// Another one took it.
    Lost,
}

const STATES: [(State, &str); 3] =
    [(State::Holds, "holds"), (State::Releases, "releases"), (State::Lost, "lost")];

/// The record of a disk, locked.
#[derive(Debug)]
pub struct Record {
    /// None: there is no folder for it, so nothing is known of dead helpers.
    file: Option<File>,
    /// The process that has started this one.
    starter: String,
    before: Option<Before>,
}

/// The entry that the last helper has left.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Before {
    owner: String,
    starter: String,
    state: State,
}

impl Record {
    /// Opens the record of a disk, and waits some seconds for a predecessor. `kind` is the folder of such records, `identity` tells
    /// the disk from all others of it, and `name` is the disk's for people.
    ///
    /// # Errors
    /// Another process of this host has the disk open for writing.
    pub fn open(kind: &str, identity: &str, name: &str) -> Result<Record, Fault> {
        let help = "make /run/ferrite writable for root, or XDG_RUNTIME_DIR for its user";
        let cannot = |e: io::Error| {
            Fault::passing(format!("the record of the lock of {name} cannot be kept: {e}"), help)
        };
        let starter = starter();
        let Some(path) = path(kind, identity) else {
            return Ok(Record { file: None, starter, before: None });
        };
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(cannot)?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let nofollow = OFlags::NOFOLLOW.bits().cast_signed();
        let file = options.custom_flags(nofollow).open(&path).map_err(cannot)?;
        wait_for_lock(&file, name)?;
        let mut bytes = [0; BYTES];
        let len = file.read_at(&mut bytes, 0).map_err(cannot)?;
        let before = parse(&bytes[..len]);
        Ok(Record { file: Some(file), starter, before })
    }

    /// Whether this owner was the last helper of this host, which is dead.
    pub fn is_predecessor(&self, owner: &str) -> bool {
        self.before.as_ref().is_some_and(|before| before.owner == owner)
    }

    /// Whether the record is kept, and so no other helper of this host has the disk.
    pub fn is_kept(&self) -> bool {
        self.file.is_some()
    }

    /// Whether the predecessor, which this helper goes on for, has lost the disk to another owner: it was told so, or the
    /// lock that it had is no longer its own. Then the guest's disk is no longer what it was.
    pub fn has_lost(&self, owner: Option<&str>) -> bool {
        match self.before() {
            Some((_, State::Lost)) => true,
            Some((before, State::Holds)) => owner != Some(before),
            Some((_, State::Releases)) | None => false,
        }
    }

    /// The owner's name with which the predecessor had the disk that this helper goes on for, and how far it was.
    /// `None`: there was none, or it had another starter.
    pub fn before(&self) -> Option<(&str, State)> {
        let before = self.before.as_ref().filter(|before| before.starter == self.starter);
        before.map(|before| (before.owner.as_str(), before.state))
    }

    /// Writes what is so now, or is about to be.
    ///
    /// # Errors
    /// The file system's; the owner's name is too long.
    pub fn write(&self, owner: &str, state: State) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let state = STATES.iter().find(|(known, _)| *known == state).map_or("", |(_, name)| *name);
        let mut text = format!("{state}\n{owner}\n{}\n", self.starter).into_bytes();
        if text.len() > BYTES {
            return Err(io::Error::other("the name of this owner is too long"));
        }
        text.resize(BYTES, 0);
        file.write_all_at(&text, 0)
    }
}

fn parse(bytes: &[u8]) -> Option<Before> {
    let mut lines = std::str::from_utf8(bytes).ok()?.split('\n');
    let state = lines.next()?;
    let (state, _) = STATES.iter().find(|(_, name)| *name == state)?;
    let (owner, starter) = (lines.next()?.to_owned(), lines.next()?.to_owned());
    Some(Before { owner, starter, state: *state })
}

fn wait_for_lock(file: &File, name: &str) -> Result<(), Fault> {
    let end = Instant::now() + PATIENCE;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if Instant::now() < end => sleep(Duration::from_millis(20)),
            Err(Errno::WOULDBLOCK) => {
                let why = format!("{name} is in use by another process of this host");
                let help = "end that process (pgrep -af 'ferrite-rbd|pool own'), or open the disk read-only";
                // It has waited already: no second attempt follows.
                return Err(Fault::lasting(why, help));
            }
            Err(e) => {
                let why = format!("the record of the lock of {name} cannot be locked: {e}");
                return Err(Fault::passing(why, "check /run/ferrite"));
            }
        }
    }
}

/// The record's file: of root in /run/ferrite, of others in their own folder.
fn path(kind: &str, identity: &str) -> Option<PathBuf> {
    let folder = match geteuid().is_root() {
        true => PathBuf::from("/run/ferrite"),
        false => PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?).join("ferrite"),
    };
    let name = blake3::hash(identity.as_bytes()).to_hex();
    Some(folder.join(kind).join(&name[..32]))
}

/// This process's parent: its number, and when it began.
fn starter() -> String {
    let number = getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
    // Behind the name, which may have anything in it: the 22nd field of all is the twentieth here (proc_pid_stat(5)).
    let began = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19));
    format!("{number} {}", began.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(starter: &str, before: &[u8]) -> Record {
        Record { file: None, starter: starter.into(), before: parse(before) }
    }

    #[test]
    fn a_lock_that_is_no_longer_the_predecessors_is_lost_for_its_starter_alone() {
        let held = record("7 1", b"holds\na:1\n7 1\n\0\0");
        assert!(held.is_predecessor("a:1") && !held.is_predecessor("a:2"));
        assert!(!held.has_lost(Some("a:1")));
        assert!(held.has_lost(None) && held.has_lost(Some("a:2")));
        assert!(!record("8 1", b"holds\na:1\n7 1\n").has_lost(None));
        assert!(record("7 1", b"lost\na:1\n7 1\n").has_lost(Some("a:1")));
        assert!(!record("7 1", b"releases\na:1\n7 1\n").has_lost(None));
    }

    #[test]
    fn what_is_no_record_says_nothing() {
        for bytes in [&b""[..], b"holds", b"other\na\nb\n", b"\xff", b"holds\na"] {
            assert_eq!(parse(bytes), None);
        }
    }
}
