//! Images that a disk of the daemon has open: their headers are changed and read through the disk's worker.
//!
//! A verb that changes an image asks here first. With `None` it opens the file itself, and locks it: a worker that the
//! daemon does not know of now has the lock, so the verb is refused then.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use ferrite_daemon::Paths;
use ferrite_daemon::control::client::{self, ClientError};
use ferrite_daemon::control::protocol::{
    Change, ChangeImageParams, Facts, ImageAnswer, Images, QueryImagesParams, Unchanged, code,
};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Refusal;

/// How long the daemon may take. It waits for half of that for a worker.
const ANSWER: Duration = Duration::from_secs(70);
/// Bytes of paths in one question; a line of the socket has twice so many.
const MOST_BYTES: usize = 32 << 10;

/// The option that names another run directory than the daemon's usual one.
const RUN_DIR: &[u8] = b"--run-dir=";

static NAMED: OnceLock<PathBuf> = OnceLock::new();

/// The daemon's run directory.
pub(crate) fn run_dir() -> PathBuf {
    NAMED.get().cloned().unwrap_or_else(|| Paths::default().run)
}

/// Takes the run directory out of a tool's arguments, which know no such option.
pub(super) fn without_run_dir(args: Vec<OsString>) -> Vec<OsString> {
    let (named, others) =
        args.into_iter().partition::<Vec<_>, _>(|arg| arg.as_bytes().starts_with(RUN_DIR));
    if let Some(dir) = named.last() {
        // It is set once, at the start.
        let _ = NAMED.set(std::ffi::OsStr::from_bytes(&dir.as_bytes()[RUN_DIR.len()..]).into());
    }
    others
}

/// Changes the headers of an image through the worker that writes to it. `None`: no disk does, and nothing was changed.
///
/// # Errors
/// The image cannot have that, or the worker does not answer.
pub(crate) fn change(run_dir: &Path, path: &Path, change: &Change) -> Result<Option<()>, Refusal> {
    let Some(name) = whole(path) else { return Ok(None) };
    let request = ChangeImageParams { path: name, change: change.clone() };
    let answer: Option<ImageAnswer> = call(run_dir, "image.change", &request)?;
    match answer.unwrap_or_default() {
        ImageAnswer { refused: Some(refused), .. } => Err(refusal(refused)),
        ImageAnswer { facts, .. } => Ok(facts.map(drop)),
    }
}

/// The facts in the headers and the table of an image that a disk writes to. `None`: no disk writes to it.
///
/// # Errors
/// The worker does not answer.
pub(crate) fn query(run_dir: &Path, path: &Path) -> Result<Option<Facts>, Refusal> {
    Ok(query_all(run_dir, &[path])?.pop().flatten())
}

/// The facts in the headers and tables of several images that disks write to, in the order of `paths`.
///
/// # Errors
/// A worker does not answer.
pub(crate) fn query_all(run_dir: &Path, paths: &[&Path]) -> Result<Vec<Option<Facts>>, Refusal> {
    let names: Vec<Option<String>> = paths.iter().map(|path| whole(path)).collect();
    let mut facts = vec![None; paths.len()];
    let mut from = 0;
    while from < names.len() {
        let mut bytes = 0;
        let fits = |name: &&Option<String>| {
            bytes += name.as_ref().map_or(0, String::len);
            bytes <= MOST_BYTES
        };
        let to = from + names[from..].iter().take_while(fits).count().max(1);
        let asked: Vec<String> = names[from..to].iter().flatten().cloned().collect();
        let told: Option<Images> =
            call(run_dir, "image.query", &QueryImagesParams { paths: asked })?;
        // Without a daemon there is no more to ask.
        let Some(told) = told else { break };
        for image in told.images {
            if let Some(refused) = image.refused {
                return Err(refusal(refused));
            }
            let same = |name: &Option<String>| name.as_ref() == Some(&image.path);
            for (facts, name) in facts[from..to].iter_mut().zip(&names[from..to]) {
                if same(name) {
                    facts.clone_from(&image.facts);
                }
            }
        }
        from = to;
    }
    Ok(facts)
}

/// The absolute path as text. `None`: it is no text, and no disk can be attached by such a path.
fn whole(path: &Path) -> Option<String> {
    std::path::absolute(path).ok()?.into_os_string().into_string().ok()
}

/// Calls a method. `None`: no daemon runs.
fn call<T: DeserializeOwned>(
    run_dir: &Path,
    method: &str,
    params: &impl Serialize,
) -> Result<Option<T>, Refusal> {
    let socket = Paths { run: run_dir.to_owned() }.control();
    match client::call(&socket, method, params, ANSWER) {
        Ok(answer) => Ok(Some(answer)),
        Err(ClientError::Unreachable(_)) => Ok(None),
        // A daemon of an older version serves taps of none: the lock of the file decides.
        Err(ClientError::Refused(e)) if e.code == code::NO_METHOD => Ok(None),
        Err(e) => {
            let why = format!("{e}; {}", e.help());
            // EIO and EAGAIN would be repeated for 20 s by the storage manager.
            Err(Refusal { errno: Errno::TIMEDOUT, why })
        }
    }
}

fn refusal(Unchanged { errno, why }: Unchanged) -> Refusal {
    Refusal { errno: Errno::from_raw_os_error(errno), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_daemon_no_image_is_served() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.vhd");
        assert!(change(dir.path(), &path, &Change::Hidden(1)).unwrap().is_none());
        assert_eq!(query(dir.path(), &path).unwrap(), None);
        // A daemon that was killed leaves its socket.
        drop(std::os::unix::net::UnixListener::bind(dir.path().join("control.sock")).unwrap());
        assert!(change(dir.path(), &path, &Change::Hidden(1)).unwrap().is_none());
        assert_eq!(query_all(dir.path(), &[&path, &path]).unwrap(), [None, None]);
    }
}
