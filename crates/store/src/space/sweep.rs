//! The places in a pass: it marks those in use, and frees those without a mark (store.md 7, 6 and 7).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::bits::Bits;
use super::{Kind, Space};
use crate::layout::Layout;

/// Places of a run that is worth to be given back to the file system: 64 KiB.
const HOLE_BLOCKS: u64 = 16;

/// Some places: bits of the segments that have any of them.
#[derive(Debug, Default)]
pub struct Places(BTreeMap<u64, Bits>);

impl Places {
    /// Adds one. `false`: it was there, or it is in no segment.
    pub fn add(&mut self, layout: &Layout, place: u64) -> bool {
        let Some((segment, at)) = layout.segment_of(place) else { return false };
        let clear = || Bits::all(false, layout.segment_blocks);
        self.0.entry(segment).or_insert_with(clear).set(at)
    }

    fn of(&self, segment: u64) -> Option<&Bits> {
        self.0.get(&segment)
    }
}

/// Places in use.
#[derive(Debug, Default)]
pub(super) struct Marks {
    places: Places,
    /// Pairs that have pages. One that came free since is not among them: it may be one of data by now.
    metadata: BTreeSet<u64>,
}

impl Space {
    /// From now on each place that is given is in use for the pass.
    pub fn begin_marks(&mut self) {
        self.marks = Some(Marks::default());
    }

    /// A pass has ended, perhaps early: only freed places that wait for their checkpoint are left of it.
    pub fn end_marks(&mut self) {
        self.marks = None;
        self.keep(0..0);
        self.let_go();
    }

    /// A content is here.
    pub fn mark(&mut self, place: u64) {
        if let Some(marks) = &mut self.marks {
            marks.places.add(&self.layout, place);
        }
    }

    /// A page is here.
    pub fn mark_page(&mut self, place: u64) {
        self.mark(place);
        let segment = self.layout.segment_of(place);
        if let (Some(marks), Some((segment, _))) = (&mut self.marks, segment) {
            marks.metadata.insert(segment / 2);
        }
    }

    /// A pair is for something else from now on, so pages that were here are gone.
    pub(super) fn mark_kind(&mut self, pair: u64, kind: Kind) {
        if let (Some(marks), Kind::Free | Kind::Data) = (&mut self.marks, kind) {
            marks.metadata.remove(&pair);
        }
    }

    /// The bits of these pairs stay in memory, and of others only if they have to.
    pub fn keep(&mut self, pairs: Range<u64>) {
        let before = std::mem::replace(&mut self.kept, pairs);
        before.for_each(|pair| self.unload(pair));
    }

    /// Leaves the places of these pairs that have no mark out of the checkpoint that begins. The caller has just called
    /// [`begin`](Space::begin). The places become free after [`let_go`](Space::let_go). Gives the runs that no write is
    /// given before that, and the number of places.
    pub fn sweep(&mut self, pairs: Range<u64>) -> (Vec<Range<u64>>, u64) {
        let (mut runs, mut count) = (Vec::new(), 0);
        let Some(marks) = self.marks.take() else { return (runs, count) };
        for pair in pairs {
            // Its kind was not known if a space page was damaged.
            if marks.metadata.contains(&pair) {
                self.set_kind(pair, Kind::Metadata);
            }
            for segment in [2 * pair, 2 * pair + 1] {
                count += self.sweep_segment(&marks.places, segment, &mut runs);
            }
        }
        self.marks = Some(marks);
        (runs, count)
    }

    fn sweep_segment(&mut self, marks: &Places, number: u64, runs: &mut Vec<Range<u64>>) -> u64 {
        let (size, first) = (self.layout.segment_blocks, self.layout.first_place(number));
        let kind = self.pairs[number as usize / 2];
        let mut waits = Bits::all(false, size);
        self.waiting_in(number).iter().for_each(|place| {
            waits.set(place - first);
        });
        let segment = &mut self.segments[number as usize];
        let Some(bits) = &mut segment.bits else { return 0 };
        let mut swept = bits.without(&waits);
        if let Some(marked) = marks.of(number) {
            swept = swept.without(marked);
        }
        let dead = size - u64::from(swept.clear_bits());
        if dead == 0 {
            return 0;
        }
        // Free places beside them become part of the hole.
        let used = bits.without(&swept);
        let mut at = 0;
        while let Some(run) = used.clear_run(at, size) {
            at = run.end;
            let is_new = run.clone().any(|at| swept.get(at));
            if kind == Kind::Metadata || !is_new || run.end - run.start < HOLE_BLOCKS {
                continue;
            }
            for at in run.clone() {
                swept.set(at);
                segment.free -= u32::from(bits.set(at));
            }
            runs.push(first + run.start..first + run.end);
        }
        segment.dropped += (size - u64::from(swept.clear_bits())) as u32;
        segment.changed = true;
        if let Some(waiting) = self.waiting.back_mut() {
            waiting.swept.push((number, swept));
            waiting.is_held = true;
        }
        dead
    }

    /// Lets the places of a [sweep](Space::sweep) become free, when the caller has made holes of its runs.
    pub fn let_go(&mut self) {
        self.waiting.iter_mut().for_each(|waiting| waiting.is_held = false);
    }
}
