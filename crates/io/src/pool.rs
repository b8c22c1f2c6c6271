//! The owners of a disk's memory, and the part that each may use.
//!
//! One [`Pool`] a disk, of fixed size: an arena cut into slabs of [`SLAB_BYTES`], the largest
//! request there is. Each queue holds one slab of its own for ever, so that a maximal request
//! always fits once the queue is idle, and no queue can starve another. The other slabs are
//! shared: a [`QueuePool`] takes one when its own are full and gives it back when it is empty.
//! Taking and giving are one atomic operation each; all else is private to the queue's thread.
//! No buffer free means: stop consuming requests (threats.md, by construction, 3).
//!
//! The last page of the last slab is no buffer but the page that stays zero.
//!
//! A pool may [grow](Pool::grow) by further shared slabs, until all of its queues rest.
//!
//! A pool of [many queues](Pool::of_many), most of which do little, keeps each of them small. An engine pins the
//! beginning of its queue's own slab, as far as that is used. The slab's memory goes back when that queue rests.

mod bitmap;
mod growth;

use std::cell::Cell;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use crate::arena::{Arena, HUGE_PAGE_BYTES, Lender, Span};
use bitmap::{PAGES, PageMap, SlabSet};
use growth::Grown;

pub use growth::{Growth, HostMemory, STEP_BYTES};

/// Bytes in a slab: the largest blkif request (256 segments of one page).
pub const SLAB_BYTES: usize = 1 << 20;

/// Pages that the queues of one pool are lent together at most, if there is a lender: 2 MiB.
pub const LENT_PAGES: u32 = 512;

/// Pages that a queue is lent at first: a sweep of small requests.
const FIRST_LENT: u32 = 16;

/// Pages that each of many queues has pinned at first: 256 KiB.
const FIRST_PINNED: u32 = 64;

/// The most that a kernel pins in one piece, in bytes.
const MAX_PINNED_BYTES: usize = 1 << 30;

/// The memory that a pool may get from others.
#[derive(Default)]
pub struct Others {
    /// Queues use its pages first while they are warm: as many as their buffers have filled at once, so
    /// that large requests have most of them.
    pub lender: Option<Box<dyn Lender>>,
    /// Memory beside the pool's own, when storage is slow.
    pub growth: Option<Growth>,
}

/// Bytes in a page, the unit of allocation.
pub const PAGE_BYTES: usize = 4096;

const _: () = assert!(SLAB_BYTES == PAGES as usize * PAGE_BYTES);

/// A disk's memory; see the module text.
pub struct Pool {
    arena: Arc<Arena>,
    /// Shared slabs that no queue holds.
    shared: SlabSet<AtomicU64>,
    /// The own slabs of the queues by index; `None` while a `QueuePool` has it.
    own: Mutex<Vec<Option<PageMap>>>,
    slabs: u32,
    /// Behind the slabs, for each queue.
    scratch_bytes: usize,
    /// Further slabs, behind it.
    grown: Option<Grown>,
    /// Queues that use buffers, or may.
    warm: Mutex<usize>,
    /// Lends each of them pages for the first part of its own slab, where most of its buffers are.
    lender: Option<Box<dyn Lender>>,
    /// Of [`LENT_PAGES`], those that no queue has asked for.
    lendable: Mutex<u32>,
    /// Each queue by itself pins and gives back the memory of its own slab.
    is_of_many: bool,
    /// Slabs that a queue may hold.
    most_held: usize,
}

impl Pool {
    /// Maps `bytes`, but at least one slab for each of `queues` and one more; rounded up to 2 MiB.
    ///
    /// # Errors
    /// Those of [`Arena::new`].
    pub fn new(bytes: usize, queues: usize) -> io::Result<Arc<Pool>> {
        Pool::with_scratch(bytes, queues, 0)
    }

    /// The same, and besides it `scratch_bytes` for each queue, rounded up to pages, that are no
    /// buffers: see [`scratch`](Self::scratch).
    ///
    /// # Errors
    /// Those of [`Arena::new`].
    pub fn with_scratch(
        bytes: usize,
        queues: usize,
        scratch_bytes: usize,
    ) -> io::Result<Arc<Pool>> {
        Pool::with_others(bytes, queues, scratch_bytes, Others::default())
    }

