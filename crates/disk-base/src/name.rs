//! The name of a disk gives its format. The content never does: a guest that may write a raw disk could turn it into an
//! image that names any file of the host as its parent.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use ferrite_nbd::address::{Address, Helped};
use ferrite_nbd::uri::{BadUri, Uri, is_uri};

use crate::format::Format;
use crate::volume_name::VolumeName;
use crate::{DiskError, ErrorKind, content};

/// A file, and its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    /// How to read the file.
    pub format: Format,
    /// Its path; of a volume `PATH#NAME`, whose parts [`volume`](ImageName::volume) gives; of an export its whole name,
    /// as [`export`](ImageName::export) gives it.
    pub path: PathBuf,
}

impl ImageName {
    /// Parses `raw:PATH`, `vhd:PATH`, `qcow2:PATH`, `store:PATH#NAME`, the name of an export ([`Uri`]),
    /// or a path whose extension names the format. A
    /// path with a colon in its first part needs a prefix, or the form `./a:b`.
    ///
    /// # Errors
    /// A prefix that is no format, or no path; an extension of an unsupported format.
    pub fn parse(text: &(impl AsRef<OsStr> + ?Sized)) -> Result<ImageName, DiskError> {
        ImageName::parse_as(text, None)
    }

    /// Parses the name of an existing image. If only the extension makes it raw, the file must not look like an image:
    /// the guest would overwrite it.
    ///
    /// # Errors
    /// As [`parse_as`](Self::parse_as); `Unsuitable`: it looks like an image.
    pub fn of_existing(
        text: &(impl AsRef<OsStr> + ?Sized),
        said: Option<Format>,
    ) -> Result<ImageName, DiskError> {
        let name = ImageName::parse_as(text, said)?;
        if name.format == Format::Raw && said.is_none() && !ImageName::says_format(text) {
            content::refuse_images(&name.path)?;
        }
        Ok(name)
    }

    /// Parses the name of an image that is about to be made.
    ///
    /// # Errors
    /// As [`parse_as`](Self::parse_as), in the words for a new image.
    pub fn of_new(
        text: &(impl AsRef<OsStr> + ?Sized),
        said: Option<Format>,
    ) -> Result<ImageName, DiskError> {
        let text = text.as_ref();
        if let Some(extension) = foreign_extension(text.as_ref())
            && said.is_none()
            && !ImageName::says_format(text)
        {
            let shown = text.display();
            let what = format!("cannot make {shown}");
            let why = format!("{} is not supported", extension.to_ascii_uppercase());
            let help = format!("use a name with .vhd or .qcow2, or raw:{shown} for a raw disk");
            return Err(DiskError::new(ErrorKind::Usage, what, why, help));
        }
        ImageName::parse_as(text, said)
    }

    /// Whether the text has a prefix.
    pub fn says_format(text: &(impl AsRef<OsStr> + ?Sized)) -> bool {
        prefix(text.as_ref()).is_some()
    }

    /// The path of a volume's store, and the volume's name.
    pub fn volume(&self) -> Option<(&Path, &str)> {
        let parts = parts_of_volume(self.path.as_os_str());
        parts.filter(|_| self.format == Format::Store)
    }

    /// The name of an export of an NBD server, of an image of a Ceph cluster, or of a disk of a pool.
    pub fn export(&self) -> Option<&str> {
        self.path.to_str().filter(|_| self.format.is_remote())
    }

    /// Refuses a volume and an export, where only an image can be.
    ///
    /// # Errors
    /// It is one.
    pub fn must_be_image(&self) -> Result<(), DiskError> {
        match self.format {
            Format::Raw | Format::Vhd | Format::Qcow2 => Ok(()),
            _ => Err(self.no_image()),
        }
    }

    /// The error for a volume or an export where only an image is possible.
    pub fn no_image(&self) -> DiskError {
        let (is, help) = match self.format {
            Format::Rbd => (
                "an image of a Ceph cluster",
                "snapshots, clones and sizes are Ceph's: use its command rbd; ferrite image convert copies \
                 from and to it",
            ),
            Format::Pool => (
                "a disk of a pool",
                "ferrite pool has the commands for it (resize, for one); ferrite image convert copies from and to it",
            ),
            Format::Nbd => (
                "an export of a server",
                "work on the image where the server runs; ferrite image convert copies from and to an export",
            ),
            _ => (
                "a volume of a store",
                "volumes have commands of their own (ferrite store create, list and others); ferrite image \
                 convert copies one into an image, and an image into a new one",
            ),
        };
        let what = format!("cannot work on {}", self.path.display());
        let why = format!("it is {is}, and this is for images in files of their own");
        DiskError::new(ErrorKind::Usage, what, why, help)
    }

