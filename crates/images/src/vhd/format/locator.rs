//! Parent locators: paths to the parent, each in the form of one platform.
//!
//! * `MACX`: a `file:` URL in UTF-8. libvhd writes `file://./NAME`, and knows no escapes.
//! * `W2RU`: a path relative to the child's directory, UTF-16 (little-endian), with `\`.
//! * `W2KU`: an absolute path, otherwise alike. libvhd writes a relative one here, too, and so do
//!   we: `vhd-util check` demands that each leads to the parent, also after both were moved.
//!
//! The deprecated ones (`Wi2r`, `Wi2k`, `Mac `) are kept, and not used.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::{Malformed, SECTOR, array, be32, be64, put, tag, whole_sectors};

/// The largest text of a locator: more than a path of 4,096 characters in UTF-16.
pub(crate) const MAX_TEXT_BYTES: u64 = 16 << 10;

/// One entry of the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Locator {
    /// The platform; four zeros: none.
    pub(crate) code: [u8; 4],
    /// Room for the text: sectors by the specification; bytes in images of Hyper-V and libvhd.
    pub(crate) space: u32,
    /// Bytes of the text.
    pub(crate) len: u32,
    /// Byte offset of the text.
    pub(crate) offset: u64,
}

impl Locator {
    /// Bytes of an entry.
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn parse(bytes: &[u8; Self::BYTES], at: u64) -> Result<Locator, Malformed> {
        let locator = Locator {
            code: array(bytes, 0),
            space: be32(bytes, 4),
            len: be32(bytes, 8),
            offset: be64(bytes, 16),
        };
        if !locator.is_used() {
            return Ok(Locator::default());
        }
        let bad = |why| Err(Malformed::new(at, format!("parent locator: {why}")));
        let known = [b"W2ru", b"W2ku", b"MacX", b"Wi2r", b"Wi2k", b"Mac "];
        if !known.contains(&&locator.code) {
            let why = format!("parent locator: unknown platform code {}", tag(locator.code));
            return Err(Malformed::unsupported(at, why));
        }
        if locator.reads() {
            let (len, room) = (u64::from(locator.len), locator.room_bytes());
            if len > room || room > MAX_TEXT_BYTES {
                return bad(format!("{len} bytes in room for {room} (at most {MAX_TEXT_BYTES})"));
            }
            if !locator.offset.is_multiple_of(SECTOR) {
                return bad(format!("text at byte {}, no sector's start", locator.offset));
            }
        }
        Ok(locator)
    }

    pub(crate) fn bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        put(&mut out, 0, &self.code);
        put(&mut out, 4, &self.space.to_be_bytes());
        put(&mut out, 8, &self.len.to_be_bytes());
        put(&mut out, 16, &self.offset.to_be_bytes());
        out
    }

    /// Whether the entry is used.
    pub(crate) fn is_used(&self) -> bool {
        self.code != [0; 4]
    }

    /// Whether paths of its platform are understood.
    pub(crate) fn reads(&self) -> bool {
        matches!(&self.code, b"W2ru" | b"W2ku" | b"MacX")
    }

    /// Room for the text in bytes, whichever unit the field has.
    pub(crate) fn room_bytes(&self) -> u64 {
        match u64::from(self.space) {
            sectors @ 0..512 => sectors * SECTOR,
            bytes => whole_sectors(bytes),
        }
    }
}

/// The text of a locator as paths to try, the likeliest first. Relative paths are relative to the child's directory.
///
/// # Errors
/// The text is not a path of its platform.
pub(crate) fn decode(code: [u8; 4], text: &[u8]) -> Result<Vec<PathBuf>, String> {
    let path = match &code {
        b"MacX" => {
            let text = text.split(|b| *b == 0).next().unwrap_or(text);
            let path = text.strip_prefix(b"file://").ok_or("no file: URL")?;
            // An authority (`file://localhost/…`) is ignored; `.` is how libvhd writes "relative".
            let path = path.strip_prefix(b"localhost").unwrap_or(path);
            let plain = path.to_vec();
            let unescaped = unescape(path);
            return match unescaped == plain {
                true => Ok(vec![checked(plain)?]),
                false => Ok(vec![checked(unescaped)?, checked(plain)?]),
            };
        }
        b"W2ru" | b"W2ku" => {
            let units = text.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
            let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
            String::from_utf16(&units).map_err(|_| "no valid UTF-16")?
        }
        other => return Err(format!("platform {} is not supported", tag(*other))),
    };
    let path = path.replace('\\', "/");
    // libvhd drops the drive of a path from another machine.
    let path = match path.as_bytes() {
        [b'a'..=b'z' | b'A'..=b'Z', b':', ..] => path[2..].to_owned(),
        _ => path,
    };
    Ok(vec![checked(path.into_bytes())?])
}

