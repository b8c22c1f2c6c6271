//! What a pass looks at: trees of volumes as they were, and P2M and the hashes as they are (store.md 7).

use std::collections::BTreeSet;
use std::io;

use ferrite_disk_base::Port;

use super::leaves::{Leaf, bytes, is_lost};
use super::passes::{Look, Passed, numbers_of};
use super::{Core, Live, damaged};
use crate::free_numbers::page_of;
use crate::pace::Pace;
use crate::page::{HASHES, P2M_ENTRIES, Pointer, Whereabouts, decode_number};
use crate::side_by_side::all;
use crate::space::Places;
use crate::tree::{Link, Way};

/// Leaves that are not read, before others have their turn.
const STEP: u64 = 64;
/// Pages that are read at once.
const PAGES_AT_ONCE: u64 = 16;
/// Numbers that writers have while no page can be opened: from the sweep of the last ones to the next checkpoint. At
/// most a 64th of all.
const SET_ASIDE: u64 = 16_384;
/// Words of an entry of P2M.
const ENTRY_WORDS: usize = 2;

/// Bytes of a page of pointers or numbers, in parts.
fn parts<const N: usize>(page: &[u8]) -> impl Iterator<Item = [u8; N]> {
    page.as_chunks().0.iter().copied()
}

impl Live {
    /// Step 3: what the volumes have had has its bits.
    pub(super) async fn mark_numbers(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        let layout = self.core().layout;
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

    /// Visits the trees that are [kept](super::Core::kept), each page once, by its place: whether or not it is
    /// read. Those of this level are read, and of all above.
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
            let core = self.core();
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
                    self.medium.read_page(port, pointer, layout.copy_of(pointer.place)).await
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

    /// Step 5: entries of numbers without a bit become nothing. Also says how many of each page are free.
    pub(super) async fn sweep_numbers(
        &self,
        port: &Port,
        pace: &Pace,
        look: Look,
    ) -> io::Result<(Passed, Vec<u8>)> {
        let end = self.core().numbers_end;
        let pages = end.div_ceil(P2M_ENTRIES as u64);
        let (mut passed, mut free) = (Passed::default(), vec![0; pages as usize]);
        passed.is_thorough = true;
        let mut below = pages;
        while below > 0 {
            let some: Vec<u64> = (below.saturating_sub(PAGES_AT_ONCE)..below).rev().collect();
            below -= some.len() as u64;
            let entries = all(some.iter().map(|page| self.entries(port, *page))).await;
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
                // Who waits for room waits for no duplicates, which are few.
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

    /// Whether writes wait for room, or will soon.
    fn is_hurried(&self) -> bool {
        let given = self.core().space.given();
        let marks = self.marks();
        marks.passes.is_hurried() || given > marks.most_given
    }

    /// Which numbers of a page nobody has; those of them that have content are added to `dead`. From above, since
    /// the content of a number may be that of a lower one. Gives how many there are.
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

    /// All entries of a page of P2M.
    pub(super) async fn entries(&self, port: &Port, page: u64) -> io::Result<Vec<Whereabouts>> {
        let layout = self.core().layout;
        let Some(words) = self.peek(port, Leaf::P2m(page)).await? else {
            return Ok(vec![Whereabouts::Nowhere; P2M_ENTRIES]);
        };
        let numbers = page * P2M_ENTRIES as u64..;
        let entries = words.as_chunks::<ENTRY_WORDS>().0.iter().zip(numbers);
        let entries =
            entries.map(|(words, number)| Whereabouts::decode(&bytes(*words), number, &layout));
        entries.collect::<Result<_, _>>().map_err(damaged)
    }

    /// Entries of a few pages of P2M become nothing.
    async fn forget_contents(&self, port: &Port, dead: &[u64]) -> io::Result<()> {
        if dead.is_empty() {
            return Ok(());
        }
        self.checkpoint_if_wanted(port).await;
        let leaves = dead.iter().map(|number| Leaf::of_number(*number).0).collect();
        let mut claim = self.claim(port, &leaves).await?;
        self.with_all(port, &mut claim, &leaves, |core| {
            for page in dead.iter().map(|number| page_of(*number)).collect::<BTreeSet<_>>() {
                if core.free_numbers.ready() < SET_ASIDE.min(core.layout.places() / 64) {
                    core.open_numbers(page)?;
                }
                // No checkpoint has it that these are nothing.
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

    /// Step 6: all places that are in use have marks.
    pub(super) async fn mark_places(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        {
            let core = &mut *self.core();
            let tables = core.volumes.places().chain(core.domains.places());
            tables.for_each(|place| core.space.mark_page(place));
        }
        let mut seen = Places::default();
        // Leaves are where the pages above say.
        let visit = |place| self.core().space.mark_page(place);
        self.walk(port, pace, &mut seen, 1, visit, |_| Ok(())).await?;
        let places = self.core().layout.places();
        let pages = places.div_ceil(P2M_ENTRIES as u64);
        for first in (0..pages).step_by(PAGES_AT_ONCE as usize) {
            let some = first..pages.min(first + PAGES_AT_ONCE);
            let entries = all(some.clone().map(|page| self.entries(port, page))).await;
            for (page, entries) in some.zip(entries) {
                self.mark_way(port, Leaf::P2m(page)).await?;
                self.core().mark_contents(&entries?);
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

    /// The pages on the way to a leaf, and it, are in use.
    async fn mark_way(&self, port: &Port, leaf: Leaf) -> io::Result<()> {
        loop {
            let (id, pointer) = {
                let core = &mut *self.core();
                match leaf.way(core)? {
                    Way::Places(places) => {
                        places.into_iter().for_each(|place| core.space.mark_page(place));
                        return Ok(());
                    }
                    Way::Load(id, pointer) => (id, pointer),
                }
            };
            self.load(port, leaf, id, pointer).await?;
        }
    }

    /// Numbers of a page of P2M can be given whose entries are nothing.
    pub(super) async fn open_numbers(&self, port: &Port, page: u64) -> io::Result<()> {
        let loaded = self.look(port, Leaf::P2m(page), |_, _| ()).await;
        let core = &mut *self.core();
        if let Err(e) = loaded {
            // Others can be given.
            core.free_numbers.close(page);
            return if is_lost(&e) { Ok(()) } else { Err(e) };
        }
        core.open_numbers(page)
    }
}

impl Core {
    /// The same, if the page is in memory.
    fn open_numbers(&mut self, page: u64) -> io::Result<()> {
        let numbers = numbers_of(page, self.numbers_end);
        let Some(is_nothing) = Leaf::P2m(page).nothing(self)? else { return Ok(()) };
        let free = numbers.filter(|number| is_nothing[(number % P2M_ENTRIES as u64) as usize]);
        self.free_numbers.open(page, free.collect::<Vec<_>>().into_iter());
        Ok(())
    }

    /// The places of these contents are in use.
    fn mark_contents(&mut self, entries: &[Whereabouts]) {
        for entry in entries {
            match *entry {
                Whereabouts::Plain { place, .. } => self.space.mark(place),
                // All of the group is in use while one block of it is.
                Whereabouts::Packed { place, places, .. } => {
                    let places = place..place + u64::from(places);
                    places.for_each(|place| self.space.mark(place));
                }
                Whereabouts::Nowhere | Whereabouts::SameAs { .. } => {}
            }
        }
    }
}
