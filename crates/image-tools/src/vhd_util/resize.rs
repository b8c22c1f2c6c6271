//! Another size of a VHD, with a journal that takes it back.
//!
//! At any moment the image is whole and has its old or its new size (`Vhd::resize`), and its data are the same. So the
//! journal is only what tells both apart: the old footer, and the number of entries of the old table. The order:
//!
//! 1. The journal, `fdatasync`, its folder.
//! 2. The image.
//! 3. The journal is removed; its folder. On a device its head becomes zeros; `fdatasync`.
//!
//! While there is a journal, [`ImageTools::revert_vhd`] gives the image back its old size: the old footers come before
//! the smaller table.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use ferrite_disk_base::{DiskError, ErrorKind, Port, Raw};
use ferrite_images::open_medium;
use ferrite_images::vhd::{self, Vhd};

use super::failed;
use crate::io_context::IoContext;
use crate::{ImageTools, broken, unsuitable};

/// The first bytes of a journal.
const MAGIC: [u8; 16] = *b"ferrite-vhd-size";
/// Bytes of a journal.
const BYTES: usize = 4096;
const ENTRIES_AT: usize = 16;
const SUM_AT: usize = 20;
const FOOTER_AT: usize = 512;
const FOOTER_BYTES: usize = 512;

/// The old headers of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Old {
    footer: [u8; FOOTER_BYTES],
    /// Entries of the table; 0: it is fixed.
    entries: u32,
}

impl Old {
    fn of(vhd: &Vhd) -> Old {
        Old { footer: vhd.footer_bytes(), entries: vhd.table_entries().unwrap_or(0) }
    }

    fn bytes(&self) -> [u8; BYTES] {
        let mut out = [0; BYTES];
        out[..MAGIC.len()].copy_from_slice(&MAGIC);
        out[ENTRIES_AT..SUM_AT].copy_from_slice(&self.entries.to_be_bytes());
        out[FOOTER_AT..FOOTER_AT + FOOTER_BYTES].copy_from_slice(&self.footer);
        let sum = sum(&out);
        out[SUM_AT..SUM_AT + 4].copy_from_slice(&sum.to_be_bytes());
        out
    }

    /// The content of a journal. `None`: it is none, or not whole. Then the image was not changed yet.
    fn parse(bytes: &[u8]) -> Option<Old> {
        let found = bytes.get(..BYTES).filter(|bytes| bytes.starts_with(&MAGIC))?;
        let footer = found[FOOTER_AT..FOOTER_AT + FOOTER_BYTES].try_into().ok()?;
        let entries = u32::from_be_bytes(found[ENTRIES_AT..SUM_AT].try_into().ok()?);
        let old = Old { footer, entries };
        (old.bytes()[..] == *found && vhd::identity_in(&footer).is_some()).then_some(old)
    }
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)))
}

