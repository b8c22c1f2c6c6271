//! Checkpoints: the state at one number of the journal, whole on the medium (store.md 5).
//!
//! [`write()`] has the order of the writes. A checkpoint that has failed is tried again as it is: the same pages, under
//! the same number, in the same places but for those that storage refuses. So whatever the medium has of it is valid.
//! When all its pages are durable, only the superblock is written again.

use std::collections::BTreeMap;
use std::io;
use std::iter;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::Port;

use super::free_numbers::FreeNumbers;
use super::layout::{Layout, LayoutInUse};
use super::medium::{MAX_BLOCKS, Medium, damaged, is_of_a_block};
use super::page::{Packing, Pointer};
use super::pages::{Kind, PageId, Pages};
use super::side_by_side::all;
use super::space::Space;
use super::superblock::{Roots, Superblock};
use super::table::{Domain, FrozenTable, Table, Volume};
use super::tree::{FOR_EVER, Link, Tree, Written, page_to_write, thaw};
use super::{BLOCK_BYTES, Damaged, StoreId};

/// The most batches of pages under way at once. Each takes a piece of the thread's memory, which writes need, too.
const BATCHES_AT_ONCE: usize = 2;
/// The most pages of one checkpoint that get another place. So storage that refuses all writes does not use up the room.
const MOST_MOVED: usize = 64;

/// The state of a store in memory, except the index.
pub struct Core {
    /// The identifier of the store.
    pub id: StoreId,
    /// The layout of the medium.
    pub layout: Layout,
    /// The layout that the next checkpoint has, if the store grows with that one. Until it has ended, no new place is
    /// given: no record of the journal may have one that the superblock does not know.
    pub grows_to: Option<Layout>,
    /// The layout, for readers without the core's lock.
    pub in_use: Arc<LayoutInUse>,
    /// The last checkpoint that is on the medium.
    pub checkpoint: u64,
    /// The first journal block that this checkpoint lacks.
    pub replay_from: u64,
    /// Pages in memory.
    pub pages: Pages,
    /// Which places are in use.
    pub space: Space,
    /// The tree from numbers to places.
    pub p2m: Tree,
    /// The tree from numbers to hashes.
    pub hashes: Tree,
    /// The volumes.
    pub volumes: Table<Volume>,
    /// The dedup domains, whose volumes share content.
    pub domains: Table<Domain>,
    /// The next generation.
    pub generation: u64,
    /// All numbers that were ever given are lower.
    pub numbers_end: u64,
    /// How new groups are compressed.
    pub packing: Option<Packing>,
    /// Whether the superblock on the medium says that volumes and records may have times. No record has one before.
    pub has_times: bool,
    /// Whether the next checkpoint's superblock says it.
    pub wants_times: bool,
    /// Numbers that can be given again.
    pub free_numbers: FreeNumbers,
    /// Trees that a pass looks at.
    pub kept: Vec<Tree>,
    /// A checkpoint that has begun, and may have failed.
    pub under_way: Option<UnderWay>,
}

/// A checkpoint that has begun.
pub struct UnderWay {
    /// The superblock, without its roots.
    superblock: Superblock,
    p2m: Tree,
    hashes: Tree,
    /// The pages in the order in which they are made, and their places.
    pages: Vec<(PageId, Option<u64>)>,
    volumes: FrozenTable<Volume>,
    domains: FrozenTable<Domain>,
    written: Written,
    /// How many pages got another place.
    moved: usize,
    /// All but the superblock is durable. The superblock may be, too, from now on.
    is_synced: bool,
}

/// Places that storage cannot write, and why.
type Refused = BTreeMap<u64, io::Error>;

/// Consecutive blocks that one operation writes.
struct Batch {
    place: u64,
    bytes: Vec<u8>,
    /// The copy is written, too.
    is_twice: bool,
}

