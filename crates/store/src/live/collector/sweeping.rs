//! The input of a pass: the trees that volumes had, and P2M and the hashes as they are now (store.md 7).

use std::collections::BTreeSet;
use std::io;

use ferrite_disk_base::Port;

use super::{Collector, Core, Look, Passed, damaged};
use crate::free_numbers::page_of;
use crate::live::leaf::{Leaf, numbers_of};
use crate::pace::Pace;
use crate::page::{HASHES, P2M_ENTRIES, Pointer, Whereabouts, decode_number};
use crate::side_by_side::all;
use crate::space::Places;
use crate::tree::{Link, Way};

/// Leaves that are looked up in memory before requests go on.
const STEP: u64 = 64;
/// Pages that are read at once.
const PAGES_AT_ONCE: u64 = 16;
/// Numbers that are set aside for writers while no page can be opened: from the sweep of the last pages to the next
/// checkpoint. They are at most a 64th of all numbers.
const SET_ASIDE: u64 = 16_384;
/// Words of an entry of P2M.
const ENTRY_WORDS: usize = 2;

/// The entries of a page of pointers or numbers.
fn parts<const N: usize>(page: &[u8]) -> impl Iterator<Item = [u8; N]> {
    page.as_chunks().0.iter().copied()
}

impl Collector {
    /// Step 3: marks the numbers of all trees that are [kept](Core::kept).
    pub(super) async fn mark_numbers(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        let layout = self.shared.core().layout;
        let mut seen = Places::default();
        self.walk(
            port,
            pace,
            &mut seen,
            0,
            |_| {},
            |page| {
                let numbers = parts(page).map(|number| decode_number(number, &layout));
                let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().map_err(damaged)?;
                self.marks().are_live(numbers.into_iter());
                Ok(())
            },
        )
        .await
    }

    /// Visits each page of the trees that are [kept](Core::kept) once, by its place. `visit` gets the places of all
    /// pages. Pages of the level `lowest` and above are read. `read` gets the leaves among them.
    async fn walk(
        &self,
        port: &Port,
        pace: &Pace,
        seen: &mut Places,
        lowest: u8,
        mut visit: impl FnMut(u64),
        mut read: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let (layout, trees) = {
            let core = self.shared.core();
            (core.layout, core.kept.clone())
        };
        let mut left: Vec<(Pointer, u8)> = Vec::new();
        for tree in trees {
            if let Link::Written(root) = tree.root {
                left.push((root, tree.depth()));
            }
            while !left.is_empty() {
                let mut some = Vec::new();
                while some.len() < PAGES_AT_ONCE as usize
                    && let Some((pointer, level)) = left.pop()
                {
                    if seen.add(&layout, pointer.place) {
                        visit(pointer.place);
                        some.extend((level >= lowest).then_some((pointer, level)));
                    }
                }
                let page = async |(pointer, _): &(Pointer, u8)| {
                    self.shared.medium.read_page(port, pointer, layout.copy_of(pointer.place)).await
                };
                let pages = all(some.iter().map(page)).await;
                for (page, (_, level)) in pages.into_iter().zip(&some) {
                    let page = page?;
                    if *level == 0 {
                        read(&page)?;
                    } else {
                        for pointer in parts(&page) {
                            let pointer = Pointer::decode(&pointer, &layout).map_err(damaged)?;
                            left.extend(pointer.map(|pointer| (pointer, level - 1)));
                        }
                    }
                    self.page_done(port, pace).await?;
                }
            }
        }
        Ok(())
    }

    /// Step 5: clears the entries of numbers without a mark. Also gives how many numbers of each page are free.
    pub(super) async fn sweep_numbers(
        &self,
        port: &Port,
        pace: &Pace,
        look: Look,
    ) -> io::Result<(Passed, Vec<u8>)> {
        let end = self.shared.core().numbers_end;
        let pages = end.div_ceil(P2M_ENTRIES as u64);
        let (mut passed, mut free) = (Passed::default(), vec![0; pages as usize]);
        passed.is_thorough = true;
        let mut below = pages;
        while below > 0 {
            let some: Vec<u64> = (below.saturating_sub(PAGES_AT_ONCE)..below).rev().collect();
            below -= some.len() as u64;
            let entries = all(some.iter().map(|page| self.leaves.entries(port, *page))).await;
            let mut dead = Vec::new();
            let mut judged = Vec::new();
            for (page, entries) in some.into_iter().zip(entries) {
                let entries = entries?;
                let before = dead.len();
                let count = self.judge_page(page, end, &entries, &mut passed, &mut dead);
                free[page as usize] = u8::try_from(count).unwrap_or(u8::MAX);
                judged.push((page, entries, dead.len() - before));
            }
            passed.dead += dead.len() as u64;
            self.forget_contents(port, &dead).await?;
            for (page, entries, dead) in judged {
                // Duplicates are few, so a write that waits for room does not wait until they are found.
                if look == Look::ForDead && self.is_hurried() {
                    passed.is_thorough = false;
                } else if dead < P2M_ENTRIES {
                    passed.joined += self.join_equal(port, pace, page, &entries).await?;
                }
                self.page_done(port, pace).await?;
            }
        }
        Ok((passed, free))
    }

