//! `query`: the properties of an image, in a fixed order of lines.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use ferrite_image_tools::vhd::{Seen, Uuid};
use rustix::io::Errno;

use super::{Given, Stop, Verb, errno_of, say, shown};
use crate::compat::{Refusal, served};

pub(in super::super) const QUERY: Verb = Verb {
    name: "query",
    letters: "n:vspfdSaub",
    usage: "-n FILE [-v virtual size in MiB] [-s bytes in use] [-p parent] [-f hidden] [-d depth of the \
            chain] [-a blocks in use] [-S largest size for resize -f, in MiB] [-u parent as it is \
            named] [-b by the copy of the footer]",
    run: query,
};

/// Bytes of a footer.
const FOOTER_BYTES: u64 = 512;

/// The longest chain that is counted.
const MAX_DEPTH: u32 = 4096;

/// The texts in which `vhd-util` and `td-util` differ.
pub(in super::super) struct Texts {
    /// Before the name of an image that cannot be opened.
    opening: &'static str,
    parent: fn(Errno) -> String,
}

const TEXTS: Texts = Texts { opening: "error opening", parent: |_| "query failed".to_owned() };

pub(in super::super) const TD_TEXTS: Texts = Texts {
    opening: "failed opening",
    parent: |errno| format!("failed getting parent: {}", negative(errno)),
};

fn query(given: &Given, out: &mut Vec<u8>) -> Result<(), Stop> {
    answer(given.image()?, given, &TEXTS, out)
}

/// Prints what the letters of the options ask for. After an error the other lines are printed nevertheless.
pub(in super::super) fn answer(
    path: &Path,
    given: &Given,
    texts: &Texts,
    out: &mut Vec<u8>,
) -> Result<(), Stop> {
    let seen = open(path, given.has('b')).inspect_err(|refusal| {
        out.extend_from_slice(format!("{} ", texts.opening).as_bytes());
        out.extend_from_slice(&shown(path));
        say(out, format_args!(": {}", negative(refusal.errno)));
    })?;
    // A worker that writes to it knows what is not on the medium yet.
    let now = served::query(&served::run_dir(), path)?;
    let mut failed = None;
    if given.has('v') {
        say(out, now.as_ref().map_or(seen.footer().current_size, |now| now.bytes) >> 20);
    }
    if given.has('s') {
        match now.as_ref().map_or_else(|| seen.used_bytes(), |now| Ok(with_footer(now.end))) {
            Ok(bytes) => say(out, bytes),
            Err(e) => said(out, &mut failed, "failed to get physical size", Refusal::from(e)),
        }
    }
    if given.has('p')
        && let Err(refusal) = parent(path, &seen, given.has('u'), out)
    {
        say(out, (texts.parent)(refusal.errno));
        failed.get_or_insert(refusal);
    }
    if given.has('f') {
        let hidden = now.as_ref().map_or(seen.footer().hidden, |now| now.hidden);
        say(out, format_args!("hidden: {hidden}"));
    }
    if given.has('d') {
        match depth(&seen) {
            Ok(depth) => say(out, format_args!("chain depth: {depth}")),
            Err(refusal) => said(out, &mut failed, "error checking chain depth", refusal),
        }
    }
    if given.has('a') {
        let now = now.as_ref().and_then(|now| now.blocks);
        match now.map_or_else(|| blocks(&seen), Ok) {
            Ok(blocks) => say(out, blocks),
            Err(refusal) => said(out, &mut failed, "error reading bat", refusal),
        }
    }
    if given.has('S') {
        let room = seen.tables().map(|t| u64::from(t.entries) * u64::from(t.block_bytes));
        say(out, room.unwrap_or(0) >> 20);
    }
    failed.map_or(Ok(()), |refusal| Err(refusal.into()))
}

/// The bytes in use of an image that a worker writes to: the footer is behind all blocks once it is closed.
pub(super) fn with_footer(end: u64) -> u64 {
    end + FOOTER_BYTES
}

/// Prints a failure as libvhd's tools do, and keeps the first one.
fn said(out: &mut Vec<u8>, failed: &mut Option<Refusal>, what: &str, refusal: Refusal) {
    say(out, format_args!("{what}: {}", negative(refusal.errno)));
    failed.get_or_insert(refusal);
}

/// libvhd's numbers of errors are negative.
pub(super) fn negative(errno: Errno) -> i32 {
    -errno.raw_os_error()
}

/// Reads the metadata of an image.
pub(super) fn open(path: &Path, from_copy: bool) -> Result<Seen, Refusal> {
    Seen::read(path, from_copy).map_err(|e| {
        let is_empty = path.metadata().is_ok_and(|meta| meta.is_file() && meta.len() == 0);
        // libvhd's number for a file that ends at once.
        let errno = if is_empty { Errno::PIPE } else { errno_of(&e) };
        Refusal { errno, ..Refusal::from(e) }
    })
}

fn parent(path: &Path, seen: &Seen, as_named: bool, out: &mut Vec<u8>) -> Result<(), Refusal> {
    if seen.parent_uuid().is_none() {
        out.extend_from_slice(&shown(path));
        say(out, " has no parent");
        return Ok(());
    }
    let parent = match as_named {
        true => seen.parent_name().ok_or_else(|| Refusal {
            errno: Errno::INVAL,
            why: format!("{} has no parent locator", path.display()),
        })?,
        false => found(seen)?,
    };
    out.extend_from_slice(&shown(&parent));
    out.push(b'\n');
    Ok(())
}

/// The path of an image's parent.
pub(super) fn found(seen: &Seen) -> Result<PathBuf, Refusal> {
    seen.parent_path().map_err(|e| {
        let path = seen.medium().path().display();
        let name = seen.tables().map(|tables| tables.parent_name).unwrap_or_default();
        let why = match e.kind() {
            io::ErrorKind::NotFound => "it is not there; bring it back".to_owned(),
            _ => e.to_string(),
        };
        Refusal {
            errno: Errno::from_io_error(&e).unwrap_or(Errno::NOENT),
            why: format!("cannot find {name:?}, the parent of {path}: {why}"),
        }
    })
}

/// The number of images of a chain. A raw one counts.
fn depth(leaf: &Seen) -> Result<u32, Refusal> {
    let mut met = HashSet::from([leaf.medium().inode()]);
    let mut depth = 1;
    let mut parent = (leaf.parent_uuid(), leaf.parent_uuid().map(|_| found(leaf)));
    while let (Some(uuid), Some(path)) = parent {
        depth += 1;
        if uuid == Uuid::NIL {
            break;
        }
        let path = path?;
        let image = open(&path, false)?;
        if !met.insert(image.medium().inode()) || depth > MAX_DEPTH {
            let why = format!("the chain comes back to {}", path.display());
            return Err(Refusal { errno: Errno::LOOP, why });
        }
        parent = (image.parent_uuid(), image.parent_uuid().map(|_| found(&image)));
    }
    Ok(depth)
}

/// Blocks that have a place.
fn blocks(seen: &Seen) -> Result<u32, Refusal> {
    match seen.allocated()? {
        Some(allocated) => Ok(allocated.blocks),
        None => Err(is_fixed(seen)),
    }
}

/// The refusal of what a fixed image does not have.
pub(super) fn is_fixed(seen: &Seen) -> Refusal {
    let path = seen.medium().path().display();
    Refusal { errno: Errno::INVAL, why: format!("{path} is a fixed image, which has no blocks") }
}
