//! An image in qcow2 on a device that is smaller than its disk: space that a guest discards is given out again, but for
//! places that an operation may still be on its way to.

use std::future::{pending, poll_fn};
use std::io;
use std::path::{Path, PathBuf};
use std::task::Poll;

use ferrite_disk::{Disk, Extent, Mark, OpenOptions, Reader, Session};
use ferrite_image_tools::{ImageTools, NewImage};

use crate::model::{check_clean, name, session_of, tools};
use ferrite_testkit::places::dir_on_disk;
use tempfile::TempDir;

const CLUSTER: u64 = 64 << 10;
const DISK_BYTES: u64 = 16 << 20;
const DEVICE_BYTES: u64 = 4 << 20;

/// A device with a new image.
fn device() -> (TempDir, PathBuf) {
    let dir = dir_on_disk();
    let path = dir.path().join("a.qcow2");
    std::fs::File::create(&path).unwrap().set_len(DEVICE_BYTES).unwrap();
    let new = NewImage { bytes: Some(DISK_BYTES), force: true, ..NewImage::default() };
    tools(|tools| {
        let on_device = ImageTools {
            fixed_size: true,
            parents: tools.parents.clone(),
            state_dir: None,
            ..*tools
        };
        on_device.create(&name(&path), &new).unwrap();
    });
    (dir, path)
}

fn open(path: &Path) -> Session {
    let options = OpenOptions { fixed_size: true, ..OpenOptions::default() };
    session_of(Disk::open_image(&name(path), &options).unwrap())
}

fn write(session: &mut Session, cluster: u64, byte: u8) -> io::Result<()> {
    session.write(cluster * CLUSTER, &[byte; CLUSTER as usize])
}

fn assert_is(session: &mut Session, cluster: u64, byte: u8) {
    let mut bytes = vec![0; CLUSTER as usize];
    session.read(cluster * CLUSTER, &mut bytes).unwrap();
    assert!(bytes == [byte; CLUSTER as usize], "cluster {cluster} is not all {byte}");
}

/// Writes clusters from the second on until the device is full; the first that does not fit.
fn fill(session: &mut Session, byte: u8) -> u64 {
    let is_full = |e: io::Error| assert_eq!(e.kind(), io::ErrorKind::StorageFull);
    let full = (1..).find(|cluster| write(session, *cluster, byte).map_err(is_full).is_err());
    full.unwrap()
}

/// Discards the first cluster, and lets all that takes time happen.
fn discard_first(session: &mut Session) {
    session.flush().unwrap();
    session.discard(0, CLUSTER).unwrap();
    for _ in 0..4 {
        session.flush().unwrap();
    }
}

/// A queue's operation on the first cluster: where it goes, and its mark.
fn begin(session: &Session, reader: &Reader, is_write: bool) -> (u64, Mark) {
    let sweep = reader.enter();
    let disk = session.disk();
    let place = if is_write { disk.reserve(0, CLUSTER) } else { disk.map(0, CLUSTER) };
    let Extent::Data { file: 0, offset, len: CLUSTER } = place else { panic!("{place:?}") };
    let mark = reader.keep(sweep);
    reader.leave(sweep);
    (offset, mark)
}

#[test]
fn what_is_discarded_is_written_elsewhere_again_and_again() {
    let (_dir, path) = device();
    let mut session = open(&path);
    let clusters = DISK_BYTES / CLUSTER;
    for round in 0..40u64 {
        let parts = |round: u64| (round * 16..round * 16 + 16).map(move |c| c % clusters);
        for cluster in parts(round) {
            write(&mut session, cluster, round as u8 + 1).unwrap();
        }
        session.flush().unwrap();
        if let Some(before) = round.checked_sub(1) {
            parts(before).for_each(|cluster| assert_is(&mut session, cluster, round as u8));
            session.discard(before * 16 % clusters * CLUSTER, 16 * CLUSTER).unwrap();
            parts(before).for_each(|cluster| assert_is(&mut session, cluster, 0));
        }
        session.flush().unwrap();
        session.flush().unwrap();
        parts(round).for_each(|cluster| assert_is(&mut session, cluster, round as u8 + 1));
    }
    session.close().unwrap();
    check_clean(&path);
}

#[test]
fn a_slow_read_of_a_discarded_cluster_never_sees_anothers_data() {
    let (_dir, path) = device();
    let mut session = open(&path);
    write(&mut session, 0, 7).unwrap();
    let reader = session.disk().reader().unwrap();
    let (place, mark) = begin(&session, &reader, false);
    discard_first(&mut session);
    let full = fill(&mut session, 8);
    let raw = |place| {
        let mut bytes = vec![0; CLUSTER as usize];
        let file = std::fs::File::open(&path).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, place).unwrap();
        bytes
    };
    session.flush().unwrap();
    assert!(raw(place).iter().all(|byte| *byte == 7), "what the read brings");
    reader.leave(mark);
    write(&mut session, full, 8).unwrap();
    session.flush().unwrap();
    assert!(raw(place).iter().all(|byte| *byte == 8), "it was the last free cluster");
    (1..=full).for_each(|cluster| assert_is(&mut session, cluster, 8));
    session.close().unwrap();
    check_clean(&path);
}

#[test]
fn a_slow_write_in_place_does_not_land_in_anothers_cluster() {
    let (_dir, path) = device();
    let mut session = open(&path);
    write(&mut session, 0, 7).unwrap();
    let reader = session.disk().reader().unwrap();
    let (place, mark) = begin(&session, &reader, true);
    discard_first(&mut session);
    let full = fill(&mut session, 8);
    let zeros = session.zero_page();
    let (io, file) = (session.port().io.clone(), session.port().files[0]);
    session.run(async move { io.write_all(file, place, zeros).await }).unwrap().unwrap();
    session.disk().written(0, CLUSTER);
    reader.leave(mark);
    write(&mut session, full, 8).unwrap();
    (1..=full).for_each(|cluster| assert_is(&mut session, cluster, 8));
    assert_is(&mut session, 0, 0);
    session.close().unwrap();
    check_clean(&path);
}

/// The kernel may still write for it.
#[test]
fn a_task_that_is_dropped_keeps_what_comes_free_out_of_use_until_the_next_opening() {
    let (_dir, path) = device();
    let mut session = open(&path);
    write(&mut session, 0, 7).unwrap();
    let disk = session.disk().clone();
    let some = async {
        let mut task = Box::pin(disk.while_mapped(pending::<()>()));
        poll_fn(|cx| Poll::Ready(task.as_mut().poll(cx).is_pending())).await
    };
    assert!(session.run(some).unwrap());
    drop(disk);
    discard_first(&mut session);
    let full = fill(&mut session, 8);
    session.close().unwrap();
    check_clean(&path);
    let mut session = open(&path);
    write(&mut session, full, 8).unwrap();
    assert_eq!(write(&mut session, full + 1, 8).unwrap_err().kind(), io::ErrorKind::StorageFull);
    session.close().unwrap();
    check_clean(&path);
}

/// A journal's record has the states that an entry may have on the medium. They are three at the most.
#[test]
fn what_is_not_durable_keeps_its_place_when_it_is_discarded() {
    let (_dir, path) = device();
    let mut session = open(&path);
    write(&mut session, 0, 7).unwrap();
    let is_placed =
        |session: &Session| matches!(session.disk().map(0, CLUSTER), Extent::Data { .. });
    session.discard(0, CLUSTER).unwrap();
    assert!(is_placed(&session));
    session.flush().unwrap();
    session.discard(0, CLUSTER).unwrap();
    assert!(!is_placed(&session));
    session.close().unwrap();
    check_clean(&path);
}
