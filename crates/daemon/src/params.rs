//! The toolstack's key `params`, which names an image. Toolstacks write it, guests cannot.
//!
//! `aio:PATH`, `vhd:PATH` and `qcow2:PATH` are tapdisk's formats; `raw:PATH` and `store:PATH#NAME`
//! are ferrite's. Paths may have colons: only the first one counts. libxl does not accept `qcow2`,
//! but passes a target on as it is. So `aio:qcow2:/PATH` is a qcow2 image, too. No path is mistaken
//! for that, since paths of images are absolute.
//!
//! An export of an NBD server is named by its URI (docs/internals/remotes.md), with `nbd:`, `aio:` or nothing before it.
//! `nbd:unix:` is something else: a tap's socket, as XAPI names it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use ferrite_nbd::address::Address;
use ferrite_nbd::uri::{BadUri, Uri, is_uri};
use serde::{Deserialize, Serialize};

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The image has the guest's bytes, and nothing else.
    Raw,
    /// A VHD.
    Vhd,
    /// A qcow2 image.
    Qcow2,
    /// A volume of a store.
    Store,
    /// An export of an NBD server.
    Nbd,
}

impl Format {
    /// The name before the path.
    pub fn word(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Vhd => "vhd",
            Format::Qcow2 => "qcow2",
            Format::Store => "store",
            Format::Nbd => "nbd",
        }
    }

    /// tapdisk's name of the format.
    pub fn tapdisk_word(self) -> &'static str {
        match self {
            Format::Raw => "aio",
            format => format.word(),
        }
    }

    fn of_word(word: &[u8]) -> Option<Format> {
        match word {
            b"aio" | b"raw" => Some(Format::Raw),
            b"vhd" => Some(Format::Vhd),
            b"qcow2" => Some(Format::Qcow2),
            b"store" => Some(Format::Store),
            b"nbd" => Some(Format::Nbd),
            _ => None,
        }
    }
}

/// An image that the toolstack has named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// The image's format.
    pub format: Format,
    /// The absolute path; of a volume `PATH#NAME`, of an export its URI.
    #[serde(with = "path_as_bytes")]
    pub path: PathBuf,
}

/// A path in a state file: bytes, since paths need not be text.
mod path_as_bytes {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(path.as_os_str().as_bytes())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Ok(OsString::from_vec(Vec::deserialize(from)?).into())
    }
}

impl Image {
    /// The path of the file or device; of a volume, its store's.
    pub fn file(&self) -> &Path {
        self.volume().map_or(&self.path, |(store, _)| store)
    }

    /// The path of the store and the name of the volume. `None` for other formats.
    pub fn volume(&self) -> Option<(&Path, &OsStr)> {
        parts_of_volume(&self.path).filter(|_| self.format == Format::Store)
    }

    /// The server and the name of an export. `None` for other formats.
    pub fn export(&self) -> Option<Uri> {
        let text = self.path.to_str().filter(|_| self.format == Format::Nbd)?;
        Uri::parse(text).ok()
    }

    /// The file without links; of an export its [place](place_of). `None`: it cannot be found.
    pub(crate) fn real_file(&self) -> Option<PathBuf> {
        match self.export() {
            Some(uri) => Some(place_of(&uri)),
            None => self.file().canonicalize().ok(),
        }
    }

    /// The name with the format before the path, as `Disk::open` takes it.
    pub fn name(&self) -> OsString {
        [OsStr::new(self.format.word()), OsStr::new(":"), self.path.as_os_str()]
            .into_iter()
            .collect()
    }
}

/// The meaning of `params`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Params {
    /// An image to serve.
    Image(Image),
    /// A drive without a medium.
    Empty,
    /// A tap, which XAPI's hotplug script names.
    Tap,
    /// Invalid contents, with the reason.
    Invalid(String),
}

