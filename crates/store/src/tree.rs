//! Trees of pages: radix trees of fixed depth, copied on write by generation (store.md 2, 5 and 6).
//!
//! **The generation rule.** Each page has the generation in which it was born. A volume of that generation changes
//! the page, and drops its place. All others copy the page. So a tree is shared by copying its root.
//!
//! If the medium lacks the present state of a page, the link to it in memory has only the generation in which the page
//! was born. A checkpoint puts the pointer in when it has written the page. A page with such a link is not clean either:
//! it was changed together with the page below, or it is a copy of one that was. So the page below a link is in memory,
//! or the link has its pointer.
//!
//! A page is visited by its depth: whatever a medium says, each way ends (store.md 13).

use std::collections::BTreeMap;

use super::layout::Layout;
use super::page::{HASHES, P2M_ENTRIES, POINTER_BYTES, Pointer, V2P_ENTRIES};
use super::pages::{Kind, PageId, Pages, Pins};
use super::{BLOCK_BYTES, Damaged};

/// The generation of the trees that a store has one of.
pub const FOR_EVER: u64 = 1;
/// The first that a volume can have.
pub const FIRST_GENERATION: u64 = 2;
/// Links of an inner page.
const LINKS: usize = BLOCK_BYTES / POINTER_BYTES;
const LINK_BITS: u32 = LINKS.ilog2();
/// Where a pointer has the generation.
const BORN_AT: usize = 9;

/// A link that leads to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// There is no page: all of it is zeros.
    Nothing,
    /// It is in memory only, as it is now.
    Unwritten {
        /// The generation in which it was born.
        born: u64,
    },
    /// The medium has it.
    Written(Pointer),
}

impl Link {
    /// As a superblock or a volume has it.
    pub fn of(pointer: Option<Pointer>) -> Link {
        pointer.map_or(Link::Nothing, Link::Written)
    }

    fn encode(self) -> [u8; POINTER_BYTES] {
        match self {
            Link::Nothing => Pointer::encode(None),
            Link::Unwritten { born } => {
                Pointer::encode(Some(Pointer { place: 0, checksum: 0, born }))
            }
            Link::Written(pointer) => Pointer::encode(Some(pointer)),
        }
    }

    /// Of a page in memory, which was [checked](check_page).
    fn decode(bytes: &[u8; POINTER_BYTES]) -> Link {
        let number = |from: usize, to: usize| {
            let mut number = [0; 8];
            number[..to - from].copy_from_slice(&bytes[from..to]);
            u64::from_le_bytes(number)
        };
        let (place, checksum) = (number(0, 5), number(5, BORN_AT) as u32);
        match number(BORN_AT, POINTER_BYTES) {
            _ if *bytes == [0; POINTER_BYTES] => Link::Nothing,
            born if place == 0 => Link::Unwritten { born },
            born => Link::Written(Pointer { place, checksum, born }),
        }
    }

    fn born(self) -> Option<u64> {
        match self {
            Link::Nothing => None,
            Link::Unwritten { born } | Link::Written(Pointer { born, .. }) => Some(born),
        }
    }

    /// With its pointer, if the page is one of these.
    fn resolved(self, page: impl Fn(u64) -> PageId, written: &Written) -> Link {
        match self {
            Link::Unwritten { born } => {
                written.get(&page(born)).map_or(self, |pointer| Link::Written(*pointer))
            }
            other => other,
        }
    }
}

/// Pages that a checkpoint has written, and where.
pub type Written = BTreeMap<PageId, Pointer>;

fn link_at(page: &[u8; BLOCK_BYTES], at: usize) -> Link {
    Link::decode(&page.as_chunks().0[at])
}

/// A page of the medium that its pointer believes: whether it is one that a store of this size has.
///
/// # Errors
/// It is not.
pub fn check_page(id: &PageId, page: &[u8], layout: &Layout) -> Result<(), Damaged> {
    if id.level > 0 {
        for pointer in page.as_chunks().0 {
            Pointer::decode(pointer, layout)?;
        }
    }
    Ok(())
}

