//! Making VHDs, and what the tools of others say about them.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::open_medium;
use ferrite_disk::{Disk, DiskError, OpenOptions, Port, Raw};
use ferrite_images::vhd::{Footer, NewImage, NewParent};
use ferrite_io::engine::Engine;
use ferrite_io::engines::test_engine;
use ferrite_io::pool::Pool;
use ferrite_io::reactor::Reactor;
use ferrite_testkit::errno::ENOSYS;
use ferrite_testkit::faulty::{Faults, Kind, Ops};

use super::Queue;
pub(crate) use ferrite_testkit::programs::peer;

/// How these tests open images: a ring that was dropped lets go of its files a little later.
pub(crate) fn options() -> OpenOptions {
    OpenOptions { wait_for_lock: Some(Duration::from_secs(30)), ..OpenOptions::default() }
}

/// A queue on a VHD, whatever its name, and whatever stands on it.
pub(crate) fn queue(path: &Path) -> Queue {
    let options = OpenOptions { even_parent: true, ..options() };
    Queue::new(Disk::open(&format!("vhd:{}", name(path)), &options).unwrap())
}

/// Runs steps on files that are no disk yet; the first is file 0.
pub(crate) fn offline<T>(media: &[&Raw], steps: impl AsyncFnOnce(Port) -> T) -> T {
    offline_files(media.iter().flat_map(|raw| raw.files()).collect(), steps)
}

/// The same, for open files.
pub(crate) fn offline_files<T>(files: Vec<Arc<OwnedFd>>, steps: impl AsyncFnOnce(Port) -> T) -> T {
    offline_on(|engine| engine, files, steps)
}

/// The same, on an engine around the usual one.
pub(crate) fn offline_on<T>(
    wrap: impl FnOnce(Box<dyn Engine>) -> Box<dyn Engine>,
    files: Vec<Arc<OwnedFd>>,
    steps: impl AsyncFnOnce(Port) -> T,
) -> T {
    let pool = Pool::with_scratch(2 << 20, 1, 256 << 10).unwrap();
    let engine = test_engine().open(pool.arena().clone(), 64).unwrap();
    let mut reactor = Reactor::new(wrap(engine));
    let files = files.into_iter().map(|f| reactor.add_file(f).unwrap()).collect();
    let port = super::port(&reactor, &pool, files);
    reactor.block_on(steps(port)).unwrap()
}

/// Makes an image in a new file.
pub(crate) fn create(path: &Path, new: &NewImage) -> Result<Footer, DiskError> {
    File::create_new(path).unwrap();
    create_on(path, new)
}

/// The same on a file system that sets no space aside, so that a fixed image is sparse.
pub(crate) fn create_sparse(path: &Path, new: &NewImage) -> Result<Footer, DiskError> {
    File::create_new(path).unwrap();
    let raw = open_medium(path, &options()).unwrap();
    let faults = Faults::none();
    faults.set([Ops::from(Kind::Allocate).fail(ENOSYS)]);
    let wrap = |engine| faults.around(engine);
    offline_on(wrap, raw.files(), async |port| new.create(&port, &raw).await)
}

/// Makes an image on what is there: a block device.
pub(crate) fn create_on(path: &Path, new: &NewImage) -> Result<Footer, DiskError> {
    let raw = open_medium(path, &options()).unwrap();
    offline(&[&raw], async |port| new.create(&port, &raw).await)
}

/// A parent in the same directory or elsewhere.
pub(crate) fn parent(path: &Path, footer: &Footer) -> NewParent {
    NewParent {
        uuid: footer.uuid,
        bytes: footer.current_size,
        modified_unix_s: 0,
        path: path.canonicalize().unwrap(),
    }
}

/// That `vhd-util`, which no distribution has, finds nothing wrong with an image, where it is
/// installed.
#[track_caller]
pub(crate) fn check_by_vhd_util(path: &Path) {
    match Command::new("vhd-util").args(["check", "-n", name(path)]).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "vhd-util check {}: {text}", path.display());
        }
        Err(_) => eprintln!("skipped: vhd-util is not installed"),
    }
}

/// A path as text.
pub(crate) fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A file in a directory.
pub(crate) fn at(dir: &tempfile::TempDir, name: &str) -> PathBuf {
    dir.path().join(name)
}
