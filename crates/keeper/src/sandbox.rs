//! The rights of a worker: none but to the files that its keeper opens for it (threats.md T27 and
//! T28).

use std::ffi::{CString, OsStr};
use std::fs::DirBuilder;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrite_host::fence::{self, Terms};
use ferrite_host::frames;
use ferrite_host::names::connect;
use ferrite_host::names::policy::{Policy, Right};
use ferrite_host::names::server::{Images, Served, Server};
use ferrite_host::names::{self, Broker};
use ferrite_host::process::{FIRST_GIVEN, take_given};
use ferrite_host::sandbox::{Lacking, Lockdown, Means};
use ferrite_host::tunnel::TunnelUser;
use ferrite_nbd::address::Address;
use serde::{Deserialize, Serialize};

use crate::log;

/// Descriptor of the socket by which a worker requests files.
pub(crate) const NAMES_FD: RawFd = FIRST_GIVEN + 2;
/// The environment variable that gives a worker or relay its user and its root directory, as JSON.
const VARIABLE: &str = "FERRITE_SANDBOX";
/// A relay's user is its worker's plus this number: no worker of any guest has it.
const RELAY: u32 = 0x80_0000;
/// And the user of its tunnels to other servers.
const TUNNEL: u32 = 0x800_0000;
/// At most one refused file is logged in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The files and the user of an unprivileged worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerSandbox {
    /// The disk's image.
    pub image: PathBuf,
    /// Whether the image is opened for writing.
    pub writable: bool,
    /// Directories and files that the worker may read, besides the image's own directory.
    #[serde(default)]
    pub read: Vec<PathBuf>,
    /// The directory of all images' journals. The worker may write the journals of its image only.
    #[serde(default)]
    pub journals: Option<PathBuf>,
    /// Files outside of its run directory that the worker may write.
    #[serde(default)]
    pub own_files: Vec<PathBuf>,
    /// An empty directory, created if it is missing: the root of the worker's file system.
    pub root: PathBuf,
    /// The user of the worker.
    pub user: u32,
    /// The servers of the disk's data. With any, there is no image on this host.
    #[serde(default)]
    pub servers: Vec<DataServer>,
    /// The mirror of the disk. An older keeper does not know the word, so it is left out without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<MirrorFiles>,
    /// How the image's LUN is reserved. An older keeper does not know the word, so it is left out without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<FenceTerms>,
}

/// How the keeper reserves the image's LUN.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FenceTerms {
    /// See [`Terms::weak`].
    #[serde(default)]
    pub weak: bool,
    /// See [`Terms::records`].
    pub records: PathBuf,
}

impl FenceTerms {
    fn terms(&self) -> Terms {
        Terms { weak: self.weak, records: self.records.clone() }
    }
}

/// The files and servers that a worker needs for the mirror of its disk, besides the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorFiles {
    /// The map, which the worker changes.
    pub map: PathBuf,
    /// The target, if it is an image on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// The servers of the target's data.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<DataServer>,
}

/// A server that a worker is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataServer {
    /// Its name, as [`Address::to_bytes`] writes it.
    address: String,
    /// The folder of the client's certificates.
    #[serde(default)]
    certificates: Option<PathBuf>,
    /// The addresses of a TCP port, found out when the description was made: a keeper does not wait for a resolver.
    resolved: Vec<SocketAddr>,
}

impl DataServer {
    /// A server. `None`: its name is not text.
    pub fn of(server: &connect::Server) -> Option<DataServer> {
        let (address, folder) = server.address.to_bytes();
        let certificates = (!folder.is_empty()).then(|| OsStr::from_bytes(folder).into());
        let address = String::from_utf8(address).ok()?;
        Some(DataServer { address, certificates, resolved: server.resolved.clone() })
    }

    fn allowed(&self) -> Option<connect::Server> {
        let folder = self.certificates.as_deref().unwrap_or(Path::new("")).as_os_str();
        let address = Address::parse(self.address.as_bytes(), folder.as_bytes())?;
        Some(connect::Server { address, resolved: self.resolved.clone() })
    }
}

impl WorkerSandbox {
    fn add_to(&self, policy: &mut Policy, run_dir: &Path) {
        if self.servers.is_empty() {
            policy.rules.extend(Policy::of_disk(&self.image, self.writable, &[]).rules);
        } else {
            self.allow_servers(policy, &self.servers);
        }
        if let Some(mirror) = &self.mirror {
            policy.add(&mirror.map, false, Right::Own);
            let target = mirror.image.iter();
            policy.rules.extend(target.flat_map(|image| Policy::of_disk(image, true, &[]).rules));
            self.allow_servers(policy, &mirror.servers);
        }
        policy.fence = self.fence.as_ref().map(FenceTerms::terms);
        policy.add(run_dir, true, Right::Own);
        // A file is allowed itself, with nothing below it.
        self.read.iter().for_each(|path| policy.add(path, true, Right::Read));
        self.journals.iter().for_each(|path| policy.add(path, true, Right::Journals));
        self.own_files.iter().for_each(|path| policy.add(path, false, Right::Own));
    }

    fn allow_servers(&self, policy: &mut Policy, servers: &[DataServer]) {
        policy.servers.extend(servers.iter().filter_map(DataServer::allowed));
        if !servers.is_empty() {
            let root = self.root.clone();
            policy.tunnel = Some(TunnelUser { user: self.user | TUNNEL, root });
        }
    }

