//! The last block of a store that has grown: it leads to the second home of its superblock, which stays where it was
//! made (store.md 2). Nothing else is looked for at the end of a medium, and it is needed only if the first home is lost.

use super::content::checksum;
use super::fields::{Reader, Writer};
use super::{BLOCK_BYTES, Damaged, StoreId};

const MAGIC: &[u8; 8] = b"FERSTEND";
const CHECKSUM_AT: usize = BLOCK_BYTES - 4;

/// As it is on the medium. `first_blocks`: the blocks of the store when it was made, at whose end the second home is.
pub(crate) fn encode(id: &StoreId, first_blocks: u64) -> Vec<u8> {
    let mut to = Writer::default();
    to.bytes(MAGIC).bytes(id).number(first_blocks, 8);
    to.0.resize(CHECKSUM_AT, 0);
    let sum = checksum(&to.0);
    to.number(sum.into(), 4);
    to.0
}

/// The blocks that the store had when it was made.
///
/// # Errors
/// It is no such block.
pub(crate) fn decode(page: &[u8]) -> Result<u64, Damaged> {
    let sum = page.get(CHECKSUM_AT..BLOCK_BYTES).ok_or(Damaged("a signpost is cut off"))?;
    if checksum(&page[..CHECKSUM_AT]).to_le_bytes() != *sum {
        return Err(Damaged("a signpost does not fit its checksum"));
    }
    let mut from = Reader::new(&page[..CHECKSUM_AT]);
    if from.bytes(MAGIC.len())? != MAGIC {
        return Err(Damaged("it is no signpost"));
    }
    // The superblock that it leads to says whose it is.
    from.bytes(size_of::<StoreId>())?;
    let first_blocks = from.u64()?;
    from.zeros()?;
    Ok(first_blocks)
}
