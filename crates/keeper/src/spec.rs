//! How a disk is kept: the disk's description, and the state that a keeper hands to its next
//! program.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::client::Keeper;
use crate::relay::RelayState;
use crate::sandbox::WorkerSandbox;

/// The environment variable that holds a keeper's [`State`] as JSON.
pub(crate) const VARIABLE: &str = "FERRITE_KEEPER";

/// One disk's worker, and how it is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// The path of the keeper's socket. The locked file beside it, with the same name and `.lock`,
    /// shows that the keeper lives.
    pub socket: PathBuf,
    /// The run directory of the disk. It holds the worker's lock.
    pub run_dir: PathBuf,
    /// The arguments of the worker, after the program's name. The program is the keeper's own.
    /// Without any there is no worker: the keeper waits for its disk.
    pub worker: Vec<String>,
    /// The files that the worker may open. Without it the worker has the rights of its keeper.
    #[serde(rename = "names")]
    pub sandbox: Option<WorkerSandbox>,
    /// The arguments of the relay of NBD clients, after the program's name. Without it the worker
    /// gets the clients, and their connections end with it.
    #[serde(default)]
    pub relay: Option<Vec<String>>,
    /// The path where the socket for NBD clients is made. The one in the run directory is a link to
    /// it then. It may be on another file system, where callers give it further names.
    #[serde(default)]
    pub public: Option<PathBuf>,
    /// The group whose keeper and worker serve this disk, if it has none of its own.
    #[serde(default)]
    pub group: Option<Group>,
    /// Files that the keeper opens for the disk and hands to the worker of its group. That worker
    /// has no right to open them itself any more.
    #[serde(default, rename = "ahead")]
    pub preopens: Vec<Preopen>,
}

/// Disks that have one keeper and one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The path of the socket where disks join. Each disk has a keeper's socket of its own besides.
    pub socket: PathBuf,
    /// The directory of the worker's lock.
    pub run_dir: PathBuf,
    /// The arguments of the one worker. Those of each disk come by the
    /// [`WorkerChannel`](crate::WorkerChannel).
    pub worker: Vec<String>,
    /// The beginning of the path of the stream socket for commands to the worker. A number that no
    /// other socket has is added. Without it the group takes no commands.
    pub commands: Option<PathBuf>,
}

/// A file that is opened `count` times, each time anew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preopen {
    /// The file's path.
    pub path: PathBuf,
    /// The flags of `open(2)`. A file that is created is readable and writable by its user only.
    pub flags: u32,
    /// How often it is opened.
    pub count: usize,
}

impl DiskSpec {
    /// A keeper that has no disk yet.
    pub fn idle(socket: PathBuf, run_dir: PathBuf, public: Option<PathBuf>) -> DiskSpec {
        let (worker, preopens) = (Vec::new(), Vec::new());
        let (sandbox, relay, group) = (None, None, None);
        DiskSpec { socket, run_dir, worker, sandbox, relay, public, group, preopens }
    }

    /// Whether it describes a keeper without a worker.
    pub fn is_idle(&self) -> bool {
        self.worker.is_empty() && self.group.is_none()
    }

    /// Starts keeping the disk. If its group has a keeper, that one adds the disk. Otherwise
    /// `command` becomes a new keeper: it has to be a program that calls [`run`](crate::run).
    ///
    /// The new keeper is no child of this process. The disk's socket is listened at when this
    /// returns.
    ///
    /// # Errors
    /// The keeper could not be started; or it failed, and wrote the reason to its standard error;
    /// or the keeper of the group refuses the disk.
    pub fn start(&self, mut command: Command) -> io::Result<()> {
        if let Some(group) = &self.group {
            match Keeper::connect(&group.socket) {
                Ok(keeper) => return keeper.join(self),
                Err(e) if has_no_listener(&e) => {}
                Err(e) => return Err(e),
            }
        }
        let text = serde_json::to_string(&State::new(self.clone()))?;
        command.env(VARIABLE, text).stdin(Stdio::null()).stdout(Stdio::null());
        let status = command.status()?;
        match status.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!("the keeper could not start: {status}"))),
        }
    }
}

/// Whether the error of a connection means that no keeper runs.
fn has_no_listener(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// The state that a keeper hands to its next program.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct State {
    #[serde(rename = "keep")]
    pub(crate) spec: DiskSpec,
    /// The number of the first worker that the next program starts.
    pub(crate) start: u64,
    /// Descriptors of the keeper: its lock, its listening socket, and the connection that requested
    /// the new program. `None` for a new keeper.
    pub(crate) before: Option<[i32; 3]>,
    /// Descriptor of the disk's public socket. `None` if the previous program had none.
    #[serde(default)]
    pub(crate) public: Option<i32>,
    /// The relay of the first disk.
    #[serde(default)]
    pub(crate) relay: RelayState,
    /// Index of the disk whose client requested the new program. It counts over all disks of the
    /// group.
    #[serde(default)]
    pub(crate) asker_of: usize,
    /// Descriptors of the group's lock and listening socket.
    #[serde(default)]
    pub(crate) group: Option<[i32; 2]>,
    /// Descriptor and path of the group's socket for commands.
    #[serde(default)]
    pub(crate) commands: Option<(i32, PathBuf)>,
    /// All disks but the first.
    #[serde(default)]
    pub(crate) others: Vec<Other>,
}

/// A disk that is handed to the next program.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Other {
    #[serde(rename = "keep")]
    pub(crate) spec: DiskSpec,
    /// Descriptors of its lock, its listening socket and its public socket.
    pub(crate) before: [i32; 3],
    pub(crate) relay: RelayState,
}

impl State {
    fn new(spec: DiskSpec) -> State {
        State {
            spec,
            start: 1,
            before: None,
            public: None,
            relay: RelayState::default(),
            asker_of: 0,
            group: None,
            commands: None,
            others: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The state that one program writes has to be understood by the next one.
    #[test]
    fn what_an_older_or_newer_keeper_hands_on_is_understood() {
        let read = |spec: &str| {
            let text = format!(r#"{{"keep": {spec}, "start": 7, "before": [3, 4, 5], "new": 1}}"#);
            serde_json::from_str::<State>(&text)
        };
        let plain = r#""socket": "/s", "run_dir": "/r", "worker": ["w"]"#;
        assert_eq!(read(&format!("{{{plain}}}")).unwrap().spec.sandbox, None);
        let names = r#""image": "/i", "writable": true, "root": "/e", "user": 9"#;
        let of = |names: &str| read(&format!(r#"{{{plain}, "names": {{{names}, "more": []}}}}"#));
        let found = of(names).unwrap().spec.sandbox.unwrap();
        assert_eq!((found.user, found.journals, found.read), (9, None, Vec::new()));
        // Without these the worker would get more rights than it was given.
        for needed in ["image", "writable", "root", "user"] {
            let less = names.replace(&format!("\"{needed}\""), "\"other\"");
            assert!(of(&less).is_err(), "{needed}");
        }
    }
}