    /// The same, with what it may get from others.
    ///
    /// # Errors
    /// Those of [`Arena::new`].
    pub fn with_others(
        bytes: usize,
        queues: usize,
        scratch_bytes: usize,
        others: Others,
    ) -> io::Result<Arc<Pool>> {
        // The last slab, which has the zero page, is no queue's own, whatever the scratch memory takes.
        let least = queues.saturating_add(1).saturating_mul(SLAB_BYTES);
        let scratch_bytes = scratch_bytes.next_multiple_of(PAGE_BYTES);
        let aside = queues.saturating_mul(scratch_bytes);
        let bytes = bytes.max(least);
        let room = others.growth.as_ref().map_or(0, |growth| growth.room(bytes));
        let arena = Arena::with_room(bytes.saturating_add(aside), room)?;
        let own_bytes = bytes.saturating_add(aside).next_multiple_of(HUGE_PAGE_BYTES);
        // An arena is below 4 GiB, so this is below 4096.
        let slabs = ((own_bytes - aside) / SLAB_BYTES) as u32;
        // Otherwise a huge page that a queue's last buffers need would make other queues' scratch memory resident.
        arena.keep_small(arena.span(slabs as usize * SLAB_BYTES, aside));
        let shared = SlabSet::new((arena.len() / SLAB_BYTES) as u32);
        for slab in queues as u32..slabs {
            shared.give(slab);
        }
        let first = (own_bytes / SLAB_BYTES) as u32;
        let room = arena.len() - own_bytes;
        Ok(Arc::new(Pool {
            arena,
            shared,
            own: Mutex::new(vec![Some(PageMap::empty()); queues]),
            slabs,
            scratch_bytes,
            grown: others.growth.map(|growth| Grown::new(growth.host, first, room)),
            warm: Mutex::new(0),
            lender: others.lender,
            lendable: Mutex::new(LENT_PAGES),
            is_of_many: false,
            most_held: usize::MAX,
        }))
    }

    /// A pool of many queues, most of which do little. A queue has at most `most_bytes` of buffers, of which one slab is
    /// its own. All of them share `shared_bytes`, at least one slab. Scratch memory is as for
    /// [`with_scratch`](Self::with_scratch).
    ///
    /// # Errors
    /// As [`Arena::sparse`].
    pub fn of_many(
        queues: usize,
        most_bytes: usize,
        shared_bytes: usize,
        scratch_bytes: usize,
    ) -> io::Result<Arc<Pool>> {
        let scratch_bytes = scratch_bytes.next_multiple_of(PAGE_BYTES);
        let shared = shared_bytes.div_ceil(SLAB_BYTES).max(1);
        let slabs = queues.saturating_add(shared);
        let buffers = slabs.saturating_mul(SLAB_BYTES);
        let bytes = buffers.saturating_add(queues.saturating_mul(scratch_bytes));
        let arena = Arena::sparse(bytes, queues * SLAB_BYTES..buffers)?;
        let set = SlabSet::new(slabs as u32);
        (queues..slabs).for_each(|slab| set.give(slab as u32));
        Ok(Arc::new(Pool {
            arena,
            shared: set,
            own: Mutex::new(vec![Some(PageMap::empty()); queues]),
            // An arena is below 4 GiB, so this is below 4096.
            slabs: slabs as u32,
            scratch_bytes,
            grown: None,
            warm: Mutex::new(0),
            lender: None,
            lendable: Mutex::new(0),
            is_of_many: true,
            most_held: (most_bytes / SLAB_BYTES).max(1),
        }))
    }

    /// A request that used a buffer has ended, for which storage took from `began_ns` to `ended_ns`, and
    /// another one found none meanwhile. If storage is slow, so that more at once would be
    /// done in the same time, there is more memory from now on: twice as much, as far as the host
    /// has it, until all queues [rest](QueuePool::cool).
    pub fn grow(&self, began_ns: u64, ended_ns: u64) {
        let Some(grown) = &self.grown else { return };
        for slab in grown.grow(self.slabs, began_ns, ended_ns) {
            self.shared.give(slab);
        }
    }

