//! A sync that fails, wherever it is in a close or a resize: that fails, and so does everything
//! after it that would say that the image is complete (blkif.md 2, rule 3).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::{Disk, OpenOptions, Parents, Session};
use ferrite_image_tools::{ImageTools, NewImage};

use crate::model::{name, session_of, tools};
use ferrite_host::directory::HostDirectory;
use ferrite_io::engine::Op;
use ferrite_testkit::faulty::{Faults, Kind, Ops};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const EIO: i32 = 5;

/// Formats, and whether the image is a fixed one.
const IMAGES: [(&str, bool); 3] = [("vhd", false), ("vhd", true), ("qcow2", false)];
/// More syncs than a close or a resize has.
const MANY: u64 = 40;

fn make(dir: &TempDir, extension: &str, fixed: bool) -> PathBuf {
    let path = dir.path().join("a").with_extension(extension);
    let new = NewImage { bytes: Some(64 * MIB), fixed, ..NewImage::default() };
    tools(|tools| tools.create(&name(&path), &new)).unwrap();
    path
}

fn options(path: &Path) -> OpenOptions {
    OpenOptions { state_dir: Some(path.with_extension("state")), ..OpenOptions::default() }
}

fn fail_after(faults: &Faults, syncs: u64) {
    faults.set([Ops::among(&[Kind::Sync]).fail(EIO).after(syncs).once()]);
}

/// Writes, and a sync fails that is the next but so many. `false`: there are not as many.
fn fails_to_close(extension: &str, fixed: bool, syncs: u64) -> bool {
    let dir = TempDir::new_in("/dev/shm").unwrap();
    let path = make(&dir, extension, fixed);
    let faults = Faults::none();
    let disk = Disk::open_image(&name(&path), &options(&path)).unwrap();
    let mut session = Session::new(Arc::new(disk), |arena| faults.open(arena, 64)).unwrap();
    session.write(MIB, &[7; 4096]).unwrap();
    session.flush().unwrap();
    session.write(9 * MIB, &[8; 4096]).unwrap();
    fail_after(&faults, syncs);
    let (disk, port) = (Arc::clone(session.disk()), session.port().clone());
    if session.run(async { disk.close(&port).await }).unwrap().is_ok() {
        return false;
    }
    faults.list();
    let again = session.run(async { disk.close(&port).await }).unwrap();
    let did = faults.take_list();
    assert!(again.is_err(), "{extension}, sync {syncs}: {did:?}");
    let changes = |op: &Op| matches!(op, Op::Write { .. } | Op::SetLen { .. } | Op::Sync { .. });
    assert!(!did.iter().any(changes), "{extension}, sync {syncs}: {did:?}");
    drop((disk, port, session));
    crate::model::wait_until_released(&path);
    let mut next = session_of(Disk::open_image(&name(&path), &options(&path)).unwrap());
    let mut bytes = vec![0; 4096];
    next.read(MIB, &mut bytes).unwrap();
    assert!(bytes == [7; 4096], "{extension}, sync {syncs}: what was flushed is lost");
    true
}

#[test]
fn an_image_of_which_a_sync_failed_is_not_closed_by_closing_it_again() {
    for (extension, fixed) in IMAGES {
        let failed = (0..MANY).take_while(|n| fails_to_close(extension, fixed, *n)).count() as u64;
        assert!((1..MANY).contains(&failed), "{extension}: {failed}");
    }
}

/// The same of a resize by the tool, which opens the image itself.
fn fails_to_resize(extension: &str, fixed: bool, to: u64, syncs: u64) -> bool {
    let dir = TempDir::new_in("/dev/shm").unwrap();
    let path = make(&dir, extension, fixed);
    let mut before = session_of(Disk::open_image(&name(&path), &OpenOptions::default()).unwrap());
    before.write(MIB, &[7; 4096]).unwrap();
    before.close().unwrap();
    crate::model::wait_until_released(&path);
    let faults = Faults::none();
    fail_after(&faults, syncs);
    faults.list();
    let resized = ImageTools {
        directory: &HostDirectory,
        unlocked: false,
        engine: &|arena| faults.open(arena, 64),
        state_dir: None,
        fixed_size: false,
        parents: Parents::default(),
        progress: &|_| true,
    }
    .resize(&name(&path), to, false);
    let did = faults.take_list();
    let done = did.iter().filter(|op| matches!(op, Op::Sync { .. })).count() as u64;
    if done <= syncs {
        resized.unwrap();
        return false;
    }
    assert!(resized.is_err(), "{extension}, sync {syncs}: {did:?}");
    let failed = did.iter().enumerate().filter(|(_, op)| matches!(op, Op::Sync { .. }));
    let failed = failed.map(|(at, _)| at).nth(syncs as usize).unwrap();
    let changes = |op: &Op| matches!(op, Op::Write { .. } | Op::SetLen { .. } | Op::Sync { .. });
    assert!(!did[failed + 1..].iter().any(changes), "{extension}, sync {syncs}: {did:?}");
    crate::model::wait_until_released(&path);
    let mut next = session_of(Disk::open_image(&name(&path), &OpenOptions::default()).unwrap());
    let bytes = next.disk().sectors() * 512;
    assert!([64 * MIB, to].contains(&bytes), "{extension}, sync {syncs}: {bytes} bytes");
    let mut data = vec![0; 4096];
    next.read(MIB, &mut data).unwrap();
    assert!(data == [7; 4096], "{extension}, sync {syncs}");
    true
}

/// To a size that the table has room for, and to one that takes a larger table.
#[test]
fn a_resize_of_which_a_sync_failed_fails_and_does_nothing_more() {
    for (extension, fixed) in IMAGES {
        for to in if fixed { [65 * MIB, 80 * MIB] } else { [66 * MIB, 4 << 40 >> 2] } {
            let fails = |n: &u64| fails_to_resize(extension, fixed, to, *n);
            let failed = (0..MANY).take_while(fails).count() as u64;
            assert!((1..MANY).contains(&failed), "{extension}: {failed}");
        }
    }
}
