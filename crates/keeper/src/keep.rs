//! What a keeper keeps.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

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
}

impl Keep {
    /// Starts a keeper: a program that calls [`run`](crate::run), with arguments that say so. It is
    /// nobody's child, and listens when this returns.
    ///
    /// # Errors
    /// It could not be started, or has failed, and has told why on its standard error.
    pub fn start(&self, mut command: Command) -> io::Result<()> {
        let text = serde_json::to_string(&State::new(self.clone()))?;
        command.env(VARIABLE, text).stdin(Stdio::null()).stdout(Stdio::null());
        let status = command.status()?;
        match status.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!("the keeper has failed: {status}"))),
        }
    }
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
}

impl State {
    fn new(keep: Keep) -> State {
        State { keep, start: 1, before: None, public: None, relay: Handed::default() }
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