impl Params {
    /// Parses the key's value.
    pub fn parse(value: &[u8]) -> Params {
        if value.starts_with(TAP) {
            return Params::Tap;
        }
        if let Some(uri) = uri(value) {
            return export(uri);
        }
        let Some((word, rest)) = split(value) else {
            return match value {
                b"" => Params::Empty,
                [b'/', ..] => without_format(value),
                _ => Params::Invalid(invalid(value)),
            };
        };
        let Some(format) = Format::of_word(word) else {
            return match value {
                [b'/', ..] => without_format(value),
                _ => Params::Invalid(invalid(value)),
            };
        };
        match split(rest).and_then(|(word, path)| Some((Format::of_word(word)?, path))) {
            Some((nested, path @ [b'/', ..])) => image(nested, path),
            _ if rest.is_empty() => Params::Empty,
            _ if word == b"aio" => without_format(rest),
            _ => image(format, rest),
        }
    }
}

/// The beginning of the `params` of a disk that XAPI has opened before.
const TAP: &[u8] = b"nbd:unix:";

/// Most bytes of a volume's name.
const MAX_NAME: usize = 63;

/// Extensions of images that are not raw disks.
const EXTENSIONS: [&str; 7] = ["vhd", "qcow2", "qcow", "vhdx", "vmdk", "vdi", "qed"];

/// A raw disk whose format the toolstack has not named. xl writes `aio` also without a format, and
/// it has no name for qcow2. A path with the extension of another format is refused, since the
/// guest would overwrite the image.
fn without_format(path: &[u8]) -> Params {
    let path = Path::new(OsStr::from_bytes(path));
    let extension = path.extension().unwrap_or_default();
    match EXTENSIONS.iter().find(|image| extension.eq_ignore_ascii_case(image)) {
        None => image(Format::Raw, path.as_os_str().as_bytes()),
        Some(extension) => Params::Invalid(format!(
            "{0} has the name of an image in format {extension}, and was given as a raw disk, which \
             its guest would overwrite: say format=vhd, or write vhd:, qcow2: or raw: before the \
             path (target=qcow2:{0})",
            path.display()
        )),
    }
}

/// The URI of an export, with or without a format before it: libxl writes `aio` before each target that it does not know.
fn uri(value: &[u8]) -> Option<&[u8]> {
    let bare = [&b"aio:"[..], b"raw:", b"nbd:"].iter().find_map(|word| value.strip_prefix(*word));
    // With two prefixes: what `ferrite disk attach` has xl write.
    let inner = bare.and_then(|bare| bare.strip_prefix(b"nbd:"));
    [inner, bare, Some(value)].into_iter().flatten().find(|name| is_uri(name))
}

fn export(uri: &[u8]) -> Params {
    let text = String::from_utf8_lossy(uri);
    match Uri::parse(&text) {
        Ok(_) => Params::Image(Image { format: Format::Nbd, path: text.into_owned().into() }),
        Err(BadUri { why, help }) => {
            let shown: String = text.chars().take(128).collect();
            Params::Invalid(format!("{shown:?} names no export: {why}; {help}"))
        }
    }
}

/// One name for an export however it is written, without this client's settings. It tells whether two disks are one.
pub(crate) fn place_of(uri: &Uri) -> PathBuf {
    let export = &uri.export;
    match &uri.server {
        Address::Unix(path) => {
            let real = real_socket(path).unwrap_or_else(|_| path.clone());
            let parts =
                [OsStr::new("nbd+unix:"), real.as_os_str(), OsStr::new("/"), export.as_ref()];
            parts.into_iter().collect::<OsString>().into()
        }
        Address::Tcp { host, port } | Address::Tls { host, port, .. } => {
            format!("nbd://{host}:{port}/{export}").into()
        }
        Address::Helped { by, .. } => by.short().into(),
    }
}

/// The path of a socket without links in its folder. The socket itself need not be there: its server may come later.
pub(crate) fn real_socket(path: &Path) -> std::io::Result<PathBuf> {
    match (path.canonicalize(), path.parent(), path.file_name()) {
        (Err(e), Some(folder), Some(name)) if e.kind() == std::io::ErrorKind::NotFound => {
            Ok(folder.canonicalize()?.join(name))
        }
        (real, ..) => real,
    }
}

fn split(value: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = value.iter().position(|byte| *byte == b':')?;
    Some((&value[..colon], &value[colon + 1..]))
}

