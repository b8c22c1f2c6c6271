//! The handshake of the old style: a server's one message, without options. XAPI's storage motion speaks it.

use crate::wire::{Fields, OPTION_MAGIC, SERVER_MAGIC};

/// The second magic number.
pub const MAGIC: u64 = 0x0000_4202_8186_1253;
/// Bytes of the message.
pub const GREETING_BYTES: usize = 152;
/// The largest size that offsets of files have.
const MAX_BYTES: u64 = i64::MAX as u64;

/// A server's greeting about its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Bytes of the disk.
    pub bytes: u64,
    /// See [`can`](crate::wire::can). A server of the first days has none.
    pub flags: u16,
}

impl Greeting {
    /// Parses a server's message.
    ///
    /// # Errors
    /// It is none of the old style, or its disk has no size. The text says why.
    pub fn parse(bytes: &[u8; GREETING_BYTES]) -> Result<Greeting, String> {
        let mut fields = Fields(bytes);
        match (fields.u64(), fields.u64()) {
            (Some(SERVER_MAGIC), Some(MAGIC)) => {}
            (Some(SERVER_MAGIC), Some(OPTION_MAGIC)) => {
                return Err("the server speaks the handshake with options".to_owned());
            }
            _ => return Err("what answers there is no NBD server".to_owned()),
        }
        let size = fields.u64().unwrap_or_default();
        // The upper half has the flags of the handshake, which do not matter here.
        let flags = fields.u32().unwrap_or_default() as u16;
        match size {
            0 | MAX_BYTES.. => Err(format!("the server says that its disk has {size} bytes")),
            bytes => Ok(Greeting { bytes, flags }),
        }
    }

    /// The message.
    pub fn to_bytes(self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(&SERVER_MAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.bytes.to_be_bytes());
        bytes[24..28].copy_from_slice(&u32::from(self.flags).to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::can;

    #[test]
    fn a_message_is_read_as_it_was_written_and_no_other_is() {
        let greeting = Greeting { bytes: 64 << 20, flags: can::HAS_FLAGS | can::FLUSH };
        let bytes = greeting.to_bytes();
        assert_eq!(Greeting::parse(&bytes), Ok(greeting));
        let mut other = bytes;
        other[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        assert!(Greeting::parse(&other).unwrap_err().contains("options"));
        other[9] = 0;
        assert!(Greeting::parse(&other).is_err());
        assert!(Greeting::parse(&Greeting { bytes: 0, flags: 0 }.to_bytes()).is_err());
        assert!(Greeting::parse(&Greeting { bytes: u64::MAX, flags: 0 }.to_bytes()).is_err());
        assert!(Greeting::parse(&[0; GREETING_BYTES]).is_err());
    }
}
