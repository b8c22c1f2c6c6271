//! The in-flight table: the state that a successor needs (blkif.md 3.9).
//!
//! The table is a file on tmpfs that outlives the process. A response overwrites a request's slot,
//! so the ring alone does not show which requests were consumed and not answered. This table does.
//! It is written in the order below, and the process may be killed between any two steps. A killed
//! process loses no store that it made to shared memory. A crash of the machine ends the guests,
//! too, so the table is never synced.
//!
//! Taking request number `n` (its index on the ring) into entry `e`:
//! 1. The slot's private copy, the segments of its indirect pages, and `n` are written to `e`.
//! 2. `e.state = TAKEN`.
//! 3. `req_cons = n + 1`.
//! 4. Only then does any work on the request begin.
//!
//! Killed before 2, the request is still on the ring. Killed between 2 and 3, the entry says that
//! `n` was consumed.
//!
//! Answering it as response number `m`:
//! 5. `e.rsp_index = m`, then `e.state = ANSWERING`.
//! 6. The response is written to its slot on the ring, for a whole batch of them.
//! 7. The ring's `rsp_prod` is stored: the guest sees the batch.
//! 8. `rsp_published` is stored.
//! 9. `e.state = FREE`, and `e` may be used again.
//!
//! Killed after 7, the published producer covers the entry's index: the request was answered and
//! must not be answered again. Killed before, the guest has not seen the answer, and the request is
//! carried out again: reads and writes may be repeated.
//!
//! The table also names the served image (`image.rs`). A successor with another image is refused.

use std::io;
use std::io::ErrorKind::{InvalidData, NotFound};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::DiskIdentity;
use ferrite_host::shm::Shm;
use ferrite_xen::abi::{MAX_SLOT_BYTES, Protocol, RawSegment, SEGMENT_BYTES, Slot};

mod image;

use image::{HEADER_BYTES, text};

/// The beginning of every version's magic number; two digits follow.
const NAME: [u8; 6] = *b"FERINF";
/// The version of the layout that is written. Once a layout has been in a release, the program with
/// the next one reads it, too (processes.md 6). No earlier layout has been in a release.
const VERSION: u8 = 5;
const MAGIC_AT: usize = 0;
const SIZE_AT: usize = 8;
const QUEUES_AT: usize = 12;
const ENTRIES_AT: usize = 16;
const SEGMENTS_AT: usize = 20;
const IDENTITY_LEN_AT: usize = 24;
const IDENTITY_AT: usize = 64;
/// Room for the identity, a text that this program writes. The largest has 64 queues and 16 pages a
/// ring, which take 12.5 KiB.
const IDENTITY_MAX: usize = image::FIRST_AT - IDENTITY_AT;

// Offsets in a queue's region.
const REQ_CONS_AT: usize = 0;
const RSP_PUBLISHED_AT: usize = 4;
const QUEUE_HEADER_BYTES: usize = 64;

// Offsets in an entry.
const STATE_AT: usize = 0;
const REQ_INDEX_AT: usize = 4;
const RSP_INDEX_AT: usize = 8;
const SEGMENT_COUNT_AT: usize = 12;
const SLOT_AT: usize = 16;
const ENTRY_SEGMENTS_AT: usize = SLOT_AT + MAX_SLOT_BYTES;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const ANSWERING: u32 = 2;

/// The properties that show that a table belongs to the guest's current connection. They must be
/// equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The guest, and its device.
    pub guest: String,
    /// All keys of the rings that the frontend published, as text.
    pub rings: String,
    /// The image that the guest reads and writes. Only its key must be equal.
    pub image: DiskIdentity,
    /// The layout of the ring's slots.
    pub protocol: Protocol,
    /// Ring order, 0 to 4.
    pub ring_order: u32,
    /// Number of queues.
    pub queues: u32,
    /// Segments of the largest offered request.
    pub max_segments: u32,
}

impl Identity {
    fn line(&self) -> String {
        let Identity { protocol, ring_order, guest, rings, .. } = self;
        format!("{} order={ring_order} {guest} {rings}", protocol.key())
    }

