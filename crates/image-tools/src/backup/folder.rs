//! A folder of backups: its names, its lock, and the chains in it.
//!
//! A backup NAME has two files: `NAME.qcow2`, the data, and `NAME.json`, the manifest. It is complete when it has the
//! manifest. Until then the data are `NAME.qcow2.partial`, and `NAME.json.partial` says how far they are.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, MAX_LAYERS, VolumeName};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

use super::manifest::{Hash, Manifest};
use crate::{ImageTools, broken, is_readable};

/// The end of the name of a manifest, and of one of an unfinished backup.
pub(super) const MANIFEST: &str = ".json";
pub(super) const UNFINISHED: &str = ".json.partial";
/// The end of the name of a file that stands while a map is begun.
pub(super) const BEGUN: &str = ".begun";
/// The end of the name of the manifest of a backup that is being removed.
pub(super) const REMOVED: &str = ".json.removed";
/// Most entries of a folder that are looked at.
const MAX_ENTRIES: usize = 100_000;
/// Most backups of one chain: as many as are served.
pub(super) const MAX_CHAIN: usize = MAX_LAYERS;

/// An open folder. It is locked until it is dropped: removing a backup excludes all other commands, and they exclude it.
pub(super) struct Folder {
    path: PathBuf,
    _locked: File,
}

/// What a command does with a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Adds a backup. The folder is made if it is not there.
    Add,
    /// Reads backups.
    Read,
    /// Removes or replaces backups.
    Remove,
}

/// The backups of a folder, by name: their manifests, or why these cannot be used.
pub(super) type Entries = BTreeMap<String, io::Result<Manifest>>;

impl Folder {
    pub(super) fn open(path: &Path, usage: Use) -> Result<Folder, DiskError> {
        let what = || format!("cannot use {} as a folder of backups", path.display());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let open = || ferrite_host::names::open(path, flags, Mode::empty());
        let opened = match open() {
            Err(Errno::NOENT) if usage == Use::Add => fs::create_dir(path)
                .and_then(|()| File::open(crate::parent_dir(path))?.sync_all())
                .and_then(|()| Ok(open()?)),
            opened => opened.map_err(io::Error::from),
        };
        let opened = opened.map_err(|e| match e.kind() {
            io::ErrorKind::NotADirectory => {
                let why = "a file has that name, or a part of the path is none";
                DiskError::new(ErrorKind::Unsuitable, what(), why, "name a folder, or a new one")
            }
            _ => broken(what(), e),
        })?;
        let how = match usage {
            Use::Add | Use::Read => FlockOperation::NonBlockingLockShared,
            Use::Remove => FlockOperation::NonBlockingLockExclusive,
        };
        match flock(&opened, how) {
            // A read-only network file system may have no locks: nothing is removed there either.
            Ok(()) | Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => {}
            Err(Errno::AGAIN) => {
                let why = match usage {
                    Use::Remove => "another command makes, reads or removes backups in it",
                    Use::Add | Use::Read => "another command is removing backups in it",
                };
                let help = "wait for that command, and run this one again";
                return Err(DiskError::new(ErrorKind::InUse, what(), why, help));
            }
            Err(e) => return Err(broken(what(), e.into())),
        }
        Ok(Folder { path: path.to_owned(), _locked: opened.into() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn file(&self, name: &str, end: &str) -> PathBuf {
        self.path.join(format!("{name}{end}"))
    }

    /// The path of a backup's data.
    pub(super) fn data(&self, name: &str) -> ImageName {
        ImageName { format: Format::Qcow2, path: self.file(name, ".qcow2") }
    }

    pub(super) fn manifest(&self, name: &str) -> PathBuf {
        self.file(name, MANIFEST)
    }

    pub(super) fn unfinished(&self, name: &str) -> PathBuf {
        self.file(name, UNFINISHED)
    }

    /// The file that says that a map of this name is begun for this folder, before it is.
    pub(super) fn begun(&self, map: &str) -> PathBuf {
        self.file(map, BEGUN)
    }

    pub(super) fn removed(&self, name: &str) -> PathBuf {
        self.file(name, REMOVED)
    }

    /// The names of the manifests that end so.
    pub(super) fn names(&self, end: &str) -> Result<Vec<String>, DiskError> {
        let cannot = |e| broken(format!("cannot list {}", self.path.display()), e);
        let mut names = Vec::new();
        for (i, entry) in fs::read_dir(&self.path).map_err(cannot)?.enumerate() {
            let entry = entry.map_err(cannot)?;
            if i >= MAX_ENTRIES {
                return Err(cannot(io::Error::other("it has too many files to be one of backups")));
            }
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(end));
            names.extend(name.and_then(VolumeName::new).map(|name| name.as_str().to_owned()));
        }
        names.sort();
        Ok(names)
    }

    /// All complete backups, also those that cannot be used.
    pub(super) fn entries(&self) -> Result<Entries, DiskError> {
        let names = self.names(MANIFEST)?;
        Ok(names.into_iter().map(|name| (name.clone(), self.read(&name))).collect())
    }

    fn read(&self, name: &str) -> io::Result<Manifest> {
        let manifest = Manifest::read(&self.manifest(name), name)?;
        match fs::symlink_metadata(self.data(name).path) {
            Ok(data) if data.is_file() => Ok(manifest),
            Ok(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "its data are no file")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "its data are missing"))
            }
            Err(e) => Err(e),
        }
    }

    /// The backup `name`, or without a name the newest, and those that it stands on: itself first, the full one last.
    pub(super) fn chain<'a>(
        &self,
        entries: &'a Entries,
        name: Option<&str>,
    ) -> Result<Vec<&'a Manifest>, DiskError> {
        let what = |name: &str| format!("cannot use backup {name} of {}", self.path.display());
        let name = match name {
            Some(name) => name,
            None => newest(self, entries)?,
        };
        let first = entries.get(name).ok_or_else(|| {
            let help = "ferrite backup list shows the backups that there are";
            let why = match self.unfinished(name).exists() {
                true => "it was interrupted, and is not complete",
                false => "there is no such backup",
            };
            DiskError::new(ErrorKind::NotFound, what(name), why, help)
        })?;
        let unusable = |name: &str, e: &io::Error| {
            let help = "restore an earlier one (ferrite backup list), or get the file back from a copy of the folder";
            DiskError::new(ErrorKind::Damaged, what(name), e.to_string(), help)
        };
        let mut chain = vec![first.as_ref().map_err(|e| unusable(name, e))?];
        while let Some(parent) = &chain[chain.len() - 1].parent {
            let found = match entries.get(&parent.name) {
                Some(found) => found.as_ref().map_err(|e| unusable(&parent.name, e))?,
                None => return Err(lacks(what(name), &parent.name)),
            };
            if found.id != parent.id || chain.len() >= MAX_CHAIN {
                let why = match found.id != parent.id {
                    true => {
                        format!("it stands on another backup {} than the one here", parent.name)
                    }
                    false => format!("more than {MAX_CHAIN} backups stand on each other"),
                };
                let help = "get the folder back as it was; the other backups can be used";
                return Err(DiskError::new(ErrorKind::Damaged, what(name), why, help));
            }
            chain.push(found);
        }
        Ok(chain)
    }

    /// Refuses a folder that this user may not read.
    pub(super) fn check_readable(path: &Path) -> Result<(), DiskError> {
        match is_readable(path) {
            true => Ok(()),
            false => Err(broken(
                format!("cannot read {}", path.display()),
                io::ErrorKind::PermissionDenied.into(),
            )),
        }
    }
}

