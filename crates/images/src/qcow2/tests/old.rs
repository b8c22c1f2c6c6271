//! Images of version 2, which cannot be marked: their refcounts tell whether another program has written since a
//! process died.

use std::fs::File;

use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName};
use ferrite_simio::On;

use super::trouble::{Machine, open_in};
use super::*;

fn old(cluster_bytes: u32) -> NewImage {
    NewImage { version: 2, cluster_bytes, ..NewImage::new(8 << 20) }
}

/// An image whose refcount table is nearly full: it has 512 bytes, for 8 MiB of the file.
fn nearly_full(path: &Path) {
    create(path, &NewImage { bytes: 1 << 20, ..old(512) });
    let mut session = open(path);
    let (disk, port) = (session.disk().clone(), session.port().clone());
    session.run(qcow2_of(&disk).resize(&port, 12 << 20, 0)).unwrap().unwrap();
    drop((session, port, disk));
    let mut session = open(path);
    for at in (0..15 << 19).step_by(1 << 16) {
        session.write(at, &[1; 1 << 16]).unwrap();
    }
    session.close().unwrap();
}

/// Writes `bytes` at a time, as long as the world goes on; returns the offsets of answered writes.
fn write_until_it_stops(machine: &mut Machine, from: u64, bytes: usize) -> Vec<u64> {
    let mut answered = Vec::new();
    for i in 0..24 {
        // Operations in flight in a stopped world keep their memory.
        if machine.world.stopped() {
            break;
        }
        let at = from + i * bytes as u64;
        if machine.session.write(at, &vec![9; bytes]).is_ok() {
            answered.push(at);
        }
        if i % 4 == 3 && !machine.world.stopped() {
            let _ = machine.session.flush();
        }
    }
    if !machine.world.stopped() {
        let (disk, port) = (machine.session.disk().clone(), machine.session.port().clone());
        let _ = machine.session.run(disk.close(&port));
    }
    answered
}

/// Kills the process at each step in turn; how often.
fn dies_everywhere(make: &dyn Fn(&Path), steps: usize, from: u64, bytes: usize) -> u32 {
    let mut deaths = 0;
    for stop in (1..).step_by(steps) {
        let mut machine = Machine::new(stop, make);
        machine.stop_after(stop);
        let answered = write_until_it_stops(&mut machine, from, bytes);
        let stopped = machine.world.stopped();
        let mut machine = machine.reopen();
        for at in answered {
            let mut found = vec![0; bytes];
            machine.session.read(at, &mut found).unwrap();
            assert!(found == vec![9; bytes], "byte {at}, after {stop} steps");
        }
        if !stopped {
            break;
        }
        deaths += 1;
    }
    deaths
}

#[test]
fn an_old_image_is_recovered_wherever_its_process_died() {
    for cluster_bytes in [512, 65536] {
        let deaths = dies_everywhere(&|path| create(path, &old(cluster_bytes)), 1, 0, 12 << 10);
        assert!(deaths > 50, "{deaths}");
    }
}

#[test]
fn an_old_image_is_recovered_while_its_refcount_table_grows() {
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("made");
    nearly_full(&made);
    let make = |path: &Path| {
        std::fs::copy(&made, path).unwrap();
    };
    let place = |path: &Path| {
        let mut place = [0; 8];
        File::open(path).unwrap().read_exact_at(&mut place, 48).unwrap();
        u64::from_be_bytes(place)
    };
    let mut machine = Machine::new(0, make);
    write_until_it_stops(&mut machine, 8 << 20, 64 << 10);
    assert_ne!(place(&machine.dir.path().join("a.qcow2")), place(&made), "it did not grow");
    let deaths = dies_everywhere(&make, 5, 8 << 20, 64 << 10);
    assert!(deaths > 50, "{deaths}");
}

/// Kills the process, which leaves a journal.
fn died(machine: Machine) -> tempfile::TempDir {
    let Machine { dir, world, session } = machine;
    drop(session);
    world.kill_process().unwrap();
    open_in(dir.path(), true);
    dir
}

/// Repairs the image as another program would; the findings.
fn repaired(dir: &Path) -> Report {
    let raw = medium(&dir.join("a.qcow2"));
    let (mut reactor, port) = port_to(&raw);
    reactor.block_on(repair(&port, &raw)).unwrap().unwrap()
}

fn reopened(dir: &Path) -> Result<Image, DiskError> {
    let name = ImageName { format: Format::Qcow2, path: dir.join("a.qcow2") };
    let options = OpenOptions { state_dir: Some(dir.join("state")), ..options() };
    Image::open(&name, &options)
}

#[track_caller]
fn is_refused(dir: &Path, lost: &str) {
    let error = reopened(dir).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.why().contains(lost), "{error}");
}

