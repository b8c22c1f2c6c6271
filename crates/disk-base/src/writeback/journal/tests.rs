use std::mem::MaybeUninit;
use std::path::PathBuf;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use super::*;
use crate::Format;
use ferrite_host::place::Place;

fn identity() -> Identity {
    let place = Place::from_text("inode 1 on a disk".into());
    Identity { format: Format::Vhd, id: [7; 16], place, path: "/srv/a.vhd".into(), handle: None }
}

fn path_in(dir: &Path) -> PathBuf {
    dir.join(identity().file_name())
}

fn open(dir: &Path) -> (Journal, Vec<Record>) {
    Journal::open(Some(dir), &identity(), 3, 4).unwrap()
}

#[test]
fn what_was_claimed_is_there_for_the_next_process() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, records) = open(dir.path());
    assert!(records.is_empty());
    let a = journal.claim(0, &[1, 2, 3]).unwrap();
    let b = journal.claim(9, &[4, 5, 6]).unwrap();
    journal.store(b, 1, 50);
    journal.release(a);
    drop(journal);
    let (mut journal, records) = open(dir.path());
    assert_eq!(records, [Record { slot: b, key: 9, words: Box::new([4, 50, 6]) }]);
    assert_eq!((journal.len(), journal.room()), (1, 3));
    journal.remove().unwrap();
    assert_eq!(Journal::peek(Some(dir.path()), &identity(), 3, 4).unwrap(), records);
    journal.release(b);
    journal.remove().unwrap();
    assert!(Journal::peek(Some(dir.path()), &identity(), 3, 4).unwrap().is_empty());
}

#[test]
fn a_full_journal_gives_no_slot_with_a_file_or_without() {
    let dir = tempfile::tempdir().unwrap();
    for dir in [Some(dir.path()), None] {
        let (mut journal, _) = Journal::open(dir, &identity(), 1, 2).unwrap();
        let slot = journal.claim(1, &[0]).unwrap();
        assert!(journal.claim(2, &[0]).is_some() && journal.claim(3, &[0]).is_none());
        journal.release(slot);
        assert!(journal.claim(3, &[0]).is_some());
    }
}

#[test]
fn the_journal_of_another_kind_is_refused_and_one_that_says_nothing_is_nobodys() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path());
    let slot = journal.claim(1, &[1, 2, 3]).unwrap();
    drop(journal);
    assert!(Journal::open(Some(dir.path()), &identity(), 2, 4).is_err());
    open(dir.path()).0.release(slot);
    assert!(Journal::open(Some(dir.path()), &identity(), 2, 4).unwrap().1.is_empty());
}

#[test]
fn a_journal_that_a_process_has_open_is_not_opened_by_another() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _) = open(dir.path());
    let error = Journal::open(Some(dir.path()), &identity(), 3, 4).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InUse);
    drop(journal);
    open(dir.path());
}

#[test]
fn a_list_says_what_is_in_use_and_keeps_nobody_from_opening_it() {
    let dir = tempfile::tempdir().unwrap();
    let state = || all(dir.path()).unwrap()[0].state;
    let (journal, _) = open(dir.path());
    assert_eq!(state(), JournalState::InUse);
    drop(journal);

    // A process has a file open before it locks it, shared or not.
    let path = path_in(dir.path());
    let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, &path, WatchFlags::OPEN).unwrap();
    let mut memory = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut memory);
    assert!(!file::is_held(&path).unwrap());
    assert!(events.next().is_err(), "it was opened");
    assert_ne!(state(), JournalState::InUse);
    assert!(events.next().is_ok(), "the watch sees nothing");
}

