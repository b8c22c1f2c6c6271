//! `ferrite:///PATH?format=raw|vhd|qcow2`: the name of an image for the datapath plug-in. The path is percent-encoded.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ferrite_disk::Format;

use super::{Fault, Kind};

/// The scheme by which XAPI chooses this plug-in.
pub(super) const SCHEME: &str = "ferrite";

/// An image that a URI names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Image {
    pub(super) format: Format,
    pub(super) path: String,
}

impl Image {
    /// Parses a URI. Without `format` the name's extension says it, as everywhere.
    pub(super) fn parse(uri: &str) -> Result<Image, Fault> {
        let refuse = |why: &str| {
            let help =
                "write ferrite:///PATH?format=raw, vhd or qcow2, with the path percent-encoded";
            Err(Fault::new(Kind::Invalid, format!("cannot use the URI {uri}: {why}; {help}")))
        };
        let (Some((path, _)), query) = (path_of(uri, SCHEME), query_of(uri)) else {
            return refuse("it is not one of a file on this host");
        };
        let Some(path) = decoded(path) else {
            return refuse("its path is not percent-encoded UTF-8 text");
        };
        if path.contains(char::is_control) || !path.starts_with('/') || path.ends_with('/') {
            return refuse("its path is not that of a file");
        }
        let named = query.split('&').find_map(|part| part.strip_prefix("format="));
        let format = match named {
            None => Format::of_path(Path::new(&path)),
            Some(name) => match Format::ALL.into_iter().find(|format| format.name() == name) {
                Some(format) => format,
                None => return refuse("there is no such format"),
            },
        };
        Ok(Image { format, path })
    }

    /// The URI of an image.
    pub(super) fn uri(&self) -> String {
        format!("{SCHEME}://{}?format={}", encoded(&self.path), self.format)
    }

    /// The word of tapdisk's tools for the format.
    pub(super) fn kind(&self) -> &'static str {
        match self.format {
            Format::Raw => "aio",
            format => format.name(),
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(&self.path)
    }
}

/// The path of a URI of this scheme without a host, and what follows.
fn path_of<'a>(uri: &'a str, scheme: &str) -> Option<(&'a str, &'a str)> {
    let rest = uri.strip_prefix(scheme)?.strip_prefix("://")?;
    let end = rest.find(['?', '#']).unwrap_or(rest.len());
    let (path, rest) = rest.split_at(end);
    path.starts_with('/').then_some((path, rest))
}

fn query_of(uri: &str) -> &str {
    let uri = uri.split('#').next().unwrap_or(uri);
    uri.split_once('?').map_or("", |(_, query)| query)
}

/// The folder of `file:///FOLDER`.
pub(super) fn folder(uri: &str) -> Option<PathBuf> {
    path_of(uri, "file").and_then(|(path, _)| decoded(path)).map(PathBuf::from)
}

/// `file:///FOLDER`.
pub(super) fn of_folder(path: &str) -> String {
    format!("file://{}", encoded(path))
}

/// The text with all bytes encoded that have a meaning in a URI, and those that are not ASCII.
fn encoded(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte.into());
            }
            // A String takes all that is written to it.
            byte => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}

fn decoded(text: &str) -> Option<String> {
    let (mut out, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, others @ ..] = rest {
        rest = others;
        if *first != b'%' {
            out.push(*first);
            continue;
        }
        let [high, low, others @ ..] = rest else { return None };
        let digit = |byte: u8| char::from(byte).to_digit(16);
        out.push(u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()?);
        rest = others;
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_names_a_path_and_a_format_and_is_written_as_it_is_read() {
        for (uri, format, path) in [
            ("ferrite:///srv/a.vhd?format=vhd", Format::Vhd, "/srv/a.vhd"),
            ("ferrite:///srv/a%20b%3Ac%25%3f%23.img?format=raw", Format::Raw, "/srv/a b:c%?#.img"),
            ("ferrite:///srv/%C3%A4.qcow2?format=qcow2", Format::Qcow2, "/srv/ä.qcow2"),
            ("ferrite:///dev/vg/disk?x=1&format=vhd#part", Format::Vhd, "/dev/vg/disk"),
            ("ferrite:///srv/a.qcow2", Format::Qcow2, "/srv/a.qcow2"),
        ] {
            let image = Image::parse(uri).unwrap();
            assert_eq!(image, Image { format, path: path.to_owned() }, "{uri}");
            assert_eq!(Image::parse(&image.uri()).unwrap(), image);
        }
        assert_eq!(folder("file:///srv/a%20b"), Some("/srv/a b".into()));
        assert_eq!(folder(&of_folder("/srv/ü#?")), Some("/srv/ü#?".into()));
    }

    #[test]
    fn what_is_no_file_of_this_host_or_hides_a_line_is_refused() {
        for uri in [
            "",
            "nbd:///srv/a.vhd",
            "ferrite:/srv/a.vhd",
            "ferrite://host/srv/a.vhd",
            "ferrite:///srv/a.vhd?format=vmdk",
            "ferrite:///srv/a.vhd?format=",
            "ferrite:///srv/a.vhd?format=store",
            "ferrite:///srv/",
            "ferrite:///srv/a%0Aminor=1.vhd",
            "ferrite:///srv/a%00.vhd",
            "ferrite:///srv/a%f.vhd",
            "ferrite:///srv/a%",
            "ferrite:///srv/%FF.vhd",
        ] {
            assert_eq!(Image::parse(uri).unwrap_err().kind, Kind::Invalid, "{uri}");
        }
        assert_eq!(folder("/srv"), None);
    }
}
