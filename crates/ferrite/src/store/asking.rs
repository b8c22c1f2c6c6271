//! Commands on a store that another process serves: that process, the owner, runs them (store.md 8).
//!
//! The owner's answers are not trusted: they are bounded, and have no control characters.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrite_host::frames::lines::Lines;
use ferrite_image_tools::Progress;
use ferrite_store::owned::StoreKey;
use rustix::net::sockopt::socket_peercred;
use rustix::process::getpid;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::owner;
use super::wire::{self, Ask, MAX_ANSWER, MAX_QUESTION, Question, Reply, VERSION};
use crate::exit::{Code, Failure};

/// How long an owner may take to acknowledge a command. It does not wait for other commands, but the host may be busy.
const PATIENCE: Duration = Duration::from_secs(20);

/// The result of asking an owner.
pub(super) enum Asked<T> {
    /// An owner has answered, or the connection to it was lost.
    Answered(Result<T, Failure>),
    /// A process listens that has not opened the store yet, or has closed it.
    NotOpen,
    /// No process listens.
    Nobody,
}

/// Has the owner of a store run a command. `shows` gets the progress, and says when to stop waiting.
pub(super) fn ask<T: DeserializeOwned>(
    store: &Path,
    what: &Ask,
    shows: &dyn Fn(Progress) -> bool,
) -> Asked<T> {
    match ask_for_stream(store, what, shows) {
        Asked::Answered(answered) => Asked::Answered(answered.map(|(answer, _)| answer)),
        Asked::NotOpen => Asked::NotOpen,
        Asked::Nobody => Asked::Nobody,
    }
}

/// As [`ask`], with the stream on which the owner has answered.
pub(super) fn ask_for_stream<T: DeserializeOwned>(
    store: &Path,
    what: &Ask,
    shows: &dyn Fn(Progress) -> bool,
) -> Asked<(T, UnixStream)> {
    let Ok(key) = StoreKey::at(store) else { return Asked::Nobody };
    let mut asked = Asked::Nobody;
    for socket in sockets(key) {
        let Ok(stream) = owner::connect(&socket) else { continue };
        if is_own(&stream) {
            continue;
        }
        match ask_on(&stream, key, store, what, shows) {
            Ok(None) => asked = Asked::NotOpen,
            Ok(Some(answer)) => {
                let nonsense = |why| lost(store, what, why);
                let answer = serde_json::from_value(answer).map_err(nonsense);
                return Asked::Answered(answer.map(|answer| (answer, stream)));
            }
            Err(failure) => return Asked::Answered(Err(failure)),
        }
    }
    asked
}

/// Whether this process listens at the other end: it is about to open the store, and does not answer before.
fn is_own(stream: &UnixStream) -> bool {
    socket_peercred(stream).is_ok_and(|listener| listener.pid == getpid())
}

/// The sockets at which an owner may listen.
fn sockets(key: StoreKey) -> Vec<PathBuf> {
    let prefix = wire::prefix(key);
    let entries = wire::folders().into_iter().filter_map(|folder| fs::read_dir(folder).ok());
    let entries = entries.flatten().flatten();
    let ours =
        entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()));
    ours.map(|entry| entry.path()).collect()
}

/// Asks on a nonblocking stream. `None`: this process has not opened the store.
fn ask_on(
    stream: &UnixStream,
    store: StoreKey,
    path: &Path,
    what: &Ask,
    shows: &dyn Fn(Progress) -> bool,
) -> Result<Option<Value>, Failure> {
    let goes_on = || shows(Progress { done_bytes: 0, total_bytes: 0 });
    let shown = path.to_string_lossy().into_owned();
    let question = Question { version: VERSION.own, store, path: shown, what };
    let mut heard = Lines::default();
    let mut hear = |most, waits: &dyn Fn() -> bool| -> io::Result<Reply> {
        Ok(serde_json::from_slice(&heard.receive(stream, most, waits)?)?)
    };
    let asked = wire::write_line(stream, &question, PATIENCE);
    let end = Instant::now() + PATIENCE;
    let first = asked.and_then(|()| hear(MAX_QUESTION, &|| goes_on() && Instant::now() < end));
    match first {
        Ok(Reply::Begun) => {}
        // A process that ends before it begins has done nothing.
        Ok(Reply::NotOpen) => return Ok(None),
        Ok(reply) => return end_of(reply).map(Some),
        Err(_) if !goes_on() => return Err(interrupted(path, what)),
        Err(e) if e.kind() == io::ErrorKind::TimedOut => {
            return Err(lost(path, what, "the process that serves the store does not answer"));
        }
        Err(e) if is_gone(&e) => return Ok(None),
        Err(e) => return Err(lost(path, what, e)),
    }
    loop {
        match hear(MAX_ANSWER, &goes_on) {
            Ok(Reply::Progress { done_bytes, total_bytes }) => {
                shows(Progress { done_bytes, total_bytes });
            }
            Ok(reply) => return end_of(reply).map(Some),
            Err(_) if !goes_on() => return Err(interrupted(path, what)),
            Err(e) if !is_gone(&e) => return Err(lost(path, what, e)),
            // It may have been done.
            Err(_) => {
                return Err(lost(
                    path,
                    what,
                    "the process that serves the store has ended before it was done",
                ));
            }
        }
    }
}