    /// Returns whether a table with this line belonged to the same guest, with any rings.
    fn is_guest_of(&self, line: &str) -> bool {
        let mut words = line.splitn(3, ' ');
        let protocol = words.next().and_then(|word| Protocol::from_key(Some(word)));
        let order = words.next().filter(|word| word.starts_with("order="));
        let rest = words.next().and_then(|rest| rest.strip_prefix(&self.guest));
        protocol.is_some() && order.is_some() && rest.is_some_and(|rest| rest.starts_with(' '))
    }

    fn entries(&self) -> u32 {
        self.protocol.entries(self.ring_order)
    }

    fn entry_bytes(&self) -> usize {
        ENTRY_SEGMENTS_AT + self.max_segments as usize * SEGMENT_BYTES
    }

    fn queue_bytes(&self) -> usize {
        QUEUE_HEADER_BYTES + self.entries() as usize * self.entry_bytes()
    }
}

/// Why a table could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The file system failed.
    #[error("in-flight table {path}: cannot {what}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation that was tried, to follow "cannot".
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The table belongs to another connection, or the file is no table.
    #[error(
        "in-flight table {path} does not belong to the guest's present connection: {why}; \
         the requests in flight are unknown, so the disk is not taken over. Detach it and attach \
         it again"
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// How the table differs.
        why: String,
    },
    /// Another version of this program made the table.
    #[error(
        "in-flight table {path} has version {was}, and this program reads {ours}; only \
         the program that made it can take over. Serve the disk with that program (ferrite upgrade \
         --binary), or detach the disk and attach it again"
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// The table's version.
        was: u8,
        /// The version that this program reads.
        ours: u8,
    },
    /// The table belongs to the same guest and image, but the guest has made a new connection
    /// since. The new connection was never served: its table would have replaced this one.
    #[error(
        "in-flight table {path} belongs to other rings: it has \"{was}\", the guest has \"{is}\""
    )]
    OtherRings {
        /// The file.
        path: PathBuf,
        /// The rings that were served.
        was: String,
        /// The rings that the guest has now.
        is: String,
    },
    /// The guest was served from another image.
    #[error(
        "its disk was served from {was}, and this is {is}; its writes would go to the wrong disk. \
         Serve the image that it was served from, or detach the disk and attach it again"
    )]
    OtherImage {
        /// The image that the guest was served from: path and key.
        was: String,
        /// The image that is to be served.
        is: String,
    },
}

/// The in-flight table of one connection.
pub struct Table {
    shm: Arc<Shm>,
    identity: Identity,
}

/// The part of a table that names the image.
pub struct ImageName(Arc<Shm>);