fn image(format: Format, path: &[u8]) -> Params {
    let path = Path::new(OsStr::from_bytes(path));
    if format == Format::Store && parts_of_volume(path).is_none() {
        return Params::Invalid(format!(
            "{:.256} names no volume of a store: write store:PATH#NAME, where NAME has 1 to 63 letters, \
             digits, \"-\", \"_\" or \".\" and begins with a letter or digit",
            path.display()
        ));
    }
    if format == Format::Nbd {
        return Params::Invalid(format!(
            "{:.256} names no export: write nbd+unix:///EXPORT?socket=PATH or \
             nbds://HOST:PORT/EXPORT?tls-certificates=DIR",
            path.display()
        ));
    }
    match path.is_absolute() {
        true => Params::Image(Image { format, path: path.to_owned() }),
        false => Params::Invalid(format!("{} is not an absolute path", path.display())),
    }
}

/// The parts before and after the last `#`, if the second one can be a volume's name.
fn parts_of_volume(path: &Path) -> Option<(&Path, &OsStr)> {
    let bytes = path.as_os_str().as_bytes();
    let at = bytes.iter().rposition(|byte| *byte == b'#')?;
    let (store, name) = (&bytes[..at], &bytes[at + 1..]);
    let is_name = matches!(name, [first, ..] if first.is_ascii_alphanumeric())
        && name.len() <= MAX_NAME
        && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte));
    (is_name && !store.is_empty())
        .then(|| (Path::new(OsStr::from_bytes(store)), OsStr::from_bytes(name)))
}

