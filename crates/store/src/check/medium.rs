//! The parts of the medium that a check reads: superblocks, space pages, and pages of trees with their copies.

use std::io;

use super::{Check, StoreFinding, in_bytes};
use crate::BLOCK_BYTES;
use crate::Damaged;
use crate::medium::MAX_BLOCKS;
use crate::page::Pointer;
use crate::space::{Bits, Found, Kind, SpacePage, UNREADABLE, choose as choose_space};
use crate::superblock::{Roots, Superblock, Unusable, choose};

/// Links of an inner page.
const LINKS: u64 = 256;

/// A page on the way through a tree.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub(super) level: u8,
    /// Its number among those of its level.
    pub(super) index: u64,
    pub(super) pointer: Pointer,
}

impl Check<'_> {
    /// All four pages. The page that counts is known already.
    pub(super) async fn superblocks(&mut self) -> io::Result<()> {
        let layout = self.layout;
        let mut pages = [[Err(Unusable::Foreign); 2]; 2];
        for (home, pages) in pages.iter_mut().enumerate() {
            let place = layout.superblock(home, 0);
            let read = self.medium.read_each(self.port, place, 2).await?;
            *pages = [0, 1].map(|odd| match &read[odd] {
                Ok(page) => Superblock::decode(page, home, odd == 1),
                Err(_) => Err(Damaged("it cannot be read").into()),
            });
        }
        self.roots = choose(&pages).map_or(Roots::default(), |superblock| superblock.roots);
        for (home, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let Err(why) = &pages[home][odd] else { continue };
            let place = layout.superblock(home, odd as u64);
            let finding = StoreFinding::harmless("superblock", format!("one of two copies: {why}"));
            let (place_bytes, mendable) = (Some(in_bytes(place)), true);
            self.add(StoreFinding { place_bytes, mendable, ..finding });
            if let (true, Ok(other)) = (self.how.mend, &pages[1 - home][odd]) {
                self.medium.write(self.port, place, &other.encode(home)).await?;
                self.medium.sync(self.port).await?;
                self.outcome.mended += 1;
            }
        }
        Ok(())
    }

    /// Which places are in use, as space pages say.
    pub(super) async fn space(&mut self) -> io::Result<()> {
        let layout = self.layout;
        let mut data = 0;
        let pairs = layout.segments / 2;
        let mut read = Vec::new().into_iter();
        for pair in 0..pairs {
            if read.len() == 0 {
                let count = 2 * layout.pages_in_a_row(2 * pair, MAX_BLOCKS as u64 / 2);
                let first = layout.space_page(2 * pair, 0);
                read = self.medium.read_each(self.port, first, count as usize).await?.into_iter();
                self.progress()?;
            }
            let pages: Vec<_> = read.by_ref().take(4).collect();
            let mut kinds = [None; 2];
            for half in 0..2 {
                let segment = 2 * pair + half as u64;
                let decode = |home: usize| {
                    let page = pages[2 * half + home].as_ref().map_err(|_| UNREADABLE)?;
                    SpacePage::decode(page, &self.core.id, &layout, segment, home)
                };
                let homes = [decode(0), decode(1)];
                let is_damaged = homes.iter().any(Result::is_err);
                let Found { page, .. } = choose_space(homes, self.core.checkpoint);
                let first = segment * layout.segment_blocks;
                kinds[half] = page.as_ref().map(|page| page.kind);
                if page.is_none() || is_damaged {
                    let follows = match page {
                        Some(_) => "the next checkpoint writes it",
                        None => "nothing of it is given out before the next gc",
                    };
                    let why = format!(
                        "a page of the bits of segment {segment} is damaged, or cannot be read: {follows}"
                    );
                    let place_bytes = Some(in_bytes(layout.space_page(segment, 0)));
                    self.add(StoreFinding { place_bytes, ..StoreFinding::harmless("space", why) });
                }
                let bits = page.map(|page| page.bits);
                let bits = bits.unwrap_or_else(|| Bits::all(true, layout.segment_blocks));
                if kinds[half] != Some(Kind::Metadata) {
                    data += layout.segment_blocks - u64::from(bits.clear_bits());
                }
                self.used.put(first, &bits);
            }
            let first = 2 * pair * layout.segment_blocks;
            let mut places = first..first + 2 * layout.segment_blocks;
            // So a checkpoint says it if it was not known. The next pass finds out.
            let is_unknown = places.all(|place| self.used.get(place));
            let kind = kinds[0].filter(|kind| kinds[1] == Some(*kind));
            self.kinds[pair as usize] = kind.filter(|_| !is_unknown);
        }
        self.total_bytes = if self.how.contents { in_bytes(data) } else { 0 };
        Ok(())
    }

    /// Something is in this place that is in no other place, and nothing else is there. `false`: that is not so.
    pub(super) fn take(&mut self, place: u64, kind: Kind, what: &str) -> bool {
        let finding = |why: String| {
            let place_bytes = Some(in_bytes(place));
            StoreFinding { place_bytes, ..StoreFinding::damage(what, why) }
        };
        let Some((segment, at)) = self.layout.segment_of(place) else {
            self.add(finding("it is in no segment".into()));
            return false;
        };
        let at = segment * self.layout.segment_blocks + at;
        let is_of_others = self.kinds[segment as usize / 2].is_some_and(|of_pair| of_pair != kind);
        let wrong = [
            (!self.taken.set(at), "two things are in one place"),
            (!self.used.get(at), "its place is not in use, and the next write may get it"),
            (is_of_others, "it is in a segment for something else"),
        ];
        for (_, why) in wrong.iter().filter(|(is_so, _)| *is_so) {
            self.add(finding((*why).into()));
        }
        wrong.iter().all(|(is_so, _)| !is_so)
    }

    /// A page, whichever copy is whole. None: none is; the caller says whose it is.
    pub(super) async fn page(
        &mut self,
        what: &str,
        pointer: &Pointer,
        has_copy: bool,
    ) -> io::Result<Option<Vec<u8>>> {
        self.looks_at_page()?;
        // In a place that others may have, too, nothing is mended.
        let is_its_own = self.take(pointer.place, Kind::Metadata, "page");
        let copy = self.layout.copy_of(pointer.place).filter(|_| has_copy);
        let (mut whole, mut bad) = (None, Vec::new());
        for place in [Some(pointer.place), copy].into_iter().flatten() {
            self.metadata_blocks += 1;
            let read = self.medium.read(self.port, place, 1).await;
            let why = match read {
                Ok(page) => match pointer.verify(&page) {
                    Ok(()) => {
                        whole = Some(page);
                        continue;
                    }
                    Err(Damaged(why)) => why.to_owned(),
                },
                Err(e) => e.to_string(),
            };
            bad.push((place, why));
        }
        if let Some(page) = &whole {
            for (place, why) in bad {
                let why = format!("one of two copies of a page of {what}: {why}");
                let (place_bytes, mendable) = (Some(in_bytes(place)), is_its_own);
                let finding = StoreFinding::harmless("page", why);
                self.add(StoreFinding { place_bytes, mendable, ..finding });
                if self.how.mend && is_its_own {
                    self.medium.write(self.port, place, page).await?;
                    self.outcome.mended += 1;
                }
            }
        }
        Ok(whole)
    }

    /// Now and then it is asked whether to go on.
    pub(super) fn looks_at_page(&mut self) -> io::Result<()> {
        self.pages += 1;
        if self.pages.is_multiple_of(64) { self.progress() } else { Ok(()) }
    }

    /// The pages that an inner page leads to. A damaged pointer becomes a finding.
    pub(super) fn below(&mut self, step: &Step, page: &[u8], what: &str) -> Vec<Step> {
        let mut below = Vec::new();
        for (bytes, index) in page.as_chunks().0.iter().zip(step.index * LINKS..) {
            match Pointer::decode(bytes, &self.layout) {
                Ok(Some(pointer)) => below.push(Step { level: step.level - 1, index, pointer }),
                Ok(None) => {}
                Err(Damaged(why)) => {
                    self.add(StoreFinding::damage("page", format!("a page of {what}: {why}")));
                }
            }
        }
        below
    }

    /// All pages of a tree that has the whole store's: leaves are given to `leaf`, in their order.
    pub(super) async fn all_leaves(
        &mut self,
        what: &str,
        root: Option<Step>,
        have_copies: bool,
        mut leaf: impl AsyncFnMut(&mut Self, u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut way: Vec<Step> = root.into_iter().collect();
        while let Some(step) = way.pop() {
            let has_copy = step.level > 0 || have_copies;
            let Some(page) = self.page(what, &step.pointer, has_copy).await? else {
                let why = format!("a page of {what} is damaged, and what it leads to is lost");
                // A hash that is lost costs space.
                let finding = match has_copy {
                    true => StoreFinding::damage("page", why),
                    false => StoreFinding::harmless("page", format!("a page of {what} is damaged")),
                };
                let place_bytes = Some(in_bytes(step.pointer.place));
                self.add(StoreFinding { place_bytes, ..finding });
                continue;
            };
            match step.level {
                0 => leaf(self, step.index, &page).await?,
                _ => way.extend(self.below(&step, &page, what).into_iter().rev()),
            }
        }
        Ok(())
    }

    /// Pages of volumes and domains: the opening has parsed their entries.
    pub(super) async fn tables(&mut self) -> io::Result<()> {
        let Roots { volumes, domains, .. } = self.roots;
        for (what, root) in [("the volumes", volumes), ("the domains", domains)] {
            let root = root.map(|pointer| Step { level: 2, index: 0, pointer });
            self.all_leaves(what, root, true, async |_, _, _| Ok(())).await?;
        }
        Ok(())
    }

    /// Blocks in a row, as far as they can be read: one by one, if they cannot be together.
    pub(super) async fn blocks(&mut self, place: u64, count: usize) -> Vec<io::Result<Vec<u8>>> {
        debug_assert!(count <= MAX_BLOCKS);
        if let Ok(all) = self.medium.read(self.port, place, count).await {
            return all.chunks(BLOCK_BYTES).map(|block| Ok(block.to_owned())).collect();
        }
        let mut each = Vec::new();
        for place in place..place + count as u64 {
            each.push(self.medium.read(self.port, place, 1).await);
        }
        each
    }
}