fn is_gone(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
    )
}

fn end_of(reply: Reply) -> Result<Value, Failure> {
    let nonsense = || {
        let help = "look at the log of the process that serves the store";
        Failure::new("cannot work on the store", "its owner sent an invalid answer", help)
    };
    match reply {
        Reply::Done(answer) if is_plain(&answer) => Ok(answer),
        Reply::Failed { code, what, why, help } => Err(Reply::failure(code, what, why, help)),
        Reply::Done(_) | Reply::Begun | Reply::Progress { .. } | Reply::NotOpen => Err(nonsense()),
    }
}

/// Whether its texts have no control characters, so that they may go to a terminal.
fn is_plain(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.contains(char::is_control),
        Value::Array(all) => all.iter().all(is_plain),
        Value::Object(all) => {
            all.iter().all(|(name, value)| !name.contains(char::is_control) && is_plain(value))
        }
        _ => true,
    }
}

/// The failure where the command may have been done.
fn lost(store: &Path, asked: &Ask, why: impl std::fmt::Display) -> Failure {
    let store = store.display();
    match asked {
        Ask::Change { .. } => {
            let what = format!("cannot tell whether the change of store {store} was made");
            let help = format!(
                "ferrite store list {store} shows it; then run the same command again if it was not"
            );
            Failure::new(what, why, help)
        }
        Ask::Grow { .. } => {
            let what = format!("cannot tell whether store {store} was made larger");
            let help = format!(
                "ferrite store info {store} shows its size; then run the same command again if it was not"
            );
            Failure::new(what, why, help)
        }
        _ => {
            let what = format!("the request to store {store} was cancelled");
            Failure::new(what, why, "no disk has changed; run the same command again")
        }
    }
}

fn interrupted(store: &Path, asked: &Ask) -> Failure {
    lost(store, asked, "it was interrupted").with_code(Code::INTERRUPTED)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use serde_json::json;

    use super::*;

    /// The result of asking an owner that sends these lines, and ends.
    fn asked(lines: &[Value]) -> Result<Option<Value>, Failure> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        for line in lines {
            theirs.write_all(format!("{line}\n").as_bytes()).unwrap();
        }
        // The owner keeps its end open, so the question can be sent.
        let _asked = theirs.try_clone().unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        ask_on(&ours, StoreKey(1, 2), Path::new("s"), &Ask::List, &|_| true)
    }

    #[test]
    fn an_owner_that_ends_before_it_has_begun_has_done_nothing_and_later_perhaps() {
        assert!(asked(&[]).unwrap().is_none());
        assert!(asked(&[json!("not-open")]).unwrap().is_none());
        let failure = asked(&[json!("begun")]).unwrap_err();
        assert!(failure.what.contains("was cancelled") && failure.why.contains("has ended"));
        let done = asked(&[json!("begun"), json!({ "done": { "a": 1 } })]).unwrap();
        assert_eq!(done, Some(json!({ "a": 1 })));
    }

    #[test]
    fn an_owner_is_not_believed() {
        let done = |text: &str| asked(&[json!("begun"), json!({ "done": [{ "name": text }] })]);
        assert!(done("a name").is_ok());
        for bad in ["\u{1b}[31m", "a\nb", "\u{9b}"] {
            assert!(done(bad).unwrap_err().why.contains("invalid answer"), "{bad:?}");
        }
        for bad in [json!("begun"), json!("not-open"), json!({ "frob": 1 }), json!(7)] {
            asked(&[json!("begun"), bad]).unwrap_err();
        }
        // An answer without a valid exit code is not a success.
        let failed = json!({ "failed": { "code": 0, "what": "w", "why": "y", "help": "h" } });
        assert_eq!(asked(&[failed]).unwrap_err().code, Code::FAILED);
    }

    #[test]
    fn who_is_told_to_stop_waits_for_no_owner() {
        let (ours, _silent) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let asked = ask_on(&ours, StoreKey(1, 2), Path::new("s"), &Ask::List, &|_| false);
        assert_eq!(asked.unwrap_err().code, Code::INTERRUPTED);
    }
}
