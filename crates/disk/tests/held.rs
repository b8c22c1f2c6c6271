//! The keeper holds images that this process has opened by it (docs/internals/processes.md 5).
//!
//! There is one keeper for the process, which is a thread here.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ferrite_disk::{Disk, ErrorKind, OpenOptions};
use ferrite_host::names::policy::{Policy, Right};
use ferrite_host::names::server::{Images, Served, Server};
use ferrite_host::names::{self, Broker};
use ferrite_testkit::images;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tempfile::TempDir;

/// A folder whose images all are this process's.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut policy = Policy::default();
        policy.add(dir.path(), true, Right::Read);
        for name in ["good.vhd", "bad.vhd", "short.img", "locked.img", "closed.img"] {
            policy.add(&dir.path().join(name), false, Right::Write);
        }
        // Before there is a keeper, which lets no process make images.
        let good = images::make(dir.path(), "vhd", 4 << 20);
        std::fs::rename(good, dir.path().join("good.vhd")).unwrap();
        keep(policy);
        dir
    });
    folder.path()
}

fn keep(policy: Policy) {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let server = Server::new(theirs, policy, std::process::id());
    std::thread::spawn(move || {
        let mut images = Images::default();
        while server.serve_one(&mut images).unwrap() != Served::Ended {
            poll(&mut [PollFd::new(&server.fd(), PollFlags::IN)], None).unwrap();
        }
    });
    names::install(Broker::new(ours)).unwrap();
}

fn open(path: &Path) -> Result<Disk, ErrorKind> {
    Disk::open(path, &OpenOptions::default()).map_err(|e| e.kind())
}

fn is_free(path: &Path) -> bool {
    let file = File::options().read(true).write(true).open(path).unwrap();
    flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

fn raw(name: &str, bytes: u64) -> PathBuf {
    let path = folder().join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

#[test]
fn an_image_that_cannot_be_opened_is_free_at_once() {
    let bad = folder().join("bad.vhd");
    std::fs::write(&bad, vec![0; 4096]).unwrap();
    let short = raw("short.img", 100);
    for path in [bad, short] {
        open(&path).unwrap_err();
        assert!(is_free(&path), "{}", path.display());
    }
}

/// The keeper would have it open, and the administrator could not unmount or detach the medium.
#[test]
fn an_image_that_somebody_else_has_locked_is_not_held() {
    let path = raw("locked.img", 1 << 20);
    let other = File::options().read(true).write(true).open(&path).unwrap();
    flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(open(&path).unwrap_err(), ErrorKind::InUse);
    let held = std::fs::read_dir("/proc/self/fd").unwrap();
    let held = held.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    assert_eq!(held.filter(|to| *to == path).count(), 1, "the other one's");
}

#[test]
fn an_image_that_nobody_was_served_from_is_free_when_it_is_dropped() {
    let path = folder().join("good.vhd");
    let disk = open(&path).unwrap();
    assert!(!is_free(&path));
    drop(disk);
    assert!(is_free(&path));
    // A guest may have been answered: it is the next process's from then on.
    let disk = open(&path).unwrap();
    disk.keep();
    drop(disk);
    assert!(!is_free(&path));
    // A process that fails leaves the image free to be repaired.
    let disk = open(&path).unwrap();
    drop(disk);
    assert!(is_free(&path));
}

#[test]
fn an_image_that_is_closed_or_let_go_of_is_nobodys() {
    let path = raw("closed.img", 1 << 20);
    let disk = open(&path).unwrap();
    disk.keep();
    disk.unlock();
    assert!(is_free(&path));
    drop(disk);
    let disk = open(&path).unwrap();
    disk.let_go();
    disk.keep();
    // As long as it is open here, or an operation of a dead process has it open.
    assert!(!is_free(&path));
    drop(disk);
    assert!(is_free(&path));
}