    /// As [`parse`](Self::parse), in the given format, whatever the extension is.
    ///
    /// # Errors
    /// A prefix that is no format, another one, or no path; an extension of an unsupported format.
    pub fn parse_as(
        text: &(impl AsRef<OsStr> + ?Sized),
        said: Option<Format>,
    ) -> Result<ImageName, DiskError> {
        let text = text.as_ref();
        let refuse = |why: String| {
            let help = "write raw:PATH, vhd:PATH, qcow2:PATH, store:PATH#NAME, \
                        nbd+unix:///EXPORT?socket=PATH, rbd:POOL/IMAGE, pool:POOL/DISK, or a path that ends in .vhd or .qcow2 (anything else is \
                        raw; a colon in a file name needs ./ before it)";
            Err(DiskError::new(
                ErrorKind::Usage,
                format!("cannot open {}", text.display()),
                why,
                help,
            ))
        };
        if text.is_empty() {
            let help = "name the image: a path, or vhd:PATH, qcow2:PATH, raw:PATH";
            let what = "cannot tell which image is meant";
            return Err(DiskError::new(ErrorKind::Usage, what, "no name was given", help));
        }
        if let Some(uri) = uri(text) {
            return match Uri::parse(uri).map(|uri| format_of(&uri)) {
                Ok(format) if said.is_some_and(|said| said != format) => {
                    refuse(format!("it is named {format}, and another format was said"))
                }
                Ok(format) => Ok(ImageName { format, path: uri.into() }),
                Err(BadUri { why, help }) => {
                    let what = format!("cannot open {}", text.display());
                    Err(DiskError::new(ErrorKind::Usage, what, why, help))
                }
            };
        }
        let (format, path) = match prefix(text) {
            None => (Format::of_path(text.as_ref()), text),
            Some((prefix, path)) => match Format::by_name(&prefix.to_string_lossy()) {
                Some(_) if path.is_empty() => return refuse("it names no file".into()),
                Some(format) if format.is_remote() => {
                    return refuse("what is behind nbd: names no export".into());
                }
                Some(format) if said.is_some_and(|said| said != format) => {
                    return refuse(format!("it is named {format}, and another format was said"));
                }
                Some(Format::Store) if parts_of_volume(path).is_none() => {
                    return refuse(
                        "a volume of a store is named PATH#NAME, where NAME has 1 to 63 letters, \
                         digits, \"-\", \"_\" or \".\" and begins with a letter or digit"
                            .into(),
                    );
                }
                Some(format) => (format, path),
                None => return refuse(format!("there is no format called {prefix:?}")),
            },
        };
        match foreign_extension(path.as_ref()) {
            Some(extension) if said.is_none() && !ImageName::says_format(text) => {
                let what = format!("cannot open {}", text.display());
                let why = format!("images in format {extension} are not read here");
                let help = format!(
                    "convert it first (qemu-img convert -O qcow2); raw:{}, if it is a raw disk in \
                     spite of its name",
                    text.display()
                );
                Err(DiskError::new(ErrorKind::Usage, what, why, help))
            }
            _ => Ok(ImageName { format: said.unwrap_or(format), path: path.into() }),
        }
    }
}

/// The text before the first colon, if it is not part of a path, and the rest.
fn prefix(text: &OsStr) -> Option<(&OsStr, &OsStr)> {
    // File names are bytes.
    let mut parts = text.as_bytes().splitn(2, |byte| *byte == b':');
    let (prefix, path) = parts.next().zip(parts.next())?;
    let both = (OsStr::from_bytes(prefix), OsStr::from_bytes(path));
    (!prefix.contains(&b'/')).then_some(both)
}

/// The format of the disk behind the connection.
fn format_of(uri: &Uri) -> Format {
    match &uri.server {
        Address::Helped { by: Helped::Rbd(_), .. } => Format::Rbd,
        Address::Helped { by: Helped::Pool(_), .. } => Format::Pool,
        _ => Format::Nbd,
    }
}

/// The name of an export, with or without the format before it.
fn uri(text: &OsStr) -> Option<&str> {
    let text = text.to_str()?;
    let inner = text.strip_prefix("nbd:").filter(|inner| is_uri(inner.as_bytes()));
    inner.or_else(|| is_uri(text.as_bytes()).then_some(text))
}

/// The parts before and after the last `#`, if these can be a path and a volume's name.
fn parts_of_volume(text: &OsStr) -> Option<(&Path, &str)> {
    let text = text.as_bytes();
    let at = text.iter().rposition(|byte| *byte == b'#')?;
    let (path, name) = (&text[..at], std::str::from_utf8(&text[at + 1..]).ok()?);
    let is_one = !path.is_empty() && VolumeName::new(name).is_some();
    is_one.then(|| (Path::new(OsStr::from_bytes(path)), name))
}

