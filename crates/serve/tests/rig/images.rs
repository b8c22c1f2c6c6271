//! Images in every format, and what is in them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::tools::{ImageTools, NewImage};
use ferrite_disk::{Disk, Format, ImageName, OpenOptions, Session};
use ferrite_io::directory::HostDirectory;
use ferrite_io::engines::test_engine;

use super::PATIENCE;

/// The formats, alone and as the leaf of a chain.
pub const FORMATS: [&str; 4] = ["vhd", "qcow2", "chain.vhd", "chain.qcow2"];

/// Where the answered metadata of images in this directory is kept.
pub fn state_dir(image: &Path) -> PathBuf {
    image.parent().unwrap().join("state")
}

fn work<T>(state_dir: Option<PathBuf>, work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    work(&ImageTools {
        directory: &HostDirectory,
        unlocked: false,
        engine: &|arena| test_engine().open(arena, 32),
        state_dir,
        fixed_size: false,
        parents: ferrite_disk::Parents::default(),
        progress: &|_| true,
    })
}

/// A new image that reads as zeros; of a chain, the leaf.
pub fn make(dir: &Path, format: &str, bytes: u64) -> PathBuf {
    let name = |file: &str| ImageName::parse(dir.join(file).to_str().unwrap()).unwrap();
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

/// What a disk goes on with that is exchanged: a child of an image that nobody has open; of a raw
/// image, which has none, a copy.
pub fn make_next(image: &Path, next: &Path) {
    let name = |path: &Path| ImageName::parse(path.to_str().unwrap()).unwrap();
    if name(image).format == Format::Raw {
        std::fs::copy(image, next).unwrap();
        return;
    }
    let new = NewImage { parent: Some(name(image)), ..NewImage::default() };
    work(Some(state_dir(image)), |tools| tools.create(&name(next), &new)).unwrap();
}

/// That nothing is wrong with an image that nobody has open, and its parents.
#[track_caller]
pub fn check(image: &Path) {
    let name = ImageName::parse(image.to_str().unwrap()).unwrap();
    let report = work(Some(state_dir(image)), |tools| tools.check(&name, true)).unwrap();
    assert!(report.usable, "{report:?}");
}

/// Writes to an image that nobody has open, and closes it in good order.
pub fn write(image: &Path, offset: u64, bytes: &[u8]) {
    let disk = Disk::open(image.to_str().unwrap(), &OpenOptions::default()).unwrap();
    let mut session = Session::new(Arc::new(disk), |arena| test_engine().open(arena, 32)).unwrap();
    session.write(offset, bytes).unwrap();
    session.close().unwrap();
}

/// All sectors of an image that nobody has open, with what a process that died had answered.
pub fn contents(image: &Path) -> Vec<u8> {
    let state_dir = Some(state_dir(image));
    let wait_for_lock = Some(PATIENCE);
    let options =
        OpenOptions { read_only: true, wait_for_lock, state_dir, ..OpenOptions::default() };
    let disk = Disk::open(image.to_str().unwrap(), &options).unwrap();
    let mut bytes = vec![0; disk.sectors() as usize * 512];
    let mut session = Session::new(Arc::new(disk), |arena| test_engine().open(arena, 32)).unwrap();
    for (i, piece) in bytes.chunks_mut(1 << 20).enumerate() {
        session.read((i as u64) << 20, piece).unwrap();
    }
    bytes
}
