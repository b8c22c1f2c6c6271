//! Errors about answered writes that cannot be recovered, although their journal exists.

use std::path::Path;

use super::shelf::{Left, Survey};
use crate::error::warn_once;
use crate::{DiskError, ErrorKind};
use ferrite_host::place::Place;

impl Survey {
    /// Refuses an image whose answered writes are in a journal under another identity. If the image is a copy, its
    /// missing writes are logged.
    ///
    /// # Errors
    /// `Refused`: the writes are elsewhere; the text tells where, and the next step.
    pub fn check(&self, path: &Path) -> Result<(), DiskError> {
        let what = || format!("cannot open image {}", path.display());
        match self {
            Survey { other_way: Some(left), .. } => Err(left.by_another_way(what())),
            Survey { own: Some(_), .. } => Ok(()),
            Survey { moved: Some(left), .. } => Err(left.moved(what())),
            Survey { original: Some(left), .. } => {
                warn_once(&format!(
                    "{} is a copy of {}, without what a killed backend has answered for that and not \
                     flushed",
                    path.display(),
                    left.path.display()
                ));
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Left {
    fn by_another_way(&self, what: String) -> DiskError {
        let path = self.path.display();
        let why = format!(
            "a backend had it open as {path}, and has left answered writes of it which are found by \
             that name only"
        );
        let help = format!(
            "use {path} (losetup attaches a file again), or do without those writes: ferrite image \
             journal drop --force {}",
            self.name
        );
        DiskError::new(ErrorKind::Refused, what, why, help)
    }

    fn moved(&self, what: String) -> DiskError {
        let path = self.path.display();
        let (now, back) = match Place::at(&self.path) {
            Ok(_) => ("another file has that name now", String::new()),
            Err(_) => (
                "it is not there any more",
                format!(", after you have renamed it back to {path} or attached its volume again"),
            ),
        };
        let why = format!(
            "a killed backend has left answered writes of an image with its identifier, which was \
             {path}; {now}, and this may be an older copy of that image"
        );
        let help = format!(
            "if there is that image still, use it{back}; to go on with this one without those \
             writes: ferrite image journal drop {}",
            self.name
        );
        DiskError::new(ErrorKind::Refused, what, why, help)
    }
}

/// The error for an image that does not match the journal called `name`. `parts` are the first and last bytes of the
/// lost ranges.
pub fn lost(what: &str, name: &str, parts: &[(u64, u64)]) -> DiskError {
    let named: Vec<_> = parts.iter().take(8).map(|(a, b)| format!("{a} to {b}")).collect();
    let more = match parts.len() - named.len() {
        0 => String::new(),
        n => format!(" and {n} more parts"),
    };
    let why = format!(
        "another program has written to it, or an older copy was put in its place, after its \
         backend was killed; writes that were answered and not flushed are lost: bytes {}{more}",
        named.join(", ")
    );
    let help = format!(
        "restore a backup, or go on without those writes: ferrite image journal drop --force {name}. \
         If a coalesce was interrupted, its child still has the data: then run coalesce again"
    );
    DiskError::new(ErrorKind::Refused, what, why, help)
}

/// The ranges of a disk that consist of these units, as first and last bytes. `bytes` is the size of a unit.
pub fn parts(mut units: Vec<u64>, bytes: u64, disk_bytes: u64) -> Vec<(u64, u64)> {
    units.retain(|unit| *unit < disk_bytes.div_ceil(bytes));
    units.sort_unstable();
    units.dedup();
    let runs = units.chunk_by(|a, b| a + 1 == *b);
    let last = disk_bytes - 1;
    runs.map(|run| (run[0] * bytes, (run[run.len() - 1] * bytes + bytes - 1).min(last))).collect()
}
