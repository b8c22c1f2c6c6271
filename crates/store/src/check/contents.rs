//! Content: each has a place of its own, and is what its checksum, and its hash, say.

use std::io;

use super::medium::Step;
use super::{Check, StoreFinding, in_bytes};
use crate::content::{ContentHash, DomainKey, checksum};
use crate::medium::MAX_BLOCKS;
use crate::packing::unpack;
use crate::page::{HASHES, P2M_ENTRIES, Pointer, Whereabouts};
use crate::space::Kind;
use crate::tree::{Link, Tree};
use crate::{BLOCK_BYTES, Damaged};

/// Content in places in a row.
#[derive(Default)]
struct Run {
    place: u64,
    /// Numbers and checksums.
    contents: Vec<(u64, u32)>,
}

/// The data to read of a content.
enum ToRead {
    /// A place, and the checksum of what is in it.
    Plain(u64, u32),
    /// A block of a compressed group.
    Packed(Whereabouts),
}

/// Where full hashes are read.
struct Hashes {
    tree: Tree,
    keys: Vec<DomainKey>,
    /// The pages on the way to the last one: level, index, page.
    way: Vec<(u8, u64, Option<Vec<u8>>)>,
}

fn pointer_of(root: Link) -> Option<Pointer> {
    match root {
        Link::Written(pointer) => Some(pointer),
        Link::Nothing | Link::Unwritten { .. } => None,
    }
}

/// The root of a tree.
pub(super) fn root_of(tree: &Tree) -> Option<Step> {
    let pointer = pointer_of(tree.root)?;
    Some(Step { level: tree.depth(), index: 0, pointer })
}

