//! A folder as a storage repository: its images, and what XAPI wants to be remembered of them.
//!
//! The images are the files whose names end in `.vhd` or `.qcow2`; the name is the volume's key. The folder `.smapi` has a
//! file of the repository, `sr.json`, and one for each volume, `KEY.json`: name, description, keys. An image without one
//! is a volume, too, so folders of images can be taken over. The images name their parents.
//!
//! An image whose file says `hidden` is no volume. Each call that makes or removes images says so first:
//! 1. The file says `hidden`, durably.
//! 2. The image is made, durably.
//! 3. The file says the rest, durably, and the image is a volume.
//!
//! To destroy is the way back. A crash leaves a volume as it was, or a hidden image, which is removed by a later call
//! when no image stands on it ([`super::volume_images`]).

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use ferrite_disk::Format;
use ferrite_host::clock::secret;
use serde::{Deserialize, Serialize};

use super::files::{self, Wait};
use super::uri::{Image, folder, of_folder};
use super::{Fault, Kind};

/// The folder of our files, in the repository's.
const OURS: &str = ".smapi";
const REPOSITORY: &str = "sr.json";
const LOCK: &str = "lock";
/// Locked, together with others, by calls that wait for [`LOCK`].
const WAITING: &str = "lock.waiting";
/// Locked by the process that merges images.
const COLLECTOR: &str = "lock.coalesce";
/// Why images were not merged.
const NOTE: &str = "coalesce.log";
/// Most bytes of that file.
const MOST_NOTES: u64 = 64 << 10;
/// Names of images that a merge of the daemon makes contain this.
const OF_JOB: &str = ".ferrite-job-";
/// The longest key: the name of an image, to which tools add more while they write a new one.
const MAX_KEY: usize = 200;

/// The file of the repository.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Repository {
    pub(super) uuid: String,
    pub(super) name: String,
    pub(super) description: String,
    /// The format of new volumes.
    pub(super) format: String,
    /// Whether hidden images with a single image on them stay. Older files do not say so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) no_coalesce: bool,
}

impl Repository {
    /// Whether hidden images with a single image on them are merged.
    pub(super) fn coalesces(&self) -> bool {
        !self.no_coalesce
    }
}

/// The file of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Record {
    /// The image is no volume.
    pub(super) hidden: bool,
    pub(super) uuid: Option<String>,
    pub(super) name: String,
    pub(super) description: String,
    /// The bytes of the disk when they were last known, for an image that cannot be read.
    pub(super) bytes: u64,
    /// The volume is a snapshot.
    pub(super) read_only: bool,
    /// The volume that a snapshot or clone was made of.
    pub(super) made_of: Option<String>,
    pub(super) keys: BTreeMap<String, String>,
}

impl Record {
    /// The file of an image that is not a volume yet, or no longer.
    pub(super) fn hidden() -> Record {
        Record { hidden: true, ..Record::default() }
    }
}

/// A repository.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    pub(super) repository: Repository,
}

impl Folder {
    /// Makes a folder a repository. The folder has to exist: it may be where a file system is yet to be mounted.
    pub(super) fn create(path: &Path, repository: Repository) -> Result<Folder, Fault> {
        let path = existing(path)?;
        let ours = path.join(OURS);
        let other = read_repository(&ours)?.filter(|other| other.uuid != repository.uuid);
        if let Some(other) = other {
            let help = "attach that one, or remove the folder .smapi in it to make another";
            let text = format!(
                "cannot make a repository of {}: it is that of {} already; {help}",
                path.display(),
                other.uuid
            );
            return Err(Fault::new(Kind::Failed, text));
        }
        let made = files::make_folder(&ours)
            .and_then(|()| files::sync_folder_of(&ours))
            .and_then(|()| files::replace(&ours.join(REPOSITORY), &repository));
        made.map_err(|e| {
            Fault::of_io(format!("cannot make a repository of {}", path.display()), e)
        })?;
        Ok(Folder { path, repository })
    }

    /// The repository in a folder, if there is one.
    pub(super) fn find(path: &Path) -> Result<Option<Folder>, Fault> {
        let path = existing(path)?;
        let repository = read_repository(&path.join(OURS))?;
        Ok(repository.map(|repository| Folder { path, repository }))
    }

    /// The repository in a folder.
    pub(super) fn at(path: &Path) -> Result<Folder, Fault> {
        Folder::find(path)?.ok_or_else(|| {
            let help = "mount what belongs there, or make a repository of it (SR.create)";
            let text = format!("there is no repository in {}; {help}", path.display());
            Fault::new(Kind::SrDoesNotExist, text)
        })
    }

