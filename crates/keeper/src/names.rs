//! The rights of a worker: none, but what its keeper opens for it (threats.md T27 and T28).

use std::ffi::CString;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrite_io::names::policy::{Policy, Right};
use ferrite_io::names::server::{Images, Served, Server};
use ferrite_io::names::{self, Broker};
use ferrite_io::process::{FIRST_GIVEN, take_given};
use ferrite_io::sandbox::{Lacking, Lockdown, Means};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

use crate::tell;

/// The socket by which a worker asks for names.
pub(crate) const NAMES_FD: RawFd = FIRST_GIVEN + 2;
/// Where a worker, or a relay, finds which user it becomes, and its root.
const VARIABLE: &str = "FERRITE_SANDBOX";
/// What a relay's user is above its worker's: no worker of any guest has it.
const RELAY: u32 = 0x80_0000;
/// Names that are refused are told once in this time.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// What a worker that has no rights may have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// The disk's image.
    pub image: PathBuf,
    /// Whether it is written.
    pub writable: bool,
    /// Folders and files that it may read, besides the image's own folder.
    #[serde(default)]
    pub read: Vec<PathBuf>,
    /// The folder of all images' journals, in which those of its image are its own.
    #[serde(default)]
    pub journals: Option<PathBuf>,
    /// Files of its own in folders that are not, besides its run directory.
    #[serde(default)]
    pub own_files: Vec<PathBuf>,
    /// A folder with nothing in it, made if it is not there: the root of its file system.
    pub root: PathBuf,
    /// The user that it becomes.
    pub user: u32,
}

impl Names {
    fn add_to(&self, policy: &mut Policy, run_dir: &Path) {
        policy.rules.extend(Policy::of_disk(&self.image, self.writable, &[]).rules);
        policy.add(run_dir, true, Right::Own);
        // A file is itself, with nothing below it.
        self.read.iter().for_each(|place| policy.add(place, true, Right::Read));
        self.journals.iter().for_each(|place| policy.add(place, true, Right::Journals));
        self.own_files.iter().for_each(|place| policy.add(place, false, Right::Own));
    }

    /// What is added to the environment of a worker.
    pub(crate) fn environment(&self) -> io::Result<Vec<CString>> {
        self.environment_of(self.user)
    }

    /// What is added to that of a relay.
    pub(crate) fn environment_of_relay(&self) -> io::Result<Vec<CString>> {
        DirBuilder::new().recursive(true).mode(0o755).create(&self.root)?;
        self.environment_of(self.user | RELAY)
    }

    fn environment_of(&self, user: u32) -> io::Result<Vec<CString>> {
        let text = serde_json::to_string(&(user, &self.root))?;
        // A backtrace looks into files.
        Ok(vec![CString::new(format!("{VARIABLE}={text}"))?, c"RUST_BACKTRACE=0".into()])
    }
}

/// One end answers for one worker; the images stay for the next one.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    server: Option<Server>,
    images: Images,
    told: Option<Instant>,
}

impl Desk {
    /// Makes the folders that a disk's files are in: the worker makes none.
    pub(crate) fn make_folders(names: &Names) -> io::Result<()> {
        let folders = names.own_files.iter().filter_map(|file| file.parent());
        for folder in folders.chain(names.journals.as_deref()) {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        DirBuilder::new().recursive(true).mode(0o755).create(&names.root)
    }

    /// The worker's end of a socket, and ours. Its folders are there then.
    pub(crate) fn ends(names: &Names) -> io::Result<(OwnedFd, OwnedFd)> {
        Desk::make_folders(names)?;
        let flags = SocketFlags::CLOEXEC;
        Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
    }

    /// A worker that may have nothing yet.
    pub(crate) fn begin(&mut self, ours: OwnedFd, worker: u32) {
        self.server = Some(Server::new(ours, Policy::default(), worker));
    }

    /// It may have what these disks may, which have these run directories.
    pub(crate) fn allow<'a>(&mut self, disks: impl Iterator<Item = (&'a Names, &'a Path)>) {
        let mut policy = Policy::default();
        disks.for_each(|(names, run_dir)| names.add_to(&mut policy, run_dir));
        if let Some(server) = &mut self.server {
            server.allow(policy);
        }
    }

    pub(crate) fn end(&mut self) {
        self.server = None;
    }

    /// Readable when the worker asks.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.server.as_ref().map(Server::fd)
    }

    /// Answers once, if there is somebody who asks. Whether the worker may go on.
    pub(crate) fn answer(&mut self) -> bool {
        let Some(server) = &self.server else { return true };
        match server.serve_one(&mut self.images) {
            Ok(Served::Nothing | Served::Answered) => {}
            Ok(Served::Refused(name)) => {
                let now = Instant::now();
                if self.told.is_none_or(|told| now.duration_since(told) >= TELL_AGAIN) {
                    self.told = Some(now);
                    tell(&format!(
                        "the worker was refused {}: it is outside of what it may have",
                        name.display()
                    ));
                }
            }
            Ok(Served::Ended) => self.end(),
            Err(e) => {
                tell(&format!("the worker is ended: {e}"));
                self.end();
                return false;
            }
        }
        true
    }
}

/// Gives up all rights of this worker, for good: from here on its keeper opens files for it. To be
/// called as soon as it has opened what only it can open, and before it has a second thread. `None`: its
/// keeper has not said so, and it keeps them.
///
/// # Errors
/// It has rights still, and must end.
pub fn give_rights_up(means: Means) -> io::Result<Option<Lacking>> {
    let Some((user, root)) = sandbox()? else { return Ok(None) };
    names::install(Broker::new(take_given(NAMES_FD)?))?;
    Lockdown { user, root, means }.enter().map(Some)
}

/// The user that this process becomes, and its root, if its keeper has said so.
pub(crate) fn sandbox() -> io::Result<Option<(u32, PathBuf)>> {
    match std::env::var(VARIABLE) {
        Ok(text) => Ok(Some(serde_json::from_str(&text)?)),
        Err(_) => Ok(None),
    }
}
