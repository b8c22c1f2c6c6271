//! Compressed groups: up to 16 blocks in fewer places (store.md 2).
//!
//! A group begins with the bytes of what is packed (4), and how many blocks it is (1), and zeros (3). Zeros follow
//! up to the end of its last place. Unpacking it never gives more than the blocks that it says.

use std::io::Read;

use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::page::{GROUP_BLOCKS, Packing};
use super::{BLOCK_BYTES, Damaged};

const HEADER_BYTES: usize = 8;
/// The memory that a frame may ask for. Its own figure is not believed.
const MAX_WINDOW_BYTES: u64 = 1 << 20;

fn damaged() -> Damaged {
    Damaged("a compressed group is not what it has to be")
}

/// Blocks as a group of whole places. None: it would save none. The result was unpacked, and compared.
pub fn pack(packing: Packing, blocks: &[u8]) -> Option<Vec<u8>> {
    let count = blocks.len() / BLOCK_BYTES;
    let packed = match packing {
        Packing::Lz4 => lz4_flex::block::compress(blocks),
        Packing::Zstandard => compress_to_vec(blocks, CompressionLevel::Fastest),
    };
    let len = (HEADER_BYTES + packed.len()).next_multiple_of(BLOCK_BYTES);
    if len >= blocks.len() || count > usize::from(GROUP_BLOCKS) {
        return None;
    }
    let mut group = Vec::with_capacity(len);
    group.extend((packed.len() as u32).to_le_bytes());
    group.extend([count as u8, 0, 0, 0]);
    group.extend(packed);
    group.resize(len, 0);
    unpack(packing, &group).is_ok_and(|unpacked| unpacked == blocks).then_some(group)
}

/// The opposite: one block or more.
///
/// # Errors
/// It is no such group.
pub fn unpack(packing: Packing, group: &[u8]) -> Result<Vec<u8>, Damaged> {
    let (header, rest) = group.split_at_checked(HEADER_BYTES).ok_or_else(damaged)?;
    let [a, b, c, d, count, 0, 0, 0] = *header else { return Err(damaged()) };
    let packed = rest.get(..u32::from_le_bytes([a, b, c, d]) as usize).ok_or_else(damaged)?;
    if !(1..=GROUP_BLOCKS).contains(&count) {
        return Err(damaged());
    }
    let mut blocks = vec![0; usize::from(count) * BLOCK_BYTES];
    match packing {
        Packing::Lz4 => {
            let len = lz4_flex::block::decompress_into(packed, &mut blocks);
            len.ok().filter(|len| *len == blocks.len()).ok_or_else(damaged)?;
        }
        Packing::Zstandard => {
            let mut decoder = FrameDecoder::new();
            decoder.set_max_window_size(MAX_WINDOW_BYTES);
            let stream = StreamingDecoder::new_with_decoder(packed, decoder);
            let mut stream = stream.map_err(|_| damaged())?;
            stream.read_exact(&mut blocks).map_err(|_| damaged())?;
        }
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [Packing; 2] = [Packing::Lz4, Packing::Zstandard];

    fn text(blocks: usize) -> Vec<u8> {
        (0..blocks * BLOCK_BYTES).map(|i| (i / 97 % 251) as u8).collect()
    }

    #[test]
    fn what_is_packed_comes_back_and_takes_fewer_places() {
        for packing in ALL {
            for count in [2, 7, 16] {
                let group = pack(packing, &text(count)).unwrap();
                assert!(
                    group.len() < count * BLOCK_BYTES && group.len().is_multiple_of(BLOCK_BYTES)
                );
                assert!(unpack(packing, &group).unwrap() == text(count));
                // The other way of packing does not make something else of it.
                let other = if packing == ALL[0] { ALL[1] } else { ALL[0] };
                assert!(unpack(other, &group).map_or(true, |blocks| blocks != text(count)));
            }
            assert_eq!(pack(packing, &text(1)), None, "it saves no place");
        }
    }

    #[test]
    fn what_does_not_get_smaller_is_left() {
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 56) as u8
        };
        let noise: Vec<u8> = (0..16 * BLOCK_BYTES).map(|_| next()).collect();
        assert_eq!(ALL.map(|packing| pack(packing, &noise)), [None, None]);
    }

    #[test]
    fn a_group_never_unpacks_to_more_than_it_says() {
        for packing in ALL {
            let mut group = pack(packing, &text(16)).unwrap();
            for count in [0, 17, 255] {
                group[4] = count;
                assert!(unpack(packing, &group).is_err());
            }
            group[4] = 3;
            // Of LZ4 the end is known; of a frame the rest is left.
            assert!(unpack(packing, &group).map_or(true, |blocks| blocks == text(3)));
            group[0..4].fill(0xFF);
            assert!(unpack(packing, &group).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_blocks_or_refused(bytes: Vec<u8>, count in 0..20u8, zstd: bool) {
            let packing = if zstd { Packing::Zstandard } else { Packing::Lz4 };
            let mut group = (bytes.len() as u32).to_le_bytes().to_vec();
            group.extend([count, 0, 0, 0]);
            group.extend(bytes);
            if let Ok(blocks) = unpack(packing, &group) {
                prop_assert_eq!(blocks.len(), usize::from(count) * BLOCK_BYTES);
            }
        }

        #[test]
        fn a_group_with_a_wrong_bit_is_some_blocks_or_refused(at in 8..4096usize, bit in 0..8u8) {
            for packing in ALL {
                let mut group = pack(packing, &text(16)).unwrap();
                let at = at % group.len();
                group[at] ^= 1 << bit;
                let _ = unpack(packing, &group);
            }
        }
    }
}
