//! A snapshot whose process is killed (`SIGKILL`) at each of its steps: the disk can be written to, and nothing that is
//! written is lost.
//!
//! It is a program of its own: new processes have the images of other tests open for a moment.

#[path = "../../disk/tests/common/mod.rs"]
mod common;

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use ferrite_disk::Format;
use ferrite_host::directory::{Directory, HostDirectory};
use rustix::process::{Signal, getpid, kill_process};

use common::tree::{FORMATS, Tree};
use common::{MIB, Queue, anywhere};

/// Where the process that is killed finds the folder, the format and the step.
const FOLDER: &str = "FERRITE_TEST_KILLED_FOLDER";
const FORMAT: &str = "FERRITE_TEST_KILLED_FORMAT";
const STEP: &str = "FERRITE_TEST_KILLED_STEP";

/// The directories of a process that is killed before or after one of their changes.
struct Killed {
    left: Cell<u32>,
}

impl Killed {
    fn step(&self) {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            None => kill_process(getpid(), Signal::KILL).unwrap(),
        }
    }

    fn around<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.step();
        let done = work();
        self.step();
        done
    }
}

impl Directory for Killed {
    fn create_new(&self, path: &Path) -> io::Result<OwnedFd> {
        self.around(|| HostDirectory.create_new(path))
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.around(|| HostDirectory.hard_link(from, to))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.around(|| HostDirectory.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.around(|| HostDirectory.remove(path))
    }

    fn sync(&self, directory: &Path) -> io::Result<()> {
        self.around(|| HostDirectory.sync(directory))
    }
}

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Not a test: the process that is killed.
#[test]
fn process_that_makes_a_snapshot() {
    let (Some(folder), Some(format), Some(step)) = (text(FOLDER), text(FORMAT), text(STEP)) else {
        return;
    };
    let image = |name: &str| {
        let format = Format::by_name(&format).unwrap();
        ferrite_disk::ImageName { format, path: PathBuf::from(&folder).join(name) }
    };
    let directory = Killed { left: Cell::new(step.parse().unwrap()) };
    anywhere(&directory, |tools| tools.snapshot(&image("a/disk"), &image("a/kept"))).unwrap();
}

fn snapshot_killed_at(tree: &Tree, format: Format, step: u32) -> ExitStatus {
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", "process_that_makes_a_snapshot"]);
    process.env(FOLDER, tree.path("")).env(FORMAT, format.name()).env(STEP, step.to_string());
    process.output().unwrap().status
}

fn write(tree: &Tree, at: u64, byte: u8) {
    let mut disk = Queue::new(tree.open("a/disk").unwrap());
    disk.write(at, &[byte; 4096]).unwrap();
    disk.close().unwrap();
}

fn has(tree: &Tree, at: u64, byte: u8) -> bool {
    let mut disk = Queue::new(tree.open("a/disk").unwrap());
    disk.read(at, 4096).unwrap() == [byte; 4096]
}

/// The disk's name is not that of an image, so a list beside its parent names it.
#[test]
fn a_disk_is_written_to_wherever_its_snapshot_was_killed_and_no_later_one_takes_that_back() {
    for format in FORMATS {
        let (mut step, mut unfinished) = (0, 0);
        loop {
            let tree = Tree::new(format);
            tree.create("a/disk");
            write(&tree, 0, 1);
            let ended = snapshot_killed_at(&tree, format, step);
            if ended.success() {
                break;
            }
            assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()), "{format:?}, step {step}");
            unfinished += u32::from(fs::exists(tree.path("a/disk.ferrite-new")).unwrap());
            write(&tree, MIB, 2);
            // A second try of this snapshot completes it, or is refused because the first one was complete.
            let again = |tools: &ferrite_image_tools::ImageTools<'_>| {
                tools.snapshot(&tree.image("a/disk"), &tree.image("a/kept"))
            };
            let again = anywhere(&HostDirectory, again);
            assert!(has(&tree, 0, 1) && has(&tree, MIB, 2), "{format:?}, step {step}: {again:?}");
            if let Err(e) = again {
                assert!(e.to_string().contains("is its parent already"), "step {step}: {e}");
            }
            assert!(!fs::exists(tree.path("a/disk.ferrite-new")).unwrap(), "step {step}");
            // Its leaf is a child for all others, and can be merged.
            tree.make_writable("a/kept");
            tree.open("a/kept").unwrap_err();
            tree.coalesce("a/disk").unwrap();
            assert!(has(&tree, 0, 1) && has(&tree, MIB, 2), "{format:?}, step {step}");
            step += 1;
        }
        assert!(step > 10 && unfinished > 2, "{format:?}: {step} steps, {unfinished} unfinished");
    }
}
