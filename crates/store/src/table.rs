//! Volumes and domains: tables by number, all of them in memory (store.md 2).
//!
//! On the medium a table is a tree with two levels of inner pages, which a checkpoint writes as far as it has
//! changed. Volumes come behind the trees of theirs, whose roots they have.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use ferrite_disk_base::Port;

use super::content::DomainKey;
use super::fields::{Reader, Writer};
use super::journal::{Name, VolumeId};
use super::layout::Layout;
use super::medium::{Medium, damaged};
use super::page::{POINTER_BYTES, Pointer};
use super::tree::{FIRST_GENERATION, FOR_EVER, Link, Tree, Written};
use super::{BLOCK_BYTES, Damaged};

/// Entries of a table at most.
pub const MAX_ENTRIES: u32 = 1 << 16;
const LINKS: u32 = (BLOCK_BYTES / POINTER_BYTES) as u32;
/// The level of the root.
const ROOT: u8 = 2;

/// An entry of a table.
pub trait Entry: Clone {
    /// Of one on the medium.
    const BYTES: usize;

    /// As it is on the medium, behind what a checkpoint has written before.
    fn encode(&self, written: &Written) -> Vec<u8>;

    /// The opposite, of an entry that is not all zeros.
    ///
    /// # Errors
    /// It means nothing.
    fn decode(bytes: &[u8], layout: &Layout) -> Result<Self, Damaged>
    where
        Self: Sized;
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its name.
    pub name: Name,
    /// Its size.
    pub blocks: u64,
    /// Its dedup domain.
    pub domain: u16,
    /// It changes pages of this generation.
    pub generation: u64,
    /// Whether it is read-only.
    pub is_snapshot: bool,
    /// The volume that it was made from.
    pub origin: Option<VolumeId>,
    /// When it was made, in seconds of Unix time. `None`: by a program that noted no time, or the time is unknown.
    pub created_unix_s: Option<u64>,
    /// The tree of its blocks.
    pub tree: Tree,
}

impl Entry for Volume {
    const BYTES: usize = 256;

    fn encode(&self, written: &Written) -> Vec<u8> {
        let mut to = Writer::default();
        let flags = 1
            | u64::from(self.is_snapshot) << 1
            | u64::from(self.origin.is_some()) << 2
            | u64::from(self.created_unix_s.is_some()) << 3;
        to.number(flags, 1).number(self.tree.depth().into(), 1).number(self.domain.into(), 2);
        to.number(self.origin.unwrap_or(0).into(), 4);
        to.number(self.blocks, 8).number(self.generation, 8);
        to.bytes(&Pointer::encode(self.tree.pointer(written))).name(&self.name);
        self.created_unix_s.iter().for_each(|time| {
            to.number(*time, 8);
        });
        to.0
    }

    fn decode(bytes: &[u8], layout: &Layout) -> Result<Volume, Damaged> {
        let mut from = Reader::new(bytes);
        let (flags, depth, domain) = (from.u8()?, from.u8()?, from.u16()?);
        let (origin, blocks, generation) = (from.u32()?, from.u64()?, from.u64()?);
        let root = Link::of(Pointer::decode(&from.array()?, layout)?);
        let name = from.name()?;
        let created_unix_s = if flags & 8 == 0 { None } else { Some(from.u64()?) };
        from.zeros()?;
        if flags & !14 != 1 || !(1..=1 << 40).contains(&blocks) || generation < FIRST_GENERATION {
            return Err(Damaged("a volume is none"));
        }
        let tree = Tree::of_volume(blocks, root);
        if tree.depth() != depth || origin >= MAX_ENTRIES || flags & 4 == 0 && origin != 0 {
            return Err(Damaged("a volume is not of the size that it says"));
        }
        let (is_snapshot, origin) = (flags & 2 != 0, (flags & 4 != 0).then_some(origin));
        Ok(Volume { name, blocks, domain, generation, is_snapshot, origin, created_unix_s, tree })
    }
}

/// Volumes that share content with each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Its name.
    pub name: Name,
    /// The key that names its contents.
    pub key: DomainKey,
}

impl Entry for Domain {
    const BYTES: usize = 128;