impl ImageName {
    /// Opens the image name of any connection's table. Returns `None` if there is no table of this
    /// version.
    ///
    /// # Errors
    /// It cannot be opened: the process that opens files for this one may be gone.
    pub fn open(table: &Path) -> io::Result<Option<ImageName>> {
        match Shm::open(table) {
            Ok(shm) => Ok(is_table(&shm).then(|| ImageName(Arc::new(shm)))),
            Err(e) if matches!(e.kind(), NotFound | InvalidData) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns the image that the guest is served from.
    pub fn get(&self) -> DiskIdentity {
        image::named(&self.0)
    }

    /// Replaces the image's name.
    pub fn set(&self, image: &DiskIdentity) {
        image::name(&self.0, image);
    }
}

/// Returns the magic number of this version's tables.
const fn magic() -> u64 {
    let [a, b, c, d, e, f] = NAME;
    u64::from_le_bytes([a, b, c, d, e, f, b'0' + VERSION / 10, b'0' + VERSION % 10])
}

/// Returns the version of a table, or `None` if the file is no table.
fn version(shm: &Shm) -> Option<u8> {
    if shm.len() < MAGIC_AT + 8 {
        return None;
    }
    let bytes = shm.load_u64(MAGIC_AT).to_le_bytes();
    let digits = std::str::from_utf8(bytes.strip_prefix(&NAME)?).ok()?;
    digits.parse().ok()
}

/// Returns whether the file has a header that this program reads.
fn is_table(shm: &Shm) -> bool {
    shm.len() >= HEADER_BYTES && version(shm) == Some(VERSION)
}

impl Table {
    /// Makes an empty table. It appears under `path` complete or not at all.
    ///
    /// # Errors
    /// Fails if the file system does; tmpfs may be full.
    pub fn create(path: &Path, identity: Identity) -> Result<Table, TableError> {
        let failed = |what| {
            let path = path.to_owned();
            move |source| TableError::Io { path, what, source }
        };
        let line = identity.line();
        if line.len() > IDENTITY_MAX {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "its identity is too long");
            return Err(failed("describe it")(source));
        }
        let bytes = HEADER_BYTES + identity.queues as usize * identity.queue_bytes();
        let new = path.with_extension("new");
        let shm = Shm::create(&new, bytes).map_err(failed("create it"))?;
        shm.store_u32(SIZE_AT, bytes as u32);
        shm.store_u32(QUEUES_AT, identity.queues);
        shm.store_u32(ENTRIES_AT, identity.entries());
        shm.store_u32(SEGMENTS_AT, identity.max_segments);
        shm.store_u32(IDENTITY_LEN_AT, line.len() as u32);
        shm.copy_in(IDENTITY_AT, line.as_bytes());
        image::name(&shm, &identity.image);
        shm.store_u64(MAGIC_AT, magic());
        ferrite_host::names::rename(&new, path).map_err(failed("put it in place"))?;
        Ok(Table { shm: Arc::new(shm), identity })
    }

    /// Opens the table that a predecessor left, if it belongs to the same connection.
    ///
    /// # Errors
    /// [`TableError::Foreign`] if the table belongs to another connection.
    /// [`TableError::OtherImage`] and [`TableError::OtherRings`] if only the image or the rings
    /// differ.
    pub fn open(path: &Path, identity: Identity) -> Result<Table, TableError> {
        let foreign =
            |why: &str| TableError::Foreign { path: path.to_owned(), why: why.to_owned() };
        let io = |source| TableError::Io { path: path.to_owned(), what: "open it", source };
        let shm = Shm::open(path).map_err(io)?;
        let bytes = HEADER_BYTES + identity.queues as usize * identity.queue_bytes();
        if !is_table(&shm) {
            return Err(match version(&shm) {
                Some(was) if was != VERSION => {
                    TableError::OtherVersion { path: path.to_owned(), was, ours: VERSION }
                }
                _ => foreign("it is not a table"),
            });
        }
        let line = identity.line();
        let there = text(&shm, IDENTITY_LEN_AT, IDENTITY_AT, IDENTITY_MAX);
        if !identity.is_guest_of(&there) {
            return Err(foreign(&format!("it says \"{there}\", the guest says \"{line}\"")));
        }
        let DiskIdentity { key, path: named } = image::named(&shm);
        // The table of a paused disk names no image, since another one may follow.
        if key.is_empty() {
            image::name(&shm, &identity.image);
        } else if key != identity.image.key {
            let DiskIdentity { key: now, path: to } = &identity.image;
            let (was, is) = (format!("{named} ({key})"), format!("{to} ({now})"));
            return Err(TableError::OtherImage { was, is });
        }
        if there != line {
            let path = path.to_owned();
            return Err(TableError::OtherRings { path, was: there, is: line });
        }
        if shm.load_u32(SEGMENTS_AT) != identity.max_segments {
            return Err(foreign("it was made with another --indirect"));
        }
        if shm.len() != bytes || shm.load_u32(SIZE_AT) as usize != bytes {
            return Err(foreign("its size is wrong"));
        }
        Ok(Table { shm: Arc::new(shm), identity })
    }

    /// Returns whether a predecessor's table has requests that may have no answer yet. A table that
    /// cannot be used has none.
    pub fn has_unanswered(path: &Path) -> bool {
        let Ok(shm) = Shm::open(path) else { return false };
        if !is_table(&shm) {
            return false;
        }
        let [queues, entries, segments] =
            [QUEUES_AT, ENTRIES_AT, SEGMENTS_AT].map(|at| shm.load_u32(at) as usize);
        let entry_bytes = ENTRY_SEGMENTS_AT + segments * SEGMENT_BYTES;
        let first = HEADER_BYTES + QUEUE_HEADER_BYTES;
        let queue_bytes = QUEUE_HEADER_BYTES + entries * entry_bytes;
        let mut places = (0..queues).flat_map(|queue| {
            (0..entries).map(move |entry| first + queue * queue_bytes + entry * entry_bytes)
        });
        // An entry beyond the file's end means that the table was made with other limits. Such a
        // table is refused later.
        places.any(|at| at + entry_bytes <= shm.len() && shm.load_u32(at + STATE_AT) != FREE)
    }

    /// Returns the part of the table that names the image.
    pub fn image(&self) -> ImageName {
        ImageName(self.shm.clone())
    }

    /// Splits the table into the parts of its queues. Each part goes to one thread.
    pub fn into_queues(self) -> Vec<QueueTable> {
        let shm = self.shm;
        (0..self.identity.queues as usize)
            .map(|i| QueueTable {
                shm: shm.clone(),
                base: HEADER_BYTES + i * self.identity.queue_bytes(),
                entry_bytes: self.identity.entry_bytes(),
                entries: self.identity.entries(),
                max_segments: self.identity.max_segments,
            })
            .collect()
    }
}

/// A request that was taken and not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// The request's entry, which stays taken.
    pub entry: u32,
    /// The request's index on the ring.
    pub req_index: u32,
    /// The request's slot, as it was consumed.
    pub slot: Slot,
    /// The segments of the request's indirect pages, as they were consumed.
    pub indirect: Vec<RawSegment>,
}

