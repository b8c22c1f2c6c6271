//! Makes stores, and opens them: from four superblocks to all that a checkpoint has (store.md 2 and 5).

use std::io;
use std::sync::Arc;

use ferrite_disk_base::Port;

use super::ballast::MOST_BYTES;
use super::checkpoint::Core;
use super::free_numbers::FreeNumbers;
use super::layout::{Layout, LayoutInUse};
use super::medium::{MAX_BLOCKS, Medium};
use super::pages::Pages;
use super::signpost;
use super::space::{Bits, Kind, Space, SpacePage, UNREADABLE, choose as choose_space, mends};
use super::superblock::{Pages as Superblocks, Roots, Superblock, Unusable, choose};
use super::table::Table;
use super::tree::{FIRST_GENERATION, Link, Tree};
use super::{BLOCK_BYTES, Damaged, StoreId};

/// A small store takes at most this part of its size as memory for metadata.
const SMALLEST_PART: u64 = 16;

fn unusable(why: Unusable) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn cut_off(end: u64, blocks: u64) -> io::Error {
    let [store_bytes, bytes] = [end, blocks].map(|blocks| blocks * BLOCK_BYTES as u64);
    unusable(Unusable::CutOff { store_bytes, bytes })
}

/// Makes an empty store on a file or device. Its old content is lost.
///
/// # Errors
/// The kernel's. There is no store then, or all of it.
pub async fn create(medium: &Medium, port: &Port, layout: &Layout, id: StoreId) -> io::Result<()> {
    // An earlier store on the medium ends first.
    let nothing = vec![0; 2 * BLOCK_BYTES];
    for home in 0..2 {
        medium.write(port, layout.superblock(home, 0), &nothing).await?;
    }
    medium.sync(port).await?;
    write_free_segments(medium, port, layout, &id, 0).await?;
    medium.sync(port).await?;
    let superblock = |checkpoint| Superblock {
        id,
        layout: *layout,
        checkpoint,
        replay_from: 0,
        generation: FIRST_GENERATION,
        numbers_end: 1,
        roots: Roots::default(),
        packing: None,
        has_times: true,
    };
    // The first home is written last: with it, the medium is a store.
    for home in [1, 0] {
        let pages = [0, 1].map(|checkpoint| superblock(checkpoint).encode(home)).concat();
        medium.write(port, layout.superblock(home, 0), &pages).await?;
        medium.sync(port).await?;
    }
    Ok(())
}

/// Writes the space pages of segments that have nothing, from `first` on. Checkpoint 1 counts of each.
///
/// # Errors
/// The kernel's. No space of the store's own is spent.
pub async fn write_free_segments(
    medium: &Medium,
    port: &Port,
    layout: &Layout,
    id: &StoreId,
    first: u64,
) -> io::Result<()> {
    let mut segment = first;
    while segment < layout.segments {
        let count = layout.pages_in_a_row(segment, MAX_BLOCKS as u64 / 2);
        let page = |segment: u64, home: u64| {
            let bits = Bits::all(false, layout.segment_blocks);
            let page = SpacePage { checkpoint: home, kind: Kind::Free, bits };
            page.encode(id, segment, home as usize)
        };
        let both = |segment| [page(segment, 0), page(segment, 1)];
        let pages: Vec<Vec<u8>> = (segment..segment + count).flat_map(both).collect();
        let place = layout.space_page(segment, 0);
        medium.write_blocks(port, place, pages.iter().map(Vec::as_slice)).await?;
        segment += count;
    }
    Ok(())
}

