use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::pages::{Pages, Promise};
use crate::slots::{SLOT_BYTES, View};

/// So volumes have two levels of inner pages.
const LEAVES: u64 = 600;

fn layout() -> Layout {
    Layout::of(1 << 30).unwrap()
}

/// The first words of the leaves of a volume.
type Model = BTreeMap<u64, u64>;

#[derive(Clone)]
struct Volume {
    tree: Tree,
    generation: u64,
    model: Model,
}

/// A checkpoint that has begun.
struct UnderWay {
    /// Pages to be written yet, the last first.
    left: Vec<PageId>,
    volumes: Vec<Volume>,
    written: Written,
    dropped: Vec<u64>,
}

struct World {
    layout: Layout,
    pages: Pages,
    medium: BTreeMap<u64, Vec<u8>>,
    next_place: u64,
    volumes: Vec<Volume>,
    generation: u64,
    under_way: Option<UnderWay>,
    /// At the last checkpoint that is on the medium.
    whole: Vec<Volume>,
    snapshots: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize, u64, u64),
    Read(usize, u64),
    Snapshot(usize),
    Freeze,
    WritePages(usize),
    Finish,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    // Some are neighbours of an inner page, and some are written often.
    let leaf = prop_oneof![0..6u64, 250..260u64, 0..LEAVES];
    prop_oneof![
        16 => (any::<usize>(), leaf.clone(), any::<u64>()).prop_map(|(v, l, w)| Step::Write(v, l, w)),
        6 => (any::<usize>(), leaf).prop_map(|(v, l)| Step::Read(v, l)),
        1 => any::<usize>().prop_map(Step::Snapshot),
        2 => Just(Step::Freeze),
        4 => (1..20usize).prop_map(Step::WritePages),
        2 => Just(Step::Finish),
        1 => Just(Step::Reopen),
    ]
}

impl World {
    fn new(slots: usize) -> World {
        let tree = Tree::of_volume(LEAVES * 512, Link::Nothing);
        let volume = Volume { tree, generation: FIRST_GENERATION, model: Model::new() };
        World {
            layout: layout(),
            pages: Pages::new(slots * 4200),
            medium: BTreeMap::new(),
            next_place: 0,
            volumes: vec![volume.clone()],
            generation: FIRST_GENERATION + 1,
            under_way: None,
            whole: vec![volume],
            snapshots: 0,
        }
    }

    /// Has all on the way to a leaf in memory. `false`: but for the leaf, for which there is no room.
    fn load(&mut self, tree: Tree, leaf: u64) -> bool {
        while let Found::Load(id, pointer) = tree.find(&self.pages, leaf).unwrap() {
            let page = &self.medium[&pointer.place];
            assert_eq!(pointer.verify(page), Ok(()), "a place was used again too early");
            check_page(&id, page, &self.layout).unwrap();
            if !self.pages.install(id, page) {
                return false;
            }
        }
        true
    }

    fn promise(&mut self) -> Promise {
        if let Some(promise) = self.pages.promise(1) {
            return promise;
        }
        for _ in 0..2 {
            self.freeze();
            self.finish();
        }
        self.pages.promise(1).expect("all is clean")
    }

    fn write(&mut self, volume: usize, leaf: u64, word: u64) {
        let promise = self.promise();
        let number = volume % self.volumes.len();
        assert!(self.load(self.volumes[number].tree, leaf), "a promise was made");
        let volume = &mut self.volumes[number];
        let mut pins = Pins::default();
        volume.tree.pin(&mut self.pages, leaf, &mut pins).unwrap();
        let changed = volume.tree.change(&mut self.pages, volume.generation, leaf);
        let view = View::of_volume(number as u32, leaf);
        changed.before.inspect(|before| self.pages.hide(before, view));
        self.pages.store(&changed.leaf, 0, &[word]);
        self.pages.show(&changed.leaf, view);
        volume.model.insert(leaf, word);
        self.pages.unpin(pins);
        self.pages.keep_promise(promise);
    }

