use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::StoreId;

mod damage;

const ID: StoreId = [4; 16];
const RESERVE: u64 = 200;
const BLOCK_BITS: usize = crate::BLOCK_BYTES * 8;

fn layout() -> Layout {
    Layout::of(18 << 20).unwrap()
}

/// How far a dropped place is on its way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Dropped,
    Begun,
    Done(u64),
}

/// The places in use, and whether they are those of pages, which have a copy.
type InUse = BTreeMap<u64, bool>;

/// A store's space, the pages on its medium, and the model of both without a look at the space.
struct World {
    layout: Layout,
    space: Space,
    medium: BTreeMap<u64, Vec<u8>>,
    now: InUse,
    /// At the last checkpoint whose superblock is in both homes.
    whole: (u64, InUse),
    /// Of the checkpoint under way, and the blocks that it has written.
    under_way: Option<(InUse, Vec<u64>)>,
    dropped: BTreeMap<u64, Stage>,
    epoch: u64,
    /// A pass has marked what is in use.
    is_marked: bool,
}

#[derive(Clone, Debug)]
enum Step {
    Data(u64),
    Page,
    Drop(usize),
    Begin(usize),
    /// A pass marks what is in use now.
    Mark,
    /// As `Begin`, of a checkpoint that sweeps.
    Sweep(usize),
    Write(usize),
    Done,
    Fail,
    Epoch,
    Release(u64),
    /// Which page is torn, whether the superblock is in its first home, which records count.
    Cut(usize, bool, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..90u64).prop_map(Step::Data),
        4 => Just(Step::Page),
        6 => any::<usize>().prop_map(Step::Drop),
        3 => (0..4usize).prop_map(Step::Begin),
        1 => Just(Step::Mark),
        2 => (0..4usize).prop_map(Step::Sweep),
        4 => (1..99usize).prop_map(Step::Write),
        3 => Just(Step::Done),
        1 => Just(Step::Fail),
        1 => Just(Step::Epoch),
        3 => (0..3u64).prop_map(Step::Release),
        1 => (any::<usize>(), any::<bool>(), any::<u64>()).prop_map(|(t, s, c)| Step::Cut(t, s, c)),
    ]
}

impl World {
    fn new() -> World {
        let layout = layout();
        let mut medium = BTreeMap::new();
        for segment in 0..layout.segments {
            for home in 0..2 {
                let bits = Bits::all(false, layout.segment_blocks);
                let page = SpacePage { checkpoint: home, kind: Kind::Free, bits };
                let page = page.encode(&ID, segment, home as usize);
                medium.insert(layout.space_page(segment, home), page);
            }
        }
        let mut world = World {
            layout,
            space: Space::new(layout, RESERVE),
            medium,
            now: InUse::new(),
            whole: (1, InUse::new()),
            under_way: None,
            dropped: BTreeMap::new(),
            epoch: 0,
            is_marked: false,
        };
        world.open();
        world
    }

    fn page(&self, segment: u64, home: usize) -> Result<SpacePage, Damaged> {
        let page = &self.medium[&self.layout.space_page(segment, home as u64)];
        SpacePage::decode(page, &ID, &self.layout, segment, home)
    }

    fn open(&mut self) {
        self.space = Space::new(self.layout, RESERVE);
        self.is_marked = false;
        for pair in 0..self.layout.segments / 2 {
            let mut found = [2 * pair, 2 * pair + 1].map(|segment| {
                choose([self.page(segment, 0), self.page(segment, 1)], self.whole.0)
            });
            let mends = mends(&found, self.whole.0, self.layout.segment_blocks);
            for ((found, mend), segment) in found.iter_mut().zip(mends).zip(2 * pair..) {
                let Some(page) = mend else { continue };
                let home = 1 - found.next_home;
                let at = self.layout.space_page(segment, home as u64);
                self.medium.insert(at, page.encode(&ID, segment, home));
                found.page = Some(page);
            }
            self.space.add_pair(found);
        }
    }

    fn load(&mut self, segment: u64) {
        let page = self.page(segment, self.space.home(segment));
        self.space.load(segment, page);
    }

    fn loaded(&mut self, place: u64) {
        let (segment, _) = self.layout.segment_of(place).unwrap();
        if !self.space.is_loaded(segment) {
            self.load(segment);
        }
    }

