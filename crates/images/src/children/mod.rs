//! The children of an image: a write to the image changes all of them.
//!
//! An image names its parent, and nothing names its children. So they are searched where they can be: in the parent's
//! own folder, and where its [marks] say that one was made. Children that other programs made in other folders are not
//! found. Neither are children of another name of the same file in another folder, so a file with such a name always
//! counts as one that may have children.
//!
//! A coalesce examines all files of the folder. Opening a disk for writing examines only those with names of images:
//! the first bytes of a raw disk are its guest's. A guest could otherwise claim another guest's disk as its parent, and
//! keep that from being served. Each file's head is read once, and more only of a possible child or a fixed VHD.

use std::collections::HashSet;
use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use ferrite_disk_base::{DiskError, ErrorKind, Format, READ_ONLY, Raw};
use ferrite_host::directory::Directory;
use ferrite_host::names;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use crate::qcow2::{backing_path, is_on_raw, is_qcow2};
use crate::vhd::{Head, Lineage, Uuid, head, lineage};
use ferrite_host::place::Place;

pub mod marks;

use marks::{Family, Held, Line, Mark, State};

/// The suffix of a new file until it is complete: it is no image yet, or no longer.
pub const NEW: &str = ".ferrite-new";
/// The suffix of a copy that can be resumed.
pub const PARTIAL: &str = ".partial";

/// A bound above the length of any chain that is read here.
const MAX_CHAIN: usize = 4096;

/// The files of the folder that are examined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// The files that the marks name.
    Marked,
    /// Files whose name is that of an image, and all that may be one.
    Named,
    /// All files. A file that cannot be examined counts.
    All,
}

/// The children that were found.
#[derive(Debug, Default)]
pub struct Children {
    /// A child. There may be more.
    pub child: Option<PathBuf>,
    /// The reason why there may be others that were not seen.
    pub unknown: Option<Unknown>,
    /// An image beside this one whose parent does not exist: this one may have had that name. It does not refuse
    /// serving this one, or one lost image would do so for all in the folder.
    pub lost: Option<Lost>,
}

/// An image whose parent does not exist. A qcow2 knows its parent by its name alone.
#[derive(Debug)]
pub struct Lost {
    pub(crate) child: PathBuf,
    pub(crate) parent: PathBuf,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (child, parent) = (self.child.display(), self.parent.display());
        write!(f, "{child} has lost its parent {parent}, which may have been a name of this image")
    }
}

/// The relation of another image to this one.
enum Stands {
    Here,
    Elsewhere,
    /// Its parent does not exist, as far as its name tells.
    Nowhere(PathBuf),
}

/// A file that may be a child.
#[derive(Debug)]
pub struct Unknown {
    /// Why it may be one.
    pub why: String,
    /// The next step for the user.
    pub(crate) help: String,
}

/// An image that may have children.
struct Target {
    identity: (u64, u64),
    /// The UUID of a VHD.
    uuid: Option<Uuid>,
    /// Former names that its children may still use.
    former: Vec<PathBuf>,
}

/// Device and inode of a file; the number of a block device, and 0. See [`Raw::inode`].
pub fn identity(meta: &Metadata) -> (u64, u64) {
    match meta.file_type().is_block_device() {
        true => (meta.rdev(), 0),
        false => (meta.dev(), meta.ino()),
    }
}

impl From<bool> for Stands {
    fn from(on_it: bool) -> Stands {
        if on_it { Stands::Here } else { Stands::Elsewhere }
    }
}

impl Target {
    fn of(path: &Path) -> io::Result<Target> {
        let uuid = match Raw::glance(path)? {
            Some(raw) => lineage(&raw).ok().flatten().map(|lineage| lineage.uuid),
            None => None,
        };
        Ok(Target { identity: identity(&names::metadata(path)?), uuid, former: Vec::new() })
    }

    fn is(&self, path: &Path) -> bool {
        let is_former = || absolute(path).is_ok_and(|path| self.former.contains(&path));
        names::metadata(path).is_ok_and(|meta| identity(&meta) == self.identity)
            || !self.former.is_empty() && is_former()
    }

    /// Whether the image at `path` is a child of this one.
    fn carries(&self, path: &Path) -> io::Result<Stands> {
        let Some(raw) = Raw::glance(path)? else { return Ok(Stands::Elsewhere) };
        match lineage(&raw)? {
            Some(child) => Ok(self.carries_vhd(&child).into()),
            None => Ok(self.carries_qcow2(backing_path(&raw)?)),
        }
    }