/// Reads the four superblocks of a medium of `blocks` blocks. One that cannot be read counts as damaged: then the one
/// in the other home is needed.
async fn superblocks(medium: &Medium, port: &Port, blocks: u64) -> io::Result<Superblocks> {
    if blocks < 4 {
        return Err(unusable(Unusable::Foreign));
    }
    let mut unreadable = None;
    let mut decode = |pages: Vec<io::Result<Vec<u8>>>, home| {
        let mut all = [Err(Unusable::Foreign); 2];
        for ((page, to), odd) in pages.into_iter().zip(&mut all).zip([false, true]) {
            *to = match page {
                Ok(page) => Superblock::decode(&page, home, odd),
                Err(e) => {
                    unreadable = Some(e);
                    Err(Damaged("a page of the superblock cannot be read").into())
                }
            };
        }
        all
    };
    let first = decode(medium.read_each(port, 0, 2).await?, 0);
    // If the store has grown with the newest one, the other has the size of before.
    let layouts = first.iter().filter_map(|page| page.ok().map(|superblock| superblock.layout));
    let layout = layouts.max_by_key(|layout| layout.blocks);
    let end = layout.map_or(blocks, |layout| layout.blocks);
    if end > blocks {
        return Err(cut_off(end, blocks));
    }
    let mut home = layout.map_or(blocks - 2, |layout| layout.superblock(1, 0));
    if layout.is_none() {
        // Nothing says how large the store is, so it is taken to be as large as the medium.
        let last = medium.read_each(port, blocks - 1, 1).await?.remove(0);
        let led_to = last.ok().and_then(|page| signpost::decode(&page).ok());
        home = led_to.filter(|end| (4..blocks).contains(end)).map_or(home, |end| end - 2);
    }
    let second = decode(medium.read_each(port, home, 2).await?, 1);
    let all = first.iter().chain(&second).filter_map(|page| page.as_ref().ok());
    if let Some(end) =
        all.map(|superblock| superblock.layout.blocks).max().filter(|end| *end > blocks)
    {
        return Err(cut_off(end, blocks));
    }
    match unreadable {
        // Nothing shows that the medium is a store.
        Some(e) if [first, second].iter().flatten().all(Result::is_err) => Err(e),
        _ => Ok([first, second]),
    }
}

/// Opens a medium of `bytes` bytes, in the state of its last checkpoint. `may_write`: damaged superblocks and space pages
/// are written again.
///
/// # Errors
/// It is no store, is damaged, or cannot be read (`InvalidData`, or the kernel's).
pub async fn open(
    medium: &Medium,
    port: &Port,
    bytes: u64,
    metadata_memory: usize,
    may_write: bool,
) -> io::Result<Core> {
    let superblocks = superblocks(medium, port, bytes / BLOCK_BYTES as u64).await?;
    let superblock = choose(&superblocks).map_err(unusable)?;
    let layout = superblock.layout;
    let pages = pages_for(&layout, metadata_memory);
    if may_write {
        take_space(medium, port, bytes, &layout, pages.count()).await;
        mend(medium, port, &superblocks, &superblock).await?;
    }
    let roots = superblock.roots;
    Ok(Core {
        id: superblock.id,
        layout,
        grows_to: None,
        in_use: Arc::new(LayoutInUse::new(&layout)),
        checkpoint: superblock.checkpoint,
        replay_from: superblock.replay_from,
        space: load_space(medium, port, &superblock, pages.count(), may_write).await?,
        pages,
        p2m: Tree::of_p2m(&layout, Link::of(roots.p2m)),
        hashes: Tree::of_hashes(&layout, Link::of(roots.hashes)),
        volumes: Table::load(medium, port, &layout, roots.volumes).await?,
        domains: Table::load(medium, port, &layout, roots.domains).await?,
        generation: superblock.generation,
        numbers_end: superblock.numbers_end,
        packing: superblock.packing,
        has_times: superblock.has_times,
        wants_times: superblock.has_times,
        free_numbers: FreeNumbers::default(),
        kept: Vec::new(),
        under_way: None,
    })
}

/// Takes space of the file system below (section 7, A full file system below). This comes before all writes of an opening:
/// a copy-on-write file system needs space for these, too.
async fn take_space(medium: &Medium, port: &Port, bytes: u64, layout: &Layout, slots: usize) {
    let first_place = layout.first_place(0) * BLOCK_BYTES as u64;
    // Space that the file system cannot give now it may give when the place is written.
    let _ = port.io.preallocate(port.files[0], 0, first_place).await;
    medium.ballast().hold(port, bytes, ballast_for(slots)).await;
}

