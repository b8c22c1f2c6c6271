//! A qcow2 image is marked while it is open: if another program writes to it after a backend was
//! killed, no answered write vanishes without a word.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ferrite_disk::{Disk, DiskError, ErrorKind, Format, ImageName, OpenOptions};
use ferrite_image_tools::{ImageTools, NewImage, Progress};
use ferrite_testkit::{is_night, rounds};

use crate::common::{MIB, Queue, dir_in_memory, dir_on_disk, run, skipped, work};
use crate::model::wait_until_released;

const IMAGE: &str = "FERRITE_TEST_IMAGE";
const MERGED: &str = "FERRITE_TEST_MERGED";
const STATE: &str = "FERRITE_TEST_STATE";
/// A cluster has 64 KiB; each write has one of its own.
const CLUSTERS: u64 = 512;
const CLUSTER: u64 = 64 << 10;
/// Writes from one flush of the backend to the next.
const FLUSHED: u64 = 37;

/// Backends that are killed, each after some more answers than the one before.
fn tries() -> u64 {
    rounds(25).max(10).into()
}

fn offset(write: u64) -> u64 {
    write * 211 % CLUSTERS * CLUSTER
}

fn name(path: &Path) -> ImageName {
    ImageName { format: Format::Qcow2, path: path.to_owned() }
}

fn create(path: &Path) {
    let new = NewImage { bytes: Some(CLUSTERS * CLUSTER), ..NewImage::default() };
    work(None, |tools| tools.create(&name(path), &new)).unwrap();
}

fn serve(path: &Path, state: &Path, read_only: bool) -> Result<Queue, DiskError> {
    let state_dir = Some(state.to_owned());
    // An io_uring of the process before keeps its files some time longer.
    let wait_for_lock = Some(Duration::from_secs(30));
    let options = OpenOptions { read_only, state_dir, wait_for_lock, ..OpenOptions::default() };
    Disk::open_image(&name(path), &options).map(Queue::new)
}

fn autoclear(path: &Path) -> u64 {
    u64::from_be_bytes(fs::read(path).unwrap()[88..96].try_into().unwrap())
}

/// Not a test: a backend, when this program is run again with the environment that says so. It says
/// which writes were answered.
#[test]
fn process_backend() {
    let Ok(image) = std::env::var(IMAGE) else { return };
    let state = std::env::var(STATE).unwrap();
    let mut disk = serve(image.as_ref(), state.as_ref(), false).unwrap();
    for write in 0..CLUSTERS {
        disk.write(offset(write), &[write as u8 + 1; 512]).unwrap();
        std::io::stderr().write_all(format!("{write}\n").as_bytes()).unwrap();
        if write % FLUSHED == FLUSHED - 1 {
            disk.flush().unwrap();
        }
    }
}

/// Kills a backend with SIGKILL after so many answers; how many there were.
fn killed_after(answers: u64, image: &Path, state: &Path) -> u64 {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "qcow2_foreign::process_backend", "--nocapture", "--test-threads=1"]);
    command.env(IMAGE, image).env(STATE, state);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let (mut answered, mut said) = (0, String::new());
    for line in lines {
        let line = line.unwrap();
        let Ok(write) = line.parse::<u64>() else {
            said += &(line + "\n");
            continue;
        };
        answered = write + 1;
        if answered == answers {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(answered >= answers, "it served {answered} writes: {said}");
    answered
}

/// An image of version 2, which has nothing that it could be marked by. False: no qemu-img.
fn create_old(path: &Path) -> bool {
    let (text, bytes) = (path.to_str().unwrap(), (CLUSTERS * CLUSTER).to_string());
    let made = run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", text, &bytes]);
    if made.is_none() {
        skipped("no qemu-img");
    }
    made.is_some()
}

/// In how many of the tries the image was refused, in how many it was changed, and in how many that
/// was missed.
#[derive(Debug, Default)]
struct Noticed {
    refused: u64,
    changed: u64,
    missed: u64,
}

/// Kills backends, has a program at the image, and opens it again: all that was answered is there,
/// or it is refused. The program's discards in an old image may be missed, and are zeros then. So are its discards in
/// an image whose backend was killed behind a flush, with nothing that could be lost.
fn noticed_after(old: bool, program: &str, args: &[&str]) -> Option<Noticed> {
    let mut noticed = Noticed::default();
    for round in 0..tries() {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let path = dir.path().join("a.qcow2");
        match old {
            true if !create_old(&path) => return None,
            true => {}
            false => create(&path),
        }
        let answered = killed_after(1 + round * 175 / tries(), &path, state.path());
        let mut all = args.to_vec();
        all.push(path.to_str().unwrap());
        wait_until_released(&path);
        let before = fs::read(&path).unwrap();
        // It may find leaks, and say so by its exit code.
        let Ok(done) = Command::new(program).args(&all).output() else {
            skipped(&format!("no {program}"));
            return None;
        };
        assert!(done.status.code().is_some_and(|code| code < 4), "{done:?}");
        let changed = before != fs::read(&path).unwrap();
        noticed.changed += u64::from(changed);
        let mut disk = match serve(&path, state.path(), round % 2 == 0) {
            Ok(disk) => disk,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Refused, "{e}");
                assert!(e.why().contains("lost: bytes "), "{e}");
                assert!(changed, "{program} {args:?}: nothing was written to it");
                noticed.refused += 1;
                continue;
            }
        };
        for write in 0..answered {
            let found = disk.read(offset(write), 512).unwrap();
            let discarded = program == "qemu-io" && offset(write) < CLUSTER;
            let has_flushed = answered.is_multiple_of(FLUSHED);
            if (old || has_flushed) && discarded && found == [0; 512] {
                noticed.missed += 1;
                break;
            }
            assert!(
                found == [write as u8 + 1; 512],
                "{program} {args:?}: write {write} of {answered}"
            );
        }
    }
    Some(noticed)
}