    /// Checks that the place is not in use, now or at a checkpoint that counts or may count.
    fn give(&mut self, place: u64, is_page: bool) {
        let blocks = |place: u64, is_page: bool| {
            std::iter::once(place).chain(is_page.then(|| self.layout.copy_of(place).unwrap()))
        };
        let states = [&self.now, &self.whole.1];
        let states = states.into_iter().chain(self.under_way.iter().map(|(state, _)| state));
        let mut taken: BTreeSet<u64> =
            states.flatten().flat_map(|(place, is_page)| blocks(*place, *is_page)).collect();
        taken.extend(self.dropped.keys());
        for block in blocks(place, is_page) {
            assert!(
                !taken.contains(&block),
                "place {block} is in use: {:?}",
                self.dropped.get(&block)
            );
        }
        self.now.insert(place, is_page);
    }

    fn data(&mut self, most: u64) -> Option<u64> {
        loop {
            match self.space.give_data(most) {
                Given::Places(run) => {
                    assert!(!run.is_empty() && run.end - run.start <= most);
                    run.clone().for_each(|place| self.give(place, false));
                    return Some(run.end - run.start);
                }
                Given::Load(segment) => self.load(segment),
                Given::Full => return None,
            }
        }
    }

    fn new_page(&mut self) -> Option<u64> {
        let place = self.space.give_page()?;
        self.give(place, true);
        Some(place)
    }

    fn write(&mut self, pages: usize) -> bool {
        let checkpoint = self.whole.0 + 1;
        for _ in 0..pages {
            let Some((_, written)) = &mut self.under_way else { return false };
            let Some((block, page)) = self.space.page_to_write(&ID, checkpoint) else {
                return true;
            };
            self.medium.insert(block, page);
            written.push(block);
        }
        false
    }

    fn done(&mut self) {
        if self.under_way.is_none() {
            return;
        }
        while !self.write(99) {}
        let (state, _) = self.under_way.take().unwrap();
        self.whole = (self.whole.0 + 1, state);
        self.space.done(self.epoch);
        self.space.let_go();
        for stage in self.dropped.values_mut().filter(|stage| **stage == Stage::Begun) {
            *stage = Stage::Done(self.epoch);
        }
    }

    /// As a pass does, when no checkpoint is under way.
    fn mark(&mut self) {
        if self.under_way.is_some() {
            return;
        }
        self.space.begin_marks();
        self.is_marked = true;
        for (place, is_page) in &self.now {
            match is_page {
                true => self.space.mark_page(*place),
                false => self.space.mark(*place),
            }
        }
    }

    fn sweep(&mut self, pages: usize) {
        if self.under_way.is_some() || !self.is_marked {
            return;
        }
        for segment in 0..self.layout.segments {
            if !self.space.is_loaded(segment) {
                self.load(segment);
            }
        }
        let pairs = 0..self.layout.segments / 2;
        self.begin_with(pages, |space| drop(space.sweep(pairs)));
    }

    fn begin(&mut self, pages: usize) {
        self.begin_with(pages, |_| {});
    }

    fn begin_with(&mut self, pages: usize, behind: impl FnOnce(&mut Space)) {
        if self.under_way.is_some() {
            return;
        }
        self.space.begin();
        behind(&mut self.space);
        self.dropped.values_mut().filter(|s| **s == Stage::Dropped).for_each(|s| *s = Stage::Begun);
        self.under_way = Some((self.now.clone(), Vec::new()));
        for _ in 0..pages {
            if let Some(place) = self.new_page() {
                self.under_way.as_mut().unwrap().0.insert(place, true);
            }
        }
    }

    fn checkpoint(&mut self) {
        self.begin(0);
        self.done();
    }

    /// The page that counts.
    fn damage(&mut self, segment: u64) {
        let homes = [0, 1].map(|home| self.page(segment, home).unwrap().checkpoint);
        let home = u64::from(homes[1] > homes[0]);
        self.medium.get_mut(&self.layout.space_page(segment, home)).unwrap()[..512].fill(7);
    }

    fn drop_one(&mut self, which: usize) {
        let Some((place, _)) = self.now.iter().nth(which % self.now.len().max(1)) else { return };
        let place = *place;
        self.loaded(place);
        self.space.drop_place(place);
        self.now.remove(&place);
        self.dropped.insert(place, Stage::Dropped);
    }

    /// Nothing is torn behind the last page.
    fn tear(&mut self, written: &[u64], torn: usize) {
        if let Some(block) = written.get(torn % (written.len() + 1)) {
            self.medium.get_mut(block).unwrap()[..512].fill(7);
        }
    }

    /// Of the checkpoint under way. None is torn, and there is no superblock.
    fn cut_behind_all_pages(&mut self) {
        while !self.write(1) {}
        let written = self.under_way.as_ref().unwrap().1.len();
        self.cut(written, false, 0);
    }