fn invalid(value: &[u8]) -> String {
    let value = String::from_utf8_lossy(value);
    let shown: String = value.chars().take(128).collect();
    format!(
        "params {shown:?} name no image: write aio:PATH, vhd:PATH, qcow2:PATH, store:PATH#NAME or the URI of an \
         export, such as nbds://HOST:PORT/EXPORT?tls-certificates=DIR"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn params_are_split_at_the_first_colon() {
        for (params, format, path) in [
            ("aio:/srv/a.img", Format::Raw, "/srv/a.img"),
            ("raw:/srv/a.img", Format::Raw, "/srv/a.img"),
            ("vhd:/srv/a.vhd", Format::Vhd, "/srv/a.vhd"),
            ("vhd:/dev/vg/lv", Format::Vhd, "/dev/vg/lv"),
            ("qcow2:/srv/a", Format::Qcow2, "/srv/a"),
            ("aio:/srv/a:b:c.img", Format::Raw, "/srv/a:b:c.img"),
            ("vhd:/srv/aio:/x", Format::Vhd, "/srv/aio:/x"),
            ("aio:qcow2:/srv/a", Format::Qcow2, "/srv/a"),
            ("aio:vhd:/srv/a:b", Format::Vhd, "/srv/a:b"),
            ("aio:aio:/srv/a", Format::Raw, "/srv/a"),
            ("store:/srv/a#b", Format::Store, "/srv/a#b"),
            ("aio:store:/srv/a:b#c.vhd", Format::Store, "/srv/a:b#c.vhd"),
            ("aio:raw:/srv/a.vhd", Format::Raw, "/srv/a.vhd"),
            ("raw:/srv/a.qcow2", Format::Raw, "/srv/a.qcow2"),
            ("aio:/srv/a.qcow2/disk", Format::Raw, "/srv/a.qcow2/disk"),
            ("/srv/cd.iso", Format::Raw, "/srv/cd.iso"),
            ("/srv/cd:2.iso", Format::Raw, "/srv/cd:2.iso"),
        ] {
            let image = Image { format, path: path.into() };
            assert_eq!(Params::parse(params.as_bytes()), Params::Image(image), "{params}");
        }
        for (path, store, name) in [("/srv/a#b", "/srv/a", "b"), ("/srv/a#b#c", "/srv/a#b", "c")] {
            let volume = Image { format: Format::Store, path: path.into() };
            assert_eq!(volume.volume(), Some((Path::new(store), OsStr::new(name))));
            let raw = Image { format: Format::Raw, ..volume.clone() };
            assert_eq!((volume.file(), raw.file()), (Path::new(store), Path::new(path)));
        }
        let long = format!("store:/srv/a#{}", "x".repeat(64));
        for invalid in
            ["store:/srv/a", "store:/srv/a#", "store:/a#.b", "store:#b", "store:/a#b/c", &long]
        {
            let Params::Invalid(why) = Params::parse(invalid.as_bytes()) else {
                panic!("{invalid}")
            };
            assert!(why.contains("store:PATH#NAME"), "{why}");
        }
        for empty in ["", "aio:", "vhd:", "raw:", "store:"] {
            assert_eq!(Params::parse(empty.as_bytes()), Params::Empty, "{empty}");
        }
        for image in ["aio:/srv/a.vhd", "/srv/a.QCOW2", "/srv/a:b.vmdk", "aio:/srv/x:y.vhdx"] {
            let Params::Invalid(why) = Params::parse(image.as_bytes()) else { panic!("{image}") };
            assert!(why.contains("given as a raw disk"), "{why}");
        }
        for invalid in
            ["aio:a.img", "nbd:/x", "a.img", "qcow2:raw:a", ":", "aio::/a", "aio: ", "store:a#b"]
        {
            assert!(matches!(Params::parse(invalid.as_bytes()), Params::Invalid(_)), "{invalid}");
        }
        let tap = b"nbd:unix:/run/blktap-control/nbd/sr/vdi:exportname=vdi";
        assert_eq!(Params::parse(tap), Params::Tap);
    }

    #[test]
    fn exports_are_named_by_uris_and_taps_of_xapi_are_not_exports() {
        let uri = "nbd+unix:///d?socket=/run/a:b&session=vm";
        for params in ["", "aio:", "raw:", "nbd:", "aio:nbd:"] {
            let Params::Image(image) = Params::parse(format!("{params}{uri}").as_bytes()) else {
                panic!("{params}")
            };
            assert_eq!(image, Image { format: Format::Nbd, path: uri.into() }, "{params}");
            assert_eq!(image.name(), OsStr::new(&format!("nbd:{uri}")));
            assert_eq!(image.export().unwrap().export, "d");
            assert_eq!((image.file(), image.volume()), (Path::new(uri), None));
        }
        let Params::Image(image) = Params::parse(b"aio:nbd:rbd:p/i@s?id=a") else { panic!() };
        assert_eq!(image.path, Path::new("rbd:p/i@s?id=a"));
        assert_eq!(place_of(&image.export().unwrap()), Path::new("rbd:p/i@s"));
        let Params::Image(image) = Params::parse(b"aio:pool:p/d?experimental=yes") else {
            panic!()
        };
        assert_eq!(image.path, Path::new("pool:p/d?experimental=yes"));
        assert_eq!(place_of(&image.export().unwrap()), Path::new("pool:p/d"));
        let places = [
            ("nbd://[::1]:7/a?plain=yes&drain_s=0", "nbd://::1:7/a"),
            ("nbds://h.example/?tls-certificates=/etc/a", "nbd://h.example:10809/"),
            ("nbd+unix:///x%20y?socket=/proc/1/nowhere/s", "nbd+unix:/proc/1/nowhere/s/x y"),
        ];
        for (uri, place) in places {
            let Params::Image(image) = Params::parse(uri.as_bytes()) else { panic!("{uri}") };
            assert_eq!(place_of(&image.export().unwrap()), Path::new(place));
        }
        for (invalid, cure) in [
            ("nbd://h/a", "nbds://h/EXPORT?tls-certificates=DIR"),
            ("aio:nbd+unix:///a", "socket=PATH"),
            ("nbds://h/a?tls-certificates=b", "write it whole"),
            ("nbd:/srv/a", "EXPORT?socket=PATH"),
        ] {
            let Params::Invalid(why) = Params::parse(invalid.as_bytes()) else {
                panic!("{invalid}")
            };
            assert!(why.contains(cure), "{why}");
        }
        let tap = b"nbd:unix:/run/nbd://x";
        assert_eq!(Params::parse(tap), Params::Tap);
    }

    #[test]
    fn any_bytes_are_understood_or_refused_in_few_words() {
        let long = vec![0xff; 100_000];
        let Params::Invalid(why) = Params::parse(&long) else { panic!("an image") };
        assert!(why.len() < 1000, "{}", why.len());
        let name = b"aio:/srv/\xff\xfe";
        let Params::Image(image) = Params::parse(name) else { panic!("no image") };
        assert_eq!(image.name().as_bytes(), b"raw:/srv/\xff\xfe");
    }
}