    fn encode(&self, _: &Written) -> Vec<u8> {
        let mut to = Writer::default();
        to.bytes(&self.key.0).name(&self.name);
        to.0
    }

    fn decode(bytes: &[u8], _: &Layout) -> Result<Domain, Damaged> {
        let mut from = Reader::new(bytes);
        let (key, name) = (DomainKey(from.array()?), from.name()?);
        from.zeros()?;
        Ok(Domain { name, key })
    }
}

/// A page of a table: its level and its number among those of its level.
type PageNumber = (u8, u32);

/// See the module text.
#[derive(Clone, Debug)]
pub struct Table<E> {
    entries: BTreeMap<u32, E>,
    /// Where pages are that the medium has.
    pages: BTreeMap<PageNumber, Pointer>,
    /// Leaves that are not as the medium has them.
    changed: BTreeSet<u32>,
}

/// The version of a table for a checkpoint.
#[derive(Clone, Debug)]
pub struct FrozenTable<E> {
    entries: BTreeMap<u32, E>,
    before: BTreeMap<PageNumber, Pointer>,
    /// Pages to write, leaves first, and their places.
    pub pages: Vec<(PageNumber, Option<u64>)>,
    written: BTreeMap<PageNumber, Pointer>,
}

impl<E: Entry> Default for Table<E> {
    fn default() -> Table<E> {
        Table { entries: BTreeMap::new(), pages: BTreeMap::new(), changed: BTreeSet::new() }
    }
}

impl<E: Entry> Table<E> {
    const PER_LEAF: u32 = (BLOCK_BYTES / E::BYTES) as u32;

    /// All of them.
    pub fn entries(&self) -> &BTreeMap<u32, E> {
        &self.entries
    }

    /// One, to be changed.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut E> {
        let entry = self.entries.get_mut(&number)?;
        self.changed.insert(number / Self::PER_LEAF);
        Some(entry)
    }

    /// One that is new, or another one.
    ///
    /// # Panics
    /// If the table does not go so far.
    pub fn insert(&mut self, number: u32, entry: E) {
        assert!(number < MAX_ENTRIES, "entry {number}");
        self.entries.insert(number, entry);
        self.changed.insert(number / Self::PER_LEAF);
    }

    /// There is none any more.
    pub fn remove(&mut self, number: u32) -> Option<E> {
        self.changed.insert(number / Self::PER_LEAF);
        self.entries.remove(&number)
    }

    /// Where the medium has it.
    pub fn places(&self) -> impl Iterator<Item = u64> {
        self.pages.values().map(|pointer| pointer.place)
    }

    /// Notes newly known facts in all entries, without a change that the medium has to have.
    pub fn settle(&mut self, settle: impl FnMut(&mut E)) {
        self.entries.values_mut().for_each(settle);
    }

    /// Pages that a checkpoint would write of it.
    pub fn owed_pages(&self) -> usize {
        let leaves = self.changed.len();
        // Those that lead to them: no more than there can be of them, and the root.
        let others = leaves.min((MAX_ENTRIES / Self::PER_LEAF / LINKS) as usize) + 1;
        if leaves == 0 { 0 } else { leaves + others }
    }

    /// Whether no checkpoint has anything to write of it.
    pub fn is_clean(&self) -> bool {
        self.changed.is_empty()
    }

    /// A checkpoint begins. Also gives the places that it has dropped.
    pub fn freeze(&mut self) -> (FrozenTable<E>, Vec<u64>) {
        let leaves = std::mem::take(&mut self.changed);
        let middle: BTreeSet<u32> = leaves.iter().map(|leaf| leaf / LINKS).collect();
        let root = (!leaves.is_empty()).then_some((ROOT, 0));
        let numbers = leaves.iter().map(|leaf| (0, *leaf));
        let numbers = numbers.chain(middle.into_iter().map(|page| (1, page))).chain(root);
        let pages: Vec<_> = numbers.map(|number| (number, None)).collect();
        let dropped = pages.iter().filter_map(|(number, _)| Some(self.pages.get(number)?.place));
        let dropped = dropped.collect();
        let is_written = |number: &u32| leaves.contains(&(number / Self::PER_LEAF));
        let entries = self.entries.iter().filter(|(number, _)| is_written(number));
        let entries = entries.map(|(number, entry)| (*number, entry.clone())).collect();
        let before = self.pages.clone();
        (FrozenTable { entries, before, pages, written: BTreeMap::new() }, dropped)
    }

    /// The checkpoint is on the medium.
    pub fn thaw(&mut self, frozen: FrozenTable<E>) {
        self.pages.extend(frozen.written);
    }

    /// As the medium has it.
    ///
    /// # Errors
    /// A page cannot be read, or means nothing.
    pub async fn load(
        medium: &Medium,
        port: &Port,
        layout: &Layout,
        root: Option<Pointer>,
    ) -> io::Result<Table<E>> {
        let mut table = Table::default();
        let mut level = ROOT;
        let mut next: Vec<(u32, Pointer)> = root.map(|root| (0, root)).into_iter().collect();
        loop {
            let mut below = Vec::new();
            for (number, pointer) in next {
                if level == 0 && number >= MAX_ENTRIES / Self::PER_LEAF {
                    return Err(damaged(Damaged("a table goes too far")));
                }
                let copy = layout.copy_of(pointer.place);
                let page = medium.read_page(port, &pointer, copy).await?;
                table.pages.insert((level, number), pointer);
                match level {
                    0 => table.take_leaf(number, &page, layout).map_err(damaged)?,
                    _ => below.extend(links(number, &page, layout).map_err(damaged)?),
                }
            }
            if level == 0 {
                return Ok(table);
            }
            (next, level) = (below, level - 1);
        }
    }

    fn take_leaf(&mut self, leaf: u32, page: &[u8], layout: &Layout) -> Result<(), Damaged> {
        for (i, bytes) in page.chunks_exact(E::BYTES).enumerate() {
            let number = leaf * Self::PER_LEAF + i as u32;
            if bytes.iter().any(|b| *b != 0) {
                self.entries.insert(number, E::decode(bytes, layout)?);
            }
        }
        Ok(())
    }
}

