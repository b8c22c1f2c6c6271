//! The file of a disk's counters: a page that says whose they are, and a page a queue.
//!
//! All numbers are 64-bit words in the machine's order. A word has one writer, and only grows, but for
//! [`SUBMITTED`]. So readers need no lock: they see one word a moment before another.

/// Bytes of the header, and of a queue's part.
pub(super) const PAGE_BYTES: usize = 4096;
/// Words of it.
pub(super) const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// Most queues of a disk: the paths of all its frontends.
pub(super) const PAGES: usize = 128;

/// "FERSTA01"; the last two are the version.
pub(super) const MAGIC: [u8; 8] = *b"FERSTA01";

// Words of the header.
pub(super) const MAGIC_AT: usize = 0;
/// Bytes of a page.
pub(super) const SIZE_AT: usize = 1;
/// Pages of queues that were ever used.
pub(super) const USED_AT: usize = 2;
/// Seconds since 1970, when the file was made.
pub(super) const MADE_AT: usize = 3;
/// The process that counts,
pub(super) const PID_AT: usize = 4;
/// and when that was started, in ticks since the machine's start: numbers of processes are used again.
pub(super) const STARTED_AT: usize = 5;
/// Which start of the machine it was: 16 bytes.
pub(super) const BOOT_AT: usize = 6;
/// The number of changes of the image's name, twice; odd while it is changed.
pub(super) const IMAGE_CHANGES_AT: usize = 8;

/// Texts, as their length and their bytes: the disk's name,
pub(super) const DISK_TEXT_AT: usize = 128;
pub(super) const DISK_TEXT_MAX: usize = 100;
/// and the image's.
pub(super) const IMAGE_TEXT_AT: usize = 256;
pub(super) const IMAGE_TEXT_MAX: usize = PAGE_BYTES - IMAGE_TEXT_AT - 8;

// Words of a queue's page: the counters, then a block for each kind of request.
/// Seconds since 1970, when the first of those requests of the queue began to wait for space that wait
/// now, if any do.
pub(super) const SPACE_SINCE_AT: usize = 31;
pub(super) const KINDS_AT: usize = 32;
pub(super) const KIND_WORDS: usize = 120;

// Words of such a block.
/// Requests that were begun. Those of them that a dead process left are taken off at the next start,
/// as they are begun again.
pub(super) const SUBMITTED: usize = 0;
/// Sectors of requests that were done.
pub(super) const SECTORS: usize = 1;
/// Requests that failed.
pub(super) const ERRORS: usize = 2;
/// The latencies of all that were answered, in nanoseconds.
pub(super) const SUM_NS: usize = 3;
/// The longest of them.
pub(super) const MAX_NS: usize = 4;
/// How many there were, by latency.
pub(super) const HISTOGRAM: usize = 16;

const _: () = assert!(KINDS_AT + 4 * KIND_WORDS == PAGE_WORDS);
const _: () = assert!(HISTOGRAM + super::histogram::BUCKETS == KIND_WORDS);