fn foreign_extension(path: &Path) -> Option<&'static str> {
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    content::FOREIGN_EXTENSIONS.into_iter().find(|foreign| *foreign == extension)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_or_else_the_extension_says_the_format() {
        for (text, format, path) in [
            ("vhd:/dev/vg/lv", Format::Vhd, "/dev/vg/lv"),
            ("raw:/a/b.vhd", Format::Raw, "/a/b.vhd"),
            ("qcow2:b", Format::Qcow2, "b"),
            ("/a/b.VHD", Format::Vhd, "/a/b.VHD"),
            ("b.qcow2", Format::Qcow2, "b.qcow2"),
            ("b.img", Format::Raw, "b.img"),
            ("./a:b", Format::Raw, "./a:b"),
            ("/dev/disk/by-path/pci-0000:00", Format::Raw, "/dev/disk/by-path/pci-0000:00"),
        ] {
            let name = ImageName::parse(text).unwrap();
            assert_eq!(name, ImageName { format, path: path.into() }, "{text}");
        }
    }

    #[test]
    fn a_name_that_is_no_utf8_is_a_name() {
        for (text, format, path) in [
            (&b"vhd:\xff.img"[..], Format::Vhd, &b"\xff.img"[..]),
            (b"\xff.vhd", Format::Vhd, b"\xff.vhd"),
            (b"./\xff:b", Format::Raw, b"./\xff:b"),
        ] {
            let path = OsStr::from_bytes(path).into();
            let name = ImageName::parse(OsStr::from_bytes(text)).unwrap();
            assert_eq!(name, ImageName { format, path });
        }
        assert!(ImageName::parse(OsStr::from_bytes(b"\xff:b")).is_err());
    }

    #[test]
    fn names_of_formats_that_are_not_read_are_refused_unless_a_format_is_said() {
        for text in ["a.vhdx", "a.avhdx", "/b/a.vmdk", "a.VDI", "./a.qed", "a.qcow"] {
            let error = ImageName::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{text}");
            assert!(error.help().contains(&format!("raw:{text}")), "{error:?}");
            let raw = ImageName::parse(&format!("raw:{text}")).unwrap();
            assert_eq!(raw, ImageName { format: Format::Raw, path: text.into() });
            assert_eq!(ImageName::parse_as(text, Some(Format::Raw)).unwrap(), raw);
        }
    }

    #[test]
    fn a_prefix_and_a_format_that_contradict_each_other_are_refused() {
        let refused = ImageName::parse_as("raw:a.vhd", Some(Format::Vhd)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Usage);
        let agreed = ImageName::parse_as("raw:a.vhd", Some(Format::Raw)).unwrap();
        assert_eq!(agreed, ImageName { format: Format::Raw, path: "a.vhd".into() });
    }

    #[test]
    fn a_volume_is_named_by_its_store_and_what_is_behind_the_last_hash() {
        for (text, path, name) in [
            ("store:/srv/s#root", "/srv/s", "root"),
            ("store:a#b#c-1.d_e", "a#b", "c-1.d_e"),
            ("store:/dev/vg/lv#7", "/dev/vg/lv", "7"),
        ] {
            let parsed = ImageName::parse(text).unwrap();
            assert_eq!(parsed.volume(), Some((Path::new(path), name)), "{text}");
            assert_eq!(parsed.must_be_image().unwrap_err().kind(), ErrorKind::Usage);
        }
        let long = format!("store:a#{}", "b".repeat(64));
        for text in ["store:a", "store:#a", "store:a#", "store:a#-b", "store:a#b/c", &long] {
            assert_eq!(ImageName::parse(text).unwrap_err().kind(), ErrorKind::Usage, "{text}");
        }
        assert!(ImageName::parse_as("store:a#b", Some(Format::Raw)).is_err());
        // A file name alone does not name a volume.
        let raw = ImageName::parse("a.store").unwrap();
        assert_eq!((raw.format, raw.volume()), (Format::Raw, None));
        assert_eq!(ImageName::parse("a#b").unwrap().volume(), None);
    }

    #[test]
    fn an_export_is_named_as_its_server_is() {
        let uri = "nbd+unix:///a.vhd?socket=/run/s";
        for text in [uri, &format!("nbd:{uri}")] {
            let name = ImageName::parse(text).unwrap();
            assert_eq!((name.format, name.export()), (Format::Nbd, Some(uri)), "{text}");
            assert_eq!(name.must_be_image().unwrap_err().kind(), ErrorKind::Usage);
            assert!(ImageName::says_format(text));
        }
        let refused = ImageName::parse("nbd://host/a").unwrap_err();
        assert!(refused.help().contains("nbds://"), "{refused:?}");
        for text in ["nbd:", "nbd:a", "nbd:/a", "nbds:a"] {
            assert_eq!(ImageName::parse(text).unwrap_err().kind(), ErrorKind::Usage, "{text}");
        }
        assert!(ImageName::parse_as(uri, Some(Format::Raw)).is_err());
        assert_eq!(ImageName::parse("./nbd:a").unwrap().format, Format::Raw);
    }

    #[test]
    fn other_prefixes_and_empty_paths_are_refused() {
        for text in ["vmdk:a", "a:b", "vhd:", ":"] {
            assert_eq!(ImageName::parse(text).unwrap_err().kind(), ErrorKind::Usage, "{text}");
        }
    }
}
