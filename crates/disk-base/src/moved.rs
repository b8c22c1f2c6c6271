//! The durable mark of an image whose disk is moved to another host: `IMAGE.ferrite-moved`.
//!
//! An image with a mark is not opened for writing, by none of Ferrite's programs: the other host may write to its copy.
//! It can be read. Other programs do not know the mark: QEMU, tapdisk, `dd` and mount write to the image in spite of it.
//!
//! Any file at that name counts as a mark, also if it is damaged: otherwise two hosts might write to one disk.
//!
//! # Order of writes
//! To set or change it: 1. another file gets the text and is synced; 2. it gets the name; 3. the folder is synced. To
//! remove it: 1. the name is removed; 2. the folder is synced. The program that sets or removes it may rely on it
//! afterwards, also after a power cut.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::{DiskError, ErrorKind, plain};

/// The end of the name of the mark.
pub const EXTENSION: &str = ferrite_host::names::policy::MOVED_EXTENSION;
/// The end of the name of a mark that is being written.
const NEW: &str = ".new";
/// The first line.
const FIRST: &str = "ferrite-moved 1";
/// The longest mark.
const MAX_BYTES: u64 = 4096;

/// The content of a mark, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The identifier of the migration.
    pub id: String,
    /// The host that the disk is moved to.
    pub to: String,
    /// Whether the other host has taken the disk. Otherwise it may have.
    pub is_taken: bool,
}

/// The path of the mark of the image at `image`.
pub fn path_of(image: &Path) -> PathBuf {
    with(image, EXTENSION)
}

fn with(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    name.into()
}

impl Mark {
    fn text(&self) -> String {
        let state = if self.is_taken { "taken" } else { "leaving" };
        format!("{FIRST}\nid {}\nto {}\nstate {state}\n", line(&self.id), line(&self.to))
    }

    /// A damaged text is a mark without a host.
    fn parse(text: &str) -> Mark {
        let mut lines = text.lines();
        let mut mark = Mark::default();
        if lines.next() != Some(FIRST) {
            return mark;
        }
        for (word, value) in lines.filter_map(|line| line.split_once(' ')) {
            match word {
                "id" => mark.id = line(value),
                "to" => mark.to = line(value),
                "state" => mark.is_taken = value == "taken",
                _ => {}
            }
        }
        mark
    }
}

/// A value on one line of its own.
fn line(value: &str) -> String {
    value.chars().filter(|c| !c.is_control()).take(300).collect()
}

/// Sets or changes the mark of an image, durably.
///
/// # Errors
/// Errors of the file system. The image may have no mark then, or one that is not durable yet.
pub fn set(image: &Path, mark: &Mark) -> io::Result<()> {
    let path = path_of(image);
    let new = with(&path, NEW);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o644);
    options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    let mut file = options.open(&new)?;
    file.write_all(mark.text().as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, &path)?;
    sync_folder(&path)
}

/// Removes the mark of an image, durably. It need not have one.
///
/// # Errors
/// Errors of the file system. The image may have its mark still, or again after a power cut.
pub fn clear(image: &Path) -> io::Result<()> {
    let path = path_of(image);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    sync_folder(&path)
}

/// Makes the names in the folder of `path` durable.
///
/// # Errors
/// Errors of the file system.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// The mark of an image, if it has one.
///
/// # Errors
/// It cannot be looked at: the image may have one.
pub fn look(image: &Path) -> io::Result<Option<Mark>> {
    match plain::read(&path_of(image), MAX_BYTES) {
        Ok(text) => Ok(Some(Mark::parse(&String::from_utf8_lossy(&text)))),
        // No mark can be beside an image with such a name.
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidFilename) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// Checks that an image may be opened for writing.
///
/// # Errors
/// It was moved, or that cannot be found out.
pub fn check(image: &Path) -> Result<(), DiskError> {
    let what = || format!("cannot open {} for writing", image.display());
    match look(image) {
        Ok(None) => Ok(()),
        Ok(Some(mark)) => {
            let to = if mark.to.is_empty() { "another host" } else { &mark.to };
            let (why, help) = match mark.is_taken {
                true => (
                    format!("its disk was moved to {to} (migration {})", mark.id),
                    "use the disk there; remove this image when it is not needed. To read it, open it read-only"
                        .to_owned(),
                ),
                false => (
                    format!("its disk is being moved to {to}, which may have it (migration {})", mark.id),
                    format!(
                        "wait until both hosts reach each other; if {to} is lost for good, say which host has the \
                         disk: ferrite migrate resolve {} --here or --there",
                        mark.id
                    ),
                ),
            };
            Err(DiskError::new(ErrorKind::Refused, what(), why, help))
        }
        Err(e) => {
            let mark = path_of(image);
            let why = format!("cannot look whether it was moved ({}): {e}", mark.display());
            let help = "ferrite migrate list shows what was moved; repair that file or its folder";
            Err(DiskError::new(ErrorKind::Refused, what(), why, help).with_source(e))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_with_a_mark_is_refused_and_without_it_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.qcow2");
        check(&image).unwrap();
        let mut mark = Mark { id: "5".into(), to: "b.example".into(), is_taken: false };
        for is_taken in [false, true] {
            mark.is_taken = is_taken;
            set(&image, &mark).unwrap();
            assert_eq!(look(&image).unwrap(), Some(mark.clone()));
            let refused = check(&image).unwrap_err();
            assert!(refused.why().contains("b.example"), "{refused}");
        }
        // Any file there is a mark.
        fs::write(path_of(&image), b"\xff").unwrap();
        check(&image).unwrap_err();
        fs::write(path_of(&image), vec![b'x'; 5000]).unwrap();
        check(&image).unwrap_err();
        clear(&image).unwrap();
        clear(&image).unwrap();
        check(&image).unwrap();
    }
}
