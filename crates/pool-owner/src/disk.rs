//! The disk: requests become parts of sets, by the map's arithmetic.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ferrite_helper::{Done, Medium, Request, State, What};
use ferrite_pool::wire::{BLOCK_BYTES, MAX_PAYLOAD};
use ferrite_pool::{Failure, OwnerId};
use ferrite_pool_map::{Access, Disk as Map};

use crate::link::Payload;
use crate::lock::Lock;
use crate::parts::Parts;
use crate::records::transact;
use crate::set::{Set, Wish};

/// The most bytes that a server makes zero by one request.
const MAX_ZEROS: u64 = 256 << 20;
const EIO: i32 = 5;
const EINVAL: i32 = 22;
/// How long the last flush may take.
const LAST_FLUSH: Duration = Duration::from_secs(3);
/// How long it may take to give a disk back.
const GIVING_BACK: Duration = Duration::from_secs(5);

/// A disk of a pool, which this process has.
pub struct Disk {
    pub(crate) name: String,
    pub(crate) now: Arc<Now>,
    pub(crate) access: Arc<Access>,
    pub(crate) read_only: bool,
    pub(crate) has_lost: AtomicBool,
    pub(crate) me: OwnerId,
    pub(crate) lock: Lock,
}

/// The map that requests follow, and its sets. While the disk grows, further sets are behind them, which are not its yet.
pub(crate) struct Whole {
    pub(crate) map: Map,
    pub(crate) sets: Vec<Arc<Set>>,
}

/// The disk as it is now.
pub(crate) struct Now(RwLock<Arc<Whole>>);

impl Now {
    pub(crate) fn new(whole: Whole) -> Now {
        Now(RwLock::new(Arc::new(whole)))
    }

    pub(crate) fn get(&self) -> Arc<Whole> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn replace(&self, whole: Whole) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(whole);
    }
}

impl Whole {
    /// The sets that requests go to.
    pub(crate) fn used(&self) -> &[Arc<Set>] {
        &self.sets[..self.map.sets().count().min(self.sets.len())]
    }

    /// Whether all of them serve. The error: one never will.
    fn is_serving(&self) -> Result<bool, Failure> {
        self.used().iter().try_fold(true, |all, set| Ok(all & set.is_serving()?))
    }
}

/// A part of a request: a range of a set, and where its bytes are in the request's data.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    set: usize,
    start: u64,
    bytes: u64,
    place: Range<usize>,
}

/// The parts of a range of the disk, each as long as a message may be.
fn pieces(map: &Map, offset: u64, len: u64) -> Option<Vec<Piece>> {
    let (mut at, end) = (offset, offset.checked_add(len)?);
    let mut pieces = Vec::new();
    while at < end {
        let spot = map.spot(at)?;
        let bytes = spot.bytes.min(end - at).min(MAX_PAYLOAD.into());
        let place = (at - offset) as usize..(at - offset + bytes) as usize;
        pieces.push(Piece { set: spot.set, start: spot.offset, bytes, place });
        at += bytes;
    }
    Some(pieces)
}

/// The ranges of sets that a range of the disk has, whatever their order.
fn ranges(map: &Map, offset: u64, len: u64) -> Option<Vec<Piece>> {
    let (mut at, end) = (offset, offset.checked_add(len)?);
    // One piece of the disk is one piece on each set: a set's stripes lie behind each other.
    let mut of: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
    while at < end {
        let spot = map.spot(at)?;
        let bytes = spot.bytes.min(end - at);
        let range = of.entry(spot.set).or_insert((spot.offset, spot.offset));
        range.1 = spot.offset + bytes;
        at += bytes;
    }
    let mut pieces = Vec::new();
    for (set, (mut start, end)) in of {
        while start < end {
            let bytes = MAX_ZEROS.min(end - start);
            pieces.push(Piece { set, start, bytes, place: 0..0 });
            start += bytes;
        }
    }
    Some(pieces)
}

impl Medium for Disk {
    fn bytes(&self) -> Option<u64> {
        Some(self.now.get().map.bytes())
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn has_lost(&self) -> bool {
        self.has_lost.load(Ordering::Relaxed)
    }

    fn submit(&self, request: Request, data: Vec<u8>, done: Done) {
        let Request { what, offset, len, durable } = request;
        let whole = self.now.get();
        let split = match what {
            What::Flush => {
                let all: Vec<usize> = (0..whole.used().len()).collect();
                return flush(&whole, &all, 0, done);
            }
            _ if (offset | len) % BLOCK_BYTES != 0 => None,
            What::Read | What::Write => pieces(&whole.map, offset, len),
            What::Discard | What::Zero { .. } => ranges(&whole.map, offset, len),
        };
        let Some(split) = split.filter(|split| !split.is_empty()) else {
            return done(Err(EINVAL), data);
        };
        let done = if durable { durable_by(&whole, &split, done) } else { done };
        let (into, data) = match what {
            What::Read => (data, Arc::default()),
            _ => (Vec::new(), Arc::new(data)),
        };
        let parts = Parts::new(split.len(), len as usize, into, done);
        for Piece { set, start, bytes, place } in split {
            let part = parts.part(place.clone());
            let Some(set) = whole.used().get(set) else {
                part.ended(Err(EIO)).tell();
                continue;
            };
            let wish = match what {
                What::Read => Wish::Read { start, bytes },
                What::Write => {
                    Wish::Write { start, bytes, data: Payload::Shared(data.clone(), place) }
                }
                _ => Wish::Zero { start, bytes },
            };
            set.ask(wish, part);
        }
    }

    fn failed(&self, _: i32) {
        if self.is_serving().is_err() && !self.has_lost.swap(true, Ordering::Relaxed) {
            self.lock.note(self.me, State::Lost);
        }
    }
}

/// Flushes what these pieces touch when they are written, and then says that it is done.
fn durable_by(whole: &Arc<Whole>, pieces: &[Piece], done: Done) -> Done {
    let mut touched: Vec<usize> = pieces.iter().map(|piece| piece.set).collect();
    touched.sort_unstable();
    touched.dedup();
    let whole = whole.clone();
    Box::new(move |result, data| match result {
        Ok(bytes) => flush(&whole, &touched, bytes, done),
        failed => done(failed, data),
    })
}

impl Disk {
    /// Whether all sets serve. The error: one never will.
    pub(crate) fn is_serving(&self) -> Result<bool, Failure> {
        self.now.get().is_serving()
    }

