//! Reads of volumes whose store another process serves: the client's end of the connection.

use std::path::Path;

use ferrite_disk::elsewhere::{Access, ask_owners};
use ferrite_disk::{DiskError, ErrorKind};
use ferrite_store::journal::Name;

use super::asking::{Asked, ask_for_stream};
use super::wire::{Ask, Reading};
use super::{AGAIN, TRIES};
use crate::exit::{Code, Failure};

/// Streams of one disk: the owner reads for one while another one's data are on the way.
const STREAMS: usize = 2;

/// Has this process read volumes of stores that others serve.
pub(crate) fn through_owners() {
    ask_owners(access);
}

fn access(store: &Path, volume: &str) -> Result<Option<Access>, DiskError> {
    let Some(name) = Name::new(volume) else { return Ok(None) };
    let what = Ask::Read { volume: name, process: std::process::id() };
    let mut tries = 0;
    let (first, stream) = loop {
        tries += 1;
        match ask_for_stream::<Reading>(store, &what, &|_| true) {
            Asked::Answered(answer) => break answer.map_err(as_disk_error)?,
            Asked::NotOpen if tries < TRIES => std::thread::sleep(AGAIN),
            Asked::NotOpen | Asked::Nobody => return Ok(None),
        }
    };
    let mut streams = vec![stream];
    // An owner with many readers grants fewer. From the first one on it holds the volume, so the others are of the same.
    while streams.len() < STREAMS
        && let Asked::Answered(Ok((reading, stream))) =
            ask_for_stream::<Reading>(store, &what, &|_| true)
        && reading == first
    {
        streams.push(stream);
    }
    Ok(Some(Access { bytes: first.bytes, is_snapshot: first.snapshot, streams }))
}

/// The failure that the owner has answered.
pub(super) fn as_disk_error(failure: Failure) -> DiskError {
    let kind = match failure.code {
        Code::USAGE => ErrorKind::Usage,
        Code::NOT_FOUND => ErrorKind::NotFound,
        Code::BUSY => ErrorKind::InUse,
        Code::DAMAGED => ErrorKind::Damaged,
        Code::INTERRUPTED => ErrorKind::Interrupted,
        _ => ErrorKind::Io,
    };
    DiskError::new(kind, failure.what, failure.why, failure.help)
}
