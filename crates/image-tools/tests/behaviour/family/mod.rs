//! A parent and its children, made, merged and looked for; and a directory that says what is done to it.

use std::cell::RefCell;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ferrite_disk::{Disk, DiskError, ErrorKind, ImageName};
use ferrite_host::directory::{Directory, HostDirectory};
use ferrite_image_tools::{Done, NewImage};
use tempfile::TempDir;

use crate::common::vhd::{at, options};
use crate::common::{MIB, anywhere, dir_on_disk, work};

pub(crate) const FORMATS: [&str; 2] = ["vhd", "qcow2"];

pub(crate) fn name(format: &str, path: &Path) -> ImageName {
    ImageName::parse(&format!("{format}:{}", path.to_str().unwrap())).unwrap()
}

pub(crate) fn create(image: &ImageName) {
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(image, &new)).unwrap();
}

pub(crate) fn on(parent: &ImageName) -> NewImage {
    NewImage { parent: Some(parent.clone()), ..NewImage::default() }
}

pub(crate) fn clone(parent: &ImageName, child: &ImageName) -> Done {
    work(None, |tools| tools.create(child, &on(parent))).unwrap()
}

pub(crate) fn clone_anywhere(parent: &ImageName, child: &ImageName) -> Done {
    anywhere(&HostDirectory, |tools| tools.create(child, &on(parent))).unwrap()
}

pub(crate) fn coalesce(child: &ImageName, force: bool) -> Result<Done, DiskError> {
    work(None, |tools| tools.coalesce(child, force))
}

pub(crate) fn open(image: &ImageName) -> Result<Disk, DiskError> {
    Disk::open_image(image, &options())
}

pub(crate) fn snapshot(leaf: &ImageName, parent: &ImageName) -> Done {
    anywhere(&HostDirectory, |tools| tools.snapshot(leaf, parent)).unwrap()
}

/// Makes an image writable, as a user does who does not know of its children.
pub(crate) fn make_writable(image: &ImageName) {
    fs::set_permissions(&image.path, Permissions::from_mode(0o644)).unwrap();
}

/// Gives an image one more name.
pub(crate) fn link(image: &ImageName, name: &Path) -> ImageName {
    fs::hard_link(&image.path, name).unwrap();
    ImageName { path: name.to_owned(), ..image.clone() }
}

/// A parent and a child in a folder, and where another child is to be.
pub(crate) struct Family {
    pub(crate) dir: TempDir,
    pub(crate) parent: ImageName,
    pub(crate) child: ImageName,
    pub(crate) other: ImageName,
}

impl Family {
    /// `other` is a path from the folder.
    pub(crate) fn new(format: &str, other: &str) -> Family {
        let dir = dir_on_disk();
        let image = |file: &str| name(format, &at(&dir, file));
        let (parent, child) =
            (image(&format!("parent.{format}")), image(&format!("child.{format}")));
        fs::create_dir(at(&dir, "elsewhere")).unwrap();
        create(&parent);
        clone(&parent, &child);
        let other = image(other);
        Family { dir, parent, child, other }
    }

    /// With the other child.
    pub(crate) fn whole(format: &str, other: &str) -> Family {
        let family = Family::new(format, other);
        clone(&family.parent, &family.other);
        family
    }

    /// The merge would destroy the other child, so it is refused for that reason.
    #[track_caller]
    pub(crate) fn refuses(&self, why: &str) {
        let before = fs::read(&self.parent.path).unwrap();
        let error = coalesce(&self.child, false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        assert!(error.to_string().contains(why), "{why:?} was expected: {error}");
        assert!(fs::read(&self.parent.path).unwrap() == before);
        drop(Disk::open_image(&self.child, &options()).unwrap());
    }
}

/// Says what is done to directories, and may fail.
pub(crate) struct Watched {
    done: RefCell<Vec<String>>,
    fails: Option<&'static str>,
}

impl Watched {
    fn note(&self, what: &str, path: &Path) -> io::Result<()> {
        let name = path.file_name().unwrap().to_str().unwrap();
        match self.fails {
            Some(part) if name.contains(part) => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            _ => {
                self.done.borrow_mut().push(format!("{what} {name}"));
                Ok(())
            }
        }
    }

    pub(crate) fn clone(&self, family: &Family, new: &NewImage) -> Result<Done, DiskError> {
        anywhere(self, |tools| tools.create(&family.other, new))
    }
}

impl Watched {
    pub(crate) fn log(fails: Option<&'static str>) -> Watched {
        Watched { done: RefCell::default(), fails }
    }

    /// Whether these were done, in this order.
    #[track_caller]
    pub(crate) fn did(self, steps: &[&str]) {
        let done = self.done.into_inner();
        let mut rest = done.iter();
        assert!(steps.iter().all(|step| rest.any(|done| done == step)), "{done:?}");
    }
}

impl Directory for Watched {
    fn create_new(&self, path: &Path) -> io::Result<OwnedFd> {
        self.note("create", path)?;
        HostDirectory.create_new(path)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let list = fs::File::open(to.with_file_name("../parent.vhd.ferrite-children"));
        let lock = rustix::fs::FlockOperation::NonBlockingLockShared;
        if list.is_ok_and(|list| rustix::fs::flock(list, lock).is_err()) {
            self.note("locked", to)?;
        }
        self.note("name", to)?;
        HostDirectory.hard_link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.note("name", to)?;
        HostDirectory.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        HostDirectory.remove(path)
    }

    fn sync(&self, directory: &Path) -> io::Result<()> {
        self.note("sync", &directory.canonicalize()?)?;
        HostDirectory.sync(directory)
    }
}