/// Locks a store's core.
pub fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// Whether there is anything that a checkpoint would write.
    pub fn is_clean(&self) -> bool {
        let trees = self.pages.is_clean() && self.volumes.is_clean() && self.domains.is_clean();
        trees && self.under_way.is_none()
    }

    /// Section 5, step 1: all that is dirty is frozen. `replay_from` is the next number of the journal, and no
    /// block with a lower one is under way. If a checkpoint has failed that one is tried again.
    pub fn freeze(&mut self, replay_from: u64) {
        if self.under_way.is_some() {
            return;
        }
        let pages = self.pages.freeze().into_iter().map(|id| (id, None)).collect();
        let (volumes, dropped) = self.volumes.freeze();
        let (domains, more) = self.domains.freeze();
        for place in self.pages.take_dropped().into_iter().chain(dropped).chain(more) {
            self.space.drop_page(place);
        }
        self.space.begin();
        let superblock = Superblock {
            id: self.id,
            layout: self.grows_to.unwrap_or(self.layout),
            checkpoint: self.checkpoint + 1,
            replay_from,
            generation: self.generation,
            numbers_end: self.numbers_end,
            roots: Roots::default(),
            packing: self.packing,
            has_times: self.wants_times,
        };
        let (p2m, hashes, written) = (self.p2m, self.hashes, Written::new());
        self.under_way = Some(UnderWay {
            superblock,
            p2m,
            hashes,
            pages,
            volumes,
            domains,
            written,
            moved: 0,
            is_synced: false,
        });
    }

    /// All pages have places before the first is written: so the space pages, and a second try, have them.
    fn give_places(&mut self) -> io::Result<()> {
        let Some(under_way) = &mut self.under_way else { return Ok(()) };
        for place in under_way.places().filter(|place| place.is_none()) {
            *place = Some(self.space.give_page().ok_or(io::ErrorKind::StorageFull)?);
        }
        Ok(())
    }

    /// Pages whose places storage refuses get others. Nothing leads to them before the superblock is written, so these
    /// places are dropped, and the next checkpoint has them free. `false`: there is no room, or too many were moved.
    fn move_pages(&mut self, refused: &Refused) -> bool {
        let Core { under_way: Some(under_way), space, .. } = self else { return false };
        let moved = under_way.moved + refused.len();
        // The next checkpoint needs its room all the same.
        let room = space.reserve() + refused.len() as u64;
        if moved > MOST_MOVED || !space.has_room_for_pages(room) {
            return false;
        }
        under_way.moved = moved;
        for place in under_way.places() {
            if let Some(refused) = place.take_if(|place| refused.contains_key(place)) {
                space.drop_page(refused);
            }
        }
        true
    }

    /// The pages from the `from`th on that are written at once. None: that was the last.
    fn batch(&mut self, from: usize) -> Result<Option<(Batch, usize)>, Damaged> {
        let Some(under_way) = &mut self.under_way else { return Ok(None) };
        let mut batch: Option<Batch> = None;
        let mut count = 0;
        while count < MAX_BLOCKS {
            let Some((place, page, is_twice)) = under_way.make(&self.pages, from + count)? else {
                break;
            };
            match &mut batch {
                None => batch = Some(Batch { place, bytes: page, is_twice }),
                Some(batch)
                    if batch.is_twice == is_twice && batch.place + count as u64 == place =>
                {
                    batch.bytes.extend(page);
                }
                // It is made again in the next one.
                Some(_) => break,
            }
            count += 1;
        }
        Ok(batch.map(|batch| (batch, count)))
    }

    /// Space pages that may not be on the medium are made again.
    fn try_again(&mut self) {
        if self.under_way.as_ref().is_some_and(|under_way| !under_way.is_synced) {
            self.space.failed();
        }
    }

    /// Has the store grow with the next checkpoint that is [frozen](Core::freeze). All that this writes of the new segments
    /// is on its way to the medium.
    pub fn grow(&mut self, layout: Layout) {
        self.p2m.reach(&mut self.pages, FOR_EVER, Tree::of_p2m(&layout, Link::Nothing));
        self.hashes.reach(&mut self.pages, FOR_EVER, Tree::of_hashes(&layout, Link::Nothing));
        self.grows_to = Some(layout);
    }

    /// A checkpoint has ended with this layout.
    fn has_grown(&mut self, layout: Layout) {
        if layout != self.layout {
            (self.layout, self.grows_to) = (layout, None);
            self.in_use.grow(&layout);
            self.space.grow(layout);
        }
    }

    /// Section 5, step 7.
    fn end(&mut self, epoch: u64) {
        let Some(under_way) = self.under_way.take() else { return };
        self.checkpoint = under_way.superblock.checkpoint;
        self.replay_from = under_way.superblock.replay_from;
        self.has_times = under_way.superblock.has_times;
        self.has_grown(under_way.superblock.layout);
        let settled = thaw(&mut self.pages, under_way.written);
        self.p2m.settle(&settled);
        self.hashes.settle(&settled);
        self.volumes.settle(|volume| volume.tree.settle(&settled));
        self.kept.iter_mut().for_each(|tree| tree.settle(&settled));
        self.volumes.thaw(under_way.volumes);
        self.domains.thaw(under_way.domains);
        self.space.done(epoch);
    }
}

