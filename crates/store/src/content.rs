//! The content of a block, and its name: a hash with the key of a domain (store.md 1 and 10).

use std::fmt;

use crc_fast::CrcAlgorithm;

use super::BLOCK_BYTES;

/// A content's name: BLAKE3-256 with its domain's key. Two contents of one domain have the same if they
/// are the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentHash(pub [u8; 32]);

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "ContentHash({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

/// The key of a dedup domain. Without it, a guest cannot tell which contents get the same bucket of the index, nor find
/// another domain's content.
#[derive(Clone, PartialEq, Eq)]
pub struct DomainKey(pub [u8; 32]);

impl fmt::Debug for DomainKey {
    /// Keeps the key out of logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DomainKey")
    }
}

impl DomainKey {
    /// The name of a block's content in this domain.
    ///
    /// # Panics
    /// If it is not a block.
    pub fn hash(&self, block: &[u8]) -> ContentHash {
        assert_eq!(block.len(), BLOCK_BYTES, "a block");
        ContentHash(*blake3::keyed_hash(&self.0, block).as_bytes())
    }
}

/// The checksum of blocks, pages and structures: CRC32C.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The checksum of more bytes behind those that `before` is the checksum of.
pub fn checksum_on(before: u32, bytes: &[u8]) -> u32 {
    // A CRC32C begins with ones, and ends with the complement of its state.
    let state = u64::from(!before);
    let mut digest = crc_fast::Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, state);
    digest.update(bytes);
    digest.finalize() as u32
}

/// Whether there is nothing but zeros: content that takes no space.
pub fn is_zeros(block: &[u8]) -> bool {
    // In parts: the first part tells it of nearly all content, and each goes without a branch.
    block.chunks(64).all(|part| part.iter().fold(0, |all, b| all | b) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(value: u8) -> Vec<u8> {
        vec![value; BLOCK_BYTES]
    }

    #[test]
    fn equal_content_has_one_name_in_a_domain_and_another_in_each_other_domain() {
        let (a, b) = (DomainKey([1; 32]), DomainKey([2; 32]));
        assert_eq!(a.hash(&block(7)), a.hash(&block(7)));
        assert_ne!(a.hash(&block(7)), b.hash(&block(7)));
        let mut other = block(7);
        other[4095] ^= 1;
        assert_ne!(a.hash(&block(7)), a.hash(&other));
    }

    #[test]
    fn names_and_checksums_are_those_of_the_published_vectors() {
        // RFC 3720, B.4: 32 bytes of zeros; and of ones.
        assert_eq!(checksum(&[0; 32]), 0x8A91_36AA);
        assert_eq!(checksum(&[0xFF; 32]), 0x62A8_AB43);
        // BLAKE3's own vectors, for no input.
        let key = b"whats the Elvish word for friend";
        let name = blake3::keyed_hash(key, &[]);
        assert!(name.to_hex().starts_with("92b2b75604ed3c761f9d6f62392c8a92"));
        // Hashes on media must not change with a version of the crate.
        assert_eq!(DomainKey(*key).hash(&block(0)).0[..4], [194, 143, 94, 144]);
    }

    #[test]
    fn a_checksum_of_two_parts_is_that_of_the_whole() {
        let block: Vec<u8> = (0..BLOCK_BYTES).map(|at| (at * 31 % 251) as u8).collect();
        for cut in [0, 1, 12, 500, 4095, 4096] {
            assert_eq!(checksum_on(checksum(&block[..cut]), &block[cut..]), checksum(&block));
        }
    }

    #[test]
    fn one_bit_anywhere_is_not_zeros() {
        assert!(is_zeros(&block(0)));
        for at in [0, 63, 64, 2000, 4095] {
            let mut one = block(0);
            one[at] = 0x10;
            assert!(!is_zeros(&one));
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", DomainKey([9; 32])), "DomainKey");
    }
}