/// Where an inner page leads to.
fn links(number: u32, page: &[u8], layout: &Layout) -> Result<Vec<(u32, Pointer)>, Damaged> {
    let links = page.as_chunks().0.iter().zip(0..);
    let links = links.map(|(bytes, i)| Ok((number * LINKS + i, Pointer::decode(bytes, layout)?)));
    let links: Vec<_> = links.collect::<Result<_, Damaged>>()?;
    Ok(links.into_iter().filter_map(|(number, link)| Some((number, link?))).collect())
}

impl<E: Entry> FrozenTable<E> {
    /// The page of [`pages`](Self::pages) at `at`, when those before it are made.
    ///
    /// # Errors
    /// It has no place. That is a mistake of the program.
    pub fn make(&mut self, at: usize, trees: &Written) -> Result<(u64, Vec<u8>), Damaged> {
        let (number, place) = self.pages[at];
        let place = place.ok_or(Damaged("a page of a table is written that has no place"))?;
        let mut page = Vec::with_capacity(BLOCK_BYTES);
        if number.0 == 0 {
            let first = number.1 * Table::<E>::PER_LEAF;
            for (entry, end) in (first..first + Table::<E>::PER_LEAF).zip(1..) {
                let bytes = self.entries.get(&entry).map(|entry| entry.encode(trees));
                page.extend(bytes.unwrap_or_default());
                page.resize(end * E::BYTES, 0);
            }
        } else {
            let children = number.1 * LINKS..(number.1 + 1) * LINKS;
            let children = children.map(|child| (number.0 - 1, child));
            let pointer = |child| self.written.get(&child).or_else(|| self.before.get(&child));
            page.extend(children.flat_map(|child| Pointer::encode(pointer(child).copied())));
        }
        self.written.insert(number, Pointer::to(place, FOR_EVER, &page));
        Ok((place, page))
    }

    /// The pointer that leads to the table.
    pub fn root(&self) -> Option<Pointer> {
        let root = (ROOT, 0);
        self.written.get(&root).or_else(|| self.before.get(&root)).copied()
    }
}
