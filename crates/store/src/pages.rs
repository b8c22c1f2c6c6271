//! Pages of trees in memory: which may leave it, and which a checkpoint has to write (store.md 5 and 6).
//!
//! A page is known by the generation in which it was born. One volume has had that generation, so there is
//! one such page, however many volumes share it. A snapshot shares what is not on the medium yet, too.
//!
//! **Within the budget.** Leaves are in [slots](super::slots). A task that changes leaves gets a
//! [promise](Pages::promise) first: of one slot for each leaf, and of one more, as the leaf may be frozen when it is
//! changed. The copy of a frozen leaf gets that slot. Leaves that are not clean, and promised slots, never take more
//! than three quarters of the slots. So no change waits for a slot, and a checkpoint needs none.
//! Inner pages are few, and bounded by their number.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::BLOCK_BYTES;
use super::journal::VolumeId;
use super::page::Pointer;
use super::slots::{SlotNumber, Slots, View, Writer};

/// Inner pages that are kept, unless more of them are not clean: 32 MiB.
const MAX_INNER: usize = 8192;
/// Looks for a page that may leave, at most, before one is given up that is wanted.
const LOOKS: usize = 2;

/// The bytes of an inner page.
pub type InnerBytes = Box<[u8; BLOCK_BYTES]>;

/// A tree of blocks or numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// From a volume's blocks to numbers.
    V2p,
    /// From numbers to places.
    P2m,
    /// From numbers to hashes.
    Hashes,
}

/// Which page. In their order a page is behind all that it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    /// Of which kind of tree.
    pub kind: Kind,
    /// 0: a leaf.
    pub level: u8,
    /// The generation in which it was born.
    pub born: u64,
    /// Its number among those of its level.
    pub index: u64,
}

/// The state of a page, with its versions.
#[derive(Debug)]
enum State<T> {
    /// The medium has it.
    Clean(T),
    /// No checkpoint has it.
    Dirty(T),
    /// The checkpoint under way has it.
    Frozen(T),
    /// That has it as it was, and it has been changed since.
    Both { frozen: T, now: T },
}

impl<T> State<T> {
    fn now(&self) -> &T {
        match self {
            State::Clean(now)
            | State::Dirty(now)
            | State::Frozen(now)
            | State::Both { now, .. } => now,
        }
    }

    /// As the checkpoint under way has it.
    fn frozen(&self) -> Option<&T> {
        match self {
            State::Frozen(frozen) | State::Both { frozen, .. } => Some(frozen),
            State::Clean(_) | State::Dirty(_) => None,
        }
    }

    fn is_clean(&self) -> bool {
        matches!(self, State::Clean(_))
    }
}

#[derive(Debug)]
struct Held<T> {
    state: State<T>,
    /// Reasons why it must stay.
    pins: u32,
}

impl<T> Held<T> {
    fn of(state: State<T>) -> Held<T> {
        Held { state, pins: 0 }
    }

    /// Does something to the state that takes it apart.
    fn turn(self, turn: impl FnOnce(State<T>) -> State<T>) -> Held<T> {
        Held { state: turn(self.state), pins: self.pins }
    }

    fn may_leave(&self) -> bool {
        self.pins == 0 && self.state.is_clean()
    }
}

/// Slots that a task may use to change leaves. It gives the promise back.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "slots that are promised are of no use to others"]
pub struct Promise(usize);

/// Pages that stay until this is [given back](Pages::unpin).
#[derive(Debug, Default)]
#[must_use = "pages that are pinned never leave"]
pub struct Pins(Vec<PageId>);

/// See the module text.
pub struct Pages {
    writer: Writer,
    leaves: HashMap<PageId, Held<SlotNumber>>,
    inner: HashMap<PageId, Held<InnerBytes>>,
    /// Those that may leave, or may not, the one that is looked at next first.
    leave_order: [VecDeque<PageId>; 2],
    /// All that are not clean.
    unclean: BTreeSet<PageId>,
    /// Slots of leaves that are not clean.
    unclean_slots: usize,
    promised: usize,
    /// A promise was refused since the last checkpoint began, and before that.
    refused: [bool; 2],
    /// Places on the medium that the trees have no more.
    dropped: Vec<u64>,
}

