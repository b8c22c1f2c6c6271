//! Opens the files and devices of disks: locked, and for writing only if the image has no children.

use std::path::Path;
use std::time::Duration;

use ferrite_disk_base::{
    DiskError, ErrorKind, Locking, OnDamage, OpenOptions, READ_ONLY, Raw, Unopened, moved,
};

use ferrite_host::clock::{Clock as _, SystemClock};

use crate::children::{self, Ask};
use crate::image::format::ImageFormat;
use crate::qcow2::Qcow2;
use crate::vhd::Vhd;

/// How often a parent that may change is opened anew if it looks damaged, and how long it is waited between.
const SETTLED_TRIES: usize = 5;
const SETTLED_PAUSE: Duration = Duration::from_millis(20);

/// Opens a raw disk on a file or device, as the options say. Errors are found before anything else is done, and nothing
/// is written.
///
/// # Errors
/// It cannot be opened or locked, or it has a child; the text tells why, and the next step.
pub fn open_raw(path: &Path, options: &OpenOptions) -> Result<Raw, DiskError> {
    unwritten(path, Raw::lock_disk(path, options), options)
}

/// Opens the medium of a store: of any size, and accessed in blocks of 4096 bytes.
///
/// # Errors
/// It cannot be opened or locked, or it has a child; the text tells why, and the next step.
pub fn open_store(path: &Path, options: &OpenOptions) -> Result<Raw, DiskError> {
    unwritten(path, Raw::lock_store(path, options), options)
}

/// Opens the medium of an image with metadata, which may be yet to be made: of any size, and accessed in sectors.
///
/// # Errors
/// It cannot be opened or locked, or it has a child; the text tells why, and the next step.
pub fn open_medium(path: &Path, options: &OpenOptions) -> Result<Raw, DiskError> {
    unwritten(path, Raw::lock_medium(path, options), options)
}

impl Vhd {
    /// Opens and locks the image at `path`. Its whole table is read and checked; nothing is written. The journal of a
    /// process that died is recovered. Its parent is not opened.
    ///
    /// # Errors
    /// It cannot be opened or locked, or is invalid; the text tells where and why.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Vhd, DiskError> {
        settled(options, || {
            in_spite(path, options, |options| Vhd::of(open_medium(path, options)?, options))
        })
    }
}

impl Qcow2 {
    /// Opens and locks the image at `path`. Its parent is not opened.
    pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Qcow2, DiskError> {
        in_spite(path, options, |options| Qcow2::of(open_medium(path, options)?, options))
    }
}

/// Opens an image. A parent that its toolstack has another process write may look damaged for a moment, when it grows
/// between two reads.
fn settled<T>(
    options: &OpenOptions,
    open: impl Fn() -> Result<T, DiskError>,
) -> Result<T, DiskError> {
    let may_change = options.as_parent && options.locking == Locking::Toolstack;
    for _ in 0..if may_change { SETTLED_TRIES } else { 0 } {
        match open() {
            Err(e) if e.kind() == ErrorKind::Damaged => SystemClock.sleep(SETTLED_PAUSE),
            opened => return opened,
        }
    }
    open()
}

/// Opens an image. One that is damaged may not fit its journal any more: then a reader that tolerates damage opens it
/// without.
fn in_spite<T: ImageFormat>(
    path: &Path,
    options: &OpenOptions,
    open: impl Fn(&OpenOptions) -> Result<T, DiskError>,
) -> Result<T, DiskError> {
    let tolerant = options.on_damage() != OnDamage::Refuse && options.state_dir.is_some();
    let refused = match open(options) {
        Err(e) if tolerant && matches!(e.kind(), ErrorKind::Damaged | ErrorKind::Refused) => e,
        opened => return opened,
    };
    match open(&OpenOptions { state_dir: None, ..options.clone() }) {
        Ok(image) if !image.flaws().is_empty() => {
            tracing::warn!(
                image = %path.display(),
                "it is read without the writes that a killed backend has left in its journal: {}",
                refused.why(),
            );
            Ok(image)
        }
        _ => Err(refused),
    }
}

/// The medium, if it has no child or is only read.
fn unwritten(
    path: &Path,
    medium: Result<Raw, Unopened>,
    options: &OpenOptions,
) -> Result<Raw, DiskError> {
    let medium = match medium {
        Err(Unopened::Protected) => return Err(protected(path)),
        Err(Unopened::Other(e)) => return Err(e),
        Ok(medium) => medium,
    };
    if !options.read_only {
        moved::check(medium.path())?;
    }
    if !options.read_only && !options.may_write_parents() {
        let ask = if options.taken_over { Ask::Marked } else { Ask::Named };
        children::check_none(&medium, ask)?;
    }
    Ok(medium)
}

/// The error for a file without write permission. The kernel would let root write it nevertheless.
fn protected(path: &Path) -> DiskError {
    let of_mode = "it is read-only by its mode";
    let help = format!("{READ_ONLY}, or make a new image on it (ferrite image clone)");
    let known = children::look(path, None, Ask::Named).unwrap_or_default();
    let (why, help) = match (&known.child, &known.unknown) {
        (Some(child), _) => {
            (format!("{of_mode}: {} stands on it, and would change with it", child.display()), help)
        }
        (None, Some(unknown)) => {
            (format!("{of_mode}, and an image may stand on it: {}", unknown.why), help)
        }
        (None, None) if let Some(lost) = &known.lost => {
            let help = format!(
                "{help}; {} is told of it by ferrite image rebase -u",
                lost.child.display()
            );
            (format!("{of_mode}, and an image may stand on it: {lost}"), help)
        }
        (None, None) => {
            let help = format!(
                "{help}, or let it be written (chmod u+w): no image is known to stand on it; \
                 a clone that was cut off leaves its parent so, and a copy by cp is so as its original"
            );
            (of_mode.to_owned(), help)
        }
    };
    DiskError::new(
        ErrorKind::Permission,
        format!("cannot open image {}", path.display()),
        why,
        help,
    )
}