    fn cut(&mut self, torn: usize, has_superblock: bool, counts: u64) {
        // No write tears a page that counts already. But any page may rot.
        while has_superblock && self.under_way.is_some() && !self.write(99) {}
        if let Some((state, written)) = self.under_way.take() {
            if has_superblock {
                self.whole = (self.whole.0 + 1, state);
            }
            self.tear(&written, torn);
        }
        self.dropped.clear();
        let since = std::mem::replace(&mut self.now, self.whole.1.clone());
        self.open();
        let was = &self.whole.1;
        let data = since.iter().filter(|(place, is_page)| !**is_page && !was.contains_key(place));
        let data: Vec<u64> = data.map(|(place, _)| *place).collect();
        for (i, place) in data.into_iter().enumerate() {
            if counts >> (i % 64) & 1 == 1 {
                self.loaded(place);
                self.space.take(place).unwrap();
                self.now.insert(place, false);
            }
        }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Data(most) => {
                self.data(most);
            }
            Step::Page => {
                self.new_page();
            }
            Step::Drop(which) => (0..9).for_each(|i| self.drop_one(which.wrapping_add(i))),
            Step::Begin(pages) => self.begin(pages),
            Step::Mark => self.mark(),
            Step::Sweep(pages) => self.sweep(pages),
            Step::Write(pages) => {
                self.write(pages);
            }
            Step::Done => self.done(),
            Step::Fail => {
                if let Some((..)) = self.under_way.take() {
                    self.space.failed();
                }
            }
            Step::Epoch => self.epoch += 1,
            Step::Release(before) => self.release(self.epoch.saturating_sub(before)),
            Step::Cut(torn, has_superblock, counts) => self.cut(torn, has_superblock, counts),
        }
    }

    fn release(&mut self, epoch: u64) {
        self.space.release(epoch);
        self.dropped.retain(|_, s| !matches!(s, Stage::Done(done) if *done <= epoch));
    }

    /// The places not in use.
    fn free(&self) -> u64 {
        let blocks = |is_page: &bool| if *is_page { 2 } else { 1 };
        self.layout.places() - self.now.values().map(blocks).sum::<u64>()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ferrite_testkit::rounds(100)))]

    /// In any order of steps, and wherever the power is cut.
    #[test]
    fn no_place_is_given_twice_or_before_its_checkpoint(steps in prop::collection::vec(step(), 1..150)) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.take(step));
    }

    /// Without a cut everything that was dropped can be given again, also after an opening.
    #[test]
    fn nothing_is_lost_but_by_a_cut(steps in prop::collection::vec(step(), 1..150)) {
        let mut world = World::new();
        let steps = steps.iter().filter(|step| !matches!(step, Step::Cut(..)));
        steps.for_each(|step| world.take(step));
        world.done();
        world.begin(0);
        world.done();
        world.release(world.epoch);
        for opened in [false, true] {
            if opened {
                world.open();
            }
            let counted: u64 = world.space.pairs.iter().zip(0..).map(|(kind, pair)| match kind {
                Kind::Metadata => 2 * world.space.room_in(*kind, pair),
                _ => world.space.free_of(pair),
            }).sum();
            prop_assert_eq!(counted, world.free());
        }
    }

    #[test]
    fn runs_are_those_that_a_look_at_each_bit_finds(
        words in prop::collection::vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 1..4),
        from in 0..256u64,
        most in 1..200u64,
    ) {
        let bits = Bits::of(words.into());
        let len = bits.words().len() as u64 * 64;
        let first = (from..len).find(|at| !bits.get(*at));
        let run = first.map(|first| {
            let end = (first..len).find(|at| bits.get(*at)).unwrap_or(len);
            first..end.min(first + most)
        });
        prop_assert_eq!(bits.clear_run(from, most), run);
    }

    #[test]
    fn a_page_is_read_as_it_was_written_and_nowhere_else(
        checkpoint in 0..1u64 << 60,
        place in 0..64u64,
        bit in 0..BLOCK_BITS,
    ) {
        let mut bits = Bits::all(false, 64);
        bits.set(place);
        let page = SpacePage { checkpoint, kind: Kind::Metadata, bits };
        let mut bytes = page.encode(&ID, 3, 1);
        let decode = |bytes: &[u8], segment, home| {
            SpacePage::decode(bytes, &ID, &layout(), segment, home)
        };
        prop_assert_eq!(decode(&bytes, 3, 1), Ok(page));
        prop_assert!(decode(&bytes, 3, 0).is_err() && decode(&bytes, 4, 1).is_err());
        prop_assert!(SpacePage::decode(&bytes, &[0; 16], &layout(), 3, 1).is_err());
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(decode(&bytes, 3, 1).is_err());
    }
}

