//! Snapshots inside of an image: made, applied and deleted.

use ferrite_disk_base::{DiskError, ErrorKind};
use ferrite_simio::SimWorld;

use super::*;

const DISK: u64 = 1 << 20;

fn make(name: &str) -> Change<'_> {
    Change::Create { name, now: (1_700_000_000, 5) }
}

/// Makes a change with an engine of this world, which may stop meanwhile: an error has no reason then.
fn changed_in(world: &SimWorld, path: &Path, change: Change<'_>) -> Result<(), Option<DiskError>> {
    let raw = medium(path);
    let planned = Planned::new(&raw, change).map_err(Some)?;
    let arena = Arena::new(2 << 20).unwrap();
    let mut reactor = Reactor::new(world.engine(arena.clone()));
    let files: Vec<_> = raw.files().into_iter().map(|f| reactor.add_file(f).unwrap()).collect();
    let scratch = Scratch::new(arena.clone(), arena.span(0, 256 << 10));
    let port = Port { io: reactor.io(), files: Rc::from(files), scratch };
    let done = reactor.block_on(planned.write(&port, &raw));
    world.cut_power().unwrap();
    done.map_err(|_| None)?.map_err(Some)
}

fn changed(path: &Path, change: Change<'_>) -> Result<(), DiskError> {
    changed_in(&SimWorld::new(0), path, change).map_err(Option::unwrap)
}

fn content(path: &Path) -> Vec<u8> {
    let mut session = open(path);
    let mut bytes = vec![0; session.disk().sectors() as usize * 512];
    for (i, part) in bytes.chunks_mut(1 << 20).enumerate() {
        session.read((i as u64) << 20, part).unwrap();
    }
    bytes
}

fn write(path: &Path, parts: &[(u64, u8)]) {
    let mut session = open(path);
    for (at, byte) in parts {
        session.write(*at, &[*byte; 3072]).unwrap();
    }
    session.close().unwrap();
}

fn names(path: &Path) -> Vec<(String, String)> {
    let told = with_qcow2(&open(path), Qcow2::snapshots).unwrap();
    told.into_iter().map(|told| (told.id, told.name)).collect()
}

fn must_be_clean(path: &Path) {
    let report = check(&medium(path)).unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert!(qemu_check(path).is_none_or(|code| code == 0));
}

/// The bytes that QEMU reads of a snapshot; `None` where it is not installed.
fn by_qemu(path: &Path, snapshot: &str) -> Option<Vec<u8>> {
    let raw = path.with_extension("raw");
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "qcow2", "-O", "raw", "-l", snapshot]).arg(path).arg(&raw);
    let output = installed("qemu-img", convert.output())?;
    assert!(output.status.success(), "{output:?}");
    Some(std::fs::read(raw).unwrap())
}

fn shapes() -> Vec<NewImage> {
    let new = NewImage { cluster_bytes: 4096, ..NewImage::new(DISK) };
    vec![
        new.clone(),
        NewImage { version: 2, ..new.clone() },
        NewImage { cluster_bytes: 512, refcount_bits: 2, ..new.clone() },
        NewImage { cluster_bytes: 16384, extended_l2: true, ..new.clone() },
        NewImage { cluster_bytes: 2 << 20, refcount_bits: 64, ..new.clone() },
        NewImage { backing: Some(("below".into(), ferrite_disk_base::Format::Raw)), ..new },
    ]
}

/// An image of this shape with some data, in a directory with a file that it may stand on.
fn made(dir: &Path, new: &NewImage) -> std::path::PathBuf {
    std::fs::write(dir.join("below"), vec![5; DISK as usize]).unwrap();
    let path = dir.join("a.qcow2");
    create(&path, new);
    write(&path, &[(0, 1), (100 << 10, 2), (700 << 10, 3)]);
    path
}

