//! A disk's counters as a reader sees them, whatever the file holds.
//!
//! The file is read and not mapped: if its writer makes it shorter, the read is short and the
//! reader goes on.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::counts::Counts;
use super::histogram::BUCKETS;
use super::layout::{
    BOOT_AT, DISK_TEXT_AT, DISK_TEXT_MAX, ERRORS, HISTOGRAM, IMAGE_CHANGES_AT, IMAGE_TEXT_AT,
    IMAGE_TEXT_MAX, KIND_WORDS, KINDS_AT, LIMITS_AT, MADE_AT, MAGIC, MAGIC_AT, MAX_NS, PAGE_BYTES,
    PAGE_WORDS, PAGES, PID_AT, SECTORS, SIZE_AT, SPACE_SINCE_AT, STARTED_AT, SUBMITTED, SUM_NS,
    USED_AT,
};
use crate::path::limit::KINDS;

/// Attempts to read a file that is being written.
const ATTEMPTS: u32 = 10;

/// Why a file does not show a disk's counters.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is shorter than its header says.
    #[error("it is too short: {0} bytes")]
    Short(u64),
    /// The file is not one of counters.
    #[error("it is no file of counters")]
    Foreign,
    /// The file is of another version of ferrite.
    #[error("it is of another version of ferrite ({0:?})")]
    Version(String),
    /// The file's contents are invalid.
    #[error("its contents are not valid: {0}")]
    Invalid(&'static str),
    /// The file is being written.
    #[error("it is being written")]
    Torn,
}

/// A boot of the machine: the kernel's random number for it, zeros if it is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Boot(pub [u8; 16]);

impl Boot {
    /// The current boot.
    pub fn now() -> Boot {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        Boot(u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes())
    }
}

/// The counters of one kind of request. Sums wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindCounts {
    /// Requests that were begun.
    pub submitted: u64,
    /// Requests that were answered, also with an error.
    pub completed: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    /// Sectors of 512 bytes of successful requests.
    pub sectors: u64,
    /// The sum of the latencies from the ring to the answer, in nanoseconds.
    pub sum_ns: u64,
    /// The longest latency, in nanoseconds.
    pub max_ns: u64,
    /// The number of requests in each bucket of latencies.
    pub histogram: [u64; BUCKETS],
}

impl Default for KindCounts {
    fn default() -> KindCounts {
        let (submitted, completed, errors) = (0, 0, 0);
        let (sectors, sum_ns, max_ns) = (0, 0, 0);
        KindCounts {
            submitted,
            completed,
            errors,
            sectors,
            sum_ns,
            max_ns,
            histogram: [0; BUCKETS],
        }
    }
}

impl KindCounts {
    /// Requests without an answer.
    pub fn in_flight(&self) -> u64 {
        self.submitted.saturating_sub(self.completed)
    }

    /// The counts since `earlier`. The longest latency is of all time.
    pub fn since(&self, earlier: &KindCounts) -> KindCounts {
        KindCounts {
            submitted: self.submitted.saturating_sub(earlier.submitted),
            completed: self.completed.saturating_sub(earlier.completed),
            errors: self.errors.saturating_sub(earlier.errors),
            sectors: self.sectors.saturating_sub(earlier.sectors),
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
            max_ns: self.max_ns,
            histogram: std::array::from_fn(|i| {
                self.histogram[i].saturating_sub(earlier.histogram[i])
            }),
        }
    }

    fn add(&mut self, block: &[u64]) {
        let sum = |a: &mut u64, b: u64| *a = a.wrapping_add(b);
        sum(&mut self.submitted, block[SUBMITTED]);
        sum(&mut self.sectors, block[SECTORS]);
        sum(&mut self.errors, block[ERRORS]);
        sum(&mut self.sum_ns, block[SUM_NS]);
        self.max_ns = self.max_ns.max(block[MAX_NS]);
        for (all, n) in self.histogram.iter_mut().zip(&block[HISTOGRAM..]) {
            sum(all, *n);
            sum(&mut self.completed, *n);
        }
    }
}

/// A disk's counters at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The disk's name: `vbd-DOMID-DEVID`.
    pub disk: String,
    /// The path of the served image.
    pub image: String,
    /// The process that counts, or has counted last.
    pub pid: u32,
    /// The start of that process, see [`Process::started`].
    pub started: u64,
    /// The boot in which the file was made.
    pub boot: Boot,
    /// The creation of the file, in seconds since 1970.
    pub made_unix_s: u64,
    /// The counters of all queues.
    pub counts: Counts,
    /// The time since when requests wait for space, in seconds since 1970. `None`: no request
    /// waits.
    pub full_since_unix_s: Option<u64>,
    /// The limits in a second, in the order of their [names](crate::path::limit::NAMES); 0 for
    /// none.
    pub limits: [u64; KINDS],
    /// The counters of reads.
    pub reads: KindCounts,
    /// The counters of writes, barriers, and flushes with data.
    pub writes: KindCounts,
    /// The counters of other flushes.
    pub flushes: KindCounts,
    /// The counters of discards.
    pub discards: KindCounts,
}

impl Snapshot {
    /// The kinds with their names.
    pub fn kinds(&self) -> [(&'static str, &KindCounts); 4] {
        [
            ("read", &self.reads),
            ("write", &self.writes),
            ("flush", &self.flushes),
            ("discard", &self.discards),
        ]
    }

    /// The process that counts, if it lives.
    pub fn process(&self) -> Option<Process> {
        process(self.pid).filter(|process| process.started == self.started && self.started != 0)
    }
}

/// Reads the counters of a disk.
///
/// # Errors
/// The file is not one of counters, or cannot be read now.
pub fn read(path: &Path) -> Result<Snapshot, Problem> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    of(&OpenOptions::new().read(true).custom_flags(flags).open(path)?)
}

