//! The contents of a sector: zeros, or a stamp that names the write.

use std::fmt;

/// Bytes of a sector.
pub const SECTOR: usize = 512;

const MAGIC: u64 = u64::from_le_bytes(*b"ferrsim1");

/// The content of a sector in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    /// Zeros only.
    Zeros,
    /// Written by the write of this number.
    Written(u64),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Zeros => f.write_str("zeros"),
            Value::Written(number) => write!(f, "write {number}"),
        }
    }
}

/// Fills `to` with the stamp of `sector` by write `number`. All 512 bytes depend on both, so that
/// no mixture of two stamps is one.
pub fn write(to: &mut [u8], seed: u64, sector: u64, number: u64) {
    let mut state = mix(seed ^ mix(sector ^ mix(number)));
    let head = [MAGIC, sector, number];
    for (i, word) in to[..SECTOR].chunks_exact_mut(8).enumerate() {
        state = mix(state);
        word.copy_from_slice(&head.get(i).copied().unwrap_or(state).to_le_bytes());
    }
}

/// The value of the bytes of `sector`; otherwise an error.
///
/// # Errors
/// A text for people.
pub fn read(bytes: &[u8], seed: u64, sector: u64) -> Result<Value, String> {
    if *bytes == [0; SECTOR] {
        return Ok(Value::Zeros);
    }
    let word = |i: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[8 * i..8 * i + 8]);
        u64::from_le_bytes(word)
    };
    if word(0) != MAGIC {
        return Err(format!("bytes that no request wrote, beginning with {:02x?}", &bytes[..16]));
    }
    let mut expected = [0; SECTOR];
    write(&mut expected, seed, word(1), word(2));
    if bytes != expected {
        return Err(format!("a torn stamp of sector {}, write {}", word(1), word(2)));
    }
    if word(1) != sector {
        return Err(format!("the content of sector {}, write {}", word(1), word(2)));
    }
    Ok(Value::Written(word(2)))
}

fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_known_again_and_nothing_else_is_one() {
        let mut bytes = [0; SECTOR];
        assert_eq!(read(&bytes, 1, 5), Ok(Value::Zeros));
        write(&mut bytes, 1, 5, 77);
        assert_eq!(read(&bytes, 1, 5), Ok(Value::Written(77)));
        assert!(read(&bytes, 1, 6).unwrap_err().contains("sector 5"));
        assert!(read(&bytes, 2, 5).unwrap_err().contains("torn"));
        bytes[511] ^= 1;
        assert!(read(&bytes, 1, 5).unwrap_err().contains("torn"));
        bytes[0] = 0;
        assert!(read(&bytes, 1, 5).unwrap_err().contains("no request"));
    }
}