    fn read(&mut self, number: usize, leaf: u64) {
        let number = number % self.volumes.len();
        let volume = self.volumes[number].clone();
        let view = View::of_volume(number as u32, leaf);
        let expected = *volume.model.get(&leaf).unwrap_or(&0);
        if let Some([word]) = self.pages.slots().read(view, 0) {
            assert_eq!(word, expected, "without a lock, leaf {leaf} of {number}");
        }
        if self.load(volume.tree, leaf) {
            let word = match volume.tree.find(&self.pages, leaf).unwrap() {
                Found::Leaf(id) => {
                    self.pages.show(&id, view);
                    self.pages.words::<1>(&id, 0).unwrap()[0]
                }
                Found::Nothing => 0,
                Found::Load(..) => unreachable!("all is loaded"),
            };
            assert_eq!(word, expected, "leaf {leaf} of {number}");
        }
    }

    fn snapshot(&mut self, volume: usize) {
        let number = volume % self.volumes.len();
        let shared = Volume { generation: self.generation, ..self.volumes[number].clone() };
        self.volumes.push(shared);
        self.volumes[number].generation = self.generation + 1;
        self.generation += 2;
        self.snapshots += 1;
    }

    fn freeze(&mut self) {
        if self.under_way.is_none() {
            let mut left = self.pages.freeze();
            left.reverse();
            let dropped = self.pages.take_dropped();
            let volumes = self.volumes.clone();
            self.under_way = Some(UnderWay { left, volumes, written: Written::new(), dropped });
        }
    }

    fn write_pages(&mut self, count: usize) {
        let Some(under_way) = &mut self.under_way else { return };
        for _ in 0..count {
            let Some(id) = under_way.left.pop() else { return };
            let page = page_to_write(&self.pages, &id, &under_way.written).unwrap();
            let (pair, at) = (self.next_place / 1024, self.next_place % 1024);
            self.next_place += 1;
            let place = self.layout.first_place(2 * pair) + at;
            under_way.written.insert(id, Pointer::to(place, id.born, &page));
            self.medium.insert(place, page);
        }
    }

    fn finish(&mut self) {
        self.write_pages(usize::MAX);
        let Some(under_way) = self.under_way.take() else { return };
        self.whole = under_way.volumes;
        for volume in &mut self.whole {
            volume.tree.root = Link::of(volume.tree.pointer(&under_way.written));
        }
        let settled = thaw(&mut self.pages, under_way.written);
        for volume in &mut self.volumes {
            volume.tree.settle(&settled);
        }
        // No tree has them any more.
        for place in under_way.dropped {
            assert!(self.medium.remove(&place).is_some(), "{place} was dropped twice");
        }
        self.check();
    }

    /// The medium has the model, and nothing else but dropped pages.
    fn check(&mut self) {
        let (mut seen, mut known) = (BTreeSet::new(), BTreeMap::new());
        for volume in &self.whole {
            let mut model = Model::new();
            if let Link::Written(pointer) = volume.tree.root {
                let depth = volume.tree.depth();
                known = self.collect(pointer, depth, 0, &mut seen, known, &mut model);
            }
            assert_eq!(model, volume.model);
        }
        if self.snapshots == 0 {
            let live: BTreeSet<u64> = self.medium.keys().copied().collect();
            assert_eq!(live, seen, "places that no volume has");
        }
    }

    fn collect(
        &self,
        pointer: Pointer,
        level: u8,
        index: u64,
        seen: &mut BTreeSet<u64>,
        mut known: BTreeMap<(u8, u64, u64), u64>,
        model: &mut Model,
    ) -> BTreeMap<(u8, u64, u64), u64> {
        let page = &self.medium[&pointer.place];
        assert_eq!(pointer.verify(page), Ok(()));
        seen.insert(pointer.place);
        // A generation has one page at most of a place in the tree.
        let id = (level, index, pointer.born);
        assert_eq!(*known.entry(id).or_insert(pointer.place), pointer.place, "{id:?}");
        if level == 0 {
            model.insert(index, u64::from_le_bytes(page[..8].try_into().unwrap()));
            return known;
        }
        for (i, bytes) in page.as_chunks().0.iter().enumerate() {
            if let Some(pointer) = Pointer::decode(bytes, &self.layout).unwrap() {
                let index = index << LINK_BITS | i as u64;
                known = self.collect(pointer, level - 1, index, seen, known, model);
            }
        }
        known
    }