/// Where a look for a leaf ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is here.
    Leaf(PageId),
    /// There is none: all of it is zeros.
    Nothing,
    /// Nothing is known before this page has come from the medium.
    Load(PageId, Pointer),
}

/// Where the pages on the way to a leaf are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// Here, as far as they are on the medium.
    Places(Vec<u64>),
    /// Nothing is known before this page has come from the medium.
    Load(PageId, Pointer),
}

/// Whether there is a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// There is.
    Leaf,
    /// Not this one, nor any before that.
    NotBefore(u64),
    /// Nor any other from it on.
    End,
    /// Nothing is known before this page has come from the medium.
    Load(PageId, Pointer),
}

/// One tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tree {
    kind: Kind,
    /// Levels of inner pages.
    depth: u8,
    /// The link that leads to it.
    pub root: Link,
}

impl Tree {
    /// Of a volume with so many blocks.
    pub fn of_volume(blocks: u64, root: Link) -> Tree {
        Tree::new(Kind::V2p, blocks.div_ceil(V2P_ENTRIES as u64), root)
    }

    /// P2M of a store of this size.
    pub fn of_p2m(layout: &Layout, root: Link) -> Tree {
        Tree::new(Kind::P2m, layout.places().div_ceil(P2M_ENTRIES as u64), root)
    }

    /// The hashes of a store of this size.
    pub fn of_hashes(layout: &Layout, root: Link) -> Tree {
        Tree::new(Kind::Hashes, layout.places().div_ceil(HASHES as u64), root)
    }

    fn new(kind: Kind, leaves: u64, root: Link) -> Tree {
        let mut depth = 0;
        while leaves > 1 << (LINK_BITS * u32::from(depth)) {
            depth += 1;
        }
        Tree { kind, depth, root }
    }

    /// Levels of inner pages.
    pub fn depth(&self) -> u8 {
        self.depth
    }

    fn page(&self, level: u8, leaf: u64, born: u64) -> PageId {
        PageId { level, kind: self.kind, born, index: leaf >> (LINK_BITS * u32::from(level)) }
    }

    /// Whether a tree of this depth has no such leaf.
    fn is_behind(&self, leaf: u64) -> bool {
        leaf >> (LINK_BITS * u32::from(self.depth)) > 0
    }

    /// The link of a page on the way to a leaf that leads to the next one.
    fn link_number(level: u8, leaf: u64) -> usize {
        (leaf >> (LINK_BITS * u32::from(level - 1))) as usize % LINKS
    }

    /// Looks for a leaf, and shows `visit` each page on the way that is here.
    fn walk(
        &self,
        pages: &Pages,
        leaf: u64,
        mut visit: impl FnMut(PageId),
    ) -> Result<Found, Damaged> {
        // A task that counts or looks behind service may have had the volume when it was larger.
        if self.is_behind(leaf) {
            return Ok(Found::Nothing);
        }
        let (mut link, mut level) = (self.root, self.depth);
        loop {
            let Some(born) = link.born() else { return Ok(Found::Nothing) };
            let id = self.page(level, leaf, born);
            if !pages.holds(&id) {
                return match link {
                    Link::Written(pointer) => Ok(Found::Load(id, pointer)),
                    _ => Err(Damaged("a page is neither in memory nor on the medium")),
                };
            }
            visit(id);
            let Some(page) = pages.inner(&id) else { return Ok(Found::Leaf(id)) };
            link = link_at(page, Tree::link_number(level, leaf));
            level -= 1;
        }
    }

    /// Looks for a leaf.
    ///
    /// # Errors
    /// A page was lost. That is a mistake of the program.
    pub fn find(&self, pages: &Pages, leaf: u64) -> Result<Found, Damaged> {
        self.walk(pages, leaf, |_| {})
    }

