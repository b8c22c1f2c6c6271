//! The log of changed blocks that XAPI's storage manager keeps for a disk, in tapdisk's format.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 16 | the identifier of the parent's log; zeros: none |
//! | 16 | 16 | the identifier of the child's log |
//! | 32 | 4 | whether the log is consistent |
//! | 40 | 8 | bytes of the disk |
//! | 48 | | a bit for each block of 64 KiB, the lowest of a byte first |
//!
//! Numbers are those of the processor. A log is a file or a volume of LVM, so it may be longer. It is changed in place.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::{BLOCK_BYTES, ChangeMapFile};

/// The largest disk that has a log.
pub const MAX_DISK_BYTES: u64 = 64 << 40;
/// Bytes before the bits.
pub const HEADER_BYTES: u64 = 48;
/// Bytes of bits that are changed at a time.
const PART_BYTES: usize = 64 << 10;

/// Bytes of the bits of a disk.
pub fn bits_bytes(disk_bytes: u64) -> u64 {
    disk_bytes.div_ceil(BLOCK_BYTES).div_ceil(8)
}

/// Why a log cannot be used.
#[derive(Debug)]
pub struct LogError {
    /// The number of the error.
    pub errno: Errno,
    /// The failed step and the reason.
    pub why: String,
    /// The next step for the administrator.
    pub help: &'static str,
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.why, self.help)
    }
}

impl std::error::Error for LogError {}

/// The fields before the bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// The identifier of the parent's log.
    pub parent: [u8; 16],
    /// The identifier of the child's log.
    pub child: [u8; 16],
    /// Not 0: the bits name all changes.
    pub consistent: u32,
    /// Bytes of the disk.
    pub bytes: u64,
}

impl Head {
    fn parse(bytes: &[u8; HEADER_BYTES as usize]) -> Head {
        let mut head = Head::default();
        head.parent.copy_from_slice(&bytes[..16]);
        head.child.copy_from_slice(&bytes[16..32]);
        let (mut flag, mut size) = ([0; 4], [0; 8]);
        flag.copy_from_slice(&bytes[32..36]);
        size.copy_from_slice(&bytes[40..48]);
        (head.consistent, head.bytes) = (u32::from_ne_bytes(flag), u64::from_ne_bytes(size));
        head
    }

    fn to_bytes(self) -> [u8; HEADER_BYTES as usize] {
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[..16].copy_from_slice(&self.parent);
        bytes[16..32].copy_from_slice(&self.child);
        bytes[32..36].copy_from_slice(&self.consistent.to_ne_bytes());
        bytes[40..].copy_from_slice(&self.bytes.to_ne_bytes());
        bytes
    }
}

/// An open log.
#[derive(Debug)]
pub struct Log {
    file: File,
    path: PathBuf,
    /// Its fields.
    pub head: Head,
}

const HELP: &str = "name a log that cbt-util has made";

impl Log {
    /// Makes a log of a disk of so many bytes, without changes and not consistent. One that is there is overwritten.
    ///
    /// # Errors
    /// It cannot be written, or there is something else.
    pub fn create(path: &Path, bytes: u64) -> Result<Log, LogError> {
        if bytes == 0 || bytes > MAX_DISK_BYTES {
            let why = format!("a disk of {bytes} bytes has no log");
            return Err(LogError { errno: Errno::INVAL, why, help: "1 byte to 64 TiB" });
        }
        let file = open_as(path, OFlags::RDWR | OFlags::CREATE)?;
        let log = Log { file, path: path.to_owned(), head: Head { bytes, ..Head::default() } };
        // An older log must not count as consistent with a part of its bits.
        let made = log.write_head().and_then(|()| log.zero(0, bits_bytes(bytes)));
        let end = HEADER_BYTES + bits_bytes(bytes);
        made.and_then(|()| match log.file.metadata()?.is_file() {
            true => log.file.set_len(end),
            false => Ok(()),
        })
        .and_then(|()| log.file.sync_all())
        .map_err(|e| log.cannot("write", &e))?;
        Ok(log)
    }