#[test]
fn a_journal_that_has_changed_since_it_was_listed_is_not_dropped_nor_are_those_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let place = Place::from_text("inode 2 on a disk".into());
    let other = Identity { id: [8; 16], place, ..identity() };
    drop(Journal::open(Some(dir.path()), &other, 3, 4).unwrap());
    drop(open(dir.path()));
    let listed = all(dir.path()).unwrap();
    let listed: Vec<&Kept> = listed.iter().collect();
    assert_eq!(listed.len(), 2);
    // A backend is started and killed.
    let (mut journal, _) = Journal::open(Some(dir.path()), &other, 3, 4).unwrap();
    journal.claim(1, &[1, 2, 3]).unwrap();
    drop(journal);
    let error = drop_kept(dir.path(), &listed).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let now = all(dir.path()).unwrap();
    assert_eq!(now.iter().map(|kept| kept.records).sum::<u64>(), 1);
    assert_eq!(now.len(), 2);
    drop_kept(dir.path(), &now.iter().collect::<Vec<_>>()).unwrap();
    assert!(all(dir.path()).unwrap().is_empty());
}

#[test]
fn a_journal_that_a_process_has_open_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, _) = Journal::open(Some(dir.path()), &identity(), 8, 1 << 16).unwrap();
    for key in 0..4 * u64::from(FIRST) {
        holder.claim(key, &[key; 8]).unwrap();
    }
    (0..4 * FIRST).for_each(|slot| holder.release(Slot(slot)));
    let bytes = || path_in(dir.path()).metadata().unwrap().len();
    let before = bytes();
    assert!(before > file_bytes(FIRST, 8) as u64);
    let error = Journal::open(Some(dir.path()), &identity(), 8, 1 << 16).err().unwrap();
    assert_eq!((error.kind(), bytes()), (ErrorKind::InUse, before));
    // Changes that the holder answers then are there for the successor.
    holder.claim(7, &[7; 8]).unwrap();
    drop(holder);
    assert_eq!(Journal::open(Some(dir.path()), &identity(), 8, 1 << 16).unwrap().1[0].key, 7);
}

/// One process reads a dead process's journal, while another opens the image.
#[test]
fn a_journal_that_is_made_anew_is_not_cut_off_below_who_reads_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let reader = std::fs::File::open(path_in(dir.path())).unwrap();
    let before = reader.metadata().unwrap().len();
    let _new = open(dir.path());
    assert_eq!(reader.metadata().unwrap().len(), before);
}

#[test]
fn a_process_that_lost_its_journals_name_does_not_remove_the_next_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (mut first, _) = open(dir.path());
    std::fs::remove_file(path_in(dir.path())).unwrap();
    let (mut second, _) = open(dir.path());
    second.claim(1, &[1, 2, 3]).unwrap();
    first.remove().unwrap();
    drop(second);
    assert_eq!(open(dir.path()).1.len(), 1);
}

/// The journal of a later version, or of an earlier one.
#[test]
fn the_journal_of_another_version_is_refused_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    for (magic, len) in [(*b"ferrjrn9", 8192), (*b"ferrjrn1", 64)] {
        let mut bytes = vec![0; len];
        bytes[..8].copy_from_slice(&magic);
        std::fs::write(path_in(dir.path()), &bytes).unwrap();
        let name = identity().file_name();
        let refused = |error: Option<DiskError>| {
            let error = error.unwrap();
            assert_eq!(error.kind(), ErrorKind::Unsuitable);
            assert!(error.to_string().contains("version 3"), "{error}");
            assert!(error.help().contains(name.trim_end_matches(".journal")), "{}", error.help());
        };
        refused(Journal::open(Some(dir.path()), &identity(), 3, 4).err());
        refused(Journal::peek(Some(dir.path()), &identity(), 3, 4).err());
        refused(survey(Some(dir.path()), &identity()).err());
        // It may belong to this image, from another place, or with another identifier.
        let elsewhere = Identity { place: Place::from_text("inode 2".into()), ..identity() };
        refused(survey(Some(dir.path()), &elsewhere).err());
        refused(survey(Some(dir.path()), &Identity { id: [8; 16], ..identity() }).err());
        assert_eq!(std::fs::read(path_in(dir.path())).unwrap(), bytes);
        assert_eq!(all(dir.path()).unwrap()[0].state, JournalState::Foreign);
    }
}

