//! The numbers of errors that callers of `tap-ctl` compare.

use std::io;

use ferrite_serve::blkif::lifecycle::ServeError;
use rustix::io::Errno;

use super::TapError;
use crate::follow::Follower;
use crate::params::{Format, Image};
use crate::state::DiskId;
use crate::{Assignment, Failure, Shared};

/// The number of an error of this host.
pub(super) fn errno_of(e: &io::Error) -> Errno {
    meant(Errno::from_io_error(e))
}

fn meant(errno: Option<Errno>) -> Errno {
    match errno {
        // Callers repeat what has failed with these.
        None | Some(Errno::IO | Errno::AGAIN) => Errno::INVAL,
        Some(errno) => errno,
    }
}

/// The number of the error by which the tap's image could not be opened.
pub(super) fn recorded(shared: &Shared, id: DiskId) -> Errno {
    meant(shared.table.read(|disks| disks.get(&id)?.errno))
}

/// Checks an image's name and file before a worker opens it.
pub(super) fn check(image: &Image) -> Result<(), TapError> {
    if image.path.as_os_str().is_empty() {
        let why = "the drive is empty: no image is named";
        return Err(TapError::new(Errno::NOMEDIUM, why, "name it as TYPE:PATH"));
    }
    // The worker finds out whether there is such a volume, and a server.
    if matches!(image.format, Format::Store | Format::Nbd) {
        return Ok(());
    }
    std::fs::metadata(&image.path).map(drop).map_err(|e| {
        let why = format!("cannot open {}: {e}", image.path.display());
        TapError::new(errno_of(&e), why, "name an image that is there")
    })
}

impl Assignment<'_> {
    /// Records the number of the error by which a worker has not opened the image.
    pub(crate) fn record_errno(&self, e: &ServeError) {
        let errno = match e {
            ServeError::Open { errno, .. } => errno.map(Errno::from_raw_os_error),
            ServeError::RunDir { source, .. } | ServeError::Host { source, .. } => {
                Errno::from_io_error(source)
            }
            _ => None,
        };
        self.shared.table.change(self.id, |entry| entry.errno = errno);
    }
}

impl Follower {
    /// Records the number of an error that came before a worker was asked.
    pub(super) fn not_opened(&self, e: TapError) -> Failure {
        self.shared.table.change(self.id, |entry| entry.errno = Some(e.errno));
        e.failure
    }
}
