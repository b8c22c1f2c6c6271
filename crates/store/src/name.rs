//! The name of a store, or of a volume in one: `PATH` or `PATH#NAME`.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use ferrite_disk_base::{DiskError, ErrorKind};

use super::journal::Name;

/// See the module text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreName {
    /// The store's file or device.
    pub path: PathBuf,
    /// A volume of it.
    pub volume: Option<Name>,
}

impl StoreName {
    /// `store:` may stand before it, as where an image is named. The last `#` separates. With nothing behind it the store itself is meant, whatever else its path has.
    ///
    /// # Errors
    /// There is no path, it has control characters, or the volume's name is none.
    pub fn parse(text: &(impl AsRef<OsStr> + ?Sized)) -> Result<StoreName, DiskError> {
        let text = text.as_ref();
        let bytes = text.as_bytes();
        // As images are named.
        let bytes = bytes.strip_prefix(b"store:").unwrap_or(bytes);
        let (path, volume) = match bytes.iter().rposition(|byte| *byte == b'#') {
            Some(at) => (&bytes[..at], &bytes[at + 1..]),
            None => (bytes, &b""[..]),
        };
        let refused = |why: &str| {
            let what = format!("cannot use {}", text.display());
            let help = "name a store PATH, and a volume of it PATH#NAME";
            Err(DiskError::new(ErrorKind::Usage, what, why, help))
        };
        if path.is_empty() {
            return refused("it names no file");
        }
        // A name that is shown, logged or kept as a line has to be one line.
        if text.to_string_lossy().contains(char::is_control) {
            return refused("its name has control characters");
        }
        let path = PathBuf::from(OsStr::from_bytes(path));
        if volume.is_empty() {
            return Ok(StoreName { path, volume: None });
        }
        match StoreName::entry(OsStr::from_bytes(volume)) {
            Ok(volume) => Ok(StoreName { path, volume: Some(volume) }),
            Err(e) => Err(e),
        }
    }

    /// The name of a volume, snapshot or domain.
    ///
    /// # Errors
    /// It is none.
    pub fn entry(text: &OsStr) -> Result<Name, DiskError> {
        text.to_str().and_then(Name::new).ok_or_else(|| {
            let what = format!("cannot use the name {}", text.display());
            let why = "it is no name of a volume, snapshot or domain";
            let help =
                "use 1 to 63 letters, digits, \"-\", \"_\" or \".\"; begin with a letter or digit";
            DiskError::new(ErrorKind::Usage, what, why, help)
        })
    }
}

impl fmt::Display for StoreName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.volume.as_ref().map_or(Ok(()), |volume| write!(f, "#{}", volume.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<(String, Option<String>)> {
        let name = StoreName::parse(text).ok()?;
        let volume = name.volume.map(|volume| volume.as_str().to_owned());
        Some((name.path.to_str()?.to_owned(), volume))
    }

    #[test]
    fn the_last_sign_separates_a_store_from_its_volume() {
        let of = |path: &str, volume: Option<&str>| Some((path.into(), volume.map(str::to_owned)));
        assert_eq!(parsed("/srv/store"), of("/srv/store", None));
        assert_eq!(parsed("/srv/store#web-1.x"), of("/srv/store", Some("web-1.x")));
        assert_eq!(parsed("a#b#c"), of("a#b", Some("c")));
        assert_eq!(parsed("a#b#"), of("a#b", None));
        assert_eq!(parsed("store:a#b"), of("a", Some("b")));
        assert_eq!(parsed("./store:a"), of("./store:a", None));
        assert_eq!(StoreName::parse("a#b#c").unwrap().to_string(), "a#b#c");
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let long = format!("a#{}", "x".repeat(64));
        for bad in ["", "#", "#a", "a#-b", "a#b/c", "a#b c", "a\n", "a\n#b", "a#\u{e9}", &long] {
            assert_eq!(parsed(bad), None, "{bad:?}");
        }
        assert!(parsed(&long[..65]).is_some());
    }
}