    /// Whether writes wait for room, or soon will.
    fn is_hurried(&self) -> bool {
        let given = self.shared.core().space.given();
        let marks = self.marks();
        marks.passes.is_hurried() || given > marks.most_given
    }

    /// Counts the numbers of a page that no volume has. Those with content are added to `dead`. It goes down from the
    /// highest number, since a number may stand for a lower one.
    fn judge_page(
        &self,
        page: u64,
        end: u64,
        entries: &[Whereabouts],
        passed: &mut Passed,
        dead: &mut Vec<u64>,
    ) -> u32 {
        let mut marks = self.marks();
        let mut count = 0;
        for number in numbers_of(page, end).rev() {
            let entry = entries[(number % P2M_ENTRIES as u64) as usize];
            let same_as = match entry {
                Whereabouts::SameAs { number } => Some(number),
                _ => None,
            };
            let (is_live, is_nothing) =
                (marks.judge(number, same_as), entry == Whereabouts::Nowhere);
            count += u32::from(!is_live);
            passed.contents += u64::from(is_live && !is_nothing);
            dead.extend((!is_live && !is_nothing).then_some(number));
        }
        count
    }

    /// Clears the entries of these numbers, which are in a few pages of P2M.
    async fn forget_contents(&self, port: &Port, dead: &[u64]) -> io::Result<()> {
        if dead.is_empty() {
            return Ok(());
        }
        self.committer.checkpoint_if_wanted(port).await;
        let leaves = dead.iter().map(|number| Leaf::of_number(*number).0).collect();
        let mut claim = self.changes.claim(port, &leaves).await?;
        self.changes
            .with_all(port, &mut claim, &leaves, |core| {
                for page in dead.iter().map(|number| page_of(*number)).collect::<BTreeSet<_>>() {
                    if core.free_numbers.ready() < SET_ASIDE.min(core.layout.places() / 64) {
                        core.open_numbers(page)?;
                    }
                    // No checkpoint has these entries cleared yet.
                    core.free_numbers.close(page);
                }
                for number in dead {
                    let (leaf, at) = Leaf::of_number(*number);
                    leaf.store(core, at, &[0; ENTRY_WORDS])?;
                }
                Ok(())
            })
            .await
    }

    /// Step 6: marks all places in use.
    pub(super) async fn mark_places(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        {
            let core = &mut *self.shared.core();
            let tables = core.volumes.places().chain(core.domains.places());
            tables.for_each(|place| core.space.mark_page(place));
        }
        let mut seen = Places::default();
        // The pages above the leaves have the places of the leaves.
        let visit = |place| self.shared.core().space.mark_page(place);
        self.walk(port, pace, &mut seen, 1, visit, |_| Ok(())).await?;
        let places = self.shared.core().layout.places();
        let pages = places.div_ceil(P2M_ENTRIES as u64);
        for first in (0..pages).step_by(PAGES_AT_ONCE as usize) {
            let some = first..pages.min(first + PAGES_AT_ONCE);
            let entries = all(some.clone().map(|page| self.leaves.entries(port, page))).await;
            for (page, entries) in some.zip(entries) {
                self.mark_way(port, Leaf::P2m(page)).await?;
                self.shared.core().mark_contents(&entries?);
                self.page_done(port, pace).await?;
            }
        }
        for leaf in 0..places.div_ceil(HASHES as u64) {
            self.mark_way(port, Leaf::Hashes(leaf)).await?;
            if leaf % STEP == 0 {
                pace.check()?;
                port.io.yield_to_others().await;
            }
        }
        Ok(())
    }

    /// Marks the places of a leaf and of the pages above it.
    async fn mark_way(&self, port: &Port, leaf: Leaf) -> io::Result<()> {
        loop {
            let (id, pointer) = {
                let core = &mut *self.shared.core();
                match leaf.way(core)? {
                    Way::Places(places) => {
                        places.into_iter().for_each(|place| core.space.mark_page(place));
                        return Ok(());
                    }
                    Way::Load(id, pointer) => (id, pointer),
                }
            };
            self.leaves.load(port, leaf, id, pointer).await?;
        }
    }
}

impl Core {
    /// Marks the places of these contents.
    fn mark_contents(&mut self, entries: &[Whereabouts]) {
        for entry in entries {
            match *entry {
                Whereabouts::Plain { place, .. } => self.space.mark(place),
                // A group is in use as a whole while one block of it is.
                Whereabouts::Packed { place, places, .. } => {
                    let places = place..place + u64::from(places);
                    places.for_each(|place| self.space.mark(place));
                }
                Whereabouts::Nowhere | Whereabouts::SameAs { .. } => {}
            }
        }
    }
}
