//! Space of a qcow2 file that no cluster in use has: a backend that was killed leaves it. A test says
//! "skipped" where there is no `qemu-img`.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use ferrite_disk::{Disk, Format, ImageName, OpenOptions};
use ferrite_image_tools::{ImageTools, NewImage, Verdict};

use crate::common::{MIB, Queue, dir_in_memory, dir_on_disk, work};
use crate::model::{Model, check_clean, compare, name, open, pattern, qemu, qemu_img};
use ferrite_host::directory::HostDirectory;
use ferrite_testkit::faulty::{Faults, Kind};
use ferrite_testkit::images;
use tempfile::TempDir;

const CLUSTER: u64 = 64 << 10;

/// A backend of an image of 64 MiB was killed after writes all over it.
fn killed(dir: &TempDir, state: &Path) -> PathBuf {
    let path = dir.path().join("a.qcow2");
    let new = NewImage { bytes: Some(64 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&name(&path), &new)).unwrap();
    let mut queue = serve(&path, state);
    for i in 0..1024 {
        queue.write(i * 7 % 1024 * CLUSTER, &[i as u8; 4096]).unwrap();
    }
    path
}

fn serve(path: &Path, state: &Path) -> Queue {
    let options = OpenOptions { state_dir: Some(state.to_owned()), ..OpenOptions::default() };
    let image = ImageName { format: Format::Qcow2, path: path.to_owned() };
    Queue::new(Disk::open_image(&image, &options).unwrap())
}

fn reads_as_written(path: &Path, state: &Path) {
    let mut queue = serve(path, state);
    for i in 0..1024 {
        assert!(queue.read(i * 7 % 1024 * CLUSTER, 4096).unwrap() == [i as u8; 4096], "{i}");
    }
}

fn unused(path: &Path) -> u64 {
    let report = work(None, |tools| tools.check(&name(path), false)).unwrap();
    assert_eq!(report.verdict, Verdict::InOrder, "{report:?}");
    report.images[0].unused_bytes
}

fn bytes(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

/// Where the last cluster in use ends.
fn end_by_qemu(path: &Path) -> Option<u64> {
    let (good, text) =
        qemu_img(&["check", "--output=json", "-f", "qcow2", path.to_str().unwrap()])?;
    assert!(good, "{text}");
    let end = text.split("\"image-end-offset\":").nth(1).unwrap();
    let digits: String = end.trim().chars().take_while(char::is_ascii_digit).collect();
    Some(digits.parse().unwrap())
}

#[test]
fn what_a_killed_backend_had_set_aside_is_told_and_given_back_by_a_repair() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let path = killed(&dir, state.path());
    let repair =
        |force| work(Some(state.path()), |tools| tools.repair(&name(&path), force)).unwrap();
    // The answered writes are in the file, if not in its tables.
    drop(serve(&path, state.path()));
    repair(true);
    reads_as_written(&path, state.path());
    assert_eq!(unused(&path), 0);
    assert!(end_by_qemu(&path).is_none_or(|end| end == bytes(&path)));
    assert!(bytes(&path) < 66 * MIB, "{}", bytes(&path));

    // Flushed before the kill: there is nothing in the journal that would have it written to.
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let path = killed(&dir, state.path());
    let mut queue = serve(&path, state.path());
    queue.flush().unwrap();
    drop(queue);
    let repair =
        |force| work(Some(state.path()), |tools| tools.repair(&name(&path), force)).unwrap();
    let left = unused(&path);
    assert!(left > 8 * MIB, "{left}");
    let before = bytes(&path);
    let shown = repair(false);
    assert!(shown.before.unused_bytes == left && shown.or_refused().is_ok());
    assert_eq!(bytes(&path), before);
    assert_eq!(repair(true).after.unused_bytes, 0);
    assert_eq!(unused(&path), 0);
    assert!(end_by_qemu(&path).is_none_or(|end| end == bytes(&path)));
    reads_as_written(&path, state.path());
}

#[test]
fn the_next_backend_that_writes_gives_it_back_when_it_is_stopped() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let path = killed(&dir, state.path());
    let mut queue = serve(&path, state.path());
    queue.flush().unwrap();
    drop(queue);
    assert!(unused(&path) > 8 * MIB);
    // Nothing needs a new cluster.
    let mut queue = serve(&path, state.path());
    queue.write(0, &[0; 4096]).unwrap();
    queue.close().unwrap();
    drop(queue);
    assert_eq!(unused(&path), 0);
    assert!(end_by_qemu(&path).is_none_or(|end| end == bytes(&path)));
    reads_as_written(&path, state.path());
}