fn checked(path: Vec<u8>) -> Result<PathBuf, String> {
    match path.is_empty() || path.contains(&0) {
        true => Err("an empty path, or one with a NUL".into()),
        false => Ok(OsString::from_vec(path).into()),
    }
}

pub(crate) fn unescape(text: &[u8]) -> Vec<u8> {
    let digit = |b: Option<&u8>| b.and_then(|b| char::from(*b).to_digit(16));
    let mut out = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match (byte, digit(text.get(at + 1)), digit(text.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                at += 3;
            }
            _ => {
                out.push(*byte);
                at += 1;
            }
        }
    }
    out
}

/// The text of a `MacX` locator. ASCII is not escaped, as in libvhd. libvhd cannot read a path with other characters,
/// so these are escaped, for programs that can.
pub(crate) fn encode_url(path: &Path) -> Vec<u8> {
    let mut out = b"file://".to_vec();
    let path = path.as_os_str().as_bytes();
    if path.is_ascii() {
        out.extend_from_slice(path);
        return out;
    }
    for byte in path {
        match byte {
            b'%' => out.extend_from_slice(b"%25"),
            b' '..=b'~' => out.push(*byte),
            _ => out.extend_from_slice(format!("%{byte:02X}").as_bytes()),
        }
    }
    out
}

/// The text of a `W2ru` or `W2ku` locator for a relative path, which begins with `.\`; `None` if it cannot express the
/// path.
pub(crate) fn encode_windows(path: &Path) -> Option<Vec<u8>> {
    let path = path.to_str().filter(|path| !path.contains('\\'))?;
    let path = path.strip_prefix("./").unwrap_or(path).replace('/', "\\");
    Some(format!(".\\{path}").encode_utf16().flat_map(u16::to_le_bytes).collect())
}

/// The reason why libvhd does not find a parent by a path or name; `None`: it does.
pub(crate) fn unreadable_by_libvhd(text: &str) -> Option<&'static str> {
    let name = text.rsplit('/').next().unwrap_or(text);
    if !text.is_ascii() {
        Some("is not ASCII, which is all that libvhd reads")
    } else if text.contains(|c: char| c.is_ascii_control()) {
        Some("has a control character, which scripts on libvhd's output do not expect")
    } else if text.contains('\\') {
        Some("has a backslash, which libvhd takes for a directory's end")
    } else if name.starts_with("C:") || name.starts_with("c:") {
        Some("begins with C:, which libvhd takes for a drive")
    } else {
        None
    }
}

/// The path that libvhd reads from a locator's text.
pub(crate) fn as_libvhd_reads(code: [u8; 4], text: &[u8]) -> Option<PathBuf> {
    let text: Vec<u8> = match &code {
        b"MacX" => text.strip_prefix(b"file://")?.to_vec(),
        _ => {
            let units = text.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
            units.map(u8::try_from).collect::<Result<_, _>>().ok()?
        }
    };
    let path = text.split(|byte| *byte == 0).next().filter(|path| path.is_ascii())?;
    let path = String::from_utf8_lossy(path);
    Some(match &code {
        b"MacX" => PathBuf::from(&*path),
        _ => {
            let path = path.replace('\\', "/");
            let path = path.strip_prefix("C:").or(path.strip_prefix("c:")).unwrap_or(&path);
            PathBuf::from(path)
        }
    })
}