/// The same of marked images: how often they were refused.
fn refused_after(program: &str, args: &[&str]) -> Option<u64> {
    noticed_after(false, program, args).map(|noticed| noticed.refused)
}

#[test]
fn leaks_that_qemu_img_mends_after_a_kill_are_not_taken_for_free_space() {
    let Some(refused) = refused_after("qemu-img", &["check", "-q", "-r", "leaks"]) else { return };
    assert!(refused >= tries() - 5, "{refused} of {}", tries());
}

#[test]
fn what_qemu_img_repairs_after_a_kill_is_refused_and_says_what_is_lost() {
    let Some(refused) = refused_after("qemu-img", &["check", "-q", "-r", "all"]) else { return };
    assert!(refused >= tries() - 5, "{refused} of {}", tries());
}

#[test]
fn a_discard_by_qemu_io_after_a_kill_is_seen() {
    let args = ["-f", "qcow2", "-d", "unmap", "-c", "discard 0 64k"];
    let Some(refused) = refused_after("qemu-io", &args) else { return };
    assert!(refused >= tries() - 5, "{refused} of {}", tries());
}

#[test]
fn an_old_image_that_another_program_has_changed_after_a_kill_is_refused() {
    let repairs = ["check", "-q", "-r", "all"];
    let frees_leaks = ["check", "-q", "-r", "leaks"];
    let discards = ["-f", "qcow2", "-d", "unmap", "-c", "discard 0 64k"];
    // In the first 37 writes there is nothing on disk to discard.
    let programs = [
        ("qemu-img", &repairs[..], tries() - 5),
        ("qemu-io", &discards, tries() * 3 / 5),
        ("qemu-img", &frees_leaks, tries() - 5),
    ];
    for (program, args, least) in programs.into_iter().take(if is_night() { 3 } else { 2 }) {
        let Some(noticed) = noticed_after(true, program, args) else { return };
        eprintln!("{program} {args:?}: {noticed:?} of {}", tries());
        // A changed image that opens has all that was answered, or has missed it.
        assert!(noticed.refused + noticed.missed <= noticed.changed, "{program} {args:?}");
        // Killed in the moment in which refcounts were being written: see docs/images.md.
        assert!(noticed.missed <= 3, "{program} {args:?}: {noticed:?}");
        assert!(noticed.refused >= least, "{program} {args:?}: {noticed:?}");
    }
}

#[test]
fn whoever_only_looks_takes_nothing_away() {
    let Some(refused) = refused_after("qemu-img", &["check", "-q"]) else { return };
    assert_eq!(refused, 0);
    assert_eq!(refused_after("qemu-img", &["info"]), Some(0));
}

#[test]
fn an_image_is_marked_from_its_first_write_to_its_end_and_by_another_mark_each_time() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let path = dir.path().join("a.qcow2");
    create(&path);
    let mut marks = vec![0];
    for round in 0..3 {
        let mut disk = serve(&path, state.path(), false).unwrap();
        assert_eq!(autoclear(&path), 0, "opening writes nothing");
        disk.write(round * MIB, &[1; 512]).unwrap();
        marks.push(autoclear(&path));
        assert!(marks[marks.len() - 1] >> 63 == 1 && marks[marks.len() - 1] & 0xffff == 0);
        disk.close().unwrap();
        assert_eq!(autoclear(&path), 0, "closed");
        // Written to again, as when a toolstack gives the disk to another guest.
        disk.write(round * MIB, &[2; 512]).unwrap();
        disk.close().unwrap();
    }
    marks.sort_unstable();
    marks.dedup();
    assert_eq!(marks.len(), 4, "{marks:x?}");
    // A dead process's mark stays as long as its journal does.
    serve(&path, state.path(), false).unwrap().write(4 * MIB, &[3; 512]).unwrap();
    let dead = autoclear(&path);
    let mut next = serve(&path, state.path(), false).unwrap();
    next.write(5 * MIB, &[4; 512]).unwrap();
    assert_eq!(autoclear(&path), dead);
    next.close().unwrap();
    assert_eq!(autoclear(&path), 0);
    assert_eq!(fs::read_dir(state.path()).unwrap().count(), 0);
}

