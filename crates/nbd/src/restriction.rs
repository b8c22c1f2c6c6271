//! The rights of a client of an export, as the process before the server says them ([`RESTRICT`]).

/// A private option of Ferrite's servers: a process that passes a client on says that client's rights. The data are a
/// [`Restriction`]. It is answered by ACK, once for each client. A client that asks for it by itself loses rights only.
pub const RESTRICT: u32 = u32::from_be_bytes(*b"FeEX");
/// The longest name of an export in bytes.
pub const MAX_EXPORT_NAME_BYTES: usize = 255;

const READ_ONLY: u8 = 1;
const HIDES_NAMES: u8 = 2;

/// The rights of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restriction {
    /// The name of the export. The empty name chooses it, too, and any other is unknown. Without a name any is right.
    pub name: String,
    /// Changes are refused.
    pub read_only: bool,
    /// LIST is refused.
    pub hides_names: bool,
}

impl Restriction {
    /// As data of [`RESTRICT`]: a byte of flags, and the name.
    pub fn to_bytes(&self) -> Vec<u8> {
        let flag = |is, flag| if is { flag } else { 0 };
        let flags = flag(self.read_only, READ_ONLY) | flag(self.hides_names, HIDES_NAMES);
        [&[flags], self.name.as_bytes()].concat()
    }

    /// Reads the data of [`RESTRICT`]. `None`: they are malformed, or have an unknown flag.
    pub fn parse(data: &[u8]) -> Option<Restriction> {
        let (flags, name) = data.split_first()?;
        let is_known = flags & !(READ_ONLY | HIDES_NAMES) == 0;
        let name = std::str::from_utf8(name).ok()?;
        (is_known && name.len() <= MAX_EXPORT_NAME_BYTES).then(|| Restriction {
            name: name.to_owned(),
            read_only: flags & READ_ONLY != 0,
            hides_names: flags & HIDES_NAMES != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restriction_is_read_as_it_was_written_and_an_unknown_one_is_refused() {
        for (read_only, hides_names) in [(false, false), (true, false), (false, true)] {
            let restriction = Restriction { name: "disk".to_owned(), read_only, hides_names };
            assert_eq!(Restriction::parse(&restriction.to_bytes()), Some(restriction));
        }
        for bad in [&[][..], &[4], &[0, 0xff], &[0; 257]] {
            assert_eq!(Restriction::parse(bad), None);
        }
    }
}