    fn reopen(&mut self) {
        let slots = self.pages.slots().clone();
        self.pages = Pages::new(64 * 4200);
        drop(slots);
        self.under_way = None;
        self.volumes = self.whole.clone();
        // An opening does not know which places the last process has used in vain.
        let mut seen = BTreeSet::new();
        for volume in &self.whole {
            if let Link::Written(pointer) = volume.tree.root {
                let depth = volume.tree.depth();
                let mut model = Model::new();
                self.collect(pointer, depth, 0, &mut seen, BTreeMap::new(), &mut model);
            }
        }
        self.medium.retain(|place, _| seen.contains(place));
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Write(volume, leaf, word) => self.write(volume, leaf, word),
            Step::Read(volume, leaf) => self.read(volume, leaf),
            Step::Snapshot(volume) => self.snapshot(volume),
            Step::Freeze => self.freeze(),
            Step::WritePages(count) => self.write_pages(count),
            Step::Finish => self.finish(),
            Step::Reopen => self.reopen(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ferrite_testkit::rounds(400), ..ProptestConfig::default() })]
    /// Random writes and shares, before, in and after checkpoints, with little memory. All volumes read the bytes that
    /// were written there. The medium has the state at the beginning of the checkpoint. No place in use is dropped, and
    /// none is forgotten.
    #[test]
    fn trees_say_what_was_written_and_checkpoints_what_was_there_when_they_began(
        slots in prop_oneof![Just(12usize), Just(64)],
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new(slots);
        for step in steps {
            world.step(step);
        }
        for number in 0..world.volumes.len() {
            for leaf in [0, 1, 2, 3, 4, 5, 250, 255, 256, 257, 599] {
                world.read(number, leaf);
            }
        }
        for _ in 0..2 {
            world.freeze();
            world.finish();
        }
        prop_assert!(world.pages.is_clean());
        let (whole, volumes) = (&world.whole, &world.volumes);
        prop_assert!(whole.iter().zip(volumes).all(|(a, b)| a.model == b.model && a.tree == b.tree));
    }
}

#[test]
fn a_way_through_harmed_pages_ends_and_leads_into_the_store_only() {
    let layout = layout();
    let place = layout.first_place(0);
    let pointer = Pointer { place, checksum: 0, born: 7 };
    // Each page leads to itself, wherever one looks.
    let circle: Vec<u8> = Pointer::encode(Some(pointer)).repeat(LINKS);
    let mut pages = Pages::new(1 << 20);
    let tree = Tree::of_volume(1 << 40, Link::Written(pointer));
    let mut steps = 0;
    while let Found::Load(id, _) = tree.find(&pages, (1 << 31) - 1).unwrap() {
        check_page(&id, &circle, &layout).unwrap();
        assert!(pages.install(id, &circle));
        steps += 1;
    }
    assert_eq!(steps, u32::from(tree.depth()) + 1);
    let inner = PageId { level: 1, kind: Kind::V2p, born: 7, index: 0 };
    for place in [0, 1, layout.first_place(1), layout.blocks, (1 << 40) - 1] {
        let harmed = Pointer { place, ..pointer };
        let page = Pointer::encode(Some(harmed)).repeat(LINKS);
        assert!(check_page(&inner, &page, &layout).is_err(), "{place}");
    }
}

#[test]
fn the_depth_follows_from_the_size() {
    let depth = |blocks| Tree::of_volume(blocks, Link::Nothing).depth();
    assert_eq!([1, 512, 513, 512 * 256, 512 * 256 + 1, 1 << 40].map(depth), [0, 0, 1, 1, 2, 4]);
}

#[test]
fn what_is_promised_and_not_clean_leaves_a_quarter_of_the_slots() {
    let mut pages = Pages::new(100 * SLOT_BYTES);
    let promises: Vec<Promise> = std::iter::from_fn(|| pages.promise(5)).collect();
    assert_eq!(promises.len(), 7);
    promises.into_iter().for_each(|promise| pages.keep_promise(promise));
    // No promise was refused here.
    let mut pages = Pages::new(100 * SLOT_BYTES);
    let mut tree = Tree::of_volume(LEAVES * 512, Link::Nothing);
    let promise = pages.promise(30).unwrap();
    for leaf in 0..30 {
        let _ = tree.change(&mut pages, 2, leaf);
    }
    pages.keep_promise(promise);
    assert!(!pages.wants_checkpoint() && pages.promise(23).is_none());
    assert!(pages.wants_checkpoint(), "more room is left for writers from now on");
    // Frozen ones that are changed take another slot each.
    pages.freeze();
    let promise = pages.promise(22).unwrap();
    for leaf in 0..20 {
        let _ = tree.change(&mut pages, 2, leaf);
    }
    pages.keep_promise(promise);
    assert!(pages.wants_checkpoint() && pages.promise(13).is_none());
}