impl Pages {
    /// With leaves in so many bytes.
    pub fn new(bytes: usize) -> Pages {
        Pages {
            writer: Writer::new(bytes),
            leaves: HashMap::new(),
            inner: HashMap::new(),
            leave_order: Default::default(),
            unclean: BTreeSet::new(),
            unclean_slots: 0,
            promised: 0,
            refused: [false; 2],
            dropped: Vec::new(),
        }
    }

    /// The slots, by which readers see the leaves.
    pub fn slots(&self) -> &Arc<Slots> {
        self.writer.slots()
    }

    /// How many leaves fit.
    pub fn count(&self) -> usize {
        self.writer.count()
    }

    /// Room for the changes of so many leaves. None: not before a checkpoint, or the end of others.
    pub fn promise(&mut self, leaves: usize) -> Option<Promise> {
        let slots = 2 * leaves;
        let fits = self.unclean_slots + self.promised + slots <= self.writer.count() / 4 * 3;
        self.refused[0] |= !fits;
        fits.then(|| {
            self.promised += slots;
            Promise(slots)
        })
    }

    /// The largest [promise](Pages::promise) that is ever given.
    pub fn most_leaves(&self) -> usize {
        self.writer.count() / 4 * 3 / 2
    }

    /// Slots without which no [promise](Pages::promise) of so many leaves is ever given.
    pub const fn least(leaves: usize) -> usize {
        (2 * leaves).div_ceil(3) * 4
    }

    /// Whether no task has a promise. Then only a checkpoint can make room.
    pub fn promises_nothing(&self) -> bool {
        self.promised == 0
    }

    /// The changes are made, or never will be.
    pub fn keep_promise(&mut self, promise: Promise) {
        self.promised -= promise.0;
    }

    /// Whether a checkpoint is wanted: leaves that are not clean take half of the memory. If a task has found no room
    /// lately, a quarter is enough: that leaves more room for writes during the checkpoint.
    pub fn wants_checkpoint(&self) -> bool {
        let part = if self.refused == [false; 2] { 2 } else { 4 };
        self.unclean_slots >= self.writer.count() / part
    }

    /// The number of pages that a checkpoint would write: unclean ones, and promised ones, which are a leaf and one
    /// that leads to it.
    pub fn owed_pages(&self) -> usize {
        self.unclean.len() + self.promised
    }

    /// Whether no page is dirty.
    pub fn is_clean(&self) -> bool {
        self.unclean.is_empty()
    }

    /// Whether a page is here.
    pub fn holds(&self, id: &PageId) -> bool {
        if id.level == 0 { self.leaves.contains_key(id) } else { self.inner.contains_key(id) }
    }

    /// Keeps a page that is here.
    pub fn pin(&mut self, id: PageId, pins: &mut Pins) {
        let count = match id.level {
            0 => self.leaves.get_mut(&id).map(|held| &mut held.pins),
            _ => self.inner.get_mut(&id).map(|held| &mut held.pins),
        };
        if let Some(count) = count {
            *count += 1;
            pins.0.push(id);
        }
    }

    /// They need not stay any more.
    pub fn unpin(&mut self, pins: Pins) {
        for id in pins.0 {
            if let Some(held) = self.leaves.get_mut(&id) {
                held.pins -= 1;
            } else if let Some(held) = self.inner.get_mut(&id) {
                held.pins -= 1;
            }
        }
    }

    /// A page that the medium has. `false`: there is no room for it now.
    ///
    /// # Panics
    /// If it is not a page.
    pub fn install(&mut self, id: PageId, page: &[u8]) -> bool {
        if self.holds(&id) {
            return true;
        }
        if id.level == 0 {
            let Some(slot) = self.take_slot() else { return false };
            self.writer.fill(&slot, page);
            self.leaves.insert(id, Held::of(State::Clean(slot)));
        } else {
            self.make_room_for_inner();
            let page = page.try_into().expect("a page");
            self.inner.insert(id, Held::of(State::Clean(Box::new(page))));
        }
        self.leave_order[usize::from(id.level > 0)].push_back(id);
        true
    }

    /// A slot, that of a clean leaf if there is no other.
    fn take_slot(&mut self) -> Option<SlotNumber> {
        if let Some(slot) = self.writer.take() {
            return Some(slot);
        }
        let all = self.leave_order[0].len();
        for look in 0..LOOKS * all {
            let id = self.leave_order[0].pop_front()?;
            // It has gone as another page was changed in its place.
            let Some(held) = self.leaves.remove(&id) else { continue };
            match held {
                // Readers may keep all slots in use. A task with a promise gets one anyway.
                Held { state: State::Clean(slot), pins: 0 }
                    if !self.writer.was_used(&slot) || look >= all =>
                {
                    self.writer.free(slot);
                    return self.writer.take();
                }
                held => {
                    self.leaves.insert(id, held);
                    self.leave_order[0].push_back(id);
                }
            }
        }
        None
    }