    fn carries_qcow2(&self, parent: Option<PathBuf>) -> Stands {
        match parent {
            Some(parent) if self.is(&parent) => Stands::Here,
            Some(parent) if !names::exists(&parent) => Stands::Nowhere(parent),
            _ => Stands::Elsewhere,
        }
    }

    /// [`carries`](Self::carries) for a file with the name of an image. It reads no further than its head if that
    /// excludes a child. The format may differ from the name's.
    fn carries_named(&self, path: &Path) -> io::Result<Stands> {
        let Some(raw) = Raw::glance(path)? else { return Ok(Stands::Elsewhere) };
        let of_another = |head: &Head| match head.parent {
            None => true,
            Some(Uuid::NIL) => false,
            Some(parent) => ![Some(parent), Some(head.uuid)].contains(&self.uuid),
        };
        // A fixed VHD begins with data of its guest, so its name counts first.
        if Format::of_path(path) != Format::Qcow2 || !is_qcow2(&raw)? {
            if head(&raw).is_some_and(|head| of_another(&head)) {
                return Ok(Stands::Elsewhere);
            }
            if let Some(child) = lineage(&raw)? {
                return Ok(self.carries_vhd(&child).into());
            }
        }
        Ok(self.carries_qcow2(backing_path(&raw)?))
    }

    /// Whether the image at `path` is below this one, with any number of images but `except` between the two.
    fn is_below(&self, path: &Path, except: Option<(u64, u64)>) -> io::Result<bool> {
        let Some(first) = Raw::glance(path)? else { return Ok(false) };
        let (mut images, mut seen) = (vec![first], HashSet::new());
        while let Some(image) = images.pop() {
            let identity = image.inode();
            if Some(identity) == except || !seen.insert(identity) {
                continue;
            }
            if seen.len() > MAX_CHAIN {
                return Err(io::Error::other("its chain is too long"));
            }
            let (carries, parents, on_raw) = match lineage(&image)? {
                Some(child) => {
                    let carries = self.carries_vhd(&child);
                    let parent =
                        child.parent.map(|parent| (parent.uuid == Uuid::NIL, parent.paths));
                    let (on_raw, paths) = parent.unwrap_or_default();
                    (carries, paths, on_raw)
                }
                None => {
                    let parent = backing_path(&image)?;
                    let carries = parent.as_deref().is_some_and(|parent| self.is(parent));
                    let on_raw = parent.is_some() && is_on_raw(&image)?;
                    (carries, parent.into_iter().collect(), on_raw)
                }
            };
            if carries {
                return Ok(true);
            }
            let there = those_there(image.path(), parents)?;
            // A raw image has no parent.
            if !on_raw {
                images.extend(glances(&there)?);
            }
        }
        Ok(false)
    }

    /// A VHD also names its parent by its UUID, which copies of the parent have as well. So if there is a file at one
    /// of its paths, that counts. If there is none, this one was moved away from there.
    fn carries_vhd(&self, child: &Lineage) -> bool {
        let Some(parent) = &child.parent else { return false };
        let at_place = parent.paths.iter().any(|path| self.is(path));
        if parent.uuid == Uuid::NIL {
            return at_place;
        }
        let moved = || !parent.paths.iter().any(names::exists);
        match self.uuid {
            Some(uuid) if uuid == parent.uuid => at_place || moved(),
            // A coalesce of the two was interrupted after the exchange of identities.
            Some(uuid) if uuid == child.uuid => at_place,
            _ => false,
        }
    }
}

/// The absolute path of a file, with its folder freed of links. The last name may be a link: the user named the file by
/// that.
///
/// # Errors
/// The path has no last name, or its folder cannot be found.
pub fn absolute(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    Ok(names::canonicalize(folder.unwrap_or(Path::new(".")))?.join(name))
}

/// Those places of an image's parent at which a file exists.
fn those_there(child: &Path, parents: Vec<PathBuf>) -> io::Result<Vec<PathBuf>> {
    let (there, missing): (Vec<_>, Vec<_>) =
        parents.into_iter().partition(|path| names::exists(path));
    match missing.first() {
        Some(parent) if there.is_empty() => {
            let (child, parent) = (child.display(), parent.display());
            Err(io::Error::other(format!("{child} stands on {parent}, which is not there")))
        }
        _ => Ok(there),
    }
}

