//! The layout of a disk's counters: a page with their identity, and a page for each queue.
//!
//! All numbers are 64-bit words in the machine's byte order. A word has one writer and only grows,
//! except for [`SUBMITTED`]. So readers need no lock: they may see one word a moment before
//! another.

/// Bytes of the header, and of a queue's page.
pub(super) const PAGE_BYTES: usize = 4096;
/// Words of a page.
pub(super) const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// Most queues of a disk: the paths of all its frontends.
pub(super) const PAGES: usize = 128;

/// "FERSTA01"; the last two characters are the version.
pub(super) const MAGIC: [u8; 8] = *b"FERSTA01";

// Words of the header.
pub(super) const MAGIC_AT: usize = 0;
/// Bytes of a page.
pub(super) const SIZE_AT: usize = 1;
/// Number of queues' pages that were ever used.
pub(super) const USED_AT: usize = 2;
/// The creation of the file, in seconds since 1970.
pub(super) const MADE_AT: usize = 3;
/// The process that counts.
pub(super) const PID_AT: usize = 4;
/// The start of that process, in ticks since boot: process numbers are used again.
pub(super) const STARTED_AT: usize = 5;
/// The boot, 16 bytes.
pub(super) const BOOT_AT: usize = 6;
/// Twice the number of changes of the image's name; odd during a change.
pub(super) const IMAGE_CHANGES_AT: usize = 8;
/// The limits of the disk in a second, in the order of their [names](crate::path::limit::NAMES); 0
/// for none.
pub(super) const LIMITS_AT: usize = 9;
const _: () = assert!(8 * (LIMITS_AT + crate::path::limit::KINDS) <= DISK_TEXT_AT);

/// The disk's name: its length and its bytes.
pub(super) const DISK_TEXT_AT: usize = 128;
pub(super) const DISK_TEXT_MAX: usize = 100;
/// The image's path: its length and its bytes.
pub(super) const IMAGE_TEXT_AT: usize = 256;
pub(super) const IMAGE_TEXT_MAX: usize = PAGE_BYTES - IMAGE_TEXT_AT - 8;

// Words of a queue's page: the counters, then a block for each kind of request.
/// The time since when requests of the queue wait for space, in seconds since 1970, if any do.
pub(super) const SPACE_SINCE_AT: usize = 31;
pub(super) const KINDS_AT: usize = 32;
pub(super) const KIND_WORDS: usize = 120;

// Words of such a block.
/// Requests that were begun. Requests that a dead process has left are subtracted at the next
/// start, since they begin again.
pub(super) const SUBMITTED: usize = 0;
/// Sectors of successful requests.
pub(super) const SECTORS: usize = 1;
/// Requests that failed.
pub(super) const ERRORS: usize = 2;
/// The sum of the latencies of all answered requests, in nanoseconds.
pub(super) const SUM_NS: usize = 3;
/// The longest latency, in nanoseconds.
pub(super) const MAX_NS: usize = 4;
/// The number of requests in each bucket of latencies.
pub(super) const HISTOGRAM: usize = 16;

const _: () = assert!(KINDS_AT + 4 * KIND_WORDS == PAGE_WORDS);
const _: () = assert!(HISTOGRAM + super::histogram::BUCKETS == KIND_WORDS);