/// Counts of clusters are on disk, and the entries that refer to them are not: to other programs they are leaks.
#[test]
fn leaks_that_another_program_has_freed_after_half_a_commit_are_missed() {
    let mut freed = [0, 0];
    for (seed, version) in (0..32).map(|i| (i / 2, 2 + i as u32 % 2)) {
        let new = NewImage { version, ..old(65536) };
        let mut machine = Machine::new(seed, |path| create(path, &new));
        machine.session.write(0, &[1; 512]).unwrap();
        machine.session.flush().unwrap();
        machine.session.write(1 << 20, &[2; 512]).unwrap();
        let table = with_qcow2(&machine.session, |qcow2| qcow2.l1_entry(0) & entry::OFFSET);
        machine.fail_once(On::Write, table..table + 65536);
        machine.session.flush().unwrap_err();
        let dir = died(machine);
        let before = repaired(dir.path());
        let bait = u64::from(version == 2);
        if before.counts.leaks == bait {
            // Only the bait was found: data of failed writes are on disk all the same.
            continue;
        }
        assert!(before.findings.iter().any(|f| f.problem == Problem::Leak), "{before:?}");
        freed[version as usize - 2] += 1;
        is_refused(dir.path(), "lost: bytes 1048576 to 1114111");
    }
    assert!(freed.iter().all(|times| *times > 2), "{freed:?}");
}

/// This holds also if only the bait can be repaired.
#[test]
fn a_repair_after_a_death_is_noticed_though_it_finds_nothing_else() {
    let mut machine = Machine::new(1, |path| create(path, &old(65536)));
    machine.session.write(1 << 20, &[2; 512]).unwrap();
    let dir = died(machine);
    let before = repaired(dir.path());
    assert_eq!((before.counts.leaks, before.counts.total()), (1, 1), "{before:?}");
    is_refused(dir.path(), "lost: bytes 1048576 to 1114111");
}

/// Counts that were being written may have any value, but not the bait's.
#[test]
fn a_repair_after_a_death_within_a_commit_is_noticed_wherever_that_was() {
    let (mut refused, mut done) = (0, 0);
    for stop in 1.. {
        let mut machine = Machine::new(1, |path| create(path, &old(65536)));
        machine.session.write(1 << 20, &[2; 512]).unwrap();
        machine.stop_after(stop);
        let _ = machine.session.flush();
        if !machine.world.stopped() {
            break;
        }
        let dir = died(machine);
        repaired(dir.path());
        match reopened(dir.path()) {
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Refused, "{e}");
                assert_eq!(done, 0, "a death after fewer than {stop} steps was not noticed");
                refused += 1;
            }
            // The journal has no records any more.
            Ok(_) => done += 1,
        }
    }
    assert!(refused > 5, "{refused} refused, {done} done");
}

#[test]
fn the_bait_of_dead_processes_is_freed_by_a_good_close() {
    for flushed in [false, true] {
        let mut machine = Machine::new(1, |path| create(path, &old(65536)));
        for i in 0..3 {
            machine.session.write(i << 20, &[2; 512]).unwrap();
            if flushed {
                machine.session.flush().unwrap();
            }
            machine = machine.reopen();
        }
        machine.session.write(4 << 20, &[2; 512]).unwrap();
        let Machine { dir, session, .. } = machine;
        session.close().unwrap();
        let report = check(&medium(&dir.path().join("a.qcow2"))).unwrap();
        assert!(report.is_clean(), "{report:?}");
    }
}

#[test]
fn what_another_program_has_changed_in_counts_or_header_is_noticed() {
    // The count of the header's cluster in the first block, and a byte after the header.
    for (at, byte) in [(2 << 16, 7), (80, 1)] {
        let mut machine = Machine::new(1, |path| create(path, &old(65536)));
        machine.session.write(0, &[1; 512]).unwrap();
        machine.session.flush().unwrap();
        machine.session.write(1 << 20, &[2; 512]).unwrap();
        let dir = died(machine);
        let file = File::options().write(true).open(dir.path().join("a.qcow2")).unwrap();
        file.write_all_at(&[byte], at).unwrap();
        is_refused(dir.path(), "lost: bytes 1048576 to 1114111");
    }
}

/// As with a program that keeps the mark, such as one that copies blocks of the file.
#[test]
fn an_entry_that_is_neither_old_nor_new_is_refused_with_what_is_lost() {
    for version in [2, 3] {
        let new = NewImage { version, ..old(65536) };
        let mut machine = Machine::new(1, |path| create(path, &new));
        machine.session.write(0, &[1; 512]).unwrap();
        machine.session.flush().unwrap();
        machine.session.write(1 << 20, &[2; 512]).unwrap();
        let table = with_qcow2(&machine.session, |qcow2| qcow2.l1_entry(0) & entry::OFFSET);
        let dir = died(machine);
        let file = File::options().write(true).open(dir.path().join("a.qcow2")).unwrap();
        let other = COPIED | (100 << 16);
        file.write_all_at(&other.to_be_bytes(), table + (1 << 20 >> 16) * 8).unwrap();
        is_refused(dir.path(), "lost: bytes 1048576 to 1114111");
    }
}
