//! A file system that is nearly full: writes that find space succeed.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use ferrite_disk::{Disk, ImageName, OpenOptions, Session};
use ferrite_image_tools::NewImage;

use crate::model::{Model, compare, name, pattern, tools};
use ferrite_testkit::errno::ENOSPC;
use ferrite_testkit::faulty::{Faults, Kind, Ops};
use ferrite_testkit::is_night;
use ferrite_testkit::places::Small;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A session on a file system that has space for files of so many bytes.
fn session(path: &Path, room_bytes: u64) -> Session {
    let disk = Disk::open_image(&name(path), &OpenOptions::default()).unwrap();
    let faults = Faults::none();
    faults.set([Ops::from(Kind::Allocate).touching(room_bytes..u64::MAX).fail(ENOSPC)]);
    Session::new(Arc::new(disk), |arena| faults.open(arena, 16)).unwrap()
}

fn create(image: &ImageName, unit_bytes: u64) {
    let new = NewImage {
        bytes: Some(256 * MIB),
        unit_bytes: Some(unit_bytes as u32),
        ..NewImage::default()
    };
    tools(|tools| tools.create(image, &new)).unwrap();
}

/// Writes one unit after the other until there is no space; how many there was space for.
fn fill(session: &mut Session, model: &mut Model, unit_bytes: u64) -> u64 {
    let sectors = unit_bytes / 512;
    for unit in 0..256 * MIB / unit_bytes {
        let (first, part) = (unit * sectors, sectors.min(2048));
        if let Err(e) = session.write(first * 512, &pattern(first, part, 1)) {
            assert_eq!(e.raw_os_error(), Some(ENOSPC), "{e}");
            return unit;
        }
        model.write(first, part, 1);
    }
    panic!("it was never full");
}

#[test]
fn writes_go_on_until_there_is_no_space_for_a_single_unit() {
    for (extension, unit_bytes) in [("qcow2", 64 << 10), ("qcow2", 4 << 10), ("vhd", 2 * MIB)] {
        let rooms = [20 * MIB + 700_000, 16 * MIB + 3 * (64 << 10), 33 * MIB];
        for room_bytes in rooms.into_iter().take(if is_night() { 3 } else { 1 }) {
            let dir = TempDir::new_in("/dev/shm").unwrap();
            let path = dir.path().join("a").with_extension(extension);
            create(&name(&path), unit_bytes);
            let mut model = Model::default();
            let mut disk = session(&path, room_bytes);
            let units = fill(&mut disk, &mut model, unit_bytes);
            let unused = room_bytes - units * unit_bytes;
            // Metadata, of which refcount blocks are made for more, and a part of a unit.
            let least = room_bytes / 64 + 2 * unit_bytes + (256 << 10);
            assert!(unused <= least, "{extension} {unit_bytes}: {unused} bytes of {room_bytes}");
            // Existing blocks can be written and read.
            disk.write(0, &pattern(0, 8, 2)).unwrap();
            model.write(0, 8, 2);
            disk.flush().unwrap();
            compare(&mut disk, &model);
            disk.close().unwrap();
            let report = tools(|tools| tools.check(&name(&path), false)).unwrap();
            assert!(report.images.iter().all(|image| image.findings.is_empty()));
            compare(&mut session(&path, u64::MAX), &model);
            // The same after the next start, when nothing is set aside yet.
            let mut disk = session(&path, room_bytes);
            disk.write(0, &pattern(0, 8, 3)).unwrap();
            model.write(0, 8, 3);
            compare(&mut disk, &model);
            disk.discard(0, unit_bytes).unwrap();
        }
    }
}

/// Needs root; passes without, saying so. A new image, and a copy that has holes where tables are zero.
#[test]
fn what_was_written_before_the_file_system_was_full_is_kept_by_a_flush() {
    for (extension, unit_bytes) in [("qcow2", 64 << 10), ("qcow2", 4 << 10), ("vhd", 2 * MIB)] {
        let dir = TempDir::new_in("/dev/shm").unwrap();
        let Some(_small) = Small::mount(dir.path(), "size=32m") else { return };
        let (made, path) =
            (dir.path().join("made"), dir.path().join("a").with_extension(extension));
        let made = made.with_extension(extension);
        create(&name(&made), unit_bytes);
        let mut copy = Command::new("cp");
        assert!(copy.arg("--sparse=always").args([&made, &path]).status().unwrap().success());
        let mut model = Model::default();
        let mut disk = session(&path, u64::MAX);
        // In the reach of several tables.
        for unit in [0, 1, 30 * MIB / unit_bytes, 250 * MIB / unit_bytes] {
            let first = unit * unit_bytes / 512;
            disk.write(first * 512, &pattern(first, 8, 1)).unwrap();
            model.write(first, 8, 1);
        }
        // Not a page is left.
        let mut fill = Command::new("dd");
        fill.args(["if=/dev/zero", "bs=4k", "status=none"]);
        let filled =
            fill.arg(format!("of={}", dir.path().join("other").display())).output().unwrap();
        assert!(String::from_utf8_lossy(&filled.stderr).contains("No space left"), "{filled:?}");
        disk.flush().unwrap_or_else(|e| panic!("{extension} {unit_bytes}: {e}"));
        disk.close().unwrap();
        fs::remove_file(dir.path().join("other")).unwrap();
        compare(&mut session(&path, u64::MAX), &model);
    }
}