/// The state of a queue whose process died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The next request to consume.
    pub req_cons: u32,
    /// The next response to write.
    pub rsp_prod: u32,
    /// The requests to carry out again, in the order in which they were taken.
    pub unanswered: Vec<Unanswered>,
}

/// The part of the table that belongs to one queue.
pub struct QueueTable {
    shm: Arc<Shm>,
    base: usize,
    entry_bytes: usize,
    entries: u32,
    max_segments: u32,
}

impl QueueTable {
    /// Sets the indices of a ring that was just attached.
    pub fn start(&self, req_cons: u32, rsp_prod: u32) {
        self.store(self.base + REQ_CONS_AT, req_cons);
        self.store(self.base + RSP_PUBLISHED_AT, rsp_prod);
    }

    /// Does steps 1 to 3. The segments of indirect pages follow with
    /// [`add_indirect`](Self::add_indirect).
    pub fn take(&self, entry: u32, req_index: u32, slot: &Slot) {
        let at = self.entry(entry);
        if self.lives() {
            self.shm.store_words(at + SLOT_AT, &slot.words());
        }
        self.store(at + SEGMENT_COUNT_AT, 0);
        self.store(at + REQ_INDEX_AT, req_index);
        self.store(at + STATE_AT, TAKEN);
        self.store(self.base + REQ_CONS_AT, req_index.wrapping_add(1));
    }

    /// Adds the segments of an indirect request. Without them a successor fetches them from the
    /// guest again. That is equivalent, because no work on the request has begun.
    pub fn add_indirect(&self, entry: u32, segments: &[RawSegment]) {
        let at = self.entry(entry);
        for (i, s) in segments.iter().take(self.max_segments as usize).enumerate() {
            let bytes = u64::from_le_bytes(s.encode());
            if self.lives() {
                self.shm.store_u64(at + ENTRY_SEGMENTS_AT + i * SEGMENT_BYTES, bytes);
            }
        }
        self.store(at + SEGMENT_COUNT_AT, segments.len() as u32);
    }

    /// Does step 5.
    pub fn answer(&self, entry: u32, rsp_index: u32) {
        #[cfg(test)]
        crate::blkif::queue::tests::is_answering(rsp_index);
        let at = self.entry(entry);
        self.store(at + RSP_INDEX_AT, rsp_index);
        self.store(at + STATE_AT, ANSWERING);
    }

    /// Does step 8.
    pub fn published(&self, rsp_prod: u32) {
        self.store(self.base + RSP_PUBLISHED_AT, rsp_prod);
    }

    /// Does step 9.
    pub fn free(&self, entry: u32) {
        #[cfg(test)]
        crate::blkif::queue::tests::is_free(self.shm.load_u32(self.entry(entry) + RSP_INDEX_AT));
        self.store(self.entry(entry) + STATE_AT, FREE);
    }