    /// The repository that `attach` gave this name.
    pub(super) fn named(sr: &str) -> Result<Folder, Fault> {
        let path = folder(sr).ok_or_else(|| {
            let help = "use what SR.attach has answered";
            Fault::new(Kind::SrDoesNotExist, format!("{sr} is no repository in a folder; {help}"))
        })?;
        Folder::at(&path)
    }

    /// Its name for later calls.
    pub(super) fn sr(&self) -> String {
        of_folder(&self.path.display().to_string())
    }

    /// Calls that change something follow each other. A merge of images is cancelled for them.
    pub(super) fn lock(&self) -> Result<OwnedFd, Fault> {
        let ours = self.path.join(OURS);
        let waits = files::lock_shared(&ours.join(WAITING));
        let lock = waits.and_then(|_waits| files::lock(&ours.join(LOCK), Wait::UntilFree));
        lock.map_err(|e| Fault::of_io(format!("cannot lock {}", self.path.display()), e))
    }

    /// Whether another call waits for the lock.
    pub(super) fn is_awaited(&self) -> bool {
        files::lock(&self.path.join(OURS).join(WAITING), Wait::Never).is_err()
    }

    /// The lock of the process that merges images. `None`: there is one.
    pub(super) fn collector(&self) -> Result<Option<OwnedFd>, Fault> {
        let path = self.path.join(OURS).join(COLLECTOR);
        match files::lock(&path, Wait::Never) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            lock => lock
                .map(Some)
                .map_err(|e| Fault::of_io(format!("cannot lock {}", path.display()), e)),
        }
    }

    /// Notes why images were not merged. No caller waits for the process that merges.
    pub(super) fn note(&self, text: &str) {
        let path = self.path.join(OURS).join(NOTE);
        if path.metadata().is_ok_and(|file| file.len() > MOST_NOTES) {
            let _ = fs::remove_file(&path);
        }
        let file = fs::File::options().create(true).append(true).mode(0o600).open(&path);
        // The file system may be full. The next process tries the merge again.
        let _ = file.and_then(|mut file| writeln!(file, "{}", crate::plain::one_line(text)));
    }

    /// Has no images of the repository in this image's folder merged while the lock is held. `None`: it is no repository.
    pub(super) fn hold(image: &Path) -> Result<Option<(Folder, OwnedFd)>, Fault> {
        let Some(folder) = image.parent().filter(|folder| folder.join(OURS).is_dir()) else {
            return Ok(None);
        };
        let Some(folder) = Folder::find(folder)? else { return Ok(None) };
        let lock = folder.lock()?;
        Ok(Some((folder, lock)))
    }

    pub(super) fn save(&self) -> Result<(), Fault> {
        let path = self.path.join(OURS).join(REPOSITORY);
        let saved = files::replace(&path, &self.repository);
        saved.map_err(|e| Fault::of_io(format!("cannot write {}", path.display()), e))
    }

    /// The folder is no repository any more.
    pub(super) fn forget(&self) -> Result<(), Fault> {
        let ours = self.path.join(OURS);
        let removed =
            files::remove(&ours.join(REPOSITORY)).and_then(|()| match fs::remove_dir_all(&ours) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
                _ => files::sync_folder_of(&ours),
            });
        removed.map_err(|e| Fault::of_io(format!("cannot remove {}", ours.display()), e))
    }

    /// The image of a key. The key of a caller must not lead out of the folder.
    pub(super) fn image(&self, key: &str) -> Result<Image, Fault> {
        let Some(format) = format_of(key) else {
            let help = "keys are names of images in the folder, which end in .vhd or .qcow2";
            let text = format!("no volume can have the key {key}; {help}");
            return Err(Fault::new(Kind::VolumeDoesNotExist, text));
        };
        Ok(Image { format, path: self.path.join(key).display().to_string() })
    }

    /// Whether an image is there, as a file of this folder.
    pub(super) fn has(&self, key: &str) -> bool {
        self.path.join(key).symlink_metadata().is_ok_and(|there| there.is_file())
    }

    /// The keys of all images, hidden ones, too.
    pub(super) fn keys(&self) -> Result<Vec<String>, Fault> {
        let read = fs::read_dir(&self.path).and_then(|entries| {
            let names = entries.map(|entry| Ok(entry?.file_name().into_string().ok()));
            names.filter_map(io::Result::transpose).collect::<io::Result<Vec<String>>>()
        });
        let mut keys =
            read.map_err(|e| Fault::of_io(format!("cannot list {}", self.path.display()), e))?;
        keys.retain(|key| format_of(key).is_some() && self.has(key));
        keys.sort();
        Ok(keys)
    }

    /// The keys that have a file, with or without an image.
    pub(super) fn recorded(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path.join(OURS)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let keys = names.filter_map(|name| Some(name.strip_suffix(".json")?.to_owned()));
        keys.filter(|key| format_of(key).is_some()).collect()
    }

    /// The file of a volume; `None`: an image that was put there by other means.
    pub(super) fn record(&self, key: &str) -> Result<Option<Record>, Fault> {
        let path = self.path_of_record(key);
        files::read(&path).map_err(|e| {
            let help = "remove the file if it cannot be restored: the volume loses its name then";
            Fault::new(Kind::Failed, format!("cannot read {}: {e}; {help}", path.display()))
        })
    }

    pub(super) fn set_record(&self, key: &str, record: &Record) -> Result<(), Fault> {
        let path = self.path_of_record(key);
        let saved = files::replace(&path, record);
        saved.map_err(|e| Fault::of_io(format!("cannot write {}", path.display()), e))
    }

    pub(super) fn remove_record(&self, key: &str) -> Result<(), Fault> {
        let path = self.path_of_record(key);
        let removed = files::remove(&path);
        removed.map_err(|e| Fault::of_io(format!("cannot remove {}", path.display()), e))
    }

    /// Removes files of volumes that killed calls were writing. The caller has the lock, so no other call writes one.
    pub(super) fn remove_unfinished(&self) {
        let entries = fs::read_dir(self.path.join(OURS)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        for name in names.filter(|name| is_unfinished(name)) {
            // They do no harm, and the next call tries again.
            let _ = fs::remove_file(self.path.join(OURS).join(name));
        }
    }

    fn path_of_record(&self, key: &str) -> PathBuf {
        self.path.join(OURS).join(format!("{key}.json"))
    }
}