#[test]
fn a_snapshot_keeps_what_the_disk_was_and_gives_it_back() {
    for new in shapes() {
        let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = made(dir.path(), &new);
        let before = content(&path);
        changed(&path, make("first")).unwrap();
        must_be_clean(&path);
        assert!(content(&path) == before, "{new:?}");
        write(&path, &[(0, 7), (101 << 10, 8), (300 << 10, 9)]);
        must_be_clean(&path);
        let later = content(&path);
        assert!(by_qemu(&path, "first").is_none_or(|read| read == before), "{new:?}");
        changed(&path, make("second")).unwrap();
        changed(&path, Change::Apply(b"first")).unwrap();
        must_be_clean(&path);
        assert!(content(&path) == before, "{new:?}");
        write(&path, &[(0, 17), (500 << 10, 18)]);
        changed(&path, Change::Apply(b"2")).unwrap();
        assert!(content(&path) == later, "{new:?}");
        let both = ["first", "second"].map(|name| name.to_owned());
        assert_eq!(names(&path).into_iter().map(|told| told.1).collect::<Vec<_>>(), both);
        changed(&path, Change::Delete(b"1")).unwrap();
        must_be_clean(&path);
        changed(&path, Change::Delete(b"second")).unwrap();
        must_be_clean(&path);
        assert!(content(&path) == later && names(&path).is_empty(), "{new:?}");
        // Each cluster has one reference again, and is written in its place.
        let bytes = std::fs::metadata(&path).unwrap().len();
        write(&path, &[(0, 20), (300 << 10, 21)]);
        assert!(std::fs::metadata(&path).unwrap().len() <= bytes, "{new:?}");
        must_be_clean(&path);
    }
}

#[test]
fn the_old_state_or_the_new_one_is_there_without_a_leak_wherever_the_power_is_cut() {
    let shape = NewImage { cluster_bytes: 4096, ..NewImage::new(DISK) };
    let start = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = made(start.path(), &shape);
    let before = content(&path);
    changed(&path, make("first")).unwrap();
    write(&path, &[(0, 7), (300 << 10, 9)]);
    let later = content(&path);
    let first = std::fs::read(&path).unwrap();
    for (change, of_disk) in [
        (make("second"), &later),
        (Change::Apply(b"first"), &before),
        (Change::Delete(b"first"), &later),
    ] {
        let mut done = false;
        for stop in 1.. {
            std::fs::write(&path, &first).unwrap();
            let world = SimWorld::new(stop);
            world.stop_at(Some(stop));
            let result = changed_in(&world, &path, change);
            let report = check(&medium(&path)).unwrap();
            assert!(report.is_clean(), "{change:?}, step {stop}: {report:?}");
            assert!(stop % 8 > 0 || qemu_check(&path).is_none_or(|code| code == 0));
            let disk = content(&path);
            let count = names(&path).len();
            let is_new = match change {
                Change::Create { .. } => count == 2,
                Change::Apply(_) => &disk == of_disk,
                Change::Delete(_) => count == 0,
            };
            assert!(if is_new { &disk == of_disk } else { disk == later }, "step {stop}");
            assert!(is_new || !done, "{change:?}, step {stop}: it was durable before");
            done = is_new && result.is_ok();
            if count > 0 {
                changed(&path, Change::Apply(b"first")).unwrap();
                assert!(content(&path) == before, "{change:?}, step {stop}");
            }
            if done {
                assert!(stop > 10, "{stop} steps");
                break;
            }
        }
    }
}

#[test]
fn a_change_that_is_not_possible_says_why_and_writes_nothing() {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = made(dir.path(), &shapes()[0]);
    changed(&path, make("first")).unwrap();
    changed(&path, make("1")).unwrap();
    let refused = |path: &Path, change: Change<'_>, kind: ErrorKind, why: &str| {
        let before = std::fs::read(path).unwrap();
        let error = changed(path, change).unwrap_err();
        assert!(error.kind() == kind && error.why().contains(why), "{error}");
        assert!(std::fs::read(path).unwrap() == before);
    };
    let long = "n".repeat(256);
    for (change, kind, why) in [
        (make("first"), ErrorKind::Usage, "already"),
        (make(""), ErrorKind::Usage, "empty"),
        (make("a\nb"), ErrorKind::Usage, "control"),
        (make(&long), ErrorKind::Usage, "too long"),
        (Change::Apply(b"1"), ErrorKind::Usage, "several"),
        (Change::Delete(b"1"), ErrorKind::Usage, "several"),
        (Change::Apply(b"third"), ErrorKind::NotFound, "no snapshot third"),
        (Change::Delete(b"\xff"), ErrorKind::NotFound, "no snapshot"),
    ] {
        refused(&path, change, kind, why);
    }
    let one_bit = dir.path().join("b.qcow2");
    create(&one_bit, &NewImage { refcount_bits: 1, ..NewImage::new(DISK) });
    write(&one_bit, &[(0, 1)]);
    refused(&one_bit, make("first"), ErrorKind::Unsuitable, "1 bits");
    let damaged = dir.path().join("c.qcow2");
    std::fs::copy(&path, &damaged).unwrap();
    let file = std::fs::File::options().write(true).open(&damaged).unwrap();
    let table = with_qcow2(&open(&damaged), |qcow2| qcow2.header.l1_offset);
    file.write_all_at(&[0xFF; 8], table).unwrap();
    refused(&damaged, make("third"), ErrorKind::Damaged, "damaged");
}