fn glances(paths: &[PathBuf]) -> io::Result<Vec<Raw>> {
    let mut found = Vec::new();
    for path in paths {
        found.extend(Raw::glance(path)?);
    }
    Ok(found)
}

/// Whether a file is a mount itself (`mount --bind`): its other name is in an unknown folder.
///
/// # Errors
/// The file cannot be examined.
pub fn is_mount_point(file: &Path) -> io::Result<bool> {
    let mount = |path: &Path| {
        statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).map(|stat| stat.stx_mnt_id)
    };
    Ok(mount(file)? != mount(file.parent().unwrap_or(Path::new("/")))?)
}

/// A parent whose marks are examined, and the image that asks.
struct Asked<'a> {
    target: &'a Target,
    except: Option<(u64, u64)>,
}

impl Family for Asked<'_> {
    fn is_below(&self, path: &Path) -> io::Result<bool> {
        self.target.is_below(path, self.except)
    }

    fn has_parent(&self, path: &Path) -> io::Result<bool> {
        let none = || io::Error::other("it is no image");
        let raw = Raw::glance(path)?.ok_or_else(none)?;
        match lineage(&raw)? {
            Some(vhd) => Ok(vhd.parent.is_some()),
            None if is_qcow2(&raw)? => Ok(backing_path(&raw)?.is_some()),
            None => Err(none()),
        }
    }

    fn is_excepted(&self, file: (u64, u64)) -> bool {
        file == self.target.identity || Some(file) == self.except
    }
}

/// Searches for children of the image at `parent`, besides `except`.
///
/// # Errors
/// The parent itself cannot be examined.
pub fn look(parent: &Path, except: Option<&Path>, ask: Ask) -> io::Result<Children> {
    let mut target = Target::of(parent)?;
    let (except_path, except) =
        (except, except.and_then(|path| Some(identity(&names::metadata(path).ok()?))));
    let itself = target.identity;
    let counts = |path: &Path| {
        let identity = names::metadata(path).ok().map(|meta| identity(&meta));
        identity.is_none_or(|found| found != itself && Some(found) != except)
    };
    let mut found = Children::default();
    // Beside the file itself, not beside a link to it.
    let file = names::canonicalize(parent)?;
    let names = names(&file, &mut found)?;
    let place = Place::lasting(&file)?;
    // The process that has served the image so far has examined the others.
    if ask != Ask::Marked {
        target.former = marks::former_names(&file, &place, ask == Ask::All).unwrap_or_default();
    }
    // The file at the path of a child that was moved proves nothing about the child.
    let may_count =
        |line: &Line| line.mark().is_none_or(|mark| counts(&mark.child) || mark.is_displaced());
    let is_its = |line: &Line| line.is_of(&place) && may_count(line);
    for name in &target.former {
        marked(name, &target, except, is_its, &mut found);
    }
    // If another image has a former name now, files that name it are that image's children.
    target.former.retain(|name| !names::exists(name));
    for name in &names {
        marked(name, &target, except, may_count, &mut found);
    }
    if let Some(path) = except_path {
        other_names(&names::canonicalize(path)?, &mut found)?;
    }
    if found.child.is_none() && ask != Ask::Marked {
        in_folder(&file, &target, counts, ask, &mut found);
    }
    Ok(found)
}

/// Whether the chain of the image at `path` leads to the one at `parent`.
///
/// # Errors
/// An image of the chain cannot be examined.
pub fn is_below(parent: &Path, path: &Path) -> io::Result<bool> {
    Target::of(parent)?.is_below(path, None)
}

/// The names of a file in its folder. Children of its names in other folders cannot be found.
fn names(file: &Path, found: &mut Children) -> io::Result<Vec<PathBuf>> {
    let meta = names::metadata(file)?;
    if meta.nlink() <= 1 || meta.file_type().is_block_device() {
        return Ok(vec![file.to_owned()]);
    }
    let is_name = |path: &PathBuf| {
        let other = names::symlink_metadata(path);
        other.is_ok_and(|other| identity(&other) == identity(&meta))
    };
    let entries = names::read_dir(file.parent().unwrap_or(Path::new("/")))?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let names = paths.collect::<io::Result<Vec<_>>>()?.into_iter().filter(is_name);
    let names: Vec<_> = names.collect();
    if (names.len() as u64) < meta.nlink() {
        let path = file.display();
        let why = format!(
            "{path} has {} names (hard links), and {} of them in its folder",
            meta.nlink(),
            names.len()
        );
        let help = format!(
            "find the others (find DIRECTORY -xdev -samefile {path}) and remove them, or {READ_ONLY}"
        );
        found.unknown = Some(Unknown { why, help });
    }
    Ok(names)
}

