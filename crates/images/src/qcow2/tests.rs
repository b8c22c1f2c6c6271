use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use ferrite_disk_base::{OpenOptions, Port, Raw};
use ferrite_io::arena::Arena;
use ferrite_io::engines::test_engine;
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::Scratch;
use ferrite_testkit::programs::installed;
use proptest::prelude::*;

use super::*;
use crate::Image;
use crate::image::Layer;
use crate::open_medium;
use crate::testing::Session;

mod inner;
mod leaks;
mod memory;
mod old;
mod reuse;
mod trouble;
mod upgrade;

/// A reactor and a port to one file.
fn port_to(raw: &Raw) -> (Reactor, Port) {
    let arena = Arena::new(2 << 20).unwrap();
    let kind = test_engine();
    let mut reactor = Reactor::new(kind.open(arena.clone(), 16).unwrap());
    let files: Vec<_> = raw.files().into_iter().map(|f| reactor.add_file(f).unwrap()).collect();
    let scratch = Scratch::new(arena.clone(), arena.span(0, 256 << 10));
    let port = Port { io: reactor.io(), files: Rc::from(files), scratch };
    (reactor, port)
}

fn options() -> OpenOptions {
    // The kernel releases a dead ring's files some time later.
    let wait_for_lock = Some(std::time::Duration::from_secs(10));
    OpenOptions { wait_for_lock, ..OpenOptions::default() }
}

fn medium(path: &Path) -> Raw {
    open_medium(path, &options()).unwrap()
}

fn create(path: &Path, new: &NewImage) {
    std::fs::File::create(path).unwrap();
    let raw = medium(path);
    let (mut reactor, port) = port_to(&raw);
    reactor.block_on(new.create(&port, &raw)).unwrap().unwrap();
}

fn open(path: &Path) -> Session {
    let name = ferrite_disk_base::ImageName {
        format: ferrite_disk_base::Format::Qcow2,
        path: path.to_owned(),
    };
    let disk = Image::open(&name, &options()).unwrap();
    let kind = test_engine();
    Session::new(Arc::new(disk), |arena| kind.open(arena, 16)).unwrap()
}

fn qcow2_of(disk: &Image) -> &Qcow2 {
    let image = disk;
    let Layer::Qcow2(qcow2) = &image.layers()[0] else { unreachable!("it is qcow2") };
    qcow2
}

fn with_qcow2<T>(session: &Session, look: impl FnOnce(&Qcow2) -> T) -> T {
    look(qcow2_of(session.disk()))
}

/// QEMU's result: 0 nothing, 2 errors, 3 leaks; `None` where it is not installed.
fn qemu_check(path: &Path) -> Option<i32> {
    let output = Command::new("qemu-img").args(["check", "-U", "-f", "qcow2"]).arg(path).output();
    installed("qemu-img", output)?.status.code()
}

fn same_as_qemu(path: &Path, report: &Report) {
    let Some(code) = qemu_check(path) else { return };
    let expected = match report {
        r if r.is_clean() => 0,
        r if r.findings.iter().all(|f| f.problem == Problem::Leak) => 3,
        _ => 2,
    };
    assert_eq!(code, expected, "{report:?}");
}

fn kinds() -> Vec<NewImage> {
    let new = NewImage::new(40 << 20);
    vec![
        new.clone(),
        NewImage { version: 2, cluster_bytes: 4096, ..new.clone() },
        NewImage { cluster_bytes: 512, refcount_bits: 1, ..new.clone() },
        NewImage { cluster_bytes: 2 << 20, refcount_bits: 64, ..new.clone() },
        NewImage { cluster_bytes: 1024, refcount_bits: 8, ..new },
    ]
}

#[test]
fn new_images_are_clean_and_stay_so_in_use() {
    for new in kinds() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        create(&path, &new);
        let report = check(&medium(&path)).unwrap();
        assert!(report.is_clean(), "{new:?}: {report:?}");
        same_as_qemu(&path, &report);
        let mut session = open(&path);
        for i in 0..40u64 {
            session.write(i * 1_000_448 / 512 * 512, &[i as u8 + 1; 9 * 512]).unwrap();
        }
        session.close().unwrap();
        let report = check(&medium(&path)).unwrap();
        assert!(report.is_clean() && report.allocated_clusters >= 19, "{new:?}: {report:?}");
        same_as_qemu(&path, &report);
    }
}

/// Changes the count of the cluster of a guest's first byte, which is found and repaired.
#[test]
fn wrong_counts_are_found_and_mended() {
    for (count, problem) in [(0u64, Problem::CountTooLow), (2, Problem::Leak)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        create(&path, &NewImage { refcount_bits: 64, ..NewImage::new(40 << 20) });
        let mut session = open(&path);
        session.write(0, &[7; 4096]).unwrap();
        session.close().unwrap();
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let last = file.metadata().unwrap().len().div_ceil(65536) - 1;
        // The guest's cluster is the last one: an L2 table was made before.
        file.write_all_at(&count.to_be_bytes(), (2 << 16) + last * 8).unwrap();
        let raw = medium(&path);
        let report = check(&raw).unwrap();
        let found = |p| report.findings.iter().any(|f| f.problem == p && f.offset == last << 16);
        assert!(found(problem), "{report:?}");
        let (mut reactor, port) = port_to(&raw);
        assert_eq!(reactor.block_on(repair(&port, &raw)).unwrap().unwrap(), report);
        assert!(check(&raw).unwrap().is_clean());
        assert!(qemu_check(&path).is_none_or(|code| code == 0));
        drop((reactor, port, raw));
        let mut bytes = [0; 4096];
        open(&path).read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);
    }
}

