//! Which image a disk is served from after it was switched to another one than the toolstack names.
//!
//! A guest that is started again by an unchanged configuration has to get the image that it has
//! written last. The file is in the state folder, so it outlives the host's restart. It is replaced
//! by a rename, and synced with its folder before the disk goes on.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::params::{Image, Params};

/// The name of the file: a JSON object from the configured image to the current one, each as
/// `FORMAT:PATH`.
const NAME: &str = "switched.json";
/// Most switches in a row that are followed.
const MAX_STEPS: usize = 64;

/// The switched images of this host.
#[derive(Debug)]
pub(crate) struct Switched {
    folder: PathBuf,
    one_writer: Mutex<()>,
}

impl Switched {
    pub(crate) fn new(folder: &Path) -> Switched {
        Switched { folder: folder.to_owned(), one_writer: Mutex::new(()) }
    }

    fn file(&self) -> PathBuf {
        self.folder.join(NAME)
    }

    fn read(&self) -> io::Result<BTreeMap<String, String>> {
        match fs::read(self.file()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            text => Ok(serde_json::from_slice(&text?)?),
        }
    }

    /// The image that a disk with this configured image is served from.
    ///
    /// # Errors
    /// The file exists and cannot be read. The configured image may be outdated then.
    pub(crate) fn current(&self, configured: &Image) -> io::Result<Image> {
        let map = self.read()?;
        let mut image = configured.clone();
        for _ in 0..MAX_STEPS {
            let next = key(&image).and_then(|name| map.get(&name));
            match next.map(|name| Params::parse(name.as_bytes())) {
                Some(Params::Image(next)) => image = next,
                _ => break,
            }
        }
        Ok(image)
    }

    /// Records that disks with the image `from` are served from `to` now. A switch back to an image
    /// ends what was recorded for it.
    ///
    /// # Errors
    /// Errors of the file system. The old file stays.
    pub(crate) fn record(&self, from: &Image, to: &Image) -> io::Result<()> {
        let _one = self.one_writer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut map = self.read()?;
        let (Some(from), Some(to)) = (key(from), key(to)) else {
            return Err(io::Error::other("a name of an image that is switched has to be UTF-8"));
        };
        map.remove(&to);
        // Images that led to the old one lead to the new one.
        map.values_mut().filter(|image| **image == from).for_each(|image| image.clone_from(&to));
        map.insert(from, to);
        map.retain(|configured, current| configured != current);
        self.write(&map)
    }

    /// Records that disks with this image are served from it. The record of a predecessor may be of a
    /// switch that was not made.
    ///
    /// # Errors
    /// As [`record`](Self::record), and as [`current`](Self::current).
    pub(crate) fn settle(&self, image: &Image) -> io::Result<()> {
        let current = self.current(image)?;
        match current == *image {
            true => Ok(()),
            false => self.record(&current, image),
        }
    }

    fn write(&self, map: &BTreeMap<String, String>) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        let new = self.file().with_extension("new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&new)?;
        file.write_all(&serde_json::to_vec_pretty(map)?)?;
        file.sync_all()?;
        fs::rename(&new, self.file())?;
        File::open(&self.folder)?.sync_all()
    }
}

fn key(image: &Image) -> Option<String> {
    image.name().into_string().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Format;

    #[test]
    fn switches_are_followed_to_the_last_image_and_back() {
        let dir = tempfile::tempdir().unwrap();
        let switched = Switched::new(&dir.path().join("state"));
        let image = |name: &str| Image { format: Format::Raw, path: Path::new("/srv").join(name) };
        let [a, b, c] = ["a", "b", "c"].map(image);
        assert_eq!(switched.current(&a).unwrap(), a);
        switched.record(&a, &b).unwrap();
        switched.record(&b, &c).unwrap();
        assert_eq!(
            [&a, &b, &c].map(|image| switched.current(image).unwrap()),
            [&c, &c, &c].map(Image::clone)
        );
        switched.record(&c, &a).unwrap();
        assert_eq!(
            [&a, &b, &c].map(|image| switched.current(image).unwrap()),
            [&a, &a, &a].map(Image::clone)
        );
        fs::write(switched.file(), "{").unwrap();
        assert!(switched.current(&a).is_err());
        assert!(switched.record(&a, &b).is_err());
    }
}