    /// Gives the memory of the shared slabs that no queue holds back to the system. Other queues find them held for that
    /// time, and go on with their own slabs.
    fn release_shared(&self) {
        let free: Vec<u32> = std::iter::from_fn(|| self.shared.take()).collect();
        for slab in free {
            self.arena.release(self.arena.span(slab as usize * SLAB_BYTES, SLAB_BYTES));
            self.shared.give(slab);
        }
    }

    /// No queue uses any memory: that which it has grown by goes back.
    fn shrink(&self) {
        let Some(grown) = &self.grown else { return };
        let slabs = grown.all();
        if !slabs.is_empty() {
            slabs.clone().for_each(|slab| self.shared.remove(slab));
            let (first, count) = (slabs.start as usize, slabs.len());
            self.arena.release(self.arena.span(first * SLAB_BYTES, count * SLAB_BYTES));
        }
        grown.give_back();
    }

    /// Memory of one queue for other things than guests' data; empty, unless it was asked for. Only
    /// that queue gives it back to the system, when it [cools](QueuePool::cool). A queue that never
    /// had data, and so was never warm, may be using its own.
    pub fn scratch(&self, queue: usize) -> Span {
        let first = self.slabs as usize * SLAB_BYTES;
        self.arena.span(first + queue * self.scratch_bytes, self.scratch_bytes)
    }

    /// The memory, to build engines on.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// 4096 bytes that are never written: they are zero.
    pub fn zero_page(&self) -> Span {
        self.arena.span(self.slabs as usize * SLAB_BYTES - PAGE_BYTES, PAGE_BYTES)
    }

    /// The part of queue `index`, until it is dropped.
    ///
    /// # Panics
    /// If there is no such queue, or its part is in use already: a bug of the caller.
    pub fn queue(self: &Arc<Pool>, index: usize) -> QueuePool {
        let own = self.own().get_mut(index).and_then(Option::take);
        let Some(own) = own else {
            panic!("queue {index} of the pool does not exist or is in use");
        };
        let mut slabs = vec![None; self.slabs as usize];
        let in_use = own.used();
        slabs[index] = Some(own);
        let own = index as u32;
        let held = vec![own];
        QueuePool {
            pool: self.clone(),
            own,
            slabs,
            held,
            in_use,
            peak: 0,
            wanted: 0,
            lent: 0,
            warm: false,
            not_sync: PhantomData,
        }
    }

    /// Pages of a queue's own slab.
    fn own_pages(&self, queue: u32, first: u32, pages: u32) -> Span {
        let offset = queue as usize * SLAB_BYTES + first as usize * PAGE_BYTES;
        self.arena.span(offset, pages as usize * PAGE_BYTES)
    }

    fn lendable(&self) -> std::sync::MutexGuard<'_, u32> {
        self.lendable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn warm(&self) -> std::sync::MutexGuard<'_, usize> {
        self.warm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn own(&self) -> std::sync::MutexGuard<'_, Vec<Option<PageMap>>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A shared slab as it is when no queue has it.
    fn fresh(&self, slab: u32) -> PageMap {
        let mut pages = PageMap::empty();
        if slab + 1 == self.slabs {
            pages.set(PAGES - 1, 1);
        }
        pages
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("arena", &self.arena).field("slabs", &self.slabs).finish()
    }
}

/// A run of whole pages that belongs to its holder until it is given to [`QueuePool::free`].
/// Bytes of earlier holders are still in it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a buffer that is not freed is lost to the pool"]
pub struct Buf(Span);

impl Buf {
    /// Where it is; whole pages.
    pub fn span(&self) -> Span {
        self.0
    }
}

/// One queue's part of the pool, for one thread.
pub struct QueuePool {
    pool: Arc<Pool>,
    own: u32,
    /// By slab number: the pages of those that this queue holds.
    slabs: Vec<Option<PageMap>>,
    /// Their numbers, the own one first.
    held: Vec<u32>,
    /// Pages.
    in_use: u32,
    /// Most of them at once, since it cooled last.
    peak: u32,
    /// Lent pages that it has asked for, and those of them that are its share. It may have got fewer.
    wanted: u32,
    lent: u32,
    warm: bool,
    not_sync: PhantomData<Cell<()>>,
}