/// QEMU leaves such clusters where the file system knows no holes, or was not told.
#[test]
fn free_clusters_between_others_become_holes() {
    let dir = dir_on_disk();
    let path = dir.path().join("a.qcow2");
    let text = path.to_str().unwrap();
    if !qemu(&["create", "-q", "-f", "qcow2", text, "64M"]) {
        return;
    }
    let mut model = Model::default();
    let mut write = |first: u64, stamp| {
        let mut disk = open(text);
        for first in (first..first + 2048 * 8).step_by(2048) {
            disk.write(first * 512, &pattern(first, 2048, stamp)).unwrap();
        }
        model.write(first, 2048 * 8, stamp);
        disk.close().unwrap();
    };
    write(0, 1);
    qemu(&["snapshot", "-c", "s", text]);
    write(0, 2);
    write(2048 * 16, 3);
    qemu(&["snapshot", "-d", "s", text]);
    check_clean(&path);
    let file = fs::File::options().write(true).open(&path).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes(&path)).unwrap();
    drop(file);
    let taken = || fs::metadata(&path).unwrap().blocks() * 512;
    let (before, left) = (taken(), unused(&path));
    assert!(left > 7 * MIB && bytes(&path) < before + MIB, "{left} of {before}");
    let repaired = work(None, |tools| tools.repair(&name(&path), true)).unwrap();
    assert_eq!(repaired.after.unused_bytes, 0);
    assert!(taken() + 7 * MIB < before, "{} of {before}", taken());
    check_clean(&path);
    compare(&mut open(text), &model);
}

/// The entry that refers to a cluster no more may not be on the medium yet.
#[test]
fn nothing_is_given_back_before_a_sync() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let path = killed(&dir, state.path());
    let mut queue = serve(&path, state.path());
    queue.flush().unwrap();
    drop(queue);
    // As a repair finds it that has brought in what was answered.
    let faults = Faults::none();
    faults.list();
    let engine = |arena| faults.open(arena, 64);
    let tools = ImageTools { engine: &engine, ..images::tools(&HostDirectory) };
    tools.repair(&name(&path), true).unwrap();
    let done: Vec<Kind> = faults.take_list().iter().map(Kind::of).collect();
    let usual = [Kind::Sync, Kind::Write, Kind::Read];
    let cut = done.iter().position(|kind| !usual.contains(kind)).unwrap();
    // The first one is of the mark, which was taken away before.
    assert_eq!(done[cut - 2..cut], [Kind::Sync, Kind::Sync], "{done:?}");
    assert_eq!(done.last(), Some(&Kind::Sync), "{done:?}");
}

/// By its counts alone, the last cluster is unused.
#[test]
fn the_last_cluster_is_not_cut_off_when_its_count_is_lost() {
    for resized in [false, true] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let path = dir.path().join("a.qcow2");
        let new = NewImage { bytes: Some(64 * MIB), ..NewImage::default() };
        work(None, |tools| tools.create(&name(&path), &new)).unwrap();
        let write = |at, stamp| {
            let mut queue = serve(&path, state.path());
            queue.write(at, &[stamp; CLUSTER as usize]).unwrap();
            queue.close().unwrap();
        };
        write(0, 1);
        write(MIB, 2);
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        let place = |at| {
            let mut place = [0; 8];
            file.read_exact_at(&mut place, at).unwrap();
            u64::from_be_bytes(place)
        };
        let (block, last) = (place(place(48)), bytes(&path) / CLUSTER - 1);
        file.write_all_at(&[0; 2], block + last * 2).unwrap();
        let before = bytes(&path);
        match resized {
            true => drop(work(None, |tools| tools.resize(&name(&path), 65 * MIB, false)).unwrap()),
            false => write(0, 3),
        }
        assert_eq!(bytes(&path), before, "resized: {resized}");
        work(None, |tools| tools.repair(&name(&path), true)).unwrap();
        assert_eq!(unused(&path), 0);
        let mut queue = serve(&path, state.path());
        assert!(queue.read(MIB, CLUSTER as usize).unwrap() == [2; CLUSTER as usize]);
        let first = if resized { 1 } else { 3 };
        assert!(queue.read(0, CLUSTER as usize).unwrap() == [first; CLUSTER as usize]);
    }
}