/// Reads the counters from an open file.
///
/// # Errors
/// As [`read`].
pub fn of(file: &File) -> Result<Snapshot, Problem> {
    if !file.metadata()?.is_file() {
        return Err(Problem::Foreign);
    }
    let mut bytes = vec![0; PAGE_BYTES];
    for _ in 0..ATTEMPTS {
        bytes.truncate(PAGE_BYTES);
        read_at(file, 0, &mut bytes)?;
        let used = check(&bytes)?;
        bytes.resize((1 + used) * PAGE_BYTES, 0);
        read_at(file, PAGE_BYTES as u64, &mut bytes[PAGE_BYTES..])?;
        let mut again = [0; 8];
        read_at(file, 8 * IMAGE_CHANGES_AT as u64, &mut again)?;
        if u64::from_ne_bytes(again) == word(&bytes, IMAGE_CHANGES_AT)
            && let Ok(snapshot) = parse(&bytes)
        {
            return Ok(snapshot);
        }
    }
    parse(&bytes).and(Err(Problem::Torn))
}

fn read_at(file: &File, at: u64, into: &mut [u8]) -> Result<(), Problem> {
    file.read_exact_at(into, at).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => {
            Problem::Short(file.metadata().map_or(0, |meta| meta.len()))
        }
        _ => Problem::Io(e),
    })
}

/// Decodes the bytes of a file.
///
/// # Errors
/// It is not a file of counters.
pub fn parse(bytes: &[u8]) -> Result<Snapshot, Problem> {
    let used = check(bytes)?;
    let pages = bytes[PAGE_BYTES..].chunks_exact(PAGE_BYTES).take(used);
    if pages.len() < used {
        return Err(Problem::Short(bytes.len() as u64));
    }
    if !word(bytes, IMAGE_CHANGES_AT).is_multiple_of(2) {
        return Err(Problem::Torn);
    }
    let mut boot = [0; 16];
    boot.copy_from_slice(&bytes[8 * BOOT_AT..8 * BOOT_AT + 16]);
    let mut snapshot = Snapshot {
        disk: text(bytes, DISK_TEXT_AT, DISK_TEXT_MAX)?,
        image: text(bytes, IMAGE_TEXT_AT, IMAGE_TEXT_MAX)?,
        pid: u32::try_from(word(bytes, PID_AT))
            .map_err(|_| Problem::Invalid("the number of its process"))?,
        started: word(bytes, STARTED_AT),
        boot: Boot(boot),
        made_unix_s: word(bytes, MADE_AT),
        counts: Counts::default(),
        full_since_unix_s: None,
        limits: std::array::from_fn(|i| word(bytes, LIMITS_AT + i)),
        reads: KindCounts::default(),
        writes: KindCounts::default(),
        flushes: KindCounts::default(),
        discards: KindCounts::default(),
    };
    for page in pages {
        let page: [u64; PAGE_WORDS] = std::array::from_fn(|i| word(page, i));
        let mut counts = Counts::default();
        counts.add(&page);
        if counts.waiting_for_space() > 0 {
            let since = page[SPACE_SINCE_AT];
            let earliest = snapshot.full_since_unix_s.map_or(since, |other| other.min(since));
            snapshot.full_since_unix_s = Some(earliest);
        }
        snapshot.counts = snapshot.counts.plus(&counts);
        let Snapshot { reads, writes, flushes, discards, .. } = &mut snapshot;
        let blocks = page[KINDS_AT..].chunks_exact(KIND_WORDS);
        for (kind, block) in [reads, writes, flushes, discards].into_iter().zip(blocks) {
            kind.add(block);
        }
    }
    Ok(snapshot)
}

/// The pages after a valid header.
fn check(bytes: &[u8]) -> Result<usize, Problem> {
    if bytes.len() < PAGE_BYTES {
        return Err(Problem::Short(bytes.len() as u64));
    }
    let magic = &bytes[8 * MAGIC_AT..8 * MAGIC_AT + 8];
    if magic[..6] != MAGIC[..6] {
        return Err(Problem::Foreign);
    }
    if magic != MAGIC {
        return Err(Problem::Version(String::from_utf8_lossy(&magic[6..]).into_owned()));
    }
    if word(bytes, SIZE_AT) != PAGE_BYTES as u64 {
        return Err(Problem::Invalid("the size of its pages"));
    }
    match usize::try_from(word(bytes, USED_AT)) {
        Ok(used) if used <= PAGES => Ok(used),
        _ => Err(Problem::Invalid("the number of its queues")),
    }
}

fn word(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[8 * index..8 * index + 8]);
    u64::from_ne_bytes(word)
}

fn text(bytes: &[u8], at: usize, max: usize) -> Result<String, Problem> {
    let len = usize::try_from(word(bytes, at / 8)).ok().filter(|len| *len <= max);
    let len = len.ok_or(Problem::Invalid("the length of a name"))?;
    Ok(String::from_utf8_lossy(&bytes[at + 8..at + 8 + len]).into_owned())
}

/// The kernel's data of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process's start, in ticks since boot.
    pub started: u64,
    /// Processor time of all its threads in user and kernel mode, in ticks.
    pub cpu_ticks: u64,
}

/// The process of this number, if there is one.
pub fn process(pid: u32) -> Option<Process> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The fields from the third on follow the name, which may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    if fields.first() == Some(&"Z") {
        return None;
    }
    Some(Process { started: field(22)?, cpu_ticks: field(14)?.checked_add(field(15)?)? })
}