    /// Gives the disk back. No request is under way.
    pub fn close(self) {
        let (tell, told) = std::sync::mpsc::channel();
        let whole = self.now.get();
        let all: Vec<usize> = (0..whole.used().len()).collect();
        // So the next owner finds no dirty regions. Without an answer it makes them equal.
        flush(
            &whole,
            &all,
            0,
            Box::new(move |_, _| {
                let _ = tell.send(());
            }),
        );
        let _ = told.recv_timeout(LAST_FLUSH);
        if self.is_serving().is_ok() {
            self.give_back();
        }
    }

    /// Stops, and gives back what this process has.
    pub(crate) fn give_back(&self) {
        let until = Instant::now() + GIVING_BACK;
        // Before: a successor must not take a disk that was given back for one that was taken away.
        self.lock.note(self.me, State::Releases);
        for set in &self.now.get().sets {
            let Some((compare, mut record)) = set.stop().filter(|_| Instant::now() < until) else {
                continue;
            };
            record.owner = OwnerId(0);
            record.nonce = ferrite_pool_map::Id::random().number();
            if let Err(why) = transact(&self.access, set.key(), compare, &record) {
                tracing::warn!("{}: it could not be given back: {why}", self.name);
            }
        }
    }
}

/// Flushes sets.
fn flush(whole: &Whole, which: &[usize], bytes: usize, done: Done) {
    let parts = Parts::new(which.len().max(1), bytes, Vec::new(), done);
    for number in which {
        let part = parts.part(0..0);
        match whole.used().get(*number) {
            Some(set) => set.ask(Wish::Flush, part),
            None => part.ended(Err(EIO)).tell(),
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_pool_map::{Copy, Id, Segment, Set, Shape, UNIT};

    use super::*;

    fn map(stripes: usize, segments: &[u64]) -> Map {
        let copy = || Copy {
            member: 0,
            server: "a".to_owned(),
            id: Id::random(),
            name: "d".to_owned(),
            leaves: false,
            start: None,
        };
        let set = || Set { copies: vec![copy()], next_member: 1 };
        let sets = || (0..stripes).map(|_| set()).collect();
        let segment = |bytes: &u64| Segment { bytes: *bytes, sets: sets() };
        let segments = segments.iter().map(segment).collect();
        let shape = Shape { replicas: 1, stripes, stripe_size: UNIT };
        Map { id: Id::random(), request: Id::random(), shape, segments }
    }

    #[test]
    fn pieces_and_ranges_have_each_byte_of_a_request_once() {
        for map in [map(1, &[64 * UNIT]), map(3, &[12 * UNIT, 6 * UNIT]), map(2, &[UNIT * 40])] {
            let all = map.bytes();
            for (offset, len) in [(0, all), (512, all - 1024), (UNIT - 512, 1024), (UNIT * 5, 512)]
            {
                let pieces = pieces(&map, offset, len).unwrap();
                let mut at = 0;
                for piece in &pieces {
                    assert_eq!(piece.place, at..at + piece.bytes as usize);
                    let spot = map.spot(offset + at as u64).unwrap();
                    assert_eq!((piece.set, piece.start), (spot.set, spot.offset));
                    assert!(piece.bytes <= u64::from(MAX_PAYLOAD));
                    at += piece.bytes as usize;
                }
                assert_eq!(at as u64, len);
                // The ranges have the same places of the same sets.
                let places = |pieces: &[Piece]| {
                    let blocks = |p: &Piece| {
                        let set = p.set;
                        let (first, last) = (p.start / 512, (p.start + p.bytes) / 512);
                        (first..last).map(move |block| (set, block)).collect::<Vec<_>>()
                    };
                    let mut all: Vec<_> = pieces.iter().flat_map(blocks).collect();
                    all.sort_unstable();
                    all
                };
                let ranges = ranges(&map, offset, len).unwrap();
                assert_eq!(places(&ranges), places(&pieces));
                assert!(ranges.len() <= 6);
            }
            assert_eq!(pieces(&map, all - 512, 1024), None);
        }
    }
}