    /// Whether there is this leaf, or where the next one may be. Only pages that lead on need to be here.
    ///
    /// # Errors
    /// As `find`.
    pub fn next(&self, pages: &Pages, leaf: u64) -> Result<Next, Damaged> {
        if self.is_behind(leaf) {
            return Ok(Next::End);
        }
        let (mut link, mut level) = (self.root, self.depth);
        loop {
            let Some(born) = link.born() else {
                let bits = LINK_BITS * u32::from(level);
                return Ok(Next::NotBefore(((leaf >> bits) + 1) << bits));
            };
            if level == 0 {
                return Ok(Next::Leaf);
            }
            let id = self.page(level, leaf, born);
            let Some(page) = pages.inner(&id) else {
                return match link {
                    Link::Written(pointer) => Ok(Next::Load(id, pointer)),
                    _ => Err(Damaged("a page is neither in memory nor on the medium")),
                };
            };
            link = link_at(page, Tree::link_number(level, leaf));
            level -= 1;
        }
    }

    /// The places of all pages on the way to a leaf that the medium has as they are now, and the leaf's. Only
    /// pages that lead on need to be here.
    ///
    /// # Errors
    /// As `find`.
    pub fn way(&self, pages: &Pages, leaf: u64) -> Result<Way, Damaged> {
        let (mut link, mut level, mut places) = (self.root, self.depth, Vec::new());
        loop {
            let Some(born) = link.born() else { return Ok(Way::Places(places)) };
            let id = self.page(level, leaf, born);
            if let Link::Written(pointer) = link {
                places.push(pointer.place);
            }
            if level == 0 {
                return Ok(Way::Places(places));
            }
            let Some(page) = pages.inner(&id) else {
                return match link {
                    Link::Written(pointer) => Ok(Way::Load(id, pointer)),
                    _ => Err(Damaged("a page is neither in memory nor on the medium")),
                };
            };
            link = link_at(page, Tree::link_number(level, leaf));
            level -= 1;
        }
    }

    /// [`find`](Self::find), and if nothing has to be loaded all on the way to the leaf stays here.
    ///
    /// # Errors
    /// As `find`.
    pub fn pin(&self, pages: &mut Pages, leaf: u64, pins: &mut Pins) -> Result<Found, Damaged> {
        let mut way = Vec::new();
        let found = self.walk(pages, leaf, |id| way.push(id))?;
        if !matches!(found, Found::Load(..)) {
            way.into_iter().for_each(|id| pages.pin(id, pins));
        }
        Ok(found)
    }

    /// Makes a leaf one that `generation` may change, and says which it was before. A slot for it was
    /// promised, and all on the way to it is [pinned](Self::pin).
    pub fn change(&mut self, pages: &mut Pages, generation: u64, leaf: u64) -> Changed {
        let mut link = self.root;
        self.root = Link::Unwritten { born: generation };
        for level in (0..=self.depth).rev() {
            let id = self.page(level, leaf, generation);
            let before = link.born().map(|born| self.page(level, leaf, born));
            match before {
                Some(before) if before == id => pages.make_dirty(id),
                before => pages.make_new(id, before),
            }
            if let Link::Written(Pointer { place, born, .. }) = link
                && born == generation
            {
                pages.drop_place(place);
            }
            if level == 0 {
                return Changed { leaf: id, before: before.filter(|before| *before != id) };
            }
            let at = Tree::link_number(level, leaf) * POINTER_BYTES;
            let bytes = &mut pages.inner_mut(&id)[at..at + POINTER_BYTES];
            let bytes: &mut [u8; POINTER_BYTES] = bytes.try_into().expect("a link");
            link = Link::decode(bytes);
            *bytes = Link::Unwritten { born: generation }.encode();
        }
        unreachable!("the last level is that of leaves")
    }

    /// Makes it the tree of a volume that has grown to so many blocks, which reads as zeros behind its old end. No page
    /// was ever born in `generation`: one that was [cut](Self::cut) off may be in memory yet.
    pub fn grow(&mut self, pages: &mut Pages, generation: u64, blocks: u64) {
        self.reach(pages, generation, Tree::of_volume(blocks, Link::Nothing));
    }

    /// Makes it as deep as another tree, which is as deep or deeper. Its new part reads as zeros. Of `generation` no
    /// page was born in the new levels.
    pub fn reach(&mut self, pages: &mut Pages, generation: u64, deeper: Tree) {
        let depth = deeper.depth;
        for level in self.depth + 1..=depth {
            if self.root == Link::Nothing {
                break;
            }
            let id = self.page(level, 0, generation);
            pages.make_new(id, None);
            pages.inner_mut(&id)[..POINTER_BYTES].copy_from_slice(&self.root.encode());
            self.root = Link::Unwritten { born: generation };
        }
        self.depth = depth;
    }

