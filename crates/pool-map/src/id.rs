//! Identifiers.

use std::fmt;
use std::str::FromStr;

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// 16 random bytes, or 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub [u8; 16]);

impl Id {
    /// One that nothing else has.
    pub fn random() -> Id {
        let mut bytes = [0; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            // It fails for odd arguments only, or before the kernel has randomness.
            filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty()).unwrap_or(0);
        }
        Id(bytes)
    }

    /// Half of it, as a number.
    pub fn number(self) -> u64 {
        self.0.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Id {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Id, &'static str> {
        const WHAT: &str = "an identifier has 32 of the digits 0-9 and a-f";
        let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return Err(WHAT);
        }
        u128::from_str_radix(text, 16).map(|n| Id(n.to_be_bytes())).map_err(|_| WHAT)
    }
}

impl Serialize for Id {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Id, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_itself_again_and_nothing_else_is_one() {
        let id = Id::random();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_ne!(id, Id::random());
        for bad in ["", "1", &"g".repeat(32), &"A".repeat(32), &"+".repeat(32), &"1".repeat(33)] {
            assert!(bad.parse::<Id>().is_err(), "{bad}");
        }
    }
}
