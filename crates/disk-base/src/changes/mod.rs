//! The changed blocks of a tap, as XAPI's storage manager has them recorded (`tap-ctl open -C`).
//!
//! * [`log`]: the file that the storage manager names, in tapdisk's format.
//! * [`ChangeMap`]: the blocks that a worker changes, in memory that survives it and no power cut.
//!
//! # Order of writes
//! 1. The log says that it is not consistent, durably, before a worker opens the disk.
//! 2. A block's bit is set in memory before its data are written.
//! 3. The disk is closed. The bits are added to the log, durably.
//! 4. The log says that it is consistent, if it said so before step 1. The memory goes last.
//!
//! A power cut before step 4 leaves a log that is not consistent. Steps 3 and 4 may be done again: a log may name too
//! much, and never too little.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::Ordering;

use ferrite_host::names;
use ferrite_host::shm::Shm;
use rustix::fs::Mode;

pub mod log;

/// Bytes of a block: the unit of the bits.
pub const BLOCK_BYTES: u64 = 64 << 10;

/// `ferrchg1`.
const MAGIC: u64 = u64::from_le_bytes(*b"ferrchg1");
const HEADER_BYTES: usize = 4096;
const WORDS_AT: usize = HEADER_BYTES / 8;
/// Bytes of the disk that have bits.
const BYTES_AT: usize = 8;
/// Whether the log was consistent when it was begun.
const CONSISTENT_AT: usize = 16;
/// Whether blocks behind the bits were changed.
const BEYOND_AT: usize = 24;

fn file_bytes(bytes: u64) -> usize {
    HEADER_BYTES + 8 * bytes.div_ceil(64 * BLOCK_BYTES) as usize
}

fn no_map() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is no file of changed blocks")
}

/// The changed blocks as the worker has them.
#[derive(Debug)]
pub struct ChangeMap {
    shm: Shm,
    bytes: u64,
}

impl ChangeMap {
    /// Maps the file that [`ChangeMapFile::create`] has made, for a disk of so many bytes.
    ///
    /// # Errors
    /// It cannot be opened. `InvalidData`: it is another file. `InvalidInput`: it is a smaller disk's.
    pub fn open(path: &Path, bytes: u64) -> io::Result<ChangeMap> {
        let shm = Shm::open(path)?;
        if shm.len() < HEADER_BYTES || shm.load_u64(0) != MAGIC {
            return Err(no_map());
        }
        let known = shm.load_u64(BYTES_AT);
        if shm.len() < file_bytes(known) {
            return Err(no_map());
        }
        if known.div_ceil(BLOCK_BYTES) < bytes.div_ceil(BLOCK_BYTES) {
            let text = format!("the log has bits for {known} bytes, and the disk has {bytes}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(ChangeMap { shm, bytes: known })
    }

    /// Notes a range that is about to be changed. It survives the death of this process.
    ///
    /// # Panics
    /// If the range is empty.
    #[inline]
    pub fn note(&self, offset: u64, len: u64) {
        let (first, last) = (offset / BLOCK_BYTES, (offset + len - 1) / BLOCK_BYTES);
        let words = &self.shm.words()[WORDS_AT..];
        for at in first / 64..=last / 64 {
            let from = first.max(at * 64) % 64;
            let to = last.min(at * 64 + 63) % 64;
            let wanted = (u64::MAX << from) & (u64::MAX >> (63 - to));
            let Some(word) = words.get(at as usize) else {
                // The disk has grown while it is open.
                self.shm.store_u64(BEYOND_AT, 1);
                return;
            };
            if word.load(Ordering::Acquire) & wanted != wanted {
                word.fetch_or(wanted, Ordering::AcqRel);
            }
        }
        if last >= self.bytes.div_ceil(BLOCK_BYTES) {
            self.shm.store_u64(BEYOND_AT, 1);
        }
    }
}

/// The file of changed blocks as the daemon has it. It does not map it: a worker could make it shorter.
#[derive(Debug)]
pub struct ChangeMapFile {
    file: File,
    /// Bytes of the disk that have bits.
    pub bytes: u64,
    /// Whether the log was consistent when it was begun.
    pub was_consistent: bool,
}

impl ChangeMapFile {
    /// Makes the file for a log that has bits for so many bytes.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn create(path: &Path, bytes: u64, was_consistent: bool) -> io::Result<ChangeMapFile> {
        if let Some(folder) = path.parent() {
            names::create_dir_all(folder, Mode::RWXU)?;
        }
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(&new)?;
        file.set_len(file_bytes(bytes) as u64)?;
        let mut head = [0; 32];
        head[..8].copy_from_slice(&MAGIC.to_le_bytes());
        head[BYTES_AT..][..8].copy_from_slice(&bytes.to_le_bytes());
        head[CONSISTENT_AT] = u8::from(was_consistent);
        file.write_all_at(&head, 0)?;
        std::fs::rename(&new, path)?;
        Ok(ChangeMapFile { file, bytes, was_consistent })
    }

    /// Opens the file.
    ///
    /// # Errors
    /// Errors of the file system. `InvalidData`: it is another file.
    pub fn open(path: &Path) -> io::Result<ChangeMapFile> {
        let file = File::open(path)?;
        let found = ChangeMapFile { file, bytes: 0, was_consistent: false };
        if found.word(0)? != MAGIC {
            return Err(no_map());
        }
        let (bytes, was_consistent) = (found.word(BYTES_AT)?, found.word(CONSISTENT_AT)? != 0);
        if bytes > log::MAX_DISK_BYTES || found.file.metadata()?.len() < file_bytes(bytes) as u64 {
            return Err(no_map());
        }
        Ok(ChangeMapFile { bytes, was_consistent, ..found })
    }

    fn word(&self, at: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at as u64)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Whether blocks were changed that have no bits: the disk has grown.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn is_beyond(&self) -> io::Result<bool> {
        Ok(self.word(BEYOND_AT)? != 0)
    }

    /// Reads bits: a bit for a block, the lowest of a byte first. `at` counts bytes.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, at: u64, bits: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bits, HEADER_BYTES as u64 + at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_ranges_are_noted_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("map");
        let bytes = 130 * BLOCK_BYTES + 512;
        ChangeMapFile::create(&path, bytes, true).unwrap();
        let map = ChangeMap::open(&path, bytes).unwrap();
        map.note(0, 1);
        map.note(BLOCK_BYTES * 2 - 1, 2);
        map.note(BLOCK_BYTES * 62, 4 * BLOCK_BYTES);
        map.note(bytes - 1, 1);
        let found = ChangeMapFile::open(&path).unwrap();
        let mut bits = [0; 17];
        found.read(0, &mut bits).unwrap();
        let set: Vec<usize> =
            (0..17 * 8).filter(|bit| bits[bit / 8] >> (bit % 8) & 1 != 0).collect();
        assert_eq!(set, [0, 1, 2, 62, 63, 64, 65, 130]);
        assert!(found.was_consistent && !found.is_beyond().unwrap());
        // The disk grows.
        map.note(131 * BLOCK_BYTES, 1);
        assert!(found.is_beyond().unwrap());
        let smaller = ChangeMap::open(&path, bytes + BLOCK_BYTES).unwrap_err();
        assert_eq!(smaller.kind(), io::ErrorKind::InvalidInput);
    }
}