impl UnderWay {
    /// Of all pages.
    fn places(&mut self) -> impl Iterator<Item = &mut Option<u64>> {
        let pages = self.pages.iter_mut().map(|(_, place)| place);
        let volumes = self.volumes.pages.iter_mut().map(|(_, place)| place);
        let domains = self.domains.pages.iter_mut().map(|(_, place)| place);
        pages.chain(volumes).chain(domains)
    }

    /// The page that is `at` in the order of all: where it goes, its bytes, and whether there is a copy.
    fn make(&mut self, pages: &Pages, at: usize) -> Result<Option<(u64, Vec<u8>, bool)>, Damaged> {
        if let Some((id, place)) = self.pages.get(at) {
            let page = page_to_write(pages, id, &self.written)?;
            let place = place.ok_or(Damaged("a page is written that has no place"))?;
            self.written.insert(*id, Pointer::to(place, id.born, &page));
            return Ok(Some((place, page, has_copy(id))));
        }
        let at = at - self.pages.len();
        let volumes = self.volumes.pages.len();
        let made = match at.checked_sub(volumes) {
            None => self.volumes.make(at, &self.written)?,
            Some(at) if at < self.domains.pages.len() => self.domains.make(at, &self.written)?,
            Some(_) => return Ok(None),
        };
        Ok(Some((made.0, made.1, true)))
    }

    fn superblock(&self) -> Superblock {
        let roots = Roots {
            p2m: self.p2m.pointer(&self.written),
            hashes: self.hashes.pointer(&self.written),
            volumes: self.volumes.root(),
            domains: self.domains.root(),
        };
        Superblock { roots, ..self.superblock }
    }
}

/// Hashes are held once.
fn has_copy(id: &PageId) -> bool {
    id.kind != Kind::Hashes || id.level > 0
}

/// Where a page's copy is, if it has one.
pub fn copy_of(layout: &Layout, id: &PageId, pointer: &Pointer) -> Option<u64> {
    layout.copy_of(pointer.place).filter(|_| has_copy(id))
}

/// Writes the checkpoint that was [frozen](Core::freeze) last, one at a time. If it fails it can be tried again.
/// `removed` is asked at its end: in which epoch what it has dropped was named last.
///
/// # Errors
/// `StorageFull`: there is no room for its pages. Others are the kernel's. The store is as it was on the
/// medium, or as the checkpoint has it.
pub async fn write(
    core: &Mutex<Core>,
    medium: &Medium,
    port: &Port,
    removed: impl FnOnce() -> u64,
) -> io::Result<()> {
    if medium.is_faulty() {
        return medium.sync(port).await;
    }
    // One that was dropped in between has said nothing.
    lock(core).try_again();
    let done = write_all(core, medium, port).await;
    match &done {
        Ok(()) => lock(core).end(removed()),
        Err(_) => lock(core).try_again(),
    }
    done
}

/// Steps 2 to 6, or the rest of them.
async fn write_all(core: &Mutex<Core>, medium: &Medium, port: &Port) -> io::Result<()> {
    let Some(is_synced) = lock(core).under_way.as_ref().map(|under_way| under_way.is_synced) else {
        return Ok(());
    };
    if !is_synced {
        write_pages(core, medium, port).await?;
    }
    let Some(superblock) = lock(core).under_way.as_ref().map(UnderWay::superblock) else {
        return Ok(());
    };
    for home in 0..2 {
        let place = superblock.layout.superblock(home, superblock.checkpoint);
        medium.write(port, place, &superblock.encode(home)).await?;
        // The second home has the old one until the first has the new one.
        medium.sync(port).await?;
    }
    Ok(())
}