/// Other names of a child: a merge leaves them its old state, on a parent that changes.
fn other_names(file: &Path, found: &mut Children) -> io::Result<()> {
    let names = names(file, found)?;
    let other = names.into_iter().find(|name| name != file && !is_unfinished(name));
    found.child = other.or(found.child.take());
    Ok(())
}

/// Whether the name is that of an image that is being made. After a crash it may be a second name of a finished image.
fn is_unfinished(path: &Path) -> bool {
    let name = path.as_os_str().as_bytes();
    [NEW, PARTIAL].iter().any(|suffix| name.ends_with(suffix.as_bytes()))
}

/// Examines the files that the marks name.
fn marked(
    file: &Path,
    target: &Target,
    except: Option<(u64, u64)>,
    counts: impl Fn(&Line) -> bool,
    found: &mut Children,
) {
    let list = marks::beside(file);
    let list = list.display();
    let unknown = |why| {
        let help = format!(
            "bring that back, or {READ_ONLY}; what is gone for good may be taken out of {list}"
        );
        Some(Unknown { why, help })
    };
    let all = match marks::read(file) {
        Ok(all) => all,
        Err(e) => return found.unknown = unknown(format!("{list} cannot be read: {e}")),
    };
    for line in marks::distinct(all).iter().filter(|line| counts(line)) {
        match line {
            Line::Mark(mark) => match mark.state(&Asked { target, except }) {
                State::Child(path) => found.child = Some(path),
                State::Unknown(why) => found.unknown = unknown(why),
                State::Gone => {}
            },
            Line::Unknown(line) => {
                let line = String::from_utf8_lossy(line);
                found.unknown = unknown(format!("a line of {list} makes no sense: {line:?}"));
            }
        }
    }
}

/// Examines the files of the folder.
fn in_folder(
    file: &Path,
    target: &Target,
    counts: impl Fn(&Path) -> bool,
    ask: Ask,
    found: &mut Children,
) {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let unknown = |path: &Path, e: io::Error| {
        let why = format!("{} cannot be read: {e}", path.display());
        Some(Unknown { why, help: "see to it that it can be read".into() })
    };
    let entries = match names::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if ask == Ask::All => return found.unknown = unknown(folder, e),
        Err(_) => return,
    };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let is_new = path.as_os_str().as_bytes().ends_with(NEW.as_bytes());
        let is_asked = || match ask {
            Ask::All => !is_new && is_file(&path),
            Ask::Marked | Ask::Named => is_named_as_image(&path) && !is_new && is_file(&path),
        };
        if !is_asked() || !counts(&path) {
            continue;
        }
        let carries = match ask {
            Ask::All => target.carries(&path),
            Ask::Marked | Ask::Named => target.carries_named(&path),
        };
        match carries {
            Ok(Stands::Here) => return found.child = Some(path),
            Ok(Stands::Elsewhere) => {}
            Ok(Stands::Nowhere(parent)) => found.lost = Some(Lost { child: path, parent }),
            Err(e) if ask == Ask::All => found.unknown = unknown(&path, e),
            Err(_) => {}
        }
    }
}

/// Whether the name is that of an image, also of QEMU's other formats: they may have a parent of a known format.
fn is_named_as_image(path: &Path) -> bool {
    let is_foreign = || path.extension().is_some_and(|end| end == "qed" || end == "qcow");
    Format::of_path(path) != Format::Raw || is_foreign()
}

fn is_file(path: &Path) -> bool {
    names::metadata(path).is_ok_and(|meta| meta.is_file())
}

/// Adds `mark`, of a child of the image in `file`, to the image's list, and removes marks of children that are gone.
///
/// # Errors
/// The list cannot be made durable.
pub fn leave_mark(directory: &dyn Directory, file: &Path, mark: &Mark) -> io::Result<Held> {
    let (target, place) = (Target::of(file)?, Place::lasting(file)?);
    marks::leave(directory, file, mark, |line| reviewed(line, &target, &place))
}