fn lacks(what: String, parent: &str) -> DiskError {
    let why = format!("it stands on backup {parent}, which is missing");
    let help =
        "get that back from a copy of the folder: without it only earlier ones can be restored";
    DiskError::new(ErrorKind::Parent, what, why, help)
}

/// The newest backup of a folder that has those of one disk.
fn newest<'a>(folder: &Folder, entries: &'a Entries) -> Result<&'a str, DiskError> {
    let what = || format!("cannot choose a backup of {}", folder.path.display());
    let good = || entries.values().filter_map(|entry| entry.as_ref().ok());
    let Some(last) = good().max_by_key(|m| (m.created_unix_s, depth(entries, m))) else {
        let why = "there is no backup in it that can be used";
        return Err(DiskError::new(
            ErrorKind::NotFound,
            what(),
            why,
            "ferrite backup list says why",
        ));
    };
    if good().any(|m| m.disk.name != last.disk.name) {
        let why = "it has backups of several disks";
        let help = "name one with --name (ferrite backup list shows them)";
        return Err(DiskError::new(ErrorKind::Usage, what(), why, help));
    }
    if let Some((name, Err(why))) = entries.iter().find(|entry| entry.1.is_err()) {
        // It may be the newest one.
        let why = format!("backup {name} cannot be used ({why})");
        let help = format!("name the one that you want with --name; {} is a good one", last.name);
        return Err(DiskError::new(ErrorKind::Damaged, what(), why, help));
    }
    Ok(&last.name)
}

/// The number of backups that one stands on.
pub(super) fn depth(entries: &Entries, of: &Manifest) -> usize {
    let mut depth = 0;
    let mut next = of.parent.as_ref();
    while let Some(parent) = next.filter(|_| depth < MAX_CHAIN) {
        depth += 1;
        next = match entries.get(&parent.name) {
            Some(Ok(parent)) => parent.parent.as_ref(),
            _ => None,
        };
    }
    depth
}

/// The hash of each region of a chain's disk. A region without one is zeros.
pub(super) fn hashes(chain: &[&Manifest]) -> BTreeMap<u32, Hash> {
    let parts = chain.iter().rev().flat_map(|manifest| manifest.regions.iter().copied());
    parts.collect()
}

impl ImageTools<'_> {
    /// Removes a file if it is there.
    pub(super) fn remove_if_there(&self, path: &Path) -> io::Result<()> {
        match self.directory.remove(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