#[test]
fn a_store_full_of_data_has_room_for_a_pass_and_a_checkpoint() {
    let mut world = World::new();
    while world.data(64).is_some() {}
    let free = world.space.pairs.iter().filter(|kind| **kind == Kind::Free).count() as u64;
    assert!(free >= 2 && (free - 2) * layout().segment_blocks >= RESERVE, "{free} pairs");
    // And no more than that is kept.
    assert!((free - 3) * layout().segment_blocks < RESERVE, "{free} pairs");
    let pages = (0..).take_while(|_| world.new_page().is_some()).count() as u64;
    assert_eq!(pages, free * layout().segment_blocks);
}

#[test]
fn what_is_left_in_pairs_of_data_is_filled_before_pages_have_to_do_without_free_ones() {
    let mut world = World::new();
    while world.space.free_pair(RESERVED_PAIRS, PLENTY * RESERVE).is_some() {
        world.data(64);
    }
    while world.space.open.is_some_and(|(_, at)| at < 2 * layout().segment_blocks) {
        world.data(1);
    }
    (0..10).for_each(|_| world.drop_one(0));
    world.begin(0);
    world.done();
    world.release(world.epoch);
    let free = world.space.free_pairs;
    for _ in 0..10 {
        assert_eq!((world.data(1), world.space.free_pairs), (Some(1), free));
    }
    assert_eq!(world.space.give_sealed(16), None, "content in order waits for better times");
    assert_eq!((world.data(1), world.space.free_pairs), (Some(1), free - 1));
}

#[test]
fn bits_that_the_medium_has_are_not_in_memory() {
    let mut world = World::new();
    while world.data(64).is_some() {}
    world.begin(5);
    world.done();
    world.release(world.epoch);
    let in_memory =
        |world: &World| world.space.segments.iter().filter(|s| s.bits.is_some()).count();
    assert_eq!(in_memory(&world), 2);
    world.open();
    assert_eq!(in_memory(&world), 2);
    assert!(std::mem::size_of::<Segment>() <= 32);
}

/// The pair is full, and the next one is being filled, while the checkpoint with its page is under way.
#[test]
fn bits_stay_in_memory_until_the_checkpoint_that_has_them_counts() {
    let mut world = World::new();
    world.data(64);
    world.begin(0);
    world.write(1);
    world.data(64);
    world.data(1);
    world.drop_one(0);
    world.done();
    while world.data(64).is_some() {}
}

/// A place is dropped while a checkpoint is under way, which is not the one that drops it.
#[test]
fn a_place_that_was_dropped_is_not_in_the_page_of_the_next_checkpoint() {
    let mut world = World::new();
    world.data(64);
    world.data(64);
    world.data(1);
    world.begin(0);
    world.drop_one(0);
    world.done();
    world.begin(0);
    world.done();
    world.open();
    assert_eq!(world.space.free_of(0), 1);
}

#[test]
fn a_pair_that_nobody_uses_any_more_is_for_anything() {
    let mut world = World::new();
    world.data(9);
    world.new_page();
    (0..10).for_each(|_| world.drop_one(0));
    world.begin(0);
    world.done();
    world.release(world.epoch);
    assert!(world.space.pairs.iter().all(|kind| *kind == Kind::Free));
}

/// A pass has found pages in a pair. They are gone when it sweeps, and a guest's data are there.
#[test]
fn a_pair_of_data_stays_one_though_a_pass_has_marked_pages_there() {
    let mut world = World::new();
    world.new_page();
    world.mark();
    world.drop_one(0);
    world.begin(0);
    world.done();
    world.release(world.epoch);
    // Both segments of it. So a page in the first one's place that comes free would have its copy in data.
    world.data(64);
    world.data(64);
    assert_eq!(world.space.pairs[0], Kind::Data);
    world.drop_one(0);
    world.sweep(0);
    world.done();
    world.release(world.epoch);
    assert_eq!(world.space.free_of(0), 1);
    while world.new_page().is_some() {}
}

#[test]
fn content_in_a_place_of_pages_or_of_nobody_is_damage() {
    let mut world = World::new();
    let place = world.new_page().unwrap();
    let beside = layout().copy_of(place).unwrap();
    for place in [place, place + 1, beside, 0, u64::MAX] {
        assert!(world.space.take(place).is_err(), "{place}");
    }
}
