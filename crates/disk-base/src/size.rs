//! Sizes in text for people.

use std::fmt;

use crate::SECTOR_BYTES;

/// The reason why a size is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not digits with an optional unit.
    #[error("{0:?} is not a size; write bytes, or a number with K, M, G, T or P: 512, 16M, 1.5G")]
    Syntax(String),
    /// More than a file can have.
    #[error("{0:?} is larger than a disk can be (8 EiB)")]
    TooLarge(String),
}

/// Parses `512`, `16M`, `1.5G`, `1GiB` to bytes. Units are powers of 1024, in either case. A fraction needs a unit, and
/// is rounded up to whole sectors.
///
/// # Errors
/// [`SizeError`] for other texts, and for 8 EiB and more.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let syntax = || SizeError::Syntax(text.chars().take(40).collect());
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(number_end);
    let (digits, fraction) = match number.split_once('.') {
        Some((digits, fraction)) if is_fraction(fraction) && !unit.is_empty() => (digits, fraction),
        Some(_) => return Err(syntax()),
        None => (number, ""),
    };
    if digits.is_empty() {
        return Err(syntax());
    }
    let unit = unit.to_ascii_lowercase();
    let shift = match unit.strip_suffix("ib").unwrap_or(&unit) {
        "" if unit.is_empty() => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return Err(syntax()),
    };
    let too_large = || SizeError::TooLarge(text.chars().take(40).collect());
    let number: u64 = digits.parse().map_err(|_| too_large())?;
    let bytes = number.checked_mul(1 << shift).ok_or_else(too_large)?;
    let bytes = bytes.checked_add(fraction_bytes(fraction, shift)).ok_or_else(too_large)?;
    if bytes > i64::MAX as u64 { Err(too_large()) } else { Ok(bytes) }
}

/// Whether these are digits, and few enough not to overflow.
fn is_fraction(text: &str) -> bool {
    (1..=9).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The bytes of the digits after the point, of a unit.
fn fraction_bytes(digits: &str, shift: u32) -> u64 {
    let tenths = 10u64.pow(digits.len() as u32);
    let bytes = u128::from(digits.parse().unwrap_or(0u64)) << shift;
    u64::try_from(bytes.div_ceil(tenths.into())).unwrap_or(0).next_multiple_of(SECTOR_BYTES)
}

/// Shows bytes in the largest unit, rounded to three significant digits, without zeros at the end: `512 bytes`, `1.5
/// GiB`, `1.99 TiB`.
#[derive(Clone, Copy, Debug)]
pub struct Human(pub u64);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 6] =
            [(60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        let Some(mut i) = UNITS.iter().position(|(shift, _)| self.0 >> shift > 0) else {
            return write!(f, "{} bytes", self.0);
        };
        // 1023.9 MiB are rounded to 1024 MiB, which are 1 GiB.
        if i > 0 && rounded(self.0, UNITS[i].0) >= 1024 * 100 {
            i -= 1;
        }
        let (shift, unit) = UNITS[i];
        let hundredths = rounded(self.0, shift);
        let (whole, fraction) = (hundredths / 100, format!("{:02}", hundredths % 100));
        match fraction.trim_end_matches('0') {
            "" => write!(f, "{whole} {unit}"),
            fraction => write!(f, "{whole}.{fraction} {unit}"),
        }
    }
}

/// Hundredths of a unit of `1 << shift` bytes, rounded to three significant digits of the whole.
fn rounded(bytes: u64, shift: u32) -> u128 {
    let step = match bytes >> shift {
        0..10 => 1,
        10..100 => 10,
        _ => 100,
    };
    let unit = 1u128 << shift;
    (u128::from(bytes) * 100 / step + unit / 2) / unit * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_and_without_units_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4k", 4096),
            ("16M", 16 << 20),
            ("16MiB", 16 << 20),
            ("1g", 1 << 30),
            ("2T", 2 << 40),
            ("1P", 1 << 50),
            ("1.5G", 3 << 29),
            ("0.25m", 1 << 18),
            ("1.3GiB", 1_395_864_576),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in [
            "",
            "M",
            "-1",
            "1.5",
            ".5G",
            "1.G",
            "1.5.5G",
            "1.0000000001G",
            "1 G",
            "0x10",
            "1GG",
            "1B",
            "1iB",
            "５",
        ] {
            assert!(matches!(parse(text), Err(SizeError::Syntax(_))), "{text}");
        }
        for text in ["8192P", "9223372036854775808", "18446744073709551616", "99999999999999P"] {
            assert!(matches!(parse(text), Err(SizeError::TooLarge(_))), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_fitting_unit() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (512, "512 bytes"),
            (1536, "1.5 KiB"),
            (1 << 30, "1 GiB"),
            ((1 << 30) + 1, "1 GiB"),
            (2040 << 30, "1.99 TiB"),
            (1999 << 20, "1.95 GiB"),
            (1535 << 20, "1.5 GiB"),
            ((64 << 20) + (500 << 10), "64.5 MiB"),
            (132 << 30, "132 GiB"),
            ((1 << 30) - 1, "1 GiB"),
            (1023 << 20, "1023 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(Human(bytes).to_string(), text);
        }
    }
}