    /// Makes it the tree of a volume that has shrunk to so many blocks. No page of it has blocks behind its new end any
    /// more, so that they read as zeros if the volume grows again. All on the way to the last leaf that is left is
    /// [pinned](Self::pin), a slot for it was promised, and no page was ever born in `generation`. Places of pages that
    /// only this tree had are the next pass's.
    pub fn cut(&mut self, pages: &mut Pages, generation: u64, blocks: u64) {
        let (last, end) =
            ((blocks - 1) / V2P_ENTRIES as u64, (blocks - 1) % V2P_ENTRIES as u64 + 1);
        let depth = Tree::of_volume(blocks, Link::Nothing).depth;
        // Of what is above only the first page of each level is left.
        for level in (depth + 1..=self.depth).rev() {
            let Some(born) = self.root.born() else { break };
            let page = pages.inner(&self.page(level, 0, born)).expect("a page that is pinned");
            self.root = link_at(page, 0);
        }
        self.depth = depth;
        if self.root == Link::Nothing {
            return;
        }
        let Changed { leaf, .. } = self.change(pages, generation, last);
        for level in 1..=depth {
            let behind = (Tree::link_number(level, last) + 1) * POINTER_BYTES;
            pages.inner_mut(&self.page(level, last, generation))[behind..].fill(0);
        }
        pages.store(&leaf, end as usize, &[0; V2P_ENTRIES][end as usize..]);
    }

    /// The pointer to its root, if what is not on the medium is one of these.
    pub fn pointer(&self, written: &Written) -> Option<Pointer> {
        match self.root.resolved(|born| self.page(self.depth, 0, born), written) {
            Link::Written(pointer) => Some(pointer),
            Link::Nothing | Link::Unwritten { .. } => None,
        }
    }

    /// A checkpoint has [ended](thaw) that has written these.
    pub fn settle(&mut self, settled: &Written) {
        let (depth, tree) = (self.depth, *self);
        self.root = self.root.resolved(|born| tree.page(depth, 0, born), settled);
    }
}

/// A leaf that may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The leaf.
    pub leaf: PageId,
    /// The one that was in its place, which others have yet.
    pub before: Option<PageId>,
}

/// Puts pointers to these pages into the page that is `id`. `false`: one is not known that it lacks.
fn resolve(id: &PageId, page: &mut [u8], written: &Written) -> bool {
    let mut all = true;
    for (i, bytes) in page.as_chunks_mut().0.iter_mut().enumerate() {
        if let link @ Link::Unwritten { .. } = Link::decode(bytes) {
            let index = id.index << LINK_BITS | i as u64;
            let child = |born| PageId { level: id.level - 1, kind: id.kind, born, index };
            let link = link.resolved(child, written);
            all &= matches!(link, Link::Written(_));
            *bytes = link.encode();
        }
    }
    all
}

/// A frozen page as it is written, when all that it leads to are.
///
/// # Errors
/// One is not. That is a mistake of the program, which must not get on the medium.
pub fn page_to_write(pages: &Pages, id: &PageId, written: &Written) -> Result<Vec<u8>, Damaged> {
    let mut page = pages.frozen(id);
    match id.level == 0 || resolve(id, &mut page, written) {
        true => Ok(page),
        false => Err(Damaged("a page is written before one that it leads to")),
    }
}

/// The checkpoint that has written these pages is on the medium. Gives those that have not changed since,
/// for roots to [settle](Tree::settle).
pub fn thaw(pages: &mut Pages, mut written: Written) -> Written {
    pages.thaw(&written);
    let all: Vec<PageId> = pages.unclean_inner().chain(written.keys().copied()).collect();
    written.retain(|id, _| !pages.is_unclean(id));
    for id in all {
        if let Some(page) = pages.inner_now_mut(&id) {
            resolve(&id, page, &written);
        }
    }
    written
}

#[cfg(test)]
mod tests;