impl QueuePool {
    /// A buffer of `bytes`, rounded up to pages, contiguous. `None`: there is none now; after
    /// everything of this queue was freed, there is one for any size up to [`SLAB_BYTES`].
    ///
    /// # Panics
    /// If `bytes` is 0 or more than [`SLAB_BYTES`]: a bug of the caller.
    #[inline]
    pub fn alloc(&mut self, bytes: usize) -> Option<Buf> {
        assert!((1..=SLAB_BYTES).contains(&bytes), "a buffer of {bytes} bytes");
        let pages = bytes.div_ceil(PAGE_BYTES) as u32;
        for i in 0..self.held.len() {
            let slab = self.held[i];
            if let Some(buf) = self.alloc_in(slab, pages) {
                return Some(buf);
            }
        }
        self.alloc_in_next(pages)
    }

    /// A buffer in a slab that this queue takes for it.
    #[cold]
    fn alloc_in_next(&mut self, pages: u32) -> Option<Buf> {
        let slab = self.take_slab(pages)?;
        if self.slabs.len() <= slab as usize {
            self.slabs.resize(slab as usize + 1, None);
        }
        self.slabs[slab as usize] = Some(self.pool.fresh(slab));
        self.held.push(slab);
        self.alloc_in(slab, pages)
    }

    /// A shared slab with room for so many pages.
    fn take_slab(&self, pages: u32) -> Option<u32> {
        if self.held.len() >= self.pool.most_held {
            return None;
        }
        let shared = &self.pool.shared;
        let slab = shared.take()?;
        if self.pool.fresh(slab).find(pages).is_some() {
            return Some(slab);
        }
        // The last one of the pool's own lacks a page. Those that it has grown by are behind that.
        let next = shared.take();
        shared.give(slab);
        next
    }

    fn alloc_in(&mut self, slab: u32, pages: u32) -> Option<Buf> {
        let map = self.slabs[slab as usize].as_mut()?;
        let first = map.find(pages)?;
        map.set(first, pages);
        self.in_use += pages;
        self.peak = self.peak.max(self.in_use);
        let offset = slab as usize * SLAB_BYTES + first as usize * PAGE_BYTES;
        Some(Buf(self.pool.arena.span(offset, pages as usize * PAGE_BYTES)))
    }

    /// Takes a buffer back, once nothing reads or writes it any more.
    ///
    /// # Panics
    /// If it is not from this queue's part of the pool: a bug of the caller.
    pub fn free(&mut self, buf: Buf) {
        let slab = buf.0.offset() / SLAB_BYTES;
        let first = (buf.0.offset() % SLAB_BYTES / PAGE_BYTES) as u32;
        let pages = (buf.0.len() / PAGE_BYTES) as u32;
        let Some(map) = self.slabs[slab].as_mut() else {
            panic!("{buf:?} is of a slab that this queue does not hold");
        };
        map.clear(first, pages);
        self.in_use -= pages;
        let slab = slab as u32;
        if slab != self.own && *map == self.pool.fresh(slab) {
            self.give_back(slab);
        }
    }

    fn give_back(&mut self, slab: u32) {
        self.slabs[slab as usize] = None;
        self.held.retain(|s| *s != slab);
        self.pool.shared.give(slab);
    }

    /// Says that this queue is going to use buffers; what an engine may
    /// [pin](crate::engine::Engine::pin) for it until [`cool`](Self::cool).
    pub fn warm(&mut self) -> Span {
        if !std::mem::replace(&mut self.warm, true) {
            *self.pool.warm() += 1;
            let first = if self.pool.is_of_many { FIRST_PINNED } else { FIRST_LENT };
            self.borrow_pages(self.peak.max(first));
            self.peak = 0;
        }
        if self.pool.is_of_many {
            return self.pool.own_pages(self.own, 0, self.wanted);
        }
        // No queue's scratch memory: pinning makes it resident, and of each queue that has no data it would stay so.
        let slabs = self.pool.slabs as usize * SLAB_BYTES;
        self.pool.arena.span(0, slabs.min(MAX_PINNED_BYTES))
    }

