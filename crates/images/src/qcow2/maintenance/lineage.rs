//! Reads an image's name of its parent, without opening the image: it may be in use, or have unsupported features.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ferrite_disk_base::Raw;
use ferrite_host::names;
use serde_json::Value;

use crate::qcow2::format::header::{HEAD_BYTES, Header, MAGIC, MAX_BACKING_NAME_BYTES, be32, be64};

/// The length of the fields that all versions have.
const FIELDS_BYTES: usize = 24;
/// The length of the fields of a QED image.
const QED_FIELDS_BYTES: usize = 64;

/// Whether it begins as a qcow2 image does.
pub(crate) fn is_qcow2(raw: &Raw) -> io::Result<bool> {
    let head = raw.read_now(0, FIELDS_BYTES)?;
    Ok(head.len() == FIELDS_BYTES && be32(&head, 0) == MAGIC)
}

/// Whether the backing file of a qcow2 image is raw: a raw file's content is its guest's, and tells nothing about a
/// parent.
pub(crate) fn is_on_raw(raw: &Raw) -> io::Result<bool> {
    let head = raw.read_now(0, HEAD_BYTES as usize)?;
    let header = Header::parse(&head, raw.bytes_now()?).ok();
    let format = header.and_then(|header| header.backing?.format);
    Ok(format.is_some_and(|format| format == "raw"))
}

/// The path of the backing file of an image of QEMU's: qcow of any version, or QED, of which no more is read here.
/// `None`: it is no such image, or its backing file is not on this host.
///
/// # Errors
/// It has a backing file, and its name cannot be read.
pub(crate) fn backing_path(raw: &Raw) -> io::Result<Option<PathBuf>> {
    let head = raw.read_now(0, QED_FIELDS_BYTES)?;
    let Some((offset, len)) = qcow_name(&head).or_else(|| qed_name(&head)) else { return Ok(None) };
    let bad = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why.to_owned()));
    if len > MAX_BACKING_NAME_BYTES {
        return bad("the name of its backing file is too long");
    }
    let all = raw.read_now(offset, len as usize)?;
    let folder = raw.path().parent().unwrap_or("".as_ref());
    let name = match all.strip_prefix(b"json:") {
        Some(json) => match file_of_json(json) {
            Some(name) => return Ok(Some(from_folder_or_here(folder, &name))),
            None => return bad("its backing file is named by json:"),
        },
        None => all.strip_prefix(b"file:").unwrap_or(&all),
    };
    let first = name.split(|b| *b == b'/').next().unwrap_or_default();
    if name.len() < all.len() || first.contains(&b':') {
        // A file of this very name counts, though QEMU would not open it by that name.
        let so_called = folder.join(OsStr::from_bytes(&all));
        if names::exists(&so_called) {
            return Ok(Some(so_called));
        }
    }
    // Names with other schemes are not files of this host.
    if name.is_empty() || first.contains(&b':') {
        return Ok(None);
    }
    let path = Path::new(OsStr::from_bytes(name));
    Ok(Some(match name.len() < all.len() {
        true => from_folder_or_here(folder, path),
        false => folder.join(path),
    }))
}

/// The path by one of QEMU's names. A relative one is from the working directory, which may have been another one when
/// the image was made: a file in the image's folder counts before.
fn from_folder_or_here(folder: &Path, path: &Path) -> PathBuf {
    let beside = folder.join(path);
    let here = std::path::absolute(path).ok().filter(|here| names::exists(here));
    here.filter(|_| !names::exists(&beside)).unwrap_or(beside)
}

/// The place and length of the name of a backing file.
fn qcow_name(head: &[u8]) -> Option<(u64, u32)> {
    let is_qcow = head.len() >= FIELDS_BYTES && be32(head, 0) == MAGIC && be64(head, 8) != 0;
    is_qcow.then(|| (be64(head, 8), be32(head, 16)))
}

/// The place and length of the name in a QED image, whose words are little-endian. A feature bit tells whether there is
/// one.
fn qed_name(head: &[u8]) -> Option<(u64, u32)> {
    let word = |at| be32(head, at).swap_bytes();
    let is_on = head.len() >= QED_FIELDS_BYTES && head.starts_with(b"QED\0") && word(16) & 1 != 0;
    is_on.then(|| (u64::from(word(56)), word(60)))
}

/// The file that a `json:` name of QEMU's names, if it is only one.
fn file_of_json(json: &[u8]) -> Option<PathBuf> {
    let mut left = vec![serde_json::from_slice::<Value>(json).ok()?];
    let mut files = Vec::new();
    while let Some(value) = left.pop() {
        let Value::Object(members) = value else { continue };
        for (key, value) in members {
            match value {
                Value::String(file) if key.rsplit('.').next() == Some("filename") => {
                    files.push(file)
                }
                value => left.push(value),
            }
        }
    }
    let [file] = files.try_into().ok()?;
    let file: String = file;
    Some(file.strip_prefix("file:").unwrap_or(&file).into())
}
