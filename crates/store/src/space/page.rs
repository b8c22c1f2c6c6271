//! Space pages: which places of a segment are in use, in two homes that take turns (store.md 2).

use super::super::content::checksum;
use super::super::fields::{Reader, Writer};
use super::super::layout::Layout;
use super::super::{BLOCK_BYTES, Damaged, StoreId};
use super::bits::Bits;

const MAGIC: &[u8; 8] = b"FERSTSPC";
const CHECKSUM_AT: usize = BLOCK_BYTES - 4;

/// A home that storage cannot read says no more than one that is damaged.
pub const UNREADABLE: Damaged = Damaged("a space page cannot be read");

/// The use of a pair of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Anything.
    Free,
    /// Contents.
    Data,
    /// Pages in the first segment, their copies in the second.
    Metadata,
}

/// See the module text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpacePage {
    /// The checkpoint that it was written for.
    pub checkpoint: u64,
    /// Of the pair.
    pub kind: Kind,
    /// The places in use.
    pub bits: Bits,
}

impl SpacePage {
    /// As it is in one of its homes.
    pub fn encode(&self, id: &StoreId, segment: u64, home: usize) -> Vec<u8> {
        let mut to = Writer::default();
        let kind = match self.kind {
            Kind::Free => 0,
            Kind::Data => 1,
            Kind::Metadata => 2,
        };
        to.bytes(MAGIC).bytes(id).number(segment, 8).number(home as u64, 1).number(kind, 1);
        to.number(0, 6).number(self.checkpoint, 8);
        self.bits.words().iter().for_each(|word| {
            to.number(*word, 8);
        });
        to.0.resize(CHECKSUM_AT, 0);
        let sum = checksum(&to.0);
        to.number(sum.into(), 4);
        to.0
    }

    /// The opposite.
    ///
    /// # Errors
    /// It is not this store's, of this segment and home.
    pub fn decode(
        page: &[u8],
        id: &StoreId,
        layout: &Layout,
        segment: u64,
        home: usize,
    ) -> Result<SpacePage, Damaged> {
        let sum = page.get(CHECKSUM_AT..BLOCK_BYTES).ok_or(Damaged("a space page is cut off"))?;
        if checksum(&page[..CHECKSUM_AT]).to_le_bytes() != *sum {
            return Err(Damaged("a space page does not fit its checksum"));
        }
        let mut from = Reader::new(&page[..CHECKSUM_AT]);
        let is_ours = from.bytes(MAGIC.len())? == MAGIC && from.bytes(id.len())? == id;
        if !is_ours || from.u64()? != segment || u64::from(from.u8()?) != home as u64 {
            return Err(Damaged("a space page is another one's"));
        }
        let kind = match from.u8()? {
            0 => Kind::Free,
            1 => Kind::Data,
            2 => Kind::Metadata,
            _ => return Err(Damaged("a segment is of no kind")),
        };
        Reader::new(from.bytes(6)?).zeros()?;
        let checkpoint = from.u64()?;
        let words = layout.segment_blocks / 64;
        let words = (0..words).map(|_| from.u64()).collect::<Result<_, _>>()?;
        from.zeros()?;
        Ok(SpacePage { checkpoint, kind, bits: Bits::of(words) })
    }
}

/// Both homes of a segment, as they were read.
pub type Homes = [Result<SpacePage, Damaged>; 2];

/// The state in a segment's homes at a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The page that counts. None: it is not known, and all places are to be taken for used.
    pub page: Option<SpacePage>,
    /// The home that is written next: its page does not count. Of a page that is not known the other one is
    /// [mended](mends).
    pub next_home: usize,
    /// It has to be written with the next checkpoint: the page in that home may not be believed then.
    pub rewrite: bool,
}

/// Which page counts at the superblock's checkpoint. One that is of a later checkpoint, which never got
/// its superblock, is overwritten by the next one: it may get the same number, and would believe it.
pub fn choose(homes: Homes, checkpoint: u64) -> Found {
    let is_late = |page: &Result<SpacePage, _>| {
        page.as_ref().is_ok_and(|page: &SpacePage| page.checkpoint > checkpoint)
    };
    if let Some(late) = homes.iter().position(is_late) {
        let [first, second] = homes;
        let other = if late == 0 { second } else { first };
        let page = other.ok().filter(|page| page.checkpoint <= checkpoint);
        return Found { page, next_home: late, rewrite: true };
    }
    match homes {
        [Ok(first), Ok(second)] if first.checkpoint != second.checkpoint => {
            let newer = usize::from(second.checkpoint > first.checkpoint);
            let page = Some(if newer == 0 { first } else { second });
            Found { page, next_home: 1 - newer, rewrite: false }
        }
        // None that counts is newer.
        [Err(_), Ok(page)] if page.checkpoint == checkpoint => {
            Found { page: Some(page), next_home: 0, rewrite: true }
        }
        [Ok(page), Err(_)] if page.checkpoint == checkpoint => {
            Found { page: Some(page), next_home: 1, rewrite: true }
        }
        // The damaged one may have been the newer.
        [first, _] => Found { page: None, next_home: usize::from(first.is_err()), rewrite: true },
    }
}

/// The pages that are written over the damaged pages of a pair before anything else is. Otherwise an older page could
/// count behind a cut, or one that could not be read could be read again. All places are used until a pass has looked.
pub fn mends(found: &[Found; 2], checkpoint: u64, segment_blocks: u64) -> [Option<SpacePage>; 2] {
    let has_pages = found[0].page.as_ref().is_some_and(|page| {
        page.kind == Kind::Metadata && u64::from(page.bits.clear_bits()) < segment_blocks
    });
    // Two kinds say that nothing is known of the pair: content may be where no pages were in use.
    let kinds = [Kind::Data, if has_pages { Kind::Metadata } else { Kind::Data }];
    [0, 1].map(|half| {
        let bits = || Bits::all(true, segment_blocks);
        let page = || SpacePage { checkpoint, kind: kinds[half], bits: bits() };
        found[half].page.is_none().then(page)
    })
}