    /// Says that this queue uses neither buffers nor its scratch memory for now, and that no
    /// engine has them pinned. The scratch memory is given back to the system; the buffers are
    /// when no queue uses any, but of [many queues](Pool::of_many) at once. Memory that is given back
    /// reads as zeros.
    pub fn cool(&mut self) {
        self.cool_as(false);
    }

    /// The same of the buffers alone: the scratch memory is in use, and stays as it is.
    pub fn cool_buffers(&mut self) {
        self.cool_as(true);
    }

    fn cool_as(&mut self, keeps_scratch: bool) {
        if self.in_use > 0 || !std::mem::take(&mut self.warm) {
            return;
        }
        self.return_pages();
        let arena = &self.pool.arena;
        if !keeps_scratch {
            arena.release(self.pool.scratch(self.own as usize));
        }
        if self.pool.is_of_many {
            arena.release(self.pool.own_pages(self.own, 0, PAGES));
            self.pool.release_shared();
        }
        // Locked until it is done, so that a queue that warms up meanwhile waits.
        let mut warm = self.pool.warm();
        *warm -= 1;
        if *warm == 0 && !self.pool.is_of_many {
            arena.release(arena.span(0, self.pool.slabs as usize * SLAB_BYTES));
            self.pool.shrink();
        }
    }

    /// Whether more lent pages, or of [many queues](Pool::of_many) pinned ones, would be of use:
    /// [`borrow_more`](Self::borrow_more).
    pub fn wants_more(&self) -> bool {
        self.more_wanted().is_some()
    }

    /// How many lent pages this queue would have, if more were of use.
    pub fn more_wanted(&self) -> Option<u32> {
        let has_more = self.pool.lender.is_some() || self.pool.is_of_many;
        let wants = self.warm && self.wanted < self.peak.min(PAGES) && has_more;
        wants.then(|| self.peak.next_power_of_two().min(PAGES))
    }

    /// Has as many pages lent, or pinned next, as its buffers have filled at once. No buffer is in use, and no engine
    /// has the memory pinned.
    pub fn borrow_more(&mut self) {
        if self.in_use == 0 && self.wants_more() {
            self.borrow_pages(self.peak);
        }
    }

    /// Asks for the next power of two, so that it is done a few times at most.
    fn borrow_pages(&mut self, pages: u32) {
        self.wanted = pages.next_power_of_two().min(PAGES);
        let Some(lender) = &self.pool.lender else { return };
        let mut lendable = self.pool.lendable();
        let more = self.wanted.saturating_sub(self.lent).min(*lendable);
        *lendable -= more;
        drop(lendable);
        if more > 0 {
            lender.lend(&self.pool.arena, self.pool.own_pages(self.own, self.lent, more));
            self.lent += more;
        }
    }

    fn return_pages(&mut self) {
        let lent = std::mem::take(&mut self.lent);
        if let (Some(lender), 1..) = (&self.pool.lender, lent) {
            lender.take_back(&self.pool.arena, self.pool.own_pages(self.own, 0, lent));
            *self.pool.lendable() += lent;
        }
    }

    /// Bytes in buffers that are not freed yet.
    pub fn in_use(&self) -> usize {
        self.in_use as usize * PAGE_BYTES
    }
}

impl Drop for QueuePool {
    /// The own slab goes back to the pool for the queue's next life. Pages whose buffers were not
    /// freed stay taken, since something may still write to them.
    fn drop(&mut self) {
        if self.in_use > 0 {
            tracing::error!(queue = self.own, bytes = self.in_use(), "buffers were not freed");
        }
        self.cool();
        let own = self.own as usize;
        let map = self.slabs[own].take();
        self.pool.own()[own] = map;
    }
}

impl fmt::Debug for QueuePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (own, held, in_use) = (self.own, &self.held, self.in_use());
        f.debug_struct("QueuePool")
            .field("own", &own)
            .field("held", held)
            .field("in_use", &in_use)
            .finish()
    }
}
