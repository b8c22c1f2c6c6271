//! An image with children in its folder and in another one.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ferrite_disk::{Disk, DiskError, ErrorKind, Format, ImageName};
use ferrite_host::directory::{Directory, HostDirectory};
use ferrite_image_tools::NewImage;
use tempfile::TempDir;

use super::vhd::{at, options};
use super::{MIB, anywhere, dir_on_disk};

/// Those whose images can have children.
pub(crate) const FORMATS: [Format; 2] = [Format::Vhd, Format::Qcow2];

/// A template in folder `a` and an image on it in `a`, and one in `b`.
pub(crate) struct Tree {
    pub(crate) dir: TempDir,
    format: Format,
}

impl Tree {
    pub(crate) fn new(format: Format) -> Tree {
        let tree = Tree { dir: dir_on_disk(), format };
        for folder in ["a", "b"] {
            fs::create_dir(tree.path(folder)).unwrap();
        }
        tree.create("a/base");
        tree.clone("a/base", "a/own");
        tree
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        at(&self.dir, path)
    }

    pub(crate) fn image(&self, path: &str) -> ImageName {
        ImageName { format: self.format, path: self.path(path) }
    }

    pub(crate) fn create(&self, name: &str) {
        let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
        anywhere(&HostDirectory, |tools| tools.create(&self.image(name), &new)).unwrap();
    }

    pub(crate) fn clone(&self, parent: &str, name: &str) {
        let new = NewImage { parent: Some(self.image(parent)), ..NewImage::default() };
        anywhere(&HostDirectory, |tools| tools.create(&self.image(name), &new)).unwrap();
    }

    pub(crate) fn rename(&self, from: &str, to: &str) {
        fs::rename(self.path(from), self.path(to)).unwrap();
    }

    pub(crate) fn remove(&self, path: &str) {
        fs::remove_file(self.path(path)).unwrap();
    }

    pub(crate) fn list(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.ferrite-children"))).unwrap_or_default()
    }

    pub(crate) fn coalesce(&self, name: &str) -> Result<(), DiskError> {
        anywhere(&HostDirectory, |tools| tools.coalesce(&self.image(name), false)).map(drop)
    }

    #[track_caller]
    pub(crate) fn refuses_to_coalesce(&self, name: &str, why: &str) {
        let error = self.coalesce(name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        assert!(error.to_string().contains(why), "{why:?} was expected: {error}");
    }

    pub(crate) fn make_writable(&self, name: &str) {
        fs::set_permissions(self.path(name), Permissions::from_mode(0o644)).unwrap();
    }

    pub(crate) fn open(&self, name: &str) -> Result<Disk, DiskError> {
        Disk::open_image(&self.image(name), &options())
    }
}

/// Does not give one name to any file.
pub(crate) struct Refuses(pub(crate) PathBuf);

impl Directory for Refuses {
    fn create_new(&self, path: &Path) -> io::Result<OwnedFd> {
        match path == self.0 {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => HostDirectory.create_new(path),
        }
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        HostDirectory.hard_link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        match to == self.0 {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => HostDirectory.rename(from, to),
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        HostDirectory.remove(path)
    }

    fn sync(&self, directory: &Path) -> io::Result<()> {
        HostDirectory.sync(directory)
    }
}