    /// Opens a log, for writing if asked.
    ///
    /// # Errors
    /// There is none, this process may not, or it is something else.
    pub fn open(path: &Path, writable: bool) -> Result<Log, LogError> {
        let file = open_as(path, if writable { OFlags::RDWR } else { OFlags::RDONLY })?;
        let mut log = Log { file, path: path.to_owned(), head: Head::default() };
        let mut bytes = [0; HEADER_BYTES as usize];
        let read = log.file.read_exact_at(&mut bytes, 0);
        read.map_err(|e| log.damaged_by(&e, "it is shorter than a header"))?;
        log.head = Head::parse(&bytes);
        if log.head.bytes == 0 || log.head.bytes > MAX_DISK_BYTES {
            let text = format!("it says that the disk has {} bytes", log.head.bytes);
            return Err(log.damaged(&text));
        }
        let last = HEADER_BYTES + bits_bytes(log.head.bytes) - 1;
        let read = log.file.read_exact_at(&mut [0], last);
        read.map_err(|e| log.damaged_by(&e, "it is shorter than its bits"))?;
        Ok(log)
    }

    fn damaged(&self, why: &str) -> LogError {
        let why = format!("{} is no log of changed blocks: {why}", self.path.display());
        LogError { errno: Errno::INVAL, why, help: HELP }
    }

