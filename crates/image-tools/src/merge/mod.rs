//! Merges a stretch of a chain, in steps that can be taken while the leaf is in use.
//!
//! A chain: the leaf on C on A on M on B on the base. The stretch is A, M, ... down to just above B. Its steps:
//! 1. *copy*: the data of A and M are written into B. All that is written is hidden by A or M from each image above, so
//!    a process may have the chain open meanwhile, also for writing to the leaf. B keeps its place and its name.
//! 2. *relink*: C, which stood on A, gets B as its parent. It reads the same. If it is open, its process closes it for
//!    these few writes.
//! 3. *clean*: A and M, which no chain leads to any more, are removed.
//!
//! Until 2 the chain is the old one, and B an image that reads differently by itself only. After it the chain is the
//! new one, and A and M are files without use. So a crash at any moment leaves one chain or the other, and each step can
//! be taken again. A file beside B, `B.ferrite-merge.partial.json`, has how far the copy is durable, and what is to be
//! removed: without it nothing is. It goes with the merge, or with B.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, OpenOptions, Parents};
use ferrite_images::Image;
use ferrite_images::children::{self, Ask, absolute};
use serde::Serialize;

use super::files::same_file;
use super::resume::Resume;
use super::{Done, ImageTools, broken, formats, refused, unsuitable};

mod at_rest;
mod clean;
mod copy;
mod leaf;
mod link;

pub use leaf::LeafMerge;

/// A writer may change the leaf's tables while they are read without a lock.
const TRIES: usize = 3;
/// The name behind that of the lower end, beside which the progress is noted.
const NOTE: &str = ".ferrite-merge";

/// A stretch of a chain, by names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The leaf of the chain.
    pub leaf: ImageName,
    /// The upper end, below the leaf.
    pub from: ImageName,
    /// The lower end, which gets the data of all from the upper end on.
    pub to: ImageName,
}

/// How the data of a stretch are copied.
#[derive(Clone, Debug, Default)]
pub struct MergeCopy {
    /// Bytes a second, which may be changed meanwhile; 0: no limit.
    pub speed: Arc<AtomicU64>,
    /// Go on if images elsewhere would change.
    pub force: bool,
}

/// The effects of a merge of a stretch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MergePlan {
    /// The image that stands on the upper end, and will stand on the lower one.
    pub child: String,
    /// The images that are merged, the upper end first.
    pub images: Vec<String>,
    /// The lower end.
    pub to: String,
    /// Bytes of the disk that are copied, at most.
    pub virtual_bytes: u64,
    /// The least space that the lower end takes for the data.
    pub needed_bytes: u64,
    /// The lower end is smaller than the upper one, and has to grow while nothing has it open.
    pub must_grow: bool,
    /// The leaf is the upper end, and has so many bytes of data now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leaf_bytes: Option<u64>,
}

/// An image of a chain.
#[derive(Clone, Debug)]
struct Link {
    name: ImageName,
    bytes: u64,
}

/// A stretch that was found in its chain.
struct Found {
    leaf: ImageName,
    /// The image above the stretch.
    child: Link,
    /// The upper end first.
    images: Vec<Link>,
    to: Link,
    /// Bytes of the disk that the lower end stands on.
    below_bytes: u64,
    /// All of the chain.
    chain: Vec<Link>,
}

impl Found {
    fn from(&self) -> &Link {
        &self.images[0]
    }

    fn what(&self) -> String {
        cannot(&self.leaf)
    }

    fn plan(&self, needed_bytes: u64) -> MergePlan {
        let path = |link: &Link| link.name.path.display().to_string();
        MergePlan {
            child: path(&self.child),
            images: self.images.iter().map(path).collect(),
            to: path(&self.to),
            virtual_bytes: self.from().bytes,
            needed_bytes,
            must_grow: self.to.bytes < self.from().bytes,
            leaf_bytes: None,
        }
    }

    /// The path beside which the progress is noted.
    fn note(&self) -> PathBuf {
        note(&self.to.name.path)
    }
}

fn cannot(leaf: &ImageName) -> String {
    format!("cannot merge images of {}", leaf.path.display())
}

fn note(to: &Path) -> PathBuf {
    let mut path = OsString::from(to);
    path.push(NOTE);
    path.into()
}