impl ImageTools<'_> {
    /// Makes the disk of a VHD larger, with a journal by which it can be taken back if this is interrupted. If it fails
    /// it is taken back.
    ///
    /// # Errors
    /// `Io` with the kernel's `EEXIST`: there is a journal. Those of a resize.
    pub fn resize_vhd(&self, path: &Path, bytes: u64, journal: &Path) -> Result<(), DiskError> {
        let what = || format!("cannot resize {}", path.display());
        self.settle(path)?;
        let vhd = Vhd::open(path, &self.vhd_options(false))?;
        let bytes = if vhd.table_entries().is_some() { super::rounded(bytes) } else { bytes };
        if bytes < vhd.bytes() {
            let why = format!("its disk has {} bytes already", vhd.bytes());
            return Err(unsuitable(what(), why, "a disk here becomes larger only"));
        }
        self.begin_journal(journal, &Old::of(&vhd))?;
        if bytes > vhd.bytes()
            && let Err(e) = self.set_vhd_size(vhd, bytes, what())
        {
            self.revert_vhd(path, journal)?;
            return Err(e);
        }
        self.end_journal(journal)
    }

    fn set_vhd_size(&self, vhd: Vhd, bytes: u64, what: String) -> Result<(), DiskError> {
        let cannot = |e| broken(what.clone(), e);
        let files = vhd.medium().files();
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port_of(files).map_err(cannot)?;
        context.run(async { Ok(vhd.resize(&port, bytes).await) }).map_err(cannot)?
    }

    /// Takes a resize back, whose journal is there, and removes the journal.
    ///
    /// # Errors
    /// `NotFound`: there is no journal. `Unsuitable`: it is of another image. Errors of the kernel: the image is whole,
    /// and this can be done again.
    pub fn revert_vhd(&self, path: &Path, journal: &Path) -> Result<(), DiskError> {
        let what = || format!("cannot take back a resize of {}", path.display());
        let raw = open_medium(journal, &self.vhd_options(true))?;
        let found = raw.read_now(0, BYTES).map_err(|e| broken(what(), e))?;
        let vhd = Vhd::open(path, &self.vhd_options(false))?;
        match Old::parse(&found) {
            Some(old) => self.on_vhd(vhd, what, async |vhd, port| {
                vhd.take_back(port, &old.footer, old.entries).await
            })?,
            None if raw.is_file() && is_begun(&found) => {}
            None => {
                let why = format!("{} is no journal of a resize", journal.display());
                return Err(unsuitable(what(), why, "name the journal that vhd-util resize made"));
            }
        }
        drop(raw);
        self.end_journal(journal)
    }

    /// Writes a journal, durably.
    fn begin_journal(&self, journal: &Path, old: &Old) -> Result<(), DiskError> {
        let what = || format!("cannot make the journal {}", journal.display());
        if !self.is_device(journal) {
            let file = self.directory.create_new(journal).map_err(|e| match e.kind() {
                io::ErrorKind::AlreadyExists => {
                    let why = "it is there: a resize was interrupted";
                    let help = "vhd-util revert takes that back";
                    DiskError::new(ErrorKind::Io, what(), why, help).with_source(e)
                }
                _ => broken(what(), e),
            })?;
            let readable = Permissions::from_mode(0o644);
            let made = std::fs::File::from(file).set_permissions(readable);
            made.map_err(|e| broken(what(), e))?;
        }
        self.on_journal(journal, async |port, _| {
            let memory = port.scratch.take(BYTES).await;
            memory.copy_in(&old.bytes());
            port.io.write_all(port.files[0], 0, memory.span()).await?;
            port.io.sync(port.files[0]).await
        })?;
        self.sync_dir(journal)
    }

    /// Removes a journal, durably.
    fn end_journal(&self, journal: &Path) -> Result<(), DiskError> {
        if self.is_device(journal) {
            return self.on_journal(journal, async |port, _| {
                let memory = port.scratch.take(BYTES).await;
                port.memory().fill(memory.span(), 0);
                port.io.write_all(port.files[0], 0, memory.span()).await?;
                port.io.sync(port.files[0]).await
            });
        }
        let what = || format!("cannot remove the journal {}", journal.display());
        self.directory.remove(journal).map_err(|e| broken(what(), e))?;
        self.sync_dir(journal)
    }

    fn on_journal(
        &self,
        journal: &Path,
        steps: impl AsyncFnOnce(&Port, &Raw) -> io::Result<()>,
    ) -> Result<(), DiskError> {
        let cannot = |e| failed(format!("cannot write the journal {}", journal.display()), e);
        let raw = open_medium(journal, &self.vhd_options(false))?;
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port_of(raw.files()).map_err(cannot)?;
        context.run(steps(&port, &raw)).map_err(cannot)
    }
}

/// Whether a file is a journal that was not written to its end: the image was not changed then.
fn is_begun(found: &[u8]) -> bool {
    found.starts_with(&MAGIC) || found.iter().all(|byte| *byte == 0)
}