#[test]
fn journals_are_found_by_identifier_and_place() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path());
    journal.claim(5, &[1, 2, 3]).unwrap();
    drop(journal);
    let find = |identity: &Identity| {
        let found = survey(Some(dir.path()), identity).unwrap();
        (found.own.is_some(), found.moved.map(|l| l.keys), found.here.map(|l| l.keys))
    };
    let elsewhere = Identity { place: Place::from_text("inode 2".into()), ..identity() };
    let other = Identity { id: [8; 16], ..identity() };
    assert_eq!(find(&identity()), (true, None, None));
    assert_eq!(find(&elsewhere), (false, Some(vec![5]), None), "its image is not there");
    assert_eq!(find(&other), (false, None, Some(vec![5])));
    assert_eq!(find(&Identity { id: [8; 16], ..elsewhere }), (false, None, None));

    // Only useless journals are removed by the next image at the place.
    Journal::open(Some(dir.path()), &other, 3, 4).unwrap();
    assert_eq!(all(dir.path()).unwrap().len(), 2);
    open(dir.path());
    assert_eq!(all(dir.path()).unwrap().len(), 1);
    assert_eq!(find(&identity()), (true, None, None));
}

#[test]
fn a_copy_beside_its_original_has_no_journal_and_none_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let original = dir.path().join("a.vhd");
    std::fs::write(&original, "x").unwrap();
    let place = Place::at(&original).unwrap();
    let at = Identity { path: original.clone(), place, ..identity() };
    let (mut journal, _) = Journal::open(Some(dir.path()), &at, 3, 4).unwrap();
    journal.claim(5, &[1, 2, 3]).unwrap();
    let copy = Identity { place: Place::from_text("inode 2".into()), ..identity() };
    let found = || survey(Some(dir.path()), &copy).unwrap();
    // A journal in use is not reported: a copy of its image lacks more than that.
    assert!(found().moved.is_none() && found().original.is_none());
    drop(journal);
    assert!(found().moved.is_none() && found().original.is_some());
    found().check(Path::new("copy")).unwrap();
    std::fs::rename(&original, dir.path().join("b.vhd")).unwrap();
    let error = found().check(Path::new("copy")).unwrap_err().to_string();
    assert!(error.contains("a.vhd"), "{error}");
}

#[test]
fn a_void_journal_says_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path());
    journal.claim(1, &[1, 2, 3]).unwrap();
    journal.void().unwrap().set();
    assert!(survey(Some(dir.path()), &identity()).unwrap().own.is_none());
    journal.claim(2, &[1, 2, 3]).unwrap();
    drop(journal);
    let (mut journal, records) = open(dir.path());
    assert!(records.is_empty() && journal.claim(3, &[1, 2, 3]).is_some());
    drop(journal);
    assert_eq!(open(dir.path()).1.len(), 1);
}

#[test]
fn a_journal_is_short_until_it_is_used_and_the_next_process_gets_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Journal::open(Some(dir.path()), &identity(), 8, 1 << 16).unwrap();
    let bytes = || path_in(dir.path()).metadata().unwrap().len();
    let (mut journal, _) = open();
    for key in 0..1000 {
        journal.claim(key, &[key; 8]).unwrap();
    }
    assert!(bytes() < 160 << 10, "{} bytes", bytes());
    for key in 1000..1 << 16 {
        assert!(journal.room() >= journal.left().min(AHEAD as usize));
        journal.claim(key, &[key; 8]).unwrap();
    }
    assert!(journal.claim(1 << 16, &[0; 8]).is_none());
    drop(journal);
    let (_, records) = open();
    let right = |(key, r): (u64, &Record)| r.key == key && *r.words == [key; 8];
    assert!(records.len() == 1 << 16 && (0..).zip(&records).all(right));
}

#[test]
fn where_a_journal_cannot_grow_its_room_is_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(Some(dir.path()), &identity(), 1, 1 << 16).unwrap();
    // Longer than any journal can get.
    std::fs::OpenOptions::new()
        .write(true)
        .open(path_in(dir.path()))
        .unwrap()
        .set_len(1 << 30)
        .unwrap();
    let mut slots = Vec::new();
    while journal.room() > 0 {
        slots.push(journal.claim(1, &[1]).unwrap());
    }
    assert_eq!(slots.len(), FIRST as usize);
    assert!(journal.claim(1, &[1]).is_none() && journal.left() > 0);
    journal.release(slots[0]);
    assert!(journal.claim(1, &[1]).is_some());
}