/// Removes what a merge that was not completed has noted beside an image that is not there any more.
pub(super) fn forget_note(gone: &Path) -> io::Result<()> {
    Resume::remove(&note(gone))
}

/// The error of a chain that another command has changed.
fn changed(what: String) -> DiskError {
    let why = "another command has changed its chain meanwhile";
    let help = "look at it (ferrite image info) and run the same command again";
    DiskError::new(ErrorKind::InUse, what, why, help)
}

impl ImageTools<'_> {
    /// Tells what a merge would do. The default of `from` is the leaf's parent, that of `to` the parent of `from`.
    ///
    /// # Errors
    /// There is no such stretch, it cannot be merged, or an image elsewhere would change.
    pub fn merge_plan(
        &self,
        leaf: &ImageName,
        from: Option<&ImageName>,
        to: Option<&ImageName>,
        force: bool,
    ) -> Result<MergePlan, DiskError> {
        let stretch = self.stretch(leaf, from, to)?;
        if same_file(&stretch.from.path, &leaf.path).map_err(|e| broken(cannot(leaf), e))? {
            return self.leaf_plan(&stretch, force);
        }
        let found = self.find(&stretch)?;
        self.check_apart_from(&found, force)?;
        Ok(found.plan(self.merge_needs(&found)?))
    }

    /// The stretch with its defaults.
    ///
    /// # Errors
    /// The chain ends before that.
    pub fn stretch(
        &self,
        leaf: &ImageName,
        from: Option<&ImageName>,
        to: Option<&ImageName>,
    ) -> Result<Stretch, DiskError> {
        let chain = self.chain_of(leaf)?;
        let at = from.map_or(Ok(1), |from| place(leaf, &chain, from))?;
        let end = |what: &str| {
            let help = "there is nothing to merge it into; ferrite image info shows the chain";
            unsuitable(cannot(leaf), format!("{what} has no parent"), help)
        };
        let from = chain.get(at).ok_or_else(|| end("it"))?.name.clone();
        let to = match to {
            Some(to) => to.clone(),
            None => {
                let below = chain.get(at + 1);
                below.ok_or_else(|| end(&from.path.display().to_string()))?.name.clone()
            }
        };
        Ok(Stretch { leaf: leaf.clone(), from, to })
    }

    /// The images of a chain, the leaf first. The leaf may be open for writing, so no lock is taken.
    fn chain_of(&self, leaf: &ImageName) -> Result<Vec<Link>, DiskError> {
        let options = OpenOptions { unlocked: true, ..self.medium_options(true) };
        let mut opened = Image::open(leaf, &options);
        for _ in 1..TRIES {
            if opened.is_ok() {
                break;
            }
            opened = Image::open(leaf, &options);
        }
        let image = opened?;
        let link = |layer: &ferrite_images::Layer| {
            let medium = layer.medium().path();
            let path = absolute(medium).map_err(|e| broken(cannot(leaf), e))?;
            Ok(Link { name: ImageName { format: layer.format(), path }, bytes: layer.bytes() })
        };
        image.layers().iter().map(link).collect()
    }

    /// Finds a stretch in its chain, and checks that it can be merged.
    fn find(&self, stretch: &Stretch) -> Result<Found, DiskError> {
        let leaf = &stretch.leaf;
        let chain = self.chain_of(leaf)?;
        let (from, to) = (place(leaf, &chain, &stretch.from)?, place(leaf, &chain, &stretch.to)?);
        let refuse = |why: String, help: &str| Err(unsuitable(cannot(leaf), why, help));
        let shown = |name: &ImageName| name.path.display().to_string();
        if from >= to {
            let why = format!("{} is not below {}", shown(&stretch.to), shown(&stretch.from));
            return refuse(why, "--from names the upper end and --to the lower one");
        }
        if from == 0 {
            let why = "the leaf itself is merged in other steps";
            let help = "ferrite image coalesce merges it at rest, ferrite disk coalesce in use";
            return refuse(why.into(), help);
        }
        let found = Found {
            leaf: leaf.clone(),
            child: chain[from - 1].clone(),
            images: chain[from..to].to_vec(),
            to: chain[to].clone(),
            below_bytes: chain.get(to + 1).map_or(0, |below| below.bytes),
            chain,
        };
        self.check_found(&found)?;
        Ok(found)
    }

    fn check_found(&self, found: &Found) -> Result<(), DiskError> {
        let refuse = |why: String, help: &str| Err(unsuitable(found.what(), why, help));
        let convert = "ferrite image convert makes one image of the whole chain";
        let (upper, lower, child) = (found.from(), &found.to, &found.child.name);
        if !formats::stands_on(child.format, lower.name.format) {
            let why = format!(
                "{} is {}, and cannot stand on {}, which is {}",
                child.path.display(),
                child.format,
                lower.name.path.display(),
                lower.name.format
            );
            return refuse(why, convert);
        }
        for image in &found.images {
            let path = image.name.path.display();
            if self.is_device(&image.name.path) {
                return refuse(format!("{path} is a block device, which stays"), convert);
            }
            if image.name.path.is_symlink() {
                let help = "put the file itself where the link is";
                return refuse(format!("{path} is a symbolic link, and would be removed"), help);
            }
            if image.name.path.to_str().is_none() {
                return refuse(format!("the name of {path} is no UTF-8"), "rename it");
            }
        }
        if upper.bytes < lower.bytes {
            let why = format!(
                "{} has {}, and {} has more: {}",
                upper.name.path.display(),
                Human(upper.bytes),
                lower.name.path.display(),
                Human(lower.bytes)
            );
            return refuse(why, convert);
        }
        if lower.bytes < upper.bytes && found.below_bytes > lower.bytes {
            let why = format!(
                "{} would have to grow, and what it stands on is larger than it",
                lower.name.path.display()
            );
            return refuse(why, "merge that one into what it stands on first");
        }
        Ok(())
    }

    /// Refuses a merge that would change an image elsewhere, or might; with `force`, tells which. Another child of the
    /// upper end reads the same, but all of the stretch would have to stay.
    fn check_apart_from(&self, found: &Found, force: bool) -> Result<Vec<String>, DiskError> {
        let mut notes = Vec::new();
        let (from, what) = (&found.from().name, || found.what());
        let child = Some(found.child.name.path.as_path());
        let seen = children::look(&from.path, child, Ask::All).map_err(|e| broken(what(), e))?;
        if let Some(other) = seen.child {
            let (other, path) = (other.display(), from.path.display());
            if !force {
                let why = format!("{other} stands on {path}, too, which would have to stay");
                let help = "remove or flatten (convert) the other one first, or say --force: the \
                            images are merged then, and stay for it";
                return Err(refused(what(), why, help));
            }
            notes.push(format!("{other} stands on {path}, too: that and what is below it stay"));
        } else {
            notes.extend(self.check_alone(&found.child.name, from, force)?);
        }
        let below = found.images.iter().skip(1).chain([&found.to]);
        for (upper, lower) in found.images.iter().zip(below) {
            notes.extend(self.check_alone(&upper.name, &lower.name, force)?);
        }
        Ok(notes)
    }

    /// Options that allow the images of the chain as parents: they were found from the leaf, which may be in another
    /// folder.
    fn chain_options(&self, found: &Found, options: OpenOptions) -> OpenOptions {
        let parents = match options.parents {
            Parents::Any => Parents::Any,
            Parents::Within(mut named) => {
                let files = found.chain.iter().filter_map(|l| fs::canonicalize(&l.name.path).ok());
                named.extend(files);
                Parents::Within(named)
            }
        };
        OpenOptions { parents, ..options }
    }
}

/// The place of an image in a chain.
fn place(leaf: &ImageName, chain: &[Link], name: &ImageName) -> Result<usize, DiskError> {
    let is_it = |link: &Link| same_file(&link.name.path, &name.path).unwrap_or(false);
    chain.iter().position(is_it).ok_or_else(|| {
        let why = format!("{} is not in its chain", name.path.display());
        let is_gone = |e: std::io::Error| e.kind() == std::io::ErrorKind::NotFound;
        let (kind, help) = match fs::metadata(&name.path).is_err_and(is_gone) {
            true => (ErrorKind::NotFound, "if it was merged before, there is nothing left to do"),
            false => (ErrorKind::Unsuitable, "ferrite image info shows the chain"),
        };
        DiskError::new(kind, cannot(leaf), why, help)
    })
}

fn done(found: &Found, notes: Vec<String>) -> Done {
    super::create::done(&found.to.name, found.from().bytes, notes)
}
