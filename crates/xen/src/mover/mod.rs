//! Movers: how data gets from a guest's pages into the arena and back.
//!
//! | mover | what it does with a batch | grants are released |
//! |---|---|---|
//! | [`Copy`](Mover::Copy) | one grant copy | when the call returns |
//! | [`Map`](Mover::Map) | maps all pages, memcpy, unmaps them | when the call returns |
//! | [`Persistent`](Mover::Persistent) | memcpy through pages that stay mapped | never, or when they were idle |
//!
//! All of them end in the private arena: no foreign page is ever handed to the kernel's I/O paths
//! (blkif.md 4.4, XSA-229). Whatever cannot be mapped (no budget, no room, a bad reference) goes
//! by grant copy, which gives each segment a status of its own (XSA-361).

mod budget;
mod mapped;
mod persistent;
mod table;

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ferrite_host::clock::{Clock, SystemClock};
use ferrite_io::arena::Arena;

use crate::hypervisor::{CopySegment, Direction, GrantRef};

pub use budget::{Budget, DISK_MAPPINGS, HOST_MAPPINGS};
pub use mapped::BATCH;
pub use persistent::QUEUE_MAPPINGS;

/// How data moves between a guest's pages and the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// By grant copy.
    Copy,
    /// Pages are mapped for one batch each.
    Map,
    /// Pages stay mapped. Only for frontends that have agreed to it (blkif.md 4.5).
    Persistent,
}

impl fmt::Display for Mover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mover::Copy => "copy",
            Mover::Map => "map",
            Mover::Persistent => "persistent",
        })
    }
}

impl FromStr for Mover {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "copy" => Ok(Mover::Copy),
            "map" => Ok(Mover::Map),
            "persistent" => Ok(Mover::Persistent),
            _ => Err(format!("{s:?} is not a mover; use copy, map or persistent")),
        }
    }
}

/// How one connection moves its data.
#[derive(Clone)]
pub struct Moving {
    /// Which way.
    pub mover: Mover,
    /// The budget of its disk.
    pub maps: Arc<Maps>,
}

impl Moving {
    /// By grant copy, which maps nothing.
    pub fn copy() -> Moving {
        Moving { mover: Mover::Copy, maps: Maps::new(Budget::of_disk(0), SystemClock::shared()) }
    }
}

/// The budget and the counters of data pages' mappings, which the queues of one disk share.
pub struct Maps {
    budget: Budget,
    clock: Arc<dyn Clock>,
    counters: Counters,
    /// It was said that the budget is used up.
    told: AtomicBool,
}

#[derive(Default)]
struct Counters {
    mapped: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    evictions: AtomicU64,
    fallbacks: AtomicU64,
}

/// Counts of one disk since it was attached. They follow the data path at a distance, and are
/// exact when its connection has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Data pages that are mapped now.
    pub mapped: u64,
    /// Segments that found their page mapped.
    pub hits: u64,
    /// Pages that were mapped.
    pub misses: u64,
    /// Persistent mappings that were given up for others or because they were idle.
    pub evictions: u64,
    /// Segments that went by grant copy because their page was not mapped.
    pub fallbacks: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { mapped, hits, misses, evictions, fallbacks } = self;
        write!(
            f,
            "{mapped} pages are mapped; {hits} segments found theirs mapped, {misses} pages were \
             mapped, {evictions} given up, {fallbacks} segments copied instead"
        )
    }
}

impl Maps {
    /// For one disk.
    pub fn new(budget: Budget, clock: Arc<dyn Clock>) -> Arc<Maps> {
        let (counters, told) = (Counters::default(), AtomicBool::new(false));
        Arc::new(Maps { budget, clock, counters, told })
    }

    /// The counts.
    pub fn counts(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counters;
        Counts {
            mapped: get(&c.mapped),
            hits: get(&c.hits),
            misses: get(&c.misses),
            evictions: get(&c.evictions),
            fallbacks: get(&c.fallbacks),
        }
    }

    /// The budget of its mappings.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Said once a disk: the guest decides how often it happens.
    fn tell_exhausted(&self) {
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::info!(
                "the budget for mapped pages is used up ({}); further pages go by grant copy",
                self.budget
            );
        }
    }
}

fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// Pages of a guest, mapped one behind the other until this is dropped.
///
/// # Safety
/// The address from [`page`](Mapping::page) is that of a whole page of the guest's. It is mapped with
/// the rights that [`Grants::map`] was asked for until this is dropped: movers copy from and to it.
pub unsafe trait Mapping {
    /// First byte of page `page`, of those that were asked for.
    fn page(&self, page: usize) -> NonNull<u8>;
}

/// The services of a hypervisor that movers need, for one guest.
pub trait Grants {
    /// Mapped pages.
    type Mapping: Mapping;

    /// As [`Link::copy`](crate::hypervisor::Link::copy), by grant copy.
    fn copy(
        &mut self,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()>;

    /// Maps 1 to [`BATCH`] pages, all or none.
    fn map(&mut self, grefs: &[GrantRef], writable: bool) -> io::Result<Self::Mapping>;
}

/// One queue's mover, for a hypervisor's [`Link`](crate::hypervisor::Link).
pub struct Carrier<M>(Kind<M>);

enum Kind<M> {
    Copy,
    Map(mapped::Mapped),
    Persistent(Box<persistent::Persistent<M>>),
}

impl<M: Mapping> Carrier<M> {
    /// That of one connection.
    pub fn new(moving: &Moving) -> Carrier<M> {
        let maps = moving.maps.clone();
        Carrier(match moving.mover {
            Mover::Copy => Kind::Copy,
            Mover::Map => Kind::Map(mapped::Mapped::new(maps)),
            Mover::Persistent => Kind::Persistent(Box::new(persistent::Persistent::new(maps))),
        })
    }

    /// As [`Link::copy`](crate::hypervisor::Link::copy), and fails where that does.
    pub fn copy<G: Grants<Mapping = M>>(
        &mut self,
        grants: &mut G,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        match &mut self.0 {
            Kind::Copy => grants.copy(arena, direction, segments),
            Kind::Map(mapped) => mapped.copy(grants, arena, direction, segments),
            Kind::Persistent(p) => p.copy(grants, arena, direction, segments),
        }
    }
}

/// Copies a segment's bytes between the arena and the guest's page.
///
/// # Safety
/// `page` is a whole page of the guest's, mapped with the rights that `direction` needs. The guest
/// may change the bytes meanwhile: they are opaque data, and nothing here looks at them.
pub unsafe fn move_bytes(
    page: NonNull<u8>,
    arena: &Arena,
    direction: Direction,
    segment: &CopySegment,
) {
    let (local, len) = (arena.ptr(segment.local()), usize::from(segment.len()));
    // SAFETY: CopySegment keeps offset + len inside one page, `ptr` bounds-checks our side, and
    // mappings of different objects do not overlap.
    unsafe {
        let guest = page.add(usize::from(segment.offset()));
        match direction {
            Direction::FromGuest => local.copy_from_nonoverlapping(guest, len),
            Direction::ToGuest => guest.copy_from_nonoverlapping(local, len),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
