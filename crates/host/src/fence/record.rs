//! The key of this host at a LUN, kept where it outlives the host's restart.
//!
//! # Order of writes
//! A key stands durably in the record before it is registered, and the record is removed after it was unregistered. So a key of
//! this host's at the LUN is always known here, however the process or the host ends.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// The first line of a record.
const FIRST: &str = "ferrite-fence 1";
const MAX_BYTES: u64 = 4096;
/// The end of the name of the file that is locked while a record and its LUN change.
const LOCK: &str = "lock";

/// Where the kernel tells which start of the host this is.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The state of this host at the LUN, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The keys by which it may be registered: the one that it had, and one that is about to take its place. None: it has
    /// nothing at the LUN.
    pub keys: Vec<u64>,
    /// Whether a disk has had the reservation since the host has started, and has not given it back. Its guest may go on.
    pub is_held: bool,
}

/// A record.
pub trait Record {
    /// Its entry.
    ///
    /// # Errors
    /// It cannot be read.
    fn get(&self) -> io::Result<Entry>;

    /// Replaces that, durably. Without keys the record goes.
    ///
    /// # Errors
    /// It cannot be written.
    fn set(&self, keys: &[u64], is_held: bool) -> io::Result<()>;
}

/// A record in a file. It is locked against other processes of this host.
#[derive(Debug)]
pub struct FileRecord {
    path: PathBuf,
    _lock: File,
}

impl FileRecord {
    /// The record of the LUN with this name. It waits while another process has it.
    ///
    /// # Errors
    /// The folder cannot be made, or the lock not be had.
    pub fn open(folder: &Path, identity: &str) -> io::Result<FileRecord> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let path = folder.join(identity);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
        let lock = options.open(folder.join(format!("{identity}.{LOCK}")))?;
        lock.lock()?;
        Ok(FileRecord { path, _lock: lock })
    }
}

impl Record for FileRecord {
    fn get(&self) -> io::Result<Entry> {
        let mut text = String::new();
        match File::open(&self.path) {
            Ok(file) => file.take(MAX_BYTES).read_to_string(&mut text)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Entry::default()),
            Err(e) => return Err(e),
        };
        parse(&text, fs::read_to_string(BOOT)?.trim()).ok_or_else(|| {
            let text = format!("{} is no record of a reservation", self.path.display());
            io::Error::new(io::ErrorKind::InvalidData, text)
        })
    }

    fn set(&self, keys: &[u64], is_held: bool) -> io::Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        if keys.is_empty() {
            match fs::remove_file(&self.path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => return File::open(folder)?.sync_all(),
            }
        }
        let mut new = self.path.clone().into_os_string();
        new.push(".new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
        let mut file = options.open(&new)?;
        let lines: String = keys.iter().map(|key| format!("key {key:016x}\n")).collect();
        let held = match is_held {
            true => format!("held {}\n", fs::read_to_string(BOOT)?.trim()),
            false => String::new(),
        };
        file.write_all(format!("{FIRST}\n{lines}{held}").as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        File::open(folder)?.sync_all()
    }
}

fn parse(text: &str, boot: &str) -> Option<Entry> {
    let mut lines = text.lines();
    (lines.next() == Some(FIRST)).then_some(())?;
    let mut entry = Entry::default();
    for (word, value) in lines.map(|line| line.split_once(' ').unwrap_or_default()) {
        match word {
            "key" => entry.keys.push(u64::from_str_radix(value, 16).ok()?),
            "held" => entry.is_held = value == boot,
            _ => return None,
        }
    }
    let is_valid = (1..=2).contains(&entry.keys.len()) && !entry.keys.contains(&0);
    is_valid.then_some(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_there_again_and_damage_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let record = FileRecord::open(&dir.path().join("a/b"), "naa.1").unwrap();
        assert_eq!(record.get().unwrap(), Entry::default());
        let two = Entry { keys: vec![7, u64::MAX], is_held: true };
        record.set(&two.keys, two.is_held).unwrap();
        assert_eq!(record.get().unwrap(), two);
        // The host has started again since.
        let text = fs::read_to_string(&record.path).unwrap();
        assert_eq!(parse(&text, "other").unwrap(), Entry { is_held: false, ..two });
        record.set(&[7], false).unwrap();
        assert_eq!(record.get().unwrap(), Entry { keys: vec![7], is_held: false });
        record.set(&[], false).unwrap();
        record.set(&[], false).unwrap();
        assert_eq!(record.get().unwrap(), Entry::default());
        for damaged in [
            "",
            "ferrite-fence 1\n",
            "ferrite-fence 1\nkey 0\n",
            "key 1\n",
            "ferrite-fence 1\nkey x\n",
            "ferrite-fence 1\nkey 1\nx",
        ] {
            fs::write(&record.path, damaged).unwrap();
            assert!(record.get().is_err(), "{damaged:?}");
        }
    }
}