#[test]
fn an_image_that_was_refused_is_used_again_when_its_journal_was_dropped() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let path = dir.path().join("a.qcow2");
    create(&path);
    killed_after(20, &path, state.path());
    wait_until_released(&path);
    if run("qemu-img", &["check", "-q", "-r", "all", path.to_str().unwrap()]).is_none() {
        return skipped("no qemu-img");
    }
    let report = work(Some(state.path()), |tools| tools.check(&name(&path), true)).unwrap();
    assert!(!report.usable && report.images[0].findings[0].why.contains("lost"), "{report:?}");
    work(Some(state.path()), |tools| tools.repair(&name(&path), true)).unwrap_err();
    let error = serve(&path, state.path(), false).err().unwrap();
    let journal = work(Some(state.path()), |tools| tools.journals()).unwrap().remove(0).name;
    assert!(error.help().contains(&journal), "{}", error.help());
    work(Some(state.path()), |tools| tools.drop_journals(&[journal], false, true)).unwrap();
    let mut disk = serve(&path, state.path(), false).unwrap();
    disk.write(0, &[9; 512]).unwrap();
    disk.close().unwrap();
}

/// Not a test: a merge that is killed, when this program is run again with the environment that says
/// so.
#[test]
fn process_merge() {
    let Ok(child) = std::env::var(MERGED) else { return };
    let state = std::env::var(STATE).unwrap();
    let steps = std::cell::Cell::new(0);
    work(Some(state.as_ref()), |tools| {
        let progress = |_: Progress| match steps.replace(steps.get() + 1) {
            0..16 => true,
            _ => std::process::abort(),
        };
        let (directory, engine, state_dir) =
            (tools.directory, tools.engine, tools.state_dir.clone());
        let parents = tools.parents.clone();
        ImageTools { progress: &progress, directory, engine, state_dir, parents, ..*tools }
            .coalesce(&name(child.as_ref()), false)
    })
    .unwrap();
}

/// The usual steps of an administrator after a kill.
#[test]
fn a_child_is_in_order_although_its_merge_was_killed_and_the_parent_repaired_by_qemu_img() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let [base, child] = ["base.qcow2", "child.qcow2"].map(|file| dir.path().join(file));
    create(&base);
    let on = NewImage { parent: Some(name(&base)), ..NewImage::default() };
    work(None, |tools| tools.create(&name(&child), &on)).unwrap();
    let mut disk = serve(&child, state.path(), false).unwrap();
    for write in 0..CLUSTERS {
        disk.write(write * CLUSTER, &[7; CLUSTER as usize]).unwrap();
    }
    disk.close().unwrap();
    drop(disk);
    let mut merge = Command::new(std::env::current_exe().unwrap());
    merge.args(["--exact", "qcow2_foreign::process_merge", "--nocapture"]).stdin(Stdio::null());
    merge.env(MERGED, &child).env(STATE, state.path());
    assert!(!merge.output().unwrap().status.success());
    for path in [&base, &child] {
        wait_until_released(path);
    }
    let repair = ["check", "-q", "-r", "all", base.to_str().unwrap()];
    let Ok(repaired) = Command::new("qemu-img").args(repair).output() else {
        return skipped("no qemu-img");
    };
    // It finds leaks, and says so by its exit code.
    assert!(repaired.status.code().is_some_and(|code| code < 4), "{repaired:?}");
    for chain in [false, true] {
        let report = work(Some(state.path()), |tools| tools.check(&name(&child), chain)).unwrap();
        let [leaf, parent] = &report.images[..] else { panic!("{report:?}") };
        assert!(leaf.path.ends_with("child.qcow2") && leaf.findings.is_empty(), "{leaf:?}");
        assert!(parent.path.ends_with("base.qcow2") && !parent.is_usable(), "{parent:?}");
        assert!(!report.usable && report.verdict == parent.verdict());
        let why = &parent.findings[0].why;
        assert!(
            why.contains("journal drop --force") && why.contains("run coalesce again"),
            "{why}"
        );
    }
    // The steps that the error advises.
    work(Some(state.path()), |tools| {
        let journals = tools.journals().unwrap();
        tools.drop_journals(&[journals[0].name.clone()], false, true).unwrap();
        tools.coalesce(&name(&child), false).unwrap();
    });
    let mut disk = serve(&child, state.path(), true).unwrap();
    assert!((0..CLUSTERS).all(|write| disk.read(write * CLUSTER, 512).unwrap() == [7; 512]));
}
