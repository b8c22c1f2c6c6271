//! Entries of a refcount block: 1 to 64 bits wide. Narrow ones start from the least significant bit of each byte on;
//! wide ones are big endian.

/// Entries of a block of `1 << cluster_bits` bytes.
pub(crate) fn entries(cluster_bits: u32, order: u32) -> u64 {
    1 << (cluster_bits + 3 - order)
}

/// The largest count that an entry can have.
pub(crate) fn max(order: u32) -> u64 {
    u64::MAX >> (64 - (1u32 << order))
}

/// Entry `i` of a block.
///
/// # Panics
/// If the block has no such entry.
pub(crate) fn get(block: &[u8], order: u32, i: usize) -> u64 {
    if order < 3 {
        let (at, shift) = narrow(order, i);
        return u64::from(block[at] >> shift) & max(order);
    }
    let bytes = 1usize << (order - 3);
    block[i * bytes..][..bytes].iter().fold(0, |n, b| n << 8 | u64::from(*b))
}

/// Sets entry `i` of a block.
///
/// # Panics
/// If the block has no such entry, or the count does not fit.
pub(crate) fn set(block: &mut [u8], order: u32, i: usize, count: u64) {
    assert!(count <= max(order), "a count of {count} in {} bits", 1 << order);
    if order < 3 {
        let (at, shift) = narrow(order, i);
        let mask = (max(order) as u8) << shift;
        block[at] = block[at] & !mask | (count as u8) << shift;
        return;
    }
    let bytes = 1usize << (order - 3);
    block[i * bytes..][..bytes].copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
}

fn narrow(order: u32, i: usize) -> (usize, u32) {
    let per_byte = 8usize >> order;
    (i / per_byte, ((i % per_byte) as u32) << order)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn narrow_entries_begin_at_the_least_significant_bit_and_wide_ones_at_the_most() {
        let mut block = [0u8; 512];
        set(&mut block, 0, 1, 1);
        set(&mut block, 0, 15, 1);
        assert_eq!(block[..2], [0b10, 0x80]);
        let mut block = [0u8; 512];
        set(&mut block, 2, 1, 0xA);
        assert_eq!(block[0], 0xA0);
        set(&mut block, 4, 1, 0x1234);
        assert_eq!(block[2..4], [0x12, 0x34]);
    }

    proptest! {
        #[test]
        fn what_was_set_is_there_and_the_rest_is_left_alone(
            order in 0u32..=6, counts in proptest::collection::vec((0usize..64, any::<u64>()), 1..40),
        ) {
            let mut block = vec![0u8; 512];
            let mut model = [0u64; 64];
            for (i, count) in counts {
                let count = count & max(order);
                set(&mut block, order, i, count);
                model[i] = count;
                let all: Vec<u64> = (0..64).map(|i| get(&block, order, i)).collect();
                prop_assert_eq!(&all[..], &model[..]);
            }
            prop_assert_eq!(entries(9, order), 4096 >> order);
        }
    }
}
