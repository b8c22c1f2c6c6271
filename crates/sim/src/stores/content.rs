//! The contents of sectors: stamps. The store may find equal ones anywhere, and every second one can be compressed.

use crate::stamp::{self, SECTOR, Value};

/// The unique part of a stamp, which is repeated if it is to be compressible.
const PATTERN: usize = 32;

/// Sectors of a block: a content is one block, in any place.
pub(super) const PER_BLOCK: u64 = 8;

/// Fills a sector, at its place in its block, with the content of this number.
pub(super) fn write(to: &mut [u8], seed: u64, sector: u64, number: u64) {
    stamp::write(to, seed, sector % PER_BLOCK, number);
    if number % 2 == 1 {
        let (pattern, rest) = to.split_at_mut(PATTERN);
        rest.chunks_exact_mut(PATTERN).for_each(|part| part.copy_from_slice(pattern));
    }
}

/// The content of a sector.
fn read(bytes: &[u8], seed: u64, sector: u64) -> Result<Value, String> {
    let number = bytes[16..24].iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
    let mut expected = [0; SECTOR];
    write(&mut expected, seed, sector, number);
    match bytes == expected {
        true => Ok(Value::Written(number)),
        false => stamp::read(bytes, seed, sector % PER_BLOCK),
    }
}

/// The contents of sectors, the first of which is `first`.
pub(super) fn read_all(bytes: &[u8], seed: u64, first: u64) -> Vec<(u64, Result<Value, String>)> {
    let all = bytes.chunks_exact(SECTOR).zip(first..);
    all.map(|(bytes, at)| (at, read(bytes, seed, at))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_known_again_at_their_place_in_any_block_and_whole() {
        for number in [4, 5] {
            let mut bytes = [0; SECTOR];
            assert_eq!(read(&bytes, 1, 3), Ok(Value::Zeros));
            write(&mut bytes, 1, 3, number);
            assert_eq!(read(&bytes, 1, 3), Ok(Value::Written(number)));
            assert_eq!(read(&bytes, 1, 8 * 77 + 3), Ok(Value::Written(number)));
            assert!(read(&bytes, 1, 4).is_err() && read(&bytes, 2, 3).is_err());
            bytes[SECTOR - 1] ^= 1;
            assert!(read(&bytes, 1, 3).is_err());
        }
    }
}