    /// Resumes the queue of a predecessor, given the response producer that is on the ring now. It
    /// frees the entries that were answered.
    ///
    /// Returns `None` if table and producer contradict each other, because the guest has changed
    /// the producer to an impossible value. The ring must not be served then; the table stays as it
    /// was.
    pub fn resume(&self, shared_rsp_prod: u32) -> Option<Resume> {
        let (req_cons, unanswered) = self.look(shared_rsp_prod)?;
        // From here on the table knows this producer, wherever a successor is killed.
        self.published(shared_rsp_prod);
        for entry in 0..self.entries {
            match self.state(entry) {
                ANSWERING if self.is_seen(entry, shared_rsp_prod) => self.free(entry),
                // This response index will be used for another request.
                ANSWERING => self.store(self.entry(entry) + STATE_AT, TAKEN),
                _ => {}
            }
        }
        self.store(self.base + REQ_CONS_AT, req_cons);
        Some(Resume { req_cons, rsp_prod: shared_rsp_prod, unanswered })
    }

    /// Returns the next request to consume, and the unanswered ones by age. Changes nothing.
    fn look(&self, shared_rsp_prod: u32) -> Option<(u32, Vec<Unanswered>)> {
        // The producer was on the ring before the table recorded it. A guest that moves the
        // producer back would get answers twice.
        let published = self.shm.load_u32(self.base + RSP_PUBLISHED_AT);
        if (shared_rsp_prod.wrapping_sub(published) as i32) < 0 {
            return None;
        }
        let mut req_cons = self.shm.load_u32(self.base + REQ_CONS_AT);
        let mut unanswered = Vec::new();
        for entry in (0..self.entries).filter(|&entry| self.state(entry) != FREE) {
            if self.state(entry) == ANSWERING && self.is_seen(entry, shared_rsp_prod) {
                continue;
            }
            let req_index = self.shm.load_u32(self.entry(entry) + REQ_INDEX_AT);
            if req_index == req_cons {
                // Killed between steps 2 and 3.
                req_cons = req_index.wrapping_add(1);
            }
            unanswered.push(self.read_entry(entry, req_index));
        }
        // Each consumed request was answered or is in the list. If the producer were off by one,
        // there would be an answer without a request, or a request that is never answered.
        if req_cons.wrapping_sub(shared_rsp_prod) as usize != unanswered.len() {
            return None;
        }
        let age = |u: &Unanswered| req_cons.wrapping_sub(u.req_index);
        unanswered.sort_by_key(|u| std::cmp::Reverse(age(u)));
        Some((req_cons, unanswered))
    }

    /// Returns whether the guest has seen the response of an entry that is being answered.
    fn is_seen(&self, entry: u32, shared_rsp_prod: u32) -> bool {
        let rsp_index = self.shm.load_u32(self.entry(entry) + RSP_INDEX_AT);
        (rsp_index.wrapping_sub(shared_rsp_prod) as i32) < 0
    }

    /// Stores a word. Every change of the table goes through here, or checks [`lives`](Self::lives)
    /// itself.
    fn store(&self, at: usize, value: u32) {
        if self.lives() {
            self.shm.store_u32(at, value);
        }
    }

    /// Returns whether the process still runs: tests kill a model of it before any single store.
    #[inline]
    fn lives(&self) -> bool {
        #[cfg(test)]
        return tests::lives();
        #[cfg(not(test))]
        true
    }

    fn state(&self, entry: u32) -> u32 {
        self.shm.load_u32(self.entry(entry) + STATE_AT)
    }

    fn read_entry(&self, entry: u32, req_index: u32) -> Unanswered {
        let at = self.entry(entry);
        let mut slot = Slot::default();
        self.shm.copy_out(at + SLOT_AT, &mut slot.0);
        let count = self.shm.load_u32(at + SEGMENT_COUNT_AT).min(self.max_segments) as usize;
        let indirect = (0..count)
            .map(|i| self.shm.load_u64(at + ENTRY_SEGMENTS_AT + i * SEGMENT_BYTES))
            .map(|word| RawSegment::decode(&word.to_le_bytes()))
            .collect();
        Unanswered { entry, req_index, slot, indirect }
    }

    fn entry(&self, entry: u32) -> usize {
        debug_assert!(entry < self.entries);
        self.base + QUEUE_HEADER_BYTES + entry as usize * self.entry_bytes
    }
}

#[cfg(test)]
mod tests;
