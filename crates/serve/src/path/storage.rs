//! The way to the storage engine and back (step 5 of the request's way).

use std::io;

use ferrite_disk::store_lookups;
use ferrite_disk::{Disk, Extent};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::{Completion, Transfer};

use super::RequestPath;
use super::flight::{Flight, Ticket};
use super::full::is_full;
use super::layout::Layout;
use super::merge::{Placed, op};
use super::pieces::{MAX_PIECES, Piece};
use super::work::{Action, Outcome};
use crate::log_limit::limited;
use crate::trace::Metadata;

/// The place of the beginning of a range for a read or write.
#[inline]
fn find(disk: &Disk, offset: u64, len: u64, transfer: Transfer) -> Extent {
    match transfer {
        Transfer::Read => disk.map(offset, len),
        Transfer::Write => disk.reserve(offset, len),
    }
}

/// Whether a read has failed or returned data that do not fit the disk's checksums. Call it while
/// the disk counts the request, so that its places are not used again yet.
fn is_doubtful(disk: &Disk, memory: &Arena, flight: &Flight, failed: bool) -> bool {
    let Some(layout) = flight.layout else { return false };
    let is_read = flight.work.action == Action::Read;
    is_read && (failed || !disk.check(memory, layout.offset, layout.blocks))
}

/// How often in a row an operation may ask to be tried again.
const RETRIES: u32 = 64;

impl RequestPath {
    /// Starts all requests that are ready. Data in one place go straight to the engine, neighbours
    /// together. All other requests become tasks.
    ///
    /// Everything that is mapped here is counted (`disk-base/src/epochs.rs`) from before the first
    /// lookup until the operations of its request have ended. Tasks are counted by themselves.
    pub(super) fn start_all(&mut self, ready: &mut Vec<Ticket>) {
        let now_ns = self.clock.now_ns();
        self.medium.begin_mapping();
        let mut others = false;
        let locked = self.member.device().ranges.are_locked();
        for ticket in ready.drain(..) {
            let ticket = match locked {
                true => match self.lock_range(ticket) {
                    Some(ticket) => ticket,
                    None => continue,
                },
                false => ticket,
            };
            self.flights.get(&ticket).record.stages.submitted_ns = now_ns;
            let action = self.flights.get(&ticket).work.action;
            others |= action != Action::Discard;
            match action {
                Action::Read => self.place(ticket, Transfer::Read, now_ns),
                Action::Write => self.place(ticket, Transfer::Write, now_ns),
                Action::Flush
                | Action::FlushThenWrite
                | Action::Barrier
                | Action::Zero
                | Action::Status => self.start_task(ticket),
                Action::Discard => self.discard_soon(ticket, now_ns),
            }
        }
        self.medium.end_mapping();
        self.count_lookups();
        if others {
            self.member.device().discards.others_begin();
        }
        self.push_placed();
    }

    /// Counts the lookups of this thread in a store's tables.
    pub(super) fn count_lookups(&mut self) {
        if !self.medium.has_checks {
            return;
        }
        let (looked, counters) = (store_lookups::of_this_thread(), self.account.counters());
        counters.v2p_hits.add(looked.v2p.hits);
        counters.v2p_misses.add(looked.v2p.misses);
        counters.p2m_hits.add(looked.p2m.hits);
        counters.p2m_misses.add(looked.p2m.misses);
    }