/// The folder without links, as its images are named in URIs.
fn existing(path: &Path) -> Result<PathBuf, Fault> {
    let found = path.canonicalize().and_then(|path| match path.is_dir() {
        true => Ok(path),
        false => Err(io::ErrorKind::NotADirectory.into()),
    });
    let found = found.map_err(|e| {
        let help = "give the path of a folder that exists, as the key path of the configuration";
        let text = format!("cannot use {} as a repository: {e}; {help}", path.display());
        Fault::new(Kind::SrDoesNotExist, text)
    })?;
    match found.to_str() {
        Some(text) if path.is_absolute() && !text.contains(char::is_control) => Ok(found),
        _ => {
            let text = format!(
                "cannot use {} as a repository: its path is not an absolute one of plain text; choose another",
                path.display()
            );
            Err(Fault::new(Kind::Invalid, text))
        }
    }
}

fn read_repository(ours: &Path) -> Result<Option<Repository>, Fault> {
    let path = ours.join(REPOSITORY);
    files::read(&path).map_err(|e| {
        let help = "restore it from a backup, or remove it and make the repository again";
        Fault::new(Kind::Failed, format!("cannot read {}: {e}; {help}", path.display()))
    })
}

/// The format of the image with this key; `None`: it cannot be a key.
fn format_of(key: &str) -> Option<Format> {
    let is_name = !key.starts_with('.') && !key.contains('/') && !key.contains(char::is_control);
    let format = Format::of_path(Path::new(key));
    (is_name && key.len() <= MAX_KEY && format != Format::Raw).then_some(format)
}

/// Whether the image was made by a merge of the daemon, and is below a volume.
pub(super) fn is_of_job(key: &str) -> bool {
    key.contains(OF_JOB)
}

/// Whether this is the name of a volume's file that is being written.
fn is_unfinished(name: &str) -> bool {
    let key = name.strip_suffix(files::NEW).and_then(|name| name.strip_suffix(".json"));
    key.and_then(format_of).is_some()
}

/// A UUID of version 4.
pub(super) fn new_uuid() -> Result<String, Fault> {
    let mut bytes: [u8; 16] =
        secret().map_err(|e| Fault::of_io("the kernel has no random numbers", e))?;
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let (a, b, c, d, e) =
        (&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]);
    Ok(format!("{a}-{b}-{c}-{d}-{e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_the_name_of_an_image_in_the_folder_and_nothing_else() {
        assert_eq!(format_of("a b:c.vhd"), Some(Format::Vhd));
        assert_eq!(format_of("a.QCOW2"), Some(Format::Qcow2));
        for key in ["", ".", "..", "a", "a.img", "a.raw", ".a.vhd", "../a.vhd", "a/b.vhd", "/a.vhd"]
        {
            assert_eq!(format_of(key), None, "{key}");
        }
        assert_eq!(format_of("a\nb.vhd"), None);
        assert_eq!(format_of(&format!("{}.vhd", "a".repeat(250))), None);
    }

    #[test]
    fn a_uuid_is_one_of_version_4() {
        let (a, b) = (new_uuid().unwrap(), new_uuid().unwrap());
        assert_ne!(a, b);
        let parts: Vec<usize> = a.split('-').map(str::len).collect();
        assert_eq!((parts, &a[14..15]), (vec![8, 4, 4, 4, 12], "4"));
    }
}
