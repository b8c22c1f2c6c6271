//! The structures on the medium of a hostile store, with correct checksums if the input asks for them.

use std::cell::Cell;

use ferrite_store::content::{checksum, checksum_on};
use ferrite_store::journal::{Block, Filling, MAX_SAME, Scan};
use ferrite_store::layout::Layout;
use ferrite_store::packing::unpack;
use ferrite_store::page::{self, POINTER_BYTES, Packing, Pointer, Whereabouts};
use ferrite_store::space::{SpacePage, choose as choose_space};
use ferrite_store::superblock::{Superblock, choose};
use ferrite_store::{BLOCK_BYTES, Damaged, StoreId};

/// The id of the store that journal blocks and pages belong to.
const ID: StoreId = [3; 16];
const BYTES: u64 = 64 << 20;

/// The bytes of an input for each page of the superblock.
const HEAD_BYTES: usize = 256;
/// The offset of the checksum in a block of the journal.
const JOURNAL_SUM_AT: usize = 60;
const MAX_JOURNAL: usize = 16;

fn padded(head: &[u8]) -> Vec<u8> {
    let mut page = head[..head.len().min(BLOCK_BYTES)].to_vec();
    page.resize(BLOCK_BYTES, 0);
    page
}

/// The four pages of the superblock. The first byte selects the checksums that are corrected.
pub(crate) fn superblock(input: &[u8]) {
    let Some((seal, heads)) = input.split_first() else { return };
    let page = |i: usize| {
        let mut page = padded(heads.chunks(HEAD_BYTES).nth(i).unwrap_or_default());
        if seal >> i & 1 == 1 {
            let sum = checksum(&page[..BLOCK_BYTES - 4]).to_le_bytes();
            page[BLOCK_BYTES - 4..].copy_from_slice(&sum);
        }
        page
    };
    let decode = |home: usize, odd: usize| {
        let page = page(2 * home + odd);
        let superblock = Superblock::decode(&page, home, odd == 1);
        match &superblock {
            Ok(superblock) => {
                assert_eq!(superblock.encode(home), page, "a page that says more than it means");
            }
            Err(e) => assert!(!e.to_string().is_empty()),
        }
        superblock
    };
    let pages = [0, 1].map(|home| [0, 1].map(|odd| decode(home, odd)));
    let Ok(found) = choose(&pages) else { return };
    let layout = found.layout;
    let whole = || pages.iter().flatten().flatten();
    assert!(
        whole().any(|page| *page == found) && whole().all(|p| p.checkpoint <= found.checkpoint)
    );
    assert!(layout.space_page(layout.segments - 1, 1) < layout.first_place(0));
    assert!(layout.first_place(layout.segments - 1) < layout.blocks);
    assert!(layout.journal(found.replay_from) < layout.space_page(0, 0));
}

/// Blocks of a journal, each with a length of two bytes. The other bits of the length select whether the checksum is
/// corrected.
pub(crate) fn journal(input: &[u8]) {
    let layout = Layout::of(BYTES).expect("a store");
    let Some((from, mut rest)) = input.split_first() else { return };
    let (mut scan, mut blocks) = (Scan::new(&layout, u64::from(*from)), Vec::new());
    while let Some(([low, high], after)) =
        rest.split_first_chunk().filter(|_| blocks.len() < MAX_JOURNAL)
    {
        let length = usize::from(u16::from_le_bytes([*low, *high & 0x1F])).min(after.len());
        let (head, next) = after.split_at(length);
        rest = next;
        let mut bytes = padded(head);
        if high & 0x80 != 0 {
            let sum = checksum_on(checksum(&bytes[..JOURNAL_SUM_AT]), &bytes[JOURNAL_SUM_AT + 4..]);
            bytes[JOURNAL_SUM_AT..JOURNAL_SUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        }
        let Ok(Some(block)) = Block::decode(&bytes, &ID, &layout) else { continue };
        let mut again = Filling::default();
        assert!(block.records.iter().all(|record| again.add(record)));
        assert_eq!(again.finish(&ID, block.number, block.synced), bytes, "{block:?}");
        match scan.add(&layout, layout.journal(block.number), &block) {
            Ok(counts) => assert_eq!(counts, block.number >= u64::from(*from)),
            Err(_) => continue,
        }
        blocks.push(block);
    }
    let Ok(replay) = scan.end() else { return };
    assert!(
        replay.blocks.is_sorted() && replay.blocks.last().is_none_or(|last| *last < replay.next)
    );
    for block in blocks.iter().filter(|block| replay.blocks.contains(&block.number)) {
        for record in &block.records {
            let (places, looks) = (layout.places(), Cell::new(0));
            replay.counts(
                block.number,
                record,
                |new| new.checksum % 2 == 0 && layout.segment_of(new.place).is_some(),
                |number| {
                    looks.set(looks.get() + 1);
                    number > 0 && number < places
                },
            );
            assert!(looks.get() <= MAX_SAME, "{} steps for a record", looks.get());
        }
    }
}

/// A space page, with the correct checksum.
fn space_page(input: &[u8], layout: &Layout) {
    let mut page = padded(input);
    let sum = checksum(&page[..BLOCK_BYTES - 4]).to_le_bytes();
    page[BLOCK_BYTES - 4..].copy_from_slice(&sum);
    let (segment, home) = (3, 1);
    if let Ok(found) = SpacePage::decode(&page, &ID, layout, segment, home) {
        assert_eq!(found.encode(&ID, segment, home), page);
        let at = |checkpoint| {
            let homes = [Err(Damaged("the other one")), Ok(found.clone())];
            choose_space(homes, checkpoint).page
        };
        assert_eq!(at(found.checkpoint).as_ref(), Some(&found), "none that counts is newer");
        let later = found.checkpoint.checked_add(1);
        assert!(later.is_none_or(|later| at(later).is_none()));
    }
}

/// Pointers and entries of leaves, 16 bytes each; a space page; and a compressed group.
pub(crate) fn pages(input: &[u8]) {
    let layout = Layout::of(BYTES).expect("a store");
    space_page(input, &layout);
    for packing in [Packing::Lz4, Packing::Zstandard] {
        if let Ok(blocks) = unpack(packing, input) {
            assert_eq!(blocks.len(), usize::from(input[4]) * BLOCK_BYTES);
        }
    }
    for (number, bytes) in input.as_chunks::<POINTER_BYTES>().0.iter().enumerate() {
        if let Ok(pointer) = Pointer::decode(bytes, &layout) {
            assert_eq!(Pointer::encode(pointer), *bytes);
            if let Some(pointer) = pointer {
                let copy = layout.copy_of(pointer.place).expect("a page of metadata has its copy");
                assert!(layout.segment_of(copy).is_some());
                let _ = pointer.verify(input);
            }
        }
        if let Ok(entry) = Whereabouts::decode(bytes, number as u64, &layout) {
            assert_eq!(entry.encode(), *bytes);
            match entry {
                Whereabouts::Nowhere => {}
                Whereabouts::Plain { place, .. } => assert!(layout.segment_of(place).is_some()),
                Whereabouts::SameAs { number: lower } => assert!(lower < number as u64),
                Whereabouts::Packed { place, places, .. } => {
                    let segment = |place| layout.segment_of(place).map(|(segment, _)| segment);
                    let last = place + u64::from(places) - 1;
                    assert!(segment(place).is_some() && segment(place) == segment(last));
                }
            }
        }
        for half in bytes.as_chunks::<8>().0 {
            if let Ok(number) = page::decode_number(*half, &layout) {
                assert!(number < layout.places() && page::encode_number(number) == *half);
            }
        }
    }
}