/// A disk that was resized since has the snapshot's size again.
#[test]
fn a_disk_has_the_size_of_the_snapshot_that_is_applied() {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = made(dir.path(), &shapes()[0]);
    let before = content(&path);
    changed(&path, make("first")).unwrap();
    let mut session = open(&path);
    let (disk, port) = (session.disk().clone(), session.port().clone());
    session.run(qcow2_of(&disk).resize(&port, 16 << 20, 0)).unwrap().unwrap();
    drop((disk, port, session));
    write(&path, &[(15 << 20, 9)]);
    changed(&path, make("large")).unwrap();
    changed(&path, Change::Apply(b"first")).unwrap();
    must_be_clean(&path);
    assert!(content(&path) == before);
    changed(&path, Change::Apply(b"large")).unwrap();
    must_be_clean(&path);
    let large = content(&path);
    assert!(large.len() == 16 << 20 && large[15 << 20] == 9);
}

/// An image whose snapshots QEMU has made: entries of their tables have flags that do not count there.
#[test]
fn snapshots_of_qemu_are_applied_and_deleted_as_our_own() {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = made(dir.path(), &shapes()[0]);
    let qemu = |args: &[&str]| {
        let output = Command::new("qemu-img").args(args).arg(&path).output();
        installed("qemu-img", output).map(|output| assert!(output.status.success(), "{output:?}"))
    };
    let before = content(&path);
    if qemu(&["snapshot", "-c", "theirs"]).is_none() {
        return;
    }
    write(&path, &[(0, 9)]);
    changed(&path, make("ours")).unwrap();
    changed(&path, Change::Apply(b"theirs")).unwrap();
    assert!(content(&path) == before);
    qemu(&["snapshot", "-a", "ours"]);
    must_be_clean(&path);
    assert!(content(&path)[..3072] == [9; 3072]);
    qemu(&["snapshot", "-d", "ours"]);
    changed(&path, Change::Delete(b"theirs")).unwrap();
    must_be_clean(&path);
    assert!(content(&path)[..3072] == [9; 3072]);
}

/// Making and deleting snapshots for ever does not make the file longer: freed clusters are used again.
#[test]
fn a_file_does_not_grow_with_snapshots_that_come_and_go() {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = made(dir.path(), &shapes()[0]);
    let mut lengths = Vec::new();
    for _ in 0..12 {
        changed(&path, make("a")).unwrap();
        changed(&path, Change::Delete(b"a")).unwrap();
        lengths.push(std::fs::metadata(&path).unwrap().len());
    }
    let later = &lengths[4..];
    assert!(later.iter().max() <= lengths[..4].iter().max(), "{lengths:?}");
    must_be_clean(&path);
}

#[test]
fn a_device_without_room_is_refused_and_one_with_room_is_changed() {
    for (more, fits) in [(0, false), (256 << 10, true)] {
        let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = made(dir.path(), &shapes()[0]);
        let before = content(&path);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(file.metadata().unwrap().len() + more).unwrap();
        let options = OpenOptions { fixed_size: true, ..options() };
        let raw = open_medium(&path, &options).unwrap();
        let planned = Planned::new(&raw, make("first"));
        let Ok(planned) = planned else {
            let error = planned.err().unwrap();
            assert!(!fits && error.why().contains("no room"), "{error}");
            continue;
        };
        assert!(fits);
        let (mut reactor, port) = port_to(&raw);
        reactor.block_on(planned.write(&port, &raw)).unwrap().unwrap();
        drop((reactor, port, raw));
        write(&path, &[(0, 9)]);
        changed(&path, Change::Apply(b"first")).unwrap();
        assert!(content(&path) == before);
    }
}