/// Memory for pages: a part of a small store at most.
fn pages_for(layout: &Layout, metadata_memory: usize) -> Pages {
    let smallest = layout.blocks * BLOCK_BYTES as u64 / SMALLEST_PART;
    Pages::new(metadata_memory.min(usize::try_from(smallest).unwrap_or(usize::MAX)))
}

/// Two checkpoints with all memory dirty, and each page twice.
fn ballast_for(slots: usize) -> u64 {
    (4 * slots * BLOCK_BYTES) as u64
}

/// The reserve of a store that is opened with so much memory: pages of one checkpoint, and bytes of ballast.
pub fn kept(layout: &Layout, metadata_memory: usize) -> (u64, u64) {
    let slots = pages_for(layout, metadata_memory).count();
    (slots as u64, ballast_for(slots).min(MOST_BYTES))
}

/// Makes the superblock durable in both homes, before any place is reused that its checkpoint has made free. A home
/// without it may have an older superblock, which still refers to those places.
///
/// All four pages are written, whatever was read: after a failed sync in an earlier process, only the kernel's memory may
/// have what was read. A page that could not be read may be of a later checkpoint that was cut off, and be readable at
/// the next opening.
async fn mend(
    medium: &Medium,
    port: &Port,
    pages: &Superblocks,
    superblock: &Superblock,
) -> io::Result<()> {
    let newest = |odd: usize| {
        let whole = pages.iter().filter_map(|home| home[odd].ok());
        whole.max_by_key(|page| page.checkpoint).unwrap_or(*superblock)
    };
    let known = [0, 1].map(newest);
    if let Some(place) = superblock.layout.signpost() {
        let page = signpost::encode(&superblock.id, superblock.layout.first_blocks);
        medium.write(port, place, &page).await?;
    }
    for home in 0..2 {
        let both = known.map(|page| page.encode(home)).concat();
        medium.write(port, superblock.layout.superblock(home, 0), &both).await?;
        medium.sync(port).await?;
    }
    Ok(())
}

async fn load_space(
    medium: &Medium,
    port: &Port,
    superblock: &Superblock,
    reserve: usize,
    may_write: bool,
) -> io::Result<Space> {
    let layout = &superblock.layout;
    let mut space = Space::new(*layout, reserve as u64);
    let (mut segment, mut is_mended) = (0, false);
    while segment < layout.segments {
        let count = layout.pages_in_a_row(segment, MAX_BLOCKS as u64 / 2);
        let pages = layout.space_page(segment, 0);
        let pages = medium.read_each(port, pages, 2 * count as usize).await?;
        let found = |segment: u64, pages: &[io::Result<Vec<u8>>]| {
            let homes = [0, 1].map(|home| {
                // A page that cannot be read counts as damaged: it may have been the newer one.
                let page = pages[home].as_ref().map_err(|_| UNREADABLE)?;
                SpacePage::decode(page, &superblock.id, layout, segment, home)
            });
            choose_space(homes, superblock.checkpoint)
        };
        for (pair, pages) in pages.chunks_exact(4).enumerate() {
            let first = segment + 2 * pair as u64;
            let (a, b) = pages.split_at(2);
            let mut found = [found(first, a), found(first + 1, b)];
            let mends = mends(&found, superblock.checkpoint, layout.segment_blocks);
            for ((found, mend), segment) in found.iter_mut().zip(mends).zip(first..) {
                let Some(page) = mend else { continue };
                let home = 1 - found.next_home;
                if may_write {
                    let place = layout.space_page(segment, home as u64);
                    let bytes = page.encode(&superblock.id, segment, home);
                    medium.write(port, place, &bytes).await?;
                    is_mended = true;
                }
                found.page = Some(page);
            }
            space.add_pair(found);
        }
        segment += count;
    }
    if is_mended {
        medium.sync(port).await?;
    }
    Ok(space)
}