    fn damaged_by(&self, e: &io::Error, short: &str) -> LogError {
        match e.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged(short),
            _ => self.cannot("read", e),
        }
    }

    fn cannot(&self, what: &str, e: &io::Error) -> LogError {
        let errno = Errno::from_io_error(e).unwrap_or(Errno::INVAL);
        let why = format!("cannot {what} the log {}: {e}", self.path.display());
        LogError { errno, why, help: "look at its storage (dmesg)" }
    }

    fn write_head(&self) -> io::Result<()> {
        self.file.write_all_at(&self.head.to_bytes(), 0)
    }

    fn zero(&self, from: u64, to: u64) -> io::Result<()> {
        let zeros = vec![0; PART_BYTES];
        let mut at = from;
        while at < to {
            let len = (to - at).min(PART_BYTES as u64);
            self.file.write_all_at(&zeros[..len as usize], HEADER_BYTES + at)?;
            at += len;
        }
        Ok(())
    }

    /// Changes the fields besides the size, durably.
    ///
    /// # Errors
    /// The log cannot be written.
    pub fn set(&mut self, change: impl FnOnce(&mut Head)) -> Result<(), LogError> {
        let bytes = self.head.bytes;
        change(&mut self.head);
        self.head.bytes = bytes;
        let written = self.write_head().and_then(|()| self.file.sync_all());
        written.map_err(|e| self.cannot("write", &e))
    }

    /// Makes it the log of a larger disk. The new part counts as unchanged.
    ///
    /// # Errors
    /// The disk would shrink; the log cannot be written.
    pub fn grow(&mut self, bytes: u64) -> Result<(), LogError> {
        if bytes < self.head.bytes || bytes > MAX_DISK_BYTES {
            let why = format!("the log's disk has {} bytes, and cannot shrink", self.head.bytes);
            return Err(LogError { errno: Errno::INVAL, why, help: "name a larger size" });
        }
        let (old, new) = (bits_bytes(self.head.bytes), bits_bytes(bytes));
        // The bits come before the size that has them.
        let written = self.zero(old, new).and_then(|()| self.file.sync_all());
        self.head.bytes = bytes;
        let written = written.and_then(|()| self.write_head()).and_then(|()| self.file.sync_all());
        written.map_err(|e| self.cannot("write", &e))
    }

    /// Calls `f` with all bits, part by part.
    ///
    /// # Errors
    /// The log cannot be read, or the first error of `f`.
    pub fn bits(&self, mut f: impl FnMut(&[u8]) -> Result<(), LogError>) -> Result<(), LogError> {
        self.parts(bits_bytes(self.head.bytes), |at, part| {
            self.read(at, part)?;
            f(part)
        })
    }

    fn parts(
        &self,
        all: u64,
        mut f: impl FnMut(u64, &mut [u8]) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        let (mut part, mut at) = (vec![0; PART_BYTES], 0);
        while at < all {
            let len = (all - at).min(PART_BYTES as u64) as usize;
            f(at, &mut part[..len])?;
            at += len as u64;
        }
        Ok(())
    }

    fn read(&self, at: u64, part: &mut [u8]) -> Result<(), LogError> {
        let read = self.file.read_exact_at(part, HEADER_BYTES + at);
        read.map_err(|e| self.damaged_by(&e, "it is shorter than its bits"))
    }

    /// Adds bits, durably. `more` reads them from a byte on.
    fn add(
        &self,
        all: u64,
        more: impl Fn(u64, &mut [u8]) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        let mut own = vec![0; PART_BYTES];
        self.parts(all, |at, part| {
            more(at, part)?;
            let own = &mut own[..part.len()];
            self.read(at, own)?;
            let lacks = own.iter().zip(&*part).any(|(own, more)| !own & more != 0);
            own.iter_mut().zip(&*part).for_each(|(own, more)| *own |= more);
            match lacks {
                true => self.file.write_all_at(own, HEADER_BYTES + at),
                false => Ok(()),
            }
            .map_err(|e| self.cannot("write", &e))
        })?;
        self.file.sync_all().map_err(|e| self.cannot("write", &e))
    }

    /// Adds the changes of a log of the same disk when it was no larger.
    ///
    /// # Errors
    /// That log has more bits; one of the two cannot be read or written.
    pub fn add_log(&self, other: &Log) -> Result<(), LogError> {
        let all = bits_bytes(other.head.bytes);
        if all > bits_bytes(self.head.bytes) {
            let why = format!(
                "{} has bits for {} bytes, and {} for {}",
                other.path.display(),
                other.head.bytes,
                self.path.display(),
                self.head.bytes
            );
            let help = "make the child's log larger first (cbt-util set -s)";
            return Err(LogError { errno: Errno::INVAL, why, help });
        }
        self.add(all, |at, part| other.read(at, part))
    }

    /// Adds what a worker has changed. A log that is smaller now has lost bits: it is no error, and `false`.
    ///
    /// # Errors
    /// The log cannot be read or written.
    pub fn add_map(&self, map: &ChangeMapFile) -> Result<bool, LogError> {
        let (own, all) = (bits_bytes(self.head.bytes), bits_bytes(map.bytes));
        let cannot = |e: io::Error| self.cannot("read the changed blocks for", &e);
        self.add(own.min(all), |at, part| map.read(at, part).map_err(cannot))?;
        Ok(own >= all && !map.is_beyond().map_err(cannot)?)
    }
}

/// Opens a file or a volume. Nothing else is waited for.
fn open_as(path: &Path, flags: OFlags) -> Result<File, LogError> {
    let refused = |errno: Errno, why: String| LogError { errno, why, help: HELP };
    let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| {
        let errno = if e == Errno::AGAIN { Errno::INVAL } else { e };
        refused(errno, format!("cannot open the log {}: {e}", path.display()))
    })?;
    let file = File::from(file);
    let kind = file.metadata().map(|meta| meta.file_type());
    match kind {
        Ok(kind) if kind.is_file() || kind.is_block_device() => Ok(file),
        Ok(kind) => {
            let errno = if kind.is_dir() { Errno::ISDIR } else { Errno::INVAL };
            Err(refused(errno, format!("{} is no file and no volume", path.display())))
        }
        Err(e) => Err(refused(Errno::INVAL, format!("cannot look at {}: {e}", path.display()))),
    }
}