    fn make_room_for_inner(&mut self) {
        let order = &mut self.leave_order[1];
        for _ in 0..order.len() {
            if self.inner.len() < MAX_INNER {
                return;
            }
            let Some(id) = order.pop_front() else { return };
            match self.inner.get(&id).is_none_or(Held::may_leave) {
                true => drop(self.inner.remove(&id)),
                false => order.push_back(id),
            }
        }
    }

    /// Words of a leaf that is here.
    pub fn words<const N: usize>(&self, id: &PageId, at: usize) -> Option<[u64; N]> {
        Some(self.writer.words(self.leaves.get(id)?.state.now(), at))
    }

    /// Readers find a leaf that is here by this view from now on, and not in another's.
    pub fn show(&mut self, id: &PageId, view: View) {
        if let Some(held) = self.leaves.get(id) {
            self.writer.show(held.state.now(), view);
        }
    }

    /// Readers do not find it by this view any more.
    pub fn hide(&mut self, id: &PageId, view: View) {
        if let Some(held) = self.leaves.get(id) {
            self.writer.hide(held.state.now(), view);
        }
    }

    /// Readers find none of a volume's leaves any more.
    pub fn hide_volume(&mut self, volume: VolumeId) {
        self.writer.hide_volume(volume);
    }

    /// Changes words of a leaf that is [dirty](Self::make_dirty).
    ///
    /// # Panics
    /// If it is not.
    pub fn store(&mut self, id: &PageId, at: usize, words: &[u64]) {
        let held = self.leaves.get(id).filter(|_| self.unclean.contains(id));
        self.writer.store(held.expect("a leaf that is dirty").state.now(), at, words);
    }

    /// The bytes of an inner page that is here.
    pub fn inner(&self, id: &PageId) -> Option<&[u8; BLOCK_BYTES]> {
        self.inner.get(id).map(|held| &**held.state.now())
    }

    /// The bytes of an inner page that is [dirty](Self::make_dirty).
    ///
    /// # Panics
    /// If it is not.
    pub fn inner_mut(&mut self, id: &PageId) -> &mut [u8; BLOCK_BYTES] {
        match self.inner.get_mut(id).map(|held| &mut held.state) {
            Some(State::Dirty(now) | State::Both { now, .. }) => now,
            other => unreachable!("{id:?} is changed, and is {other:?}"),
        }
    }

    /// The trees have this place of the medium no more.
    pub fn drop_place(&mut self, place: u64) {
        self.dropped.push(place);
    }

