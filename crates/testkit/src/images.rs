//! Images in every format, the tools for them, and their contents.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::{Disk, Format, ImageName, OpenOptions, Parents, Session};
use ferrite_host::directory::{Directory, HostDirectory};
use ferrite_image_tools::{ImageTools, NewImage};
use ferrite_io::engines::test_engine;

use crate::PATIENCE;

/// The formats, alone and as the leaf of a chain.
pub const FORMATS: [&str; 4] = ["vhd", "qcow2", "chain.vhd", "chain.qcow2"];

/// Operations in flight of a session.
const ENTRIES: u32 = 64;

/// The name of an image, with the format of its path.
pub fn name(path: &Path) -> ImageName {
    ImageName::parse(path.to_str().unwrap()).unwrap()
}

/// Runs operations on images that are not in use, with this directory for answered metadata.
pub fn work<T>(state_dir: Option<&Path>, work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    work(&ImageTools { state_dir: state_dir.map(Path::to_owned), ..tools(&HostDirectory) })
}

/// Runs operations with parents of images allowed anywhere.
pub fn anywhere<T>(directory: &dyn Directory, work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    work(&ImageTools { parents: Parents::Any, ..tools(directory) })
}

/// The operations on images, with the engine of the tests.
pub fn tools(directory: &dyn Directory) -> ImageTools<'_> {
    ImageTools {
        fixed_size: false,
        parents: Parents::default(),
        directory,
        unlocked: false,
        engine: &|arena| test_engine().open(arena, ENTRIES),
        state_dir: None,
        progress: &|_| true,
    }
}

/// A session of a disk, with that engine.
pub fn session(disk: Disk) -> Session {
    Session::new(Arc::new(disk), |arena| test_engine().open(arena, ENTRIES)).unwrap()
}

/// The directory for answered metadata of images in this one.
pub fn state_dir(image: &Path) -> PathBuf {
    image.parent().unwrap().join("state")
}

/// Makes an image of zeros; of a chain, the leaf.
pub fn make(dir: &Path, format: &str, bytes: u64) -> PathBuf {
    let name = |file: &str| name(&dir.join(file));
    let (chain, extension) = match format.strip_prefix("chain.") {
        Some(extension) => (true, extension),
        None => (false, format),
    };
    let leaf = name(&format!("disk.{extension}"));
    let mut new = NewImage { bytes: Some(bytes), ..NewImage::default() };
    if chain {
        let parent = name(&format!("parent.{extension}"));
        work(None, |tools| tools.create(&parent, &new)).unwrap();
        new.parent = Some(parent);
    }
    work(None, |tools| tools.create(&leaf, &new)).unwrap();
    leaf.path
}

/// Makes an empty qcow2 image with clusters of 512 bytes: a write of some MiB allocates space, with a sync.
pub fn make_of_small_clusters(dir: &Path, bytes: u64) -> PathBuf {
    let image = name(&dir.join("small.qcow2"));
    let new = NewImage { bytes: Some(bytes), unit_bytes: Some(512), ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    image.path
}

/// Makes the image that replaces another one under a disk: a child of an image that is not open; for a raw image, which
/// has none, a copy.
pub fn make_next(image: &Path, next: &Path) {
    if name(image).format == Format::Raw {
        std::fs::copy(image, next).unwrap();
        return;
    }
    let new = NewImage { parent: Some(name(image)), ..NewImage::default() };
    work(Some(&state_dir(image)), |tools| tools.create(&name(next), &new)).unwrap();
}

/// Checks that an image that is not open, and its parents, are intact.
#[track_caller]
pub fn check(image: &Path) {
    let report = work(Some(&state_dir(image)), |tools| tools.check(&name(image), true)).unwrap();
    assert!(report.usable, "{report:?}");
}

/// Writes to an image that is not open, and closes it in good order.
pub fn write(image: &Path, offset: u64, bytes: &[u8]) {
    let mut session = session(Disk::open(image, &OpenOptions::default()).unwrap());
    session.write(offset, bytes).unwrap();
    session.close().unwrap();
}

/// All sectors of an image that is not open, including a dead process's journal.
pub fn contents(image: &Path) -> Vec<u8> {
    let state_dir = Some(state_dir(image));
    let wait_for_lock = Some(PATIENCE);
    let options =
        OpenOptions { read_only: true, wait_for_lock, state_dir, ..OpenOptions::default() };
    let disk = Disk::open(image, &options).unwrap();
    let mut bytes = vec![0; disk.sectors() as usize * 512];
    let mut session = session(disk);
    for (i, piece) in bytes.chunks_mut(1 << 20).enumerate() {
        session.read((i as u64) << 20, piece).unwrap();
    }
    bytes
}
