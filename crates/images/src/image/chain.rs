//! Opens a chain from its leaf on: each image names its parent.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ErrorKind, ImageName, OpenOptions, Parents};
use ferrite_host::names;
use rustix::io::Errno;

use super::format::ParentNames;
use super::layer::Layer;

/// Memory for tables of a chain that are kept completely: 32 VHDs of 2,040 GiB each.
const MAX_TABLE_BYTES: u64 = 256 << 20;

/// Opens an image and its parents. The leaf is opened as the options say, parents read-only.
pub(super) fn open_chain(name: &ImageName, options: &OpenOptions) -> Result<Vec<Layer>, DiskError> {
    match open_as_far(name, options)? {
        (layers, None) => Ok(layers),
        (_, Some(e)) => Err(e),
    }
}

/// Opens an image and its parents, as many of these as can be opened. The error tells why the chain ends there. The
/// leaf is opened as the options say, parents read-only.
///
/// # Errors
/// The leaf cannot be opened.
pub fn open_as_far(
    name: &ImageName,
    options: &OpenOptions,
) -> Result<(Vec<Layer>, Option<DiskError>), DiskError> {
    open_some(name, options, usize::MAX)
}

/// [`open_as_far`], and no more than `count` images.
pub(super) fn open_some(
    name: &ImageName,
    options: &OpenOptions,
    count: usize,
) -> Result<(Vec<Layer>, Option<DiskError>), DiskError> {
    let mut layers = vec![Layer::open(name, options)?];
    // The length of the chain is not known yet. Until then each layer gets little, so a hostile chain also takes little
    // (threats.md T17).
    let parents = OpenOptions {
        read_only: true,
        as_parent: true,
        beside_readers: false,
        metadata_bytes: options.metadata_bytes / 16,
        opened: None,
        inner_snapshot: None,
        format_said: false,
        ..options.clone()
    };
    let end = loop {
        if layers.len() >= count {
            break None;
        }
        match open_parent(&layers, &parents) {
            Ok(Some(found)) => layers.push(found),
            Ok(None) => break None,
            Err(e) => break Some(e),
        }
        if let Err(e) = check_tables(&layers) {
            break Some(e);
        }
    };
    let share = options.metadata_bytes / layers.len();
    layers.iter_mut().for_each(|layer| layer.set_metadata_bytes(share));
    Ok((layers, end))
}

/// Bounds the tables that are kept completely: a sparse file may have 32 MiB of them (threats.md T17).
fn check_tables(layers: &[Layer]) -> Result<(), DiskError> {
    let bytes: u64 = layers.iter().map(Layer::table_bytes).sum();
    if bytes <= MAX_TABLE_BYTES {
        return Ok(());
    }
    Err(DiskError::new(
        ErrorKind::Unsuitable,
        format!("cannot open image {}", layers[0].medium().path().display()),
        format!("the tables of its first {} images take {}", layers.len(), Human(bytes)),
        "coalesce some of the chain first; at most 256 MiB are used for the tables of a chain",
    ))
}

/// The parent of the last layer, if it has one.
fn open_parent(layers: &[Layer], options: &OpenOptions) -> Result<Option<Layer>, DiskError> {
    let Some(child) = layers.last() else { return Ok(None) };
    let Some(ParentNames { name, candidates }) = child.parents()? else { return Ok(None) };
    let child_path = child.medium().path();
    let refuse = |why: String, help: &str| -> Result<Option<Layer>, DiskError> {
        let what = format!("cannot open image {}", child_path.display());
        Err(DiskError::new(ErrorKind::Unsuitable, what, why, help))
    };
    if layers.len() >= options.max_layers {
        let number = layers.len();
        let why = format!("it has a parent, and is number {number} of its chain already");
        let help =
            format!("make the chain shorter: ferrite image coalesce {}", child_path.display());
        return refuse(why, &help);
    }
    let mut last = None;
    for candidate in candidates.iter().filter(|candidate| names::exists(&candidate.path)) {
        if is_layer(layers, &candidate.path) {
            let path = candidate.path.display();
            let why = format!("its parent {path} is itself or one of its children");
            return refuse(why, "the chain is damaged: find the image that it was made on");
        }
        if is_no_medium(&candidate.path) {
            let why = format!("its parent {} is no file or device", candidate.path.display());
            let help = "put the parent back to where it was when the image was made";
            last = last.or(refuse(why, help).err());
            continue;
        }
        let leaf = layers[0].medium().path();
        if !options.parents.allow(leaf, &candidate.path).unwrap_or(false) {
            last = last.or(Some(Parents::refusal(child_path, &candidate.path)));
            continue;
        }
        let accepted = Layer::open(candidate, options).and_then(|layer| {
            check_opened(&layers[0], child_path, &candidate.path, &layer, &options.parents)?;
            child.accepts_parent(&layer)?;
            Ok(layer)
        });
        match accepted {
            Ok(layer) => return Ok(Some(layer)),
            Err(e) => last = last.or(Some(e)),
        }
    }
    let paths: Vec<_> = candidates.iter().map(|candidate| &candidate.path).collect();
    let outside = paths.iter().find(|path| names::is_refused(path));
    match (last, outside) {
        (Some(e), _) => Err(e),
        (None, Some(path)) => Err(Parents::outside(child_path, path)),
        (None, None) if paths.is_empty() => refuse(
            format!("it names its parent {name:?}, and no place of it"),
            "say where that is: ferrite image rebase -u IMAGE -b PARENT",
        ),
        (None, None) => refuse(
            format!("its parent {name:?} is not at {}", places(&paths)),
            "put the parent back to where it was when the image was made, or, if it has another name \
             now, say so: ferrite image rebase -u IMAGE -b PARENT",
        )
        .map_err(|e| e.with_source(Errno::NOENT)),
    }
}

/// Absolute paths in one line, each once.
fn places(paths: &[&PathBuf]) -> String {
    let mut places = Vec::new();
    for path in paths {
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let place = format!("{whole:?}");
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places.join(", nor at ")
}

/// Whether the path is a folder, a pipe or a socket.
fn is_no_medium(path: &Path) -> bool {
    names::metadata(path).is_ok_and(|meta| {
        let kind = meta.file_type();
        kind.is_dir() || kind.is_fifo() || kind.is_socket()
    })
}

/// Refuses a file that was opened by a parent's name and is not allowed. The name may have led elsewhere when it was
/// checked: the owner of a folder can replace links in it at any moment.
fn check_opened(
    leaf: &Layer,
    child: &Path,
    path: &Path,
    parent: &Layer,
    parents: &Parents,
) -> Result<(), DiskError> {
    match parents.allow_opened(leaf.medium().fd(), path, parent.medium().fd()) {
        Ok(true) => Ok(()),
        Ok(false) | Err(_) => Err(Parents::refusal(child, path)),
    }
}

/// Whether `path` is open as one of the layers.
fn is_layer(layers: &[Layer], path: &Path) -> bool {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let Ok(meta) = names::metadata(path) else { return false };
    let inode = match meta.file_type().is_block_device() {
        true => (meta.rdev(), 0),
        false => (meta.dev(), meta.ino()),
    };
    layers.iter().any(|layer| layer.medium().inode() == inode)
}
