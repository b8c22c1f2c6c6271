//! Patterns of file names, as the C library's `glob` has them, with braces.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

/// The most patterns that the braces of one are expanded to.
const MAX_PATTERNS: usize = 1024;

/// The paths that match a pattern, in order. A path without special characters is itself, if it exists.
///
/// # Errors
/// A folder cannot be read, or a path without special characters does not exist.
pub(super) fn paths(pattern: &OsStr) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for pattern in alternatives(pattern.as_bytes())? {
        let root = if pattern.starts_with(b"/") { Path::new("/") } else { Path::new("") };
        let parts: Vec<&[u8]> =
            pattern.split(|byte| *byte == b'/').filter(|part| !part.is_empty()).collect();
        walk(root.to_owned(), &parts, false, &mut found)?;
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// Whether a whole name matches a pattern without braces.
pub(super) fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Behind the last star, and the name's byte from which its rest was tried.
    let mut star = None;
    while n < name.len() {
        if pattern.get(p) == Some(&b'*') {
            p += 1;
            star = Some((p, n));
            continue;
        }
        match one(&pattern[p..], name[n]) {
            Some(taken) => (p, n) = (p + taken, n + 1),
            None => match star {
                Some((behind, from)) => {
                    (p, n) = (behind, from + 1);
                    star = Some((behind, n));
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// Whether the first element of a pattern matches a byte: the length of the element.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern {
        [b'?', ..] => Some(1),
        [b'[', rest @ ..] => match set(rest, byte) {
            Some((len, true)) => Some(1 + len),
            Some((_, false)) => None,
            // A bracket that is not closed is itself.
            None => (byte == b'[').then_some(1),
        },
        [b'\\', escaped, ..] => (*escaped == byte).then_some(2),
        [plain, ..] => (*plain == byte).then_some(1),
        [] => None,
    }
}

/// The length of a set behind its bracket, and whether the byte is in it. `None`: it is not closed.
fn set(rest: &[u8], byte: u8) -> Option<(usize, bool)> {
    let inverted = matches!(rest.first(), Some(b'!' | b'^'));
    let mut at = usize::from(inverted);
    let first = at;
    let mut found = false;
    loop {
        match rest.get(at..)? {
            [b']', ..] if at > first => return Some((at + 1, found != inverted)),
            [from, b'-', to, ..] if *to != b']' => {
                found |= (*from..=*to).contains(&byte);
                at += 3;
            }
            [b'\\', escaped, ..] => {
                found |= *escaped == byte;
                at += 2;
            }
            [plain, ..] => {
                found |= *plain == byte;
                at += 1;
            }
            [] => return None,
        }
    }
}

fn is_magic(part: &[u8]) -> bool {
    part.iter().any(|byte| matches!(byte, b'*' | b'?' | b'[' | b'\\'))
}

fn walk(
    path: PathBuf,
    parts: &[&[u8]],
    is_matched: bool,
    found: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let Some((part, rest)) = parts.split_first() else {
        match path.symlink_metadata() {
            Ok(_) => found.push(path),
            Err(e) if !is_matched => return Err(e),
            // It was there a moment ago, or a name behind a pattern is not in this folder.
            Err(_) => {}
        }
        return Ok(());
    };
    if !is_magic(part) {
        return walk(path.join(OsStr::from_bytes(part)), rest, is_matched, found);
    }
    let folder = if path.as_os_str().is_empty() { Path::new(".") } else { &path };
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        // It matched a pattern, and is no folder, or no longer there.
        Err(e) if is_matched && e.kind() != io::ErrorKind::PermissionDenied => return Ok(()),
        Err(e) => return Err(e),
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name().into_vec();
        // A hidden name has to be asked for.
        if (!name.starts_with(b".") || part.starts_with(b".")) && matches(part, &name) {
            names.push(name);
        }
    }
    for name in names {
        walk(path.join(OsString::from_vec(name)), rest, true, found)?;
    }
    Ok(())
}

/// The patterns that the braces of one stand for.
fn alternatives(pattern: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let (mut done, mut left) = (Vec::new(), vec![pattern.to_vec()]);
    while let Some(pattern) = left.pop() {
        let Some((open, commas, close)) = braces(&pattern) else {
            done.push(pattern);
            continue;
        };
        let mut from = open + 1;
        for to in commas.into_iter().chain([close]) {
            let parts = [&pattern[..open], &pattern[from..to], &pattern[close + 1..]];
            left.push(parts.concat());
            from = to + 1;
        }
        if done.len() + left.len() > MAX_PATTERNS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many braces"));
        }
    }
    Ok(done)
}

/// The first pair of braces of a pattern, and the commas between them.
fn braces(pattern: &[u8]) -> Option<(usize, Vec<usize>, usize)> {
    let (mut open, mut depth, mut commas, mut at) = (None, 0, Vec::new(), 0);
    while at < pattern.len() {
        match pattern[at] {
            b'\\' => at += 1,
            b'{' => {
                depth += 1;
                open = open.or(Some(at));
            }
            b',' if depth == 1 => commas.push(at),
            b'}' if depth == 1 => return Some((open?, commas, at)),
            b'}' if depth > 0 => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_as_they_do_for_the_c_library() {
        for (pattern, name, is_match) in [
            ("*.vhd", "a.vhd", true),
            ("*.vhd", ".vhd", true),
            ("*.vhd", "a.vhd.new", false),
            ("VHD-*", "VHD-1", true),
            ("VHD-*", "LV-1", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]x]y", "]y", true),
            ("a[b", "a[b", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("*a*b*c", "xaybzc", true),
            ("*a*b*c", "xaybz", false),
            ("", "", true),
            ("**", "", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), is_match, "{pattern} {name}");
        }
    }

    #[test]
    fn braces_are_alternatives() {
        let sorted = |pattern: &str| {
            let mut all = alternatives(pattern.as_bytes()).unwrap();
            all.sort();
            all.into_iter().map(|one| String::from_utf8(one).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(sorted("a{b,c{d,e}}f"), ["abf", "acdf", "acef"]);
        assert_eq!(sorted("a{b"), ["a{b"]);
        assert_eq!(sorted("\\{a,b}"), ["\\{a,b}"]);
        let many = "{a,b}".repeat(20);
        assert!(alternatives(many.as_bytes()).is_err());
    }

    #[test]
    fn paths_are_those_of_the_folders() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.vhd", "a c:d.vhd", ".h.vhd", "x.raw", "sub/e.vhd"] {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let found = |pattern: &str| {
            let found = paths(dir.path().join(pattern).as_os_str())?;
            let names =
                found.into_iter().map(|path| path.strip_prefix(dir.path()).unwrap().to_owned());
            Ok::<_, io::Error>(names.map(|name| name.display().to_string()).collect::<Vec<_>>())
        };
        assert_eq!(found("*.vhd").unwrap(), ["a c:d.vhd", "b.vhd"]);
        assert_eq!(found("*.{raw,vhd}").unwrap(), ["a c:d.vhd", "b.vhd", "x.raw"]);
        assert_eq!(found("*/e.vhd").unwrap(), ["sub/e.vhd"]);
        assert_eq!(found("b.vhd").unwrap(), ["b.vhd"]);
        assert_eq!(found("*.none").unwrap(), Vec::<String>::new());
        for missing in ["none.vhd", "none/*.vhd"] {
            assert_eq!(found(missing).unwrap_err().kind(), io::ErrorKind::NotFound);
        }
    }
}
