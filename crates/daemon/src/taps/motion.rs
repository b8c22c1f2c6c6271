//! A tap's second disk (`tap-ctl -2 nbd:NAME`): XAPI's storage motion has all writes go to it, too. XAPI copies the rest
//! itself. The rules are in docs/internals/mirror.md 6; the connections are in `passed`.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use ferrite_disk::{MirrorFile, MirrorState};
use rustix::io::Errno;

use super::TapError;
use super::errno::errno_of;
use crate::jobs::MirrorSpec;
use crate::state::{DiskId, TapMirror, TapState};
use crate::{Paths, Shared};

/// A change of a tap's second disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Second {
    /// It has none from now on.
    Null,
    /// The one behind the connection of this name.
    Nbd(String),
}

impl Second {
    /// Parses the value of `-2`.
    pub(crate) fn parse(text: &str) -> Result<Second, TapError> {
        match text.split_once(':') {
            None if text == "null" => Ok(Second::Null),
            Some(("nbd", name)) if super::passed::is_name(name.as_bytes()) => {
                Ok(Second::Nbd(name.to_owned()))
            }
            Some(("nbd", _)) => {
                let why = "the name of a connection has 1 to 255 bytes, and no control characters";
                Err(TapError::new(Errno::INVAL, why, "name it as nbd:NAME"))
            }
            _ => {
                let why = format!("{text:.99} cannot be a tap's second disk");
                Err(TapError::new(Errno::OPNOTSUPP, why, "name nbd:NAME, or null"))
            }
        }
    }
}

impl Paths {
    /// The map of a tap's second disk.
    fn motion(&self, id: DiskId) -> PathBuf {
        self.mirrors().join(format!("{}.map", id.file_name()))
    }
}

/// Begins or ends a second disk, while the tap's image is closed. Returns what the tap's state has from now on.
pub(super) fn change(
    shared: &Shared,
    id: DiskId,
    second: &Second,
) -> Result<Option<TapMirror>, TapError> {
    let Second::Nbd(name) = second else {
        end(shared, id);
        return Ok(None);
    };
    if let Some(job) = shared.jobs.of_disk(id) {
        let why = format!("job {job} changes the images of {id}");
        return Err(TapError::new(
            Errno::BUSY,
            why,
            "wait for it, or cancel it: ferrite job cancel",
        ));
    }
    let socket = shared.taps.passed.socket_of(id.devid, name);
    if socket.is_none() {
        tracing::warn!("{id} goes on without a mirror: no connection was passed as {name:?}");
    }
    let map = shared.paths.motion(id);
    MirrorFile::create_for_writes(&map).map_err(|e| {
        let why = format!("cannot make {}: {e}", map.display());
        TapError::new(errno_of(&e), why, "make room on the file system of /run")
    })?;
    Ok(Some(TapMirror { name: name.clone(), socket }))
}

/// Ends the second disk of a tap, whose image is closed.
pub(super) fn end(shared: &Shared, id: DiskId) {
    let mirror = shared.table.read(|disks| disks.get(&id)?.tap.as_ref()?.mirror.clone());
    if let Some(mirror) = mirror {
        shared.taps.passed.end(id.devid, &mirror.name);
    }
    let map = shared.paths.motion(id);
    if let Err(e) = std::fs::remove_file(&map)
        && e.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("cannot remove {}: {e}", map.display());
    }
}

/// The mirror that a worker of the tap opens, too. `None`: the tap has no second disk, or an unknown one.
pub(super) fn spec(shared: &Shared, id: DiskId, tap: &TapState) -> Option<MirrorSpec> {
    let socket = tap.mirror.as_ref()?.socket.as_ref()?;
    let target = format!("nbd+unix:///?socket={}", encoded(socket));
    Some(MirrorSpec { target, map: shared.paths.motion(id) })
}

/// Whether the second disk lacks writes.
pub(super) fn has_failed(shared: &Shared, id: DiskId) -> bool {
    let mirror = shared.table.read(|disks| disks.get(&id)?.tap.as_ref()?.mirror.clone());
    let Some(mirror) = mirror else { return false };
    if mirror.socket.is_none() {
        return true;
    }
    let status = MirrorFile::open(&shared.paths.motion(id)).and_then(|map| map.status());
    !status.is_ok_and(|status| matches!(status.state, MirrorState::New | MirrorState::InStep))
}

/// A path as a part of a URI.
fn encoded(path: &Path) -> String {
    let mut text = String::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'/' | b'-' | b'.' | b'_' => text.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => text.push(char::from(*byte)),
            byte => text += &format!("%{byte:02X}"),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_disks_are_named_as_tap_ctl_has_them() {
        assert_eq!(Second::parse("null"), Ok(Second::Null));
        assert_eq!(Second::parse("nbd:dp-1"), Ok(Second::Nbd("dp-1".to_owned())));
        let errno = |text: &str| Second::parse(text).unwrap_err().errno;
        assert_eq!([errno("nbd:"), errno("nbd:a\nb")], [Errno::INVAL; 2]);
        assert_eq!([errno("vhd:/a"), errno("")], [Errno::OPNOTSUPP; 2]);
        assert_eq!(encoded("/a b/ü-1".as_ref()), "/a%20b/%C3%BC-1");
    }
}