    fn place(&mut self, ticket: Ticket, transfer: Transfer, now_ns: u64) {
        let disk = &self.medium.disk;
        let flight = self.flights.get(&ticket);
        let Some(layout) = flight.layout else {
            unreachable!("reads and writes have buffers");
        };
        if transfer == Transfer::Write && !layout.is_whole() {
            return self.start_task(ticket);
        }
        let all = layout.blocks.len() as u64;
        let extent = find(disk, layout.offset, all, transfer);
        if self.medium.has_metadata && (transfer == Transfer::Read || disk.reserves()) {
            let counters = self.account.counters();
            flight.record.metadata = match extent {
                Extent::Slow { .. } => {
                    counters.metadata_misses.add(1);
                    Metadata::Miss
                }
                Extent::Data { .. } | Extent::Zeros { .. } => {
                    counters.metadata_hits.add(1);
                    Metadata::Hit
                }
            };
            if matches!(extent, Extent::Data { len, .. } if len >= all) {
                flight.mapped = self.medium.keep_mapped();
            }
        }
        match extent {
            Extent::Data { file, offset, len } if len >= all => {
                flight.pieces = 1;
                flight.pieces_left = 1;
                self.add_piece(ticket.park(), transfer, layout.blocks, (file, offset));
            }
            Extent::Zeros { len } if len >= all => {
                flight.zeros = true;
                self.data_done(ticket, now_ns);
            }
            Extent::Slow { .. } => self.start_task(ticket),
            Extent::Data { .. } | Extent::Zeros { .. } => {
                self.place_in_pieces(ticket, layout, transfer, now_ns);
            }
        }
    }

    /// Places data that are in several places. If there are too many of them or one is not known,
    /// the request becomes a task.
    fn place_in_pieces(&mut self, ticket: Ticket, layout: Layout, transfer: Transfer, now_ns: u64) {
        let disk = &self.medium.disk;
        let (mut found, mut count, mut done) = ([None; MAX_PIECES], 0, 0);
        while done < layout.blocks.len() {
            let (at, left) = (layout.offset + done as u64, layout.blocks.len() - done);
            let extent = find(disk, at, left as u64, transfer);
            let (Extent::Data { len, .. } | Extent::Zeros { len } | Extent::Slow { len }) = extent;
            let blocks = layout.blocks.slice(done, (len as usize).min(left));
            match extent {
                Extent::Data { file, offset, .. } if count < MAX_PIECES => {
                    found[count] = Some((blocks, (file, offset)));
                    count += 1;
                }
                Extent::Zeros { .. } if transfer == Transfer::Read => {
                    self.shared.pool.arena().fill(blocks, 0);
                }
                Extent::Data { .. } | Extent::Zeros { .. } | Extent::Slow { .. } => {
                    return self.start_task(ticket);
                }
            }
            done += blocks.len();
        }
        if count == 0 {
            return self.data_done(ticket, now_ns);
        }
        if !self.pieces.reserve(count) {
            return self.start_task(ticket);
        }
        let flight = self.flights.get(&ticket);
        flight.mapped = self.medium.keep_mapped();
        flight.pieces = count;
        flight.pieces_left = count;
        let entry = ticket.park();
        for (blocks, place) in found.into_iter().flatten() {
            self.add_piece(entry, transfer, blocks, place);
        }
    }

    fn add_piece(
        &mut self,
        entry: u16,
        transfer: Transfer,
        blocks: Span,
        (file, offset): (usize, u64),
    ) {
        let file = self.medium.port.files[file];
        let (done_bytes, retries, next) = (0, 0, None);
        let piece = Piece { entry, transfer, file, offset, blocks, done_bytes, retries, next };
        let flushes = self.flights.at(entry).flushes;
        let index = self.pieces.add(piece);
        self.placed.push(Placed::new(index, &piece, flushes));
    }

    /// Handles the end of one piece's operation: it is done, goes on, is tried again, or has
    /// failed.
    pub(super) fn piece_completed(&mut self, index: u16, completion: Completion, now_ns: u64) {
        let piece = self.pieces.get(index);
        match completion.result() {
            Ok(bytes) => {
                let before = piece.done_bytes;
                // A transfer cannot go on inside a block, so the block is repeated.
                let now = before + bytes as usize;
                piece.done_bytes = if now < piece.blocks.len() {
                    now - now % self.medium.block_bytes
                } else {
                    now
                };
                if piece.done_bytes >= piece.blocks.len() {
                    self.piece_ended(index, None, now_ns);
                } else if piece.done_bytes > before {
                    piece.retries = 0;
                    self.push_rest(index);
                } else {
                    let e = io::Error::new(io::ErrorKind::UnexpectedEof, "no progress");
                    self.piece_ended(index, Some(e), now_ns);
                }
            }
            Err(e) => {
                let again =
                    matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
                if again && piece.retries < RETRIES {
                    piece.retries += 1;
                    self.push_rest(index);
                } else {
                    self.piece_ended(index, Some(e), now_ns);
                }
            }
        }
    }