/// The parent's name as in the header.
pub(crate) fn utf16_be(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_be_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn paths(code: &[u8; 4], text: &[u8]) -> Vec<String> {
        let paths = decode(*code, text).unwrap();
        paths.into_iter().map(|p| p.into_os_string().into_string().unwrap()).collect()
    }

    fn utf16(text: &str) -> Vec<u8> {
        text.encode_utf16().flat_map(u16::to_le_bytes).collect()
    }

    #[test]
    fn what_others_write_is_understood() {
        assert_eq!(paths(b"MacX", b"file://./base.vhd"), ["./base.vhd"]);
        assert_eq!(
            paths(b"MacX", b"file:///srv/a%20b.vhd\0\0"),
            ["/srv/a b.vhd", "/srv/a%20b.vhd"]
        );
        assert_eq!(paths(b"MacX", b"file://localhost/srv/100%"), ["/srv/100%"]);
        assert_eq!(paths(b"W2ru", &utf16(".\\base.vhd\0junk")), ["./base.vhd"]);
        assert_eq!(paths(b"W2ku", &utf16("C:\\vm\\b\u{e4}se.vhd")), ["/vm/b\u{e4}se.vhd"]);
    }

    #[test]
    fn what_libvhd_cannot_read_is_known() {
        for name in ["base.vhd", "a b.vhd", "100%25.vhd", "../x/D:y.vhd"] {
            assert_eq!(unreadable_by_libvhd(name), None, "{name}");
        }
        for name in ["b\u{e4}se.vhd", "a\tb.vhd", "a\\b.vhd", "c:base.vhd", "\u{7f}"] {
            assert!(unreadable_by_libvhd(name).is_some(), "{name}");
        }
        let up = encode_windows(Path::new("../x/a.vhd")).unwrap();
        assert_eq!(up, utf16(".\\..\\x\\a.vhd"));
        assert_eq!(as_libvhd_reads(*b"W2ru", &up).unwrap(), Path::new("./../x/a.vhd"));
        assert_eq!(as_libvhd_reads(*b"MacX", "file://./b\u{e4}se".as_bytes()), None);
        assert_eq!(as_libvhd_reads(*b"MacX", b"./base"), None);
    }

    #[test]
    fn what_is_no_path_is_refused() {
        assert!(decode(*b"MacX", b"http://x").is_err());
        assert!(decode(*b"MacX", b"file://").is_err());
        assert!(decode(*b"MacX", b"file://a%00b").is_err());
        assert!(decode(*b"W2ru", &[0, 0xd8, b'a', 0]).is_err());
        assert!(decode(*b"Mac ", b"alias").is_err());
        assert!(decode(*b"W2ru", b"").is_err());
    }

    #[test]
    fn absurd_lengths_and_places_are_refused() {
        let at = |space, len, offset| {
            Locator::parse(&Locator { code: *b"MacX", space, len, offset }.bytes(), 0)
        };
        assert!(
            at(1, 512, 1536).is_ok() && at(512, 512, 1536).is_ok() && at(600, 600, 512).is_ok()
        );
        assert!(at(1, 513, 1536).is_err() && at(u32::MAX, 5, 1536).is_err());
        assert!(at(64, 5, 1536).is_err() && at(1, 5, 1537).is_err());
    }

    proptest! {
        #[test]
        fn names_of_any_kind_come_back(name in "[^\\\\/\0]{1,40}") {
            let path = Path::new("./dir").join(&name);
            let (url, text) = (encode_url(&path), encode_windows(&path).unwrap());
            prop_assert!(decode(*b"MacX", &url).unwrap().contains(&path));
            prop_assert_eq!(&decode(*b"W2ru", &text).unwrap()[0], &path);
            if unreadable_by_libvhd(&name).is_none() {
                prop_assert_eq!(as_libvhd_reads(*b"MacX", &url).unwrap(), path.clone());
                prop_assert_eq!(as_libvhd_reads(*b"W2ku", &text).unwrap(), path);
            }
        }

        #[test]
        fn no_bytes_make_it_panic(text in proptest::collection::vec(any::<u8>(), 0..80)) {
            for code in [b"MacX", b"W2ru", b"W2ku"] {
                let _ = decode(*code, &text);
            }
            let mut entry = [0; Locator::BYTES];
            let n = text.len().min(Locator::BYTES);
            entry[..n].copy_from_slice(&text[..n]);
            let _ = Locator::parse(&entry, 0);
        }
    }
}