impl Check<'_> {
    /// P2M, and the content that it leads to.
    pub(super) async fn p2m(&mut self) -> io::Result<()> {
        let keys = self.core.domains.entries().values().map(|domain| domain.key.clone()).collect();
        let mut hashes = Hashes { tree: self.core.hashes, keys, way: Vec::new() };
        let mut run = Run::default();
        let root = root_of(&self.core.p2m);
        self.all_leaves("P2M", root, true, async |check, index, page| {
            for (entry, number) in page.as_chunks().0.iter().zip(index * P2M_ENTRIES as u64..) {
                let (place, sum) = match check.entry(number, entry) {
                    Some(ToRead::Plain(place, sum)) => (place, sum),
                    Some(ToRead::Packed(entry)) => {
                        check.read_packed(number, entry, &mut hashes).await?;
                        continue;
                    }
                    None => continue,
                };
                {
                    if place != run.place + run.contents.len() as u64
                        || run.contents.len() == MAX_BLOCKS
                    {
                        check.read_run(&mut run, &mut hashes).await?;
                        run.place = place;
                    }
                    run.contents.push((number, sum));
                }
            }
            Ok(())
        })
        .await?;
        self.read_run(&mut run, &mut hashes).await?;
        // The number that is meant is lower, so it is known.
        for (number, lower) in self.same.clone() {
            if self.contents.get(lower) {
                self.contents.set(number);
            }
            if self.bad.get(lower) {
                self.bad.set(number);
            }
        }
        Ok(())
    }

    /// Whether nothing has named the group yet that begins here.
    fn is_new_group(&mut self, (segment, at): (u64, u64)) -> bool {
        self.groups.set(segment * self.layout.segment_blocks + at)
    }

    /// Examines an entry. Gives the data that have to be read.
    fn entry(&mut self, number: u64, entry: &[u8; 16]) -> Option<ToRead> {
        let found = match Whereabouts::decode(entry, number, &self.layout) {
            Ok(Whereabouts::Nowhere) => return None,
            Ok(_) if number >= self.core.numbers_end => {
                Err(Damaged("it has content, and was never given"))
            }
            found => found,
        };
        match found {
            Ok(Whereabouts::Plain { place, checksum }) => {
                self.take(place, Kind::Data, "content");
                self.contents.set(number);
                return self.how.contents.then_some(ToRead::Plain(place, checksum));
            }
            Ok(Whereabouts::SameAs { number: lower }) => self.same.push((number, lower)),
            Ok(Whereabouts::Nowhere) => {}
            Ok(entry @ Whereabouts::Packed { place, places, .. }) => {
                // Others of its group come, too.
                if self.layout.segment_of(place).is_some_and(|at| self.is_new_group(at)) {
                    for place in place..place + u64::from(places) {
                        self.take(place, Kind::Data, "content");
                    }
                    self.group_places += u64::from(places);
                }
                self.packed_contents += 1;
                self.contents.set(number);
                return self.how.contents.then_some(ToRead::Packed(entry));
            }
            Err(Damaged(why)) => {
                let why = format!("number {number}: {why}");
                self.add(StoreFinding::damage("number", why));
            }
        }
        None
    }

    /// Reads what is in a run, which is empty afterwards.
    async fn read_run(&mut self, run: &mut Run, hashes: &mut Hashes) -> io::Result<()> {
        let contents = std::mem::take(&mut run.contents);
        if contents.is_empty() {
            return Ok(());
        }
        let blocks = self.blocks(run.place, contents.len()).await;
        for ((number, sum), block) in contents.iter().zip(blocks) {
            let fits = block.as_ref().is_ok_and(|block| checksum(block) == *sum);
            match block {
                Ok(block) if fits && self.how.deep => {
                    self.compare_hash(*number, &block, hashes).await?;
                }
                _ if fits => {}
                _ => drop(self.bad.set(*number)),
            }
        }
        self.has_read(in_bytes(contents.len() as u64)).await
    }

    /// A block of a compressed group. The group is kept for the next one.
    async fn read_packed(
        &mut self,
        number: u64,
        entry: Whereabouts,
        hashes: &mut Hashes,
    ) -> io::Result<()> {
        let Whereabouts::Packed { place, checksum: sum, packing, places, index } = entry else {
            return Ok(());
        };
        if self.group.0 != place {
            let group = self.medium.read(self.port, place, places.into()).await;
            let blocks = group.ok().and_then(|group| unpack(packing, &group).ok());
            self.group = (place, blocks.unwrap_or_default());
            self.has_read(in_bytes(places.into())).await?;
        }
        let at = usize::from(index) * BLOCK_BYTES;
        let block = self.group.1.get(at..at + BLOCK_BYTES).map(<[u8]>::to_vec);
        match block.filter(|block| checksum(block) == sum) {
            Some(block) if self.how.deep => self.compare_hash(number, &block, hashes).await,
            Some(_) => Ok(()),
            None => {
                self.bad.set(number);
                Ok(())
            }
        }
    }

    async fn compare_hash(
        &mut self,
        number: u64,
        block: &[u8],
        hashes: &mut Hashes,
    ) -> io::Result<()> {
        let Some(hash) = self.hash(number, hashes).await? else { return Ok(()) };
        let keys = &mut hashes.keys;
        match keys.iter().position(|key| key.hash(block) == hash) {
            // Most are of the domain that the last one was of.
            Some(at) => keys.swap(0, at),
            None => {
                let why = format!(
                    "the hash of number {number} is another content's: a write of that content would get this one"
                );
                self.add(StoreFinding::damage("hash", why));
            }
        }
        Ok(())
    }

    /// The full hash of a number. None: it is lost, which is told elsewhere.
    async fn hash(&mut self, number: u64, hashes: &mut Hashes) -> io::Result<Option<ContentHash>> {
        let leaf = number / HASHES as u64;
        let mut pointer = pointer_of(hashes.tree.root);
        for level in (0..=hashes.tree.depth()).rev() {
            let Some(to) = pointer else { return Ok(None) };
            let (index, at) = (leaf >> (8 * u32::from(level)), usize::from(level));
            hashes.way.resize(hashes.way.len().max(at + 1), (0, u64::MAX, None));
            if hashes.way[at].1 != index {
                let copy = self.layout.copy_of(to.place).filter(|_| level > 0);
                let page = self.medium.read_page(self.port, &to, copy).await.ok();
                hashes.way[at] = (level, index, page);
            }
            let Some(page) = &hashes.way[at].2 else { return Ok(None) };
            if level == 0 {
                let hash = page.as_chunks().0[number as usize % HASHES];
                return Ok((hash != [0; 32]).then_some(ContentHash(hash)));
            }
            let next = (leaf >> (8 * u32::from(level - 1))) as usize % (BLOCK_BYTES / 16);
            pointer = Pointer::decode(&page.as_chunks().0[next], &self.layout).unwrap_or(None);
        }
        Ok(None)
    }

    /// The pages of hashes.
    pub(super) async fn hashes(&mut self) -> io::Result<()> {
        let root = root_of(&self.core.hashes);
        self.all_leaves("hashes", root, false, async |_, _, _| Ok(())).await
    }
}