    /// Submits the rest of a piece alone.
    pub(super) fn push_rest(&mut self, index: u16) {
        let piece = *self.pieces.get(index);
        let done = piece.done_bytes;
        let rest = piece.blocks.slice(done, piece.blocks.len() - done);
        let op = op(piece.transfer, piece.file, piece.offset + done as u64, rest);
        self.reactor.push(u64::from(index), op);
    }

    /// Ends a piece. The request ends with its last piece.
    fn piece_ended(&mut self, index: u16, error: Option<io::Error>, now_ns: u64) {
        let entry = self.pieces.remove(index).entry;
        let flight = self.flights.at(entry);
        if let Some(e) = error {
            flight.failed.get_or_insert(e);
        }
        flight.pieces_left -= 1;
        if flight.pieces_left > 0 {
            return;
        }
        self.pieces.give_back(flight.pieces);
        let (failed, mapped) = (flight.failed.take(), flight.mapped.take());
        let (disk, memory) = (&self.medium.disk, self.shared.pool.arena());
        let doubtful =
            self.medium.has_checks && is_doubtful(disk, memory, flight, failed.is_some());
        if let (None, Action::Write, Some(layout)) = (&failed, flight.work.action, flight.layout) {
            self.medium.disk.written(layout.offset, layout.blocks.len() as u64);
            self.save_soon();
        }
        if let Some(mark) = mapped {
            self.medium.unmap(mark);
        }
        match failed {
            // The task finds out step by step what is damaged (docs/internals/store.md 6).
            _ if doubtful => self.start_task(Ticket::unpark(entry)),
            None => self.data_done(Ticket::unpark(entry), now_ns),
            Some(e) => self.storage_failed(Ticket::unpark(entry), &e, now_ns),
        }
    }

    /// Ends a request whose data are all in place.
    #[inline]
    pub(super) fn data_done(&mut self, ticket: Ticket, now_ns: u64) {
        let flight = self.flights.get(&ticket);
        flight.record.stages.completed_ns = now_ns;
        if let Some(lock) = flight.lock.take() {
            self.release_range(lock);
        }
        if self.flights.see(&ticket).work.action == Action::Read {
            self.read.push(ticket);
        } else {
            self.finish(ticket, Outcome::Done);
        }
    }

    /// Fails a request, or lets it wait for space. The disk goes on.
    pub(super) fn storage_failed(&mut self, ticket: Ticket, e: &io::Error, now_ns: u64) {
        self.shared.device.check_failed_sync(&self.medium.disk);
        self.shared.device.check_taken(&self.medium.disk, e);
        if let Some(lock) = self.flights.get(&ticket).lock.take() {
            self.release_range(lock);
        }
        if self.may_wait(e) {
            return self.wait_for_space(ticket, e);
        }
        let flight = self.flights.get(&ticket);
        flight.record.stages.completed_ns = now_ns;
        flight.no_space = is_full(e);
        let work = flight.work;
        limited!(
            error,
            self.shared.device.log_limits.storage,
            now_ns,
            queue = self.index,
            "{:?} of sectors {}+{} failed: {e}; the client gets an error for this request",
            work.action,
            work.sector,
            work.sectors
        );
        let unsupported =
            work.action == Action::Discard && matches!(e.kind(), io::ErrorKind::Unsupported);
        // Linux then stops sending discards, which is right if the medium does not support them.
        self.finish(ticket, if unsupported { Outcome::Unsupported } else { Outcome::Failed });
    }
}
