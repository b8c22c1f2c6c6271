//! What a keeper keeps.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::client::Keeper;
use crate::names::Names;
use crate::relay::Handed;

/// Where a keeper finds it in its environment.
pub(crate) const VARIABLE: &str = "FERRITE_KEEPER";

/// One disk's worker, and how it is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The keeper's socket. Beside it, with `.lock` behind its name, is what says that it lives.
    pub socket: PathBuf,
    /// The run directory of the disk. The worker's lock is in there.
    pub run_dir: PathBuf,
    /// The arguments of the worker, after the program's name. The program is the keeper's own.
    pub worker: Vec<String>,
    /// What the worker may have of this host. Without it, it has the rights of its keeper.
    pub names: Option<Names>,
    /// The arguments of the relay of NBD clients, after the program's name. Without it the worker gets
    /// them, and they end with it.
    #[serde(default)]
    pub relay: Option<Vec<String>>,
    /// The disk has no keeper and no worker of its own, but those of this group.
    #[serde(default)]
    pub group: Option<Group>,
    /// What the keeper opens for the disk, and hands to the worker of its group: that has no right to any more
    /// when the disk comes.
    #[serde(default)]
    pub ahead: Vec<Ahead>,
}

/// Disks that have one keeper and one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Where disks join it. Each has the socket of a keeper besides.
    pub socket: PathBuf,
    /// The folder of the worker's lock.
    pub run_dir: PathBuf,
    /// The arguments of the one worker. Those of each disk's come to it by the [`Roll`](crate::Roll).
    pub worker: Vec<String>,
    /// Where commands come that the worker does: how the path of a stream socket begins. A number that no other
    /// socket has stands behind it. Without it none come.
    pub commands: Option<PathBuf>,
}

/// A file that is opened so often, each time anew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ahead {
    /// Its name.
    pub path: PathBuf,
    /// How, as the kernel's numbers. One that is made is its user's only.
    pub flags: u32,
    /// How often.
    pub count: usize,
}

impl Keep {
    /// Has the disk kept: by its group, if that has a keeper, or by a new keeper: a program that calls
    /// [`run`](crate::run), with arguments that say so. That is nobody's child. Somebody listens at the
    /// disk's socket when this returns.
    ///
    /// # Errors
    /// It could not be started, or has failed, and has told why on its standard error. The group does not
    /// take the disk.
    pub fn start(&self, mut command: Command) -> io::Result<()> {
        if let Some(group) = &self.group {
            match Keeper::connect(&group.socket) {
                Ok(keeper) => return keeper.join(self),
                Err(e) if is_nobody(&e) => {}
                Err(e) => return Err(e),
            }
        }
        let text = serde_json::to_string(&State::new(self.clone()))?;
        command.env(VARIABLE, text).stdin(Stdio::null()).stdout(Stdio::null());
        let status = command.status()?;
        match status.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!("the keeper has failed: {status}"))),
        }
    }
}

/// There is no keeper.
fn is_nobody(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// What a keeper goes on with when it becomes another binary.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) keep: Keep,
    /// The first worker of this binary has this number.
    pub(crate) start: u64,
    /// Descriptors of the keeper before: its lock, its listening socket, and who has asked for it.
    pub(crate) before: Option<[i32; 3]>,
    /// And the disk's public socket, unless that keeper knew of none.
    #[serde(default)]
    pub(crate) public: Option<i32>,
    /// And the relay, if there is one.
    #[serde(default)]
    pub(crate) relay: Handed,
    /// Of a group: which disk it was that has asked for this binary, by its number among all;
    #[serde(default)]
    pub(crate) asker_of: usize,
    /// its lock and its listening socket,
    #[serde(default)]
    pub(crate) group: Option<[i32; 2]>,
    /// where commands come, with the socket's path,
    #[serde(default)]
    pub(crate) commands: Option<(i32, PathBuf)>,
    /// and all disks but the first.
    #[serde(default)]
    pub(crate) others: Vec<Other>,
}

/// A disk that is handed on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Other {
    pub(crate) keep: Keep,
    /// Its lock, its listening socket, and its public one.
    pub(crate) before: [i32; 3],
    pub(crate) relay: Handed,
}

impl State {
    fn new(keep: Keep) -> State {
        State {
            keep,
            start: 1,
            before: None,
            public: None,
            relay: Handed::default(),
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

    /// A keeper goes on as another binary with what the one before it has written.
    #[test]
    fn what_an_older_or_newer_keeper_hands_on_is_understood() {
        let read = |keep: &str| {
            let text = format!(r#"{{"keep": {keep}, "start": 7, "before": [3, 4, 5], "new": 1}}"#);
            serde_json::from_str::<State>(&text)
        };
        let plain = r#""socket": "/s", "run_dir": "/r", "worker": ["w"]"#;
        assert_eq!(read(&format!("{{{plain}}}")).unwrap().keep.names, None);
        let names = r#""image": "/i", "writable": true, "root": "/e", "user": 9"#;
        let of = |names: &str| read(&format!(r#"{{{plain}, "names": {{{names}, "more": []}}}}"#));
        let found = of(names).unwrap().keep.names.unwrap();
        assert_eq!((found.user, found.journals, found.read), (9, None, Vec::new()));
        // Without these it would have more rights than it was given.
        for needed in ["image", "writable", "root", "user"] {
            let less = names.replace(&format!("\"{needed}\""), "\"other\"");
            assert!(of(&less).is_err(), "{needed}");
        }
    }
}