/// Removes the mark of a child that was not made, and marks of children that are gone.
///
/// # Errors
/// The list cannot be made durable.
pub fn take_mark_back(directory: &dyn Directory, file: &Path, mark: &Mark) -> io::Result<()> {
    let (target, place) = (Target::of(file)?, Place::lasting(file)?);
    let is_it = |line: &Line| line.mark() == Some(mark);
    let keep = |line: Line| (!is_it(&line)).then(|| reviewed(line, &target, &place)).flatten();
    marks::review(directory, file, keep)
}

/// Decides what happens to a line when an image's list is rewritten.
fn reviewed(line: Line, target: &Target, place: &Place) -> Option<Line> {
    let Line::Mark(mark) = line else { return Some(line) };
    // The image that had this name before may be the child's parent.
    let is_anothers = mark.is_of_another(place) && names::exists(&mark.child);
    match mark.state(&Asked { target, except: None }) {
        State::Child(path) if path == mark.child => Some(Line::Mark(mark.refreshed())),
        State::Gone if !is_anothers => None,
        _ => Some(Line::Mark(mark)),
    }
}

/// The lists with marks of an image, and its identity: see [`forget_all`].
pub struct Lists(Vec<PathBuf>, Place);

/// Finds the lists with marks of the image in `file`.
///
/// # Errors
/// The image cannot be examined.
pub fn lists(file: &Path) -> io::Result<Lists> {
    let place = Place::lasting(file)?;
    let mut names = marks::former_names(file, &place, false)?;
    names.push(file.to_owned());
    Ok(Lists(names, place))
}

/// Removes all marks of an image, which may have been renamed since. Marks of other images stay.
///
/// # Errors
/// The lists cannot be made durable.
pub fn forget_all(directory: &dyn Directory, Lists(names, place): &Lists) -> io::Result<()> {
    for name in names.iter().filter(|name| names::exists(marks::beside(name))) {
        let is_own = Some(name) == names.last();
        let is_anothers = |line: &Line| match line.mark() {
            Some(mark) if is_own => mark.is_of_another(place),
            Some(_) => !line.is_of(place),
            None => !is_own,
        };
        marks::review(directory, name, |line| Some(line).filter(is_anothers))?;
    }
    Ok(())
}

/// Transfers the marks of an image to the one in `file`, which will get its name. They name the new parent, and are
/// found after it is renamed.
///
/// # Errors
/// The lists cannot be made durable.
pub fn inherit(
    directory: &dyn Directory,
    Lists(names, place): &Lists,
    file: &Path,
) -> io::Result<()> {
    let heir = Place::lasting(file)?;
    for name in names.iter().filter(|name| names::exists(marks::beside(name))) {
        marks::review(directory, name, |line| Some(line.handed_over(place, &heir)))?;
    }
    Ok(())
}

/// Refuses to write to an image that has children. The image is open and locked, so no child can be made meanwhile.
/// Children of a block device cannot be found, so a device is never refused.
///
/// # Errors
/// `Refused`: the image has a child, or may have one. `Io`: the search failed.
pub fn check_none(medium: &Raw, ask: Ask) -> Result<(), DiskError> {
    if !medium.is_file() {
        return Ok(());
    }
    let path = medium.path();
    let what = format!("cannot open image {} for writing", path.display());
    let look = || match names::metadata(path)?.nlink() {
        // The file has no name any more, so its children cannot find it.
        0 => Ok(Children::default()),
        _ => look(path, None, ask),
    };
    let found = look().map_err(|e| {
        let help = "check the medium below it and the kernel's log (dmesg)";
        DiskError::new(ErrorKind::Io, &what, e.to_string(), help).with_source(e)
    })?;
    if let Some(child) = found.child {
        let child = child.display();
        let why = format!("{child} stands on it, and would change with it");
        let help = format!("{READ_ONLY}, or make a new image on it (ferrite image clone)");
        return Err(DiskError::new(ErrorKind::Refused, what, why, help));
    }
    if let Some(Unknown { why, help }) = found.unknown {
        let why = format!("an image may stand on it: {why}");
        return Err(DiskError::new(ErrorKind::Refused, what, why, help));
    }
    Ok(())
}