    /// Places that the trees have had, and have no more, since this was asked last.
    pub fn take_dropped(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.dropped)
    }

    /// A page that is here, from the medium or not, is going to be changed.
    ///
    /// # Panics
    /// If it is not here, or a slot for it was not promised.
    pub fn make_dirty(&mut self, id: PageId) {
        if id.level > 0 {
            let held = self.inner.remove(&id).expect("a page that is pinned");
            let held = held.turn(|state| match state {
                State::Clean(now) => State::Dirty(now),
                State::Frozen(now) => State::Both { frozen: now.clone(), now },
                dirty => dirty,
            });
            self.inner.insert(id, held);
            self.unclean.insert(id);
            return;
        }
        let held = self.leaves.remove(&id).expect("a leaf that is pinned");
        let held = match held {
            Held { state: State::Frozen(now), pins } => {
                // Readers find the one that they have found before.
                let frozen = self.take_slot().expect("a slot that was promised");
                self.writer.copy(&now, &frozen);
                self.unclean_slots += 1;
                Held { state: State::Both { frozen, now }, pins }
            }
            Held { state: State::Clean(now), pins } => {
                self.unclean_slots += 1;
                Held { state: State::Dirty(now), pins }
            }
            dirty => dirty,
        };
        self.leaves.insert(id, held);
        self.unclean.insert(id);
    }

    /// A page that was not, with what is in another one that is here, or with zeros.
    ///
    /// # Panics
    /// If the other one is not here, or a slot was not promised.
    pub fn make_new(&mut self, id: PageId, from: Option<PageId>) {
        if id.level > 0 {
            let bytes = from.map(|from| *self.inner(&from).expect("a page that is pinned"));
            let bytes = bytes.unwrap_or([0; BLOCK_BYTES]);
            self.inner.insert(id, Held::of(State::Dirty(Box::new(bytes))));
        } else {
            let slot = self.take_slot().expect("a slot that was promised");
            match from {
                Some(from) => {
                    let from = self.leaves.get(&from).expect("a leaf that is pinned");
                    self.writer.copy(from.state.now(), &slot);
                }
                None => self.writer.fill(&slot, &[0; BLOCK_BYTES]),
            }
            self.unclean_slots += 1;
            self.leaves.insert(id, Held::of(State::Dirty(slot)));
        }
        self.unclean.insert(id);
        self.leave_order[usize::from(id.level > 0)].push_back(id);
    }

    /// All that is dirty belongs to the checkpoint that begins: these pages, leaves first.
    ///
    /// # Panics
    /// If another one is under way.
    pub fn freeze(&mut self) -> Vec<PageId> {
        self.refused = [false, self.refused[0]];
        for id in &self.unclean {
            if let Some(held) = self.leaves.remove(id) {
                self.leaves.insert(*id, held.turn(freeze));
            } else if let Some(held) = self.inner.remove(id) {
                self.inner.insert(*id, held.turn(freeze));
            }
        }
        self.unclean.iter().copied().collect()
    }

    /// A frozen page as the checkpoint has it.
    ///
    /// # Panics
    /// If it is not frozen.
    pub fn frozen(&self, id: &PageId) -> Vec<u8> {
        let leaf = self.leaves.get(id).and_then(|held| held.state.frozen());
        let inner = self.inner.get(id).and_then(|held| held.state.frozen());
        match (leaf, inner) {
            (Some(slot), _) => self.writer.page(slot),
            (_, Some(bytes)) => bytes.to_vec(),
            _ => unreachable!("{id:?} is not frozen"),
        }
    }

    /// The checkpoint is on the medium, with these pages. The next checkpoint writes pages that were changed meanwhile
    /// to other places.
    pub fn thaw(&mut self, written: &BTreeMap<PageId, Pointer>) {
        for (id, pointer) in written {
            let was_changed = if let Some(held) = self.leaves.remove(id) {
                // One slot is clean now, or free.
                self.unclean_slots -= 1;
                let (state, rest) = thaw(held.state);
                let was_changed = rest.is_some();
                rest.into_iter().for_each(|slot| self.writer.free(slot));
                self.leaves.insert(*id, Held { state, pins: held.pins });
                was_changed
            } else if let Some(held) = self.inner.remove(id) {
                let (state, rest) = thaw(held.state);
                self.inner.insert(*id, Held { state, pins: held.pins });
                rest.is_some()
            } else {
                continue;
            };
            match was_changed {
                true => self.dropped.push(pointer.place),
                false => drop(self.unclean.remove(id)),
            }
        }
    }

    /// Inner pages that are not on the medium as they are now.
    pub fn unclean_inner(&self) -> impl Iterator<Item = PageId> {
        self.unclean.iter().copied().filter(|id| id.level > 0)
    }

    /// An inner page that is here, as it is now: to put in what it means already.
    pub fn inner_now_mut(&mut self, id: &PageId) -> Option<&mut [u8; BLOCK_BYTES]> {
        match &mut self.inner.get_mut(id)?.state {
            State::Clean(now)
            | State::Dirty(now)
            | State::Frozen(now)
            | State::Both { now, .. } => Some(now),
        }
    }

    /// Whether a page is not on the medium as it is now.
    pub fn is_unclean(&self, id: &PageId) -> bool {
        self.unclean.contains(id)
    }
}

fn freeze<T>(state: State<T>) -> State<T> {
    match state {
        State::Dirty(now) => State::Frozen(now),
        State::Clean(now) => State::Clean(now),
        State::Frozen(_) | State::Both { .. } => unreachable!("one checkpoint at a time"),
    }
}

/// The new state of a frozen page, and its frozen version if it was changed since.
fn thaw<T>(state: State<T>) -> (State<T>, Option<T>) {
    match state {
        State::Frozen(now) => (State::Clean(now), None),
        State::Both { frozen, now } => (State::Dirty(now), Some(frozen)),
        other => (other, None),
    }
}