/// Steps 2 to 4.
async fn write_pages(core: &Mutex<Core>, medium: &Medium, port: &Port) -> io::Result<()> {
    loop {
        lock(core).give_places()?;
        let refused = write_trees(core, medium, port).await?;
        if refused.is_empty() {
            break;
        }
        // The pages that lead to a moved page change, so all are made again.
        if !lock(core).move_pages(&refused) {
            return refused.into_values().next().map_or(Ok(()), Err);
        }
    }
    let checkpoint = lock(core).checkpoint + 1;
    write_space(core, medium, port, checkpoint).await?;
    // All that the superblock leads to is there before it, and so are data and journal up to here.
    medium.sync(port).await?;
    // From here on a cut would tear them, or a failed sync lose them, where they count already.
    lock(core).under_way.iter_mut().for_each(|under_way| under_way.is_synced = true);
    Ok(())
}

/// Step 2. Gives the places that storage refuses.
async fn write_trees(core: &Mutex<Core>, medium: &Medium, port: &Port) -> io::Result<Refused> {
    let layout = lock(core).layout;
    let (mut made, mut refused) = (0, Refused::new());
    loop {
        let mut batches = Vec::new();
        while batches.len() < BATCHES_AT_ONCE
            && let Some((batch, count)) = lock(core).batch(made).map_err(damaged)?
        {
            made += count;
            batches.push(batch);
        }
        if batches.is_empty() {
            return Ok(refused);
        }
        let write = |batch: Batch| write_batch(&layout, medium, port, batch);
        for found in all(batches.into_iter().map(write)).await {
            refused.extend(found?);
        }
    }
}

/// Pages in a row; each by itself if storage refuses one of them.
async fn write_batch(
    layout: &Layout,
    medium: &Medium,
    port: &Port,
    batch: Batch,
) -> io::Result<Refused> {
    let copy = layout.copy_of(batch.place).filter(|_| batch.is_twice);
    match medium.write_twice(port, batch.place, copy, &batch.bytes).await {
        Err(e) if is_of_a_block(&e) => {}
        done => return done.map(|()| Refused::new()),
    }
    let mut refused = Refused::new();
    for (page, i) in batch.bytes.chunks(BLOCK_BYTES).zip(0..) {
        let (place, copy) = (batch.place + i, copy.map(|copy| copy + i));
        match medium.write_twice(port, place, copy, page).await {
            Err(e) if is_of_a_block(&e) => drop(refused.insert(place, e)),
            done => done?,
        }
    }
    Ok(refused)
}

/// Step 3.
async fn write_space(
    core: &Mutex<Core>,
    medium: &Medium,
    port: &Port,
    checkpoint: u64,
) -> io::Result<()> {
    loop {
        let pages: Vec<_> = {
            let core = &mut *lock(core);
            let next = || core.space.page_to_write(&core.id, checkpoint);
            iter::from_fn(next).take(MAX_BLOCKS).collect()
        };
        if pages.is_empty() {
            return Ok(());
        }
        let write = async |(place, page): (u64, Vec<u8>)| medium.write(port, place, &page).await;
        all(pages.into_iter().map(write)).await.into_iter().collect::<io::Result<()>>()?;
    }
}

/// Reads a page of a tree, or its copy if it is damaged, and checks it.
///
/// # Errors
/// It is damaged (`InvalidData`), or cannot be read.
pub async fn load(
    layout: &Layout,
    medium: &Medium,
    port: &Port,
    id: &PageId,
    pointer: &Pointer,
) -> io::Result<Vec<u8>> {
    let page = medium.read_page(port, pointer, copy_of(layout, id, pointer)).await?;
    super::tree::check_page(id, &page, layout).map_err(damaged)?;
    Ok(page)
}

#[cfg(test)]
mod tests;