    /// Gives the reservation of the image's LUN back, which a worker has left that did not close its image. The worker, and
    /// its I/O, have ended. It waits some seconds; the LUN stays reserved for this host if it does not answer.
    pub(crate) fn release_fence(&self) {
        const PATIENCE: Duration = Duration::from_secs(5);
        let Some(FenceTerms { records, .. }) = self.fence.clone() else { return };
        let (image, (tell, told)) = (self.image.clone(), std::sync::mpsc::sync_channel(1));
        let work = move || {
            let _ = tell.send(fence::release_left(&image, &records));
        };
        let begun = std::thread::Builder::new().name("fence".into()).spawn(work);
        let why = match begun.map(|_| told.recv_timeout(PATIENCE)) {
            Ok(Ok(Ok(()))) => return,
            Ok(Ok(Err(e))) => e.to_string(),
            Ok(Err(_)) => "the LUN does not answer".to_owned(),
            Err(e) => e.to_string(),
        };
        log(&format!(
            "{} stays reserved for this host: {why}; ferrite fence release gives it back",
            self.image.display()
        ));
    }

    /// Environment variables of a worker.
    pub(crate) fn environment(&self) -> io::Result<Vec<CString>> {
        self.environment_for(self.user)
    }

    /// Environment variables of a relay.
    pub(crate) fn environment_of_relay(&self) -> io::Result<Vec<CString>> {
        DirBuilder::new().recursive(true).mode(0o755).create(&self.root)?;
        self.environment_for(self.user | RELAY)
    }

    fn environment_for(&self, user: u32) -> io::Result<Vec<CString>> {
        let text = serde_json::to_string(&(user, &self.root))?;
        // A backtrace would open files.
        Ok(vec![CString::new(format!("{VARIABLE}={text}"))?, c"RUST_BACKTRACE=0".into()])
    }
}

/// The server of a worker's requests for files. It keeps images open from one worker to the next.
#[derive(Debug, Default)]
pub(crate) struct NameService {
    server: Option<Server>,
    images: Images,
    last_logged: Option<Instant>,
}

impl NameService {
    /// Creates the directories of a disk's files, since the worker may not.
    pub(crate) fn make_folders(sandbox: &WorkerSandbox) -> io::Result<()> {
        let folders = sandbox.own_files.iter().filter_map(|file| file.parent());
        for folder in folders.chain(sandbox.journals.as_deref()) {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        DirBuilder::new().recursive(true).mode(0o755).create(&sandbox.root)
    }

    /// Creates the directories and a socket pair: the worker's end and the keeper's.
    pub(crate) fn ends(sandbox: &WorkerSandbox) -> io::Result<(OwnedFd, OwnedFd)> {
        NameService::make_folders(sandbox)?;
        frames::pair()
    }

    /// Begins to serve a worker, which may open nothing yet.
    pub(crate) fn begin(&mut self, keeper_end: OwnedFd, worker: u32) {
        self.server = Some(Server::new(keeper_end, Policy::default(), worker));
    }

    /// Allows the worker the files of these disks and nothing else. Each disk comes with its run
    /// directory.
    pub(crate) fn allow<'a>(&mut self, disks: impl Iterator<Item = (&'a WorkerSandbox, &'a Path)>) {
        let mut policy = Policy::default();
        disks.for_each(|(sandbox, run_dir)| sandbox.add_to(&mut policy, run_dir));
        if let Some(server) = &mut self.server {
            server.allow(policy);
        }
    }

    /// Closes the images that are kept open, with their locks.
    pub(crate) fn drop_images(&mut self) {
        self.images = Images::default();
    }

    pub(crate) fn end(&mut self) {
        self.server = None;
    }

    /// A descriptor that is readable when the worker requests a file.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.server.as_ref().map(Server::fd)
    }

    /// Serves one request, if there is one. Returns whether the worker may go on: `false` after a
    /// malformed request.
    pub(crate) fn serve_request(&mut self) -> bool {
        let Some(server) = &self.server else { return true };
        match server.serve_one(&mut self.images) {
            Ok(Served::Nothing | Served::Answered) => {}
            Ok(Served::Refused(name)) => {
                let now = Instant::now();
                if self.last_logged.is_none_or(|last| now.duration_since(last) >= LOG_INTERVAL) {
                    self.last_logged = Some(now);
                    log(&format!(
                        "the worker was refused {}: the file is outside of its sandbox",
                        name.display()
                    ));
                }
            }
            Ok(Served::Ended) => self.end(),
            Err(e) => {
                log(&format!("the worker broke the protocol of file requests and is killed: {e}"));
                self.end();
                return false;
            }
        }
        true
    }
}

/// Gives up all rights of this worker for good: its keeper opens files for it from now on. Call it
/// when everything that only this process can open is open, and before there is a second thread.
///
/// Returns the kernel features that are missing, or `None` if the keeper has not asked for a
/// sandbox: the process keeps its rights then.
///
/// # Errors
/// The process still has rights, and must end.
pub fn drop_privileges(means: Means) -> io::Result<Option<Lacking>> {
    let Some((user, root)) = sandbox()? else { return Ok(None) };
    names::install(Broker::new(take_given(NAMES_FD)?))?;
    Lockdown { user, root, means }.enter().map(Some)
}

/// The user and the root directory that the keeper has given this process, if any.
pub(crate) fn sandbox() -> io::Result<Option<(u32, PathBuf)>> {
    match std::env::var(VARIABLE) {
        Ok(text) => Ok(Some(serde_json::from_str(&text)?)),
        Err(_) => Ok(None),
    }
}