/// A failed write may have left some of its data in its place.
#[test]
fn what_a_failed_write_has_left_does_not_come_up_after_zeros() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    create(&path, &NewImage::new(40 << 20));
    let mut session = open(&path);
    session.write(20 << 20, &[1; 512]).unwrap();
    let placed = session.disk().reserve(0, 4096);
    let Extent::Data { offset, .. } = placed else { panic!("{placed:?}") };
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[2; 4096], offset).unwrap();
    session.write_zeroes(0, 2048).unwrap();
    session.write(8192, &[3; 512]).unwrap();
    session.flush().unwrap();
    let mut bytes = [9; 2048];
    session.read(0, &mut bytes).unwrap();
    assert!(bytes == [0; 2048], "what failed is back");
}

/// An image of 1 MiB whose first cluster is compressed, and full of nines.
fn compressed(path: &Path) {
    create(path, &NewImage::new(1 << 20));
    let mut session = open(path);
    session.write(0, &[7; 65536]).unwrap();
    session.close().unwrap();
    let table = with_qcow2(&open(path), |qcow2| qcow2.l1_entry(0) & entry::OFFSET);
    let mut stream = flate2::Compress::new(flate2::Compression::default(), false);
    let mut packed = Vec::with_capacity(512);
    stream.compress_vec(&[9; 65536], &mut packed, flate2::FlushCompress::Finish).unwrap();
    let file = std::fs::File::options().write(true).open(path).unwrap();
    // The last cluster is the guest's; one sector of it is enough.
    let host = file.metadata().unwrap().len() - 65536;
    file.write_all_at(&packed, host).unwrap();
    file.write_all_at(&(1u64 << 62 | host).to_be_bytes(), table).unwrap();
}

/// Between finding an entry and reading the data, another thread may need the entry's place in memory.
#[test]
fn a_compressed_cluster_is_read_though_its_entry_was_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    compressed(&path);
    let mut session = open(&path);
    let (disk, port) = (session.disk().clone(), session.port().clone());
    let bytes = session.run(async {
        let piece = port.scratch.take(4096).await;
        qcow2_of(&disk).unpack(&port, port.files[0], 0, piece.span()).await.unwrap();
        let mut bytes = [0; 4096];
        port.memory().copy_out(piece.span(), &mut bytes);
        bytes
    });
    assert_eq!(bytes.unwrap(), [9; 4096]);
}

#[test]
fn disks_grow_with_their_tables() {
    for (cluster_bytes, from, to) in [
        (65536, 40u64 << 20, 1u64 << 40),
        (65536, 40 << 20, 16 << 40),
        (512, 1 << 20, 100 << 20),
        (4096, 1 << 30, 1 << 30 | 4096),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        create(&path, &NewImage { cluster_bytes, ..NewImage::new(from) });
        let mut session = open(&path);
        session.write(from - 512, &[3; 512]).unwrap();
        session.close().unwrap();
        let mut session = open(&path);
        let (disk, port) = (session.disk().clone(), session.port().clone());
        session.run(qcow2_of(&disk).resize(&port, to, 0)).unwrap().unwrap();
        drop((disk, port, session));
        let report = check(&medium(&path)).unwrap();
        assert!(report.is_clean(), "{report:?}");
        same_as_qemu(&path, &report);
        let mut session = open(&path);
        assert_eq!(session.disk().sectors() * 512, to);
        session.write(to - 512, &[4; 512]).unwrap();
        for (at, byte) in [(from - 512, 3), (to - 512, 4), (0, 0)] {
            let mut bytes = [9; 512];
            session.read(at, &mut bytes).unwrap();
            assert_eq!(bytes, [byte; 512]);
        }
        session.close().unwrap();
        same_as_qemu(&path, &check(&medium(&path)).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ferrite_testkit::rounds(48), failure_persistence: None, ..Default::default() })]

    /// Tables that refer to each other, to nowhere and to themselves.
    #[test]
    fn hostile_tables_give_errors_and_reading_writes_nothing(
        words in proptest::collection::vec((0u64..5 * 8192, prop_oneof![
            any::<u64>(),
            (0u64..9).prop_map(|c| COPIED | c << 16),
            (0u64..9).prop_map(|c| c << 16),
        ]), 1..30),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        create(&path, &NewImage::new(40 << 20));
        let mut session = open(&path);
        session.write(1 << 20, &[7; 4096]).unwrap();
        session.close().unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for (word, value) in words {
            // The header has tests of its own.
            file.write_all_at(&value.to_be_bytes(), (1 << 16) + word * 8).unwrap();
        }
        let before = std::fs::read(&path).unwrap();
        let _ = check(&medium(&path));
        let name = ferrite_disk_base::ImageName { format: ferrite_disk_base::Format::Qcow2, path: path.clone() };
        if let Ok(disk) = Image::open(&name, &options()) {
            let kind = test_engine();
            let mut session =
                Session::new(Arc::new(disk), |arena| kind.open(arena, 16)).unwrap();
            let mut bytes = vec![0; 1 << 20];
            for at in (0..40 << 20).step_by(1 << 20) {
                let _ = session.read(at, &mut bytes);
            }
            prop_assert!(before == std::fs::read(&path).unwrap());
            let _ = session.write(0, &[1; 512]);
            let _ = session.write(20 << 20, &bytes);
            let _ = session.discard(0, 4 << 20);
            let _ = session.flush();
            let _ = session.close();
        }
    }
}
