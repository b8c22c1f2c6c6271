//! Fields of structures on the medium: little-endian, one after the other.

use super::Damaged;

/// Takes fields from the front of bytes.
#[derive(Clone)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    pub(super) fn bytes(&mut self, n: usize) -> Result<&'a [u8], Damaged> {
        let (taken, rest) =
            self.0.split_at_checked(n).ok_or(Damaged("a structure is longer than its block"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Damaged> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    /// A number of `n` bytes, 8 at most.
    pub(super) fn number(&mut self, n: usize) -> Result<u64, Damaged> {
        let mut bytes = [0; 8];
        bytes[..n].copy_from_slice(self.bytes(n)?);
        Ok(u64::from_le_bytes(bytes))
    }

    pub(super) fn u8(&mut self) -> Result<u8, Damaged> {
        self.array().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Damaged> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Damaged> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Damaged> {
        self.array().map(u64::from_le_bytes)
    }

    /// All that is left has to be zeros: it may mean something to a later version.
    pub(super) fn zeros(self) -> Result<(), Damaged> {
        // Each byte equals the one before it: one comparison of memory, in builds without optimisation, too.
        let first = self.0.first().is_none_or(|byte| *byte == 0);
        match first && self.0.get(1..).is_none_or(|rest| rest == &self.0[..rest.len()]) {
            true => Ok(()),
            false => Err(Damaged("bytes that mean nothing are not zeros")),
        }
    }
}

/// Puts fields at the end of bytes.
#[derive(Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }

    /// The low `n` bytes of a number, of which the others are zeros.
    pub(super) fn number(&mut self, value: u64, n: usize) -> &mut Writer {
        let bytes = value.to_le_bytes();
        debug_assert!(bytes[n..].iter().all(|b| *b == 0), "{value} in {n} bytes");
        self.bytes(&bytes[..n])
    }
}
