use std::cell::Cell;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use tempfile::TempDir;

use super::*;

const PATH: &str = "inflight";

thread_local! {
    /// Stores that this thread's process makes before it is killed.
    static STORES_LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Whether the next store is made.
pub(super) fn lives() -> bool {
    let left = STORES_LEFT.get();
    STORES_LEFT.set(left.saturating_sub(1));
    left > 0
}

fn identity() -> Identity {
    Identity {
        guest: "guest 7".to_owned(),
        rings: "ring-ref=8 event-channel=3".to_owned(),
        image: DiskIdentity { key: "raw, inode 5".into(), path: "/srv/a.img".into() },
        protocol: Protocol::X86_64,
        ring_order: 0,
        queues: 2,
        max_segments: 256,
    }
}

fn one_queue(dir: &TempDir, open: bool) -> QueueTable {
    let path = dir.path().join(PATH);
    let table =
        if open { Table::open(&path, identity()) } else { Table::create(&path, identity()) };
    table.unwrap().into_queues().remove(1)
}

fn slot(n: u32) -> Slot {
    let mut slot = Slot::default();
    slot.0[8..12].copy_from_slice(&n.to_le_bytes());
    slot.0[111] = 0xEE;
    slot
}

#[test]
fn what_was_taken_and_not_answered_is_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let table = one_queue(&dir, false);
    table.start(10, 10);
    table.take(3, 10, &slot(10));
    table.take(1, 11, &slot(11));
    let segments = [RawSegment { gref: 5, first_sect: 1, last_sect: 6 }; 256];
    table.add_indirect(1, &segments);
    drop(table);

    let resume = one_queue(&dir, true).resume(10).unwrap();
    assert_eq!((resume.req_cons, resume.rsp_prod), (12, 10));
    assert_eq!(resume.unanswered[0].slot, slot(10));
    assert_eq!(resume.unanswered[0].entry, 3);
    assert_eq!(resume.unanswered[1].indirect, segments);
}

#[test]
fn a_request_whose_consumption_was_not_recorded_is_not_consumed_twice() {
    let dir = tempfile::tempdir().unwrap();
    let table = one_queue(&dir, false);
    table.start(10, 10);
    table.take(0, 10, &slot(10));
    // As if killed between steps 2 and 3.
    table.shm.store_u32(table.base + REQ_CONS_AT, 10);
    assert_eq!(one_queue(&dir, true).resume(10).unwrap().req_cons, 11);
}

#[test]
fn a_response_producer_that_nobody_wrote_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let table = one_queue(&dir, false);
    table.start(10, 10);
    table.take(0, 10, &slot(10));
    table.answer(0, 10);
    assert!(table.resume(12).is_none(), "one was being answered, not two");
    assert!(table.resume(9).is_none());
    assert!(table.resume(11).is_some());
}

#[test]
fn a_table_of_another_connection_is_refused_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let _ = one_queue(&dir, false);
    let path = dir.path().join(PATH);
    for guest in ["guest 8", "guest 77"] {
        let other = Identity { guest: guest.to_owned(), ..identity() };
        let e = Table::open(&path, other).err().unwrap();
        assert!(matches!(e, TableError::Foreign { .. }), "{e}");
        assert!(e.to_string().contains(&format!("{guest} ring-ref=8")), "{e}");
        assert!(e.to_string().contains("guest 7 ring-ref=8"), "{e}");
    }
    let longer = dir.path().join("longer");
    Table::create(&longer, Identity { guest: "guest 77".to_owned(), ..identity() }).unwrap();
    assert!(matches!(Table::open(&longer, identity()), Err(TableError::Foreign { .. })));
    let smaller = Identity { max_segments: 32, ..identity() };
    assert!(matches!(Table::open(&path, smaller), Err(TableError::Foreign { .. })));
    std::fs::write(&path, b"short").unwrap();
    assert!(Table::open(&path, identity()).is_err());
}

#[test]
fn a_table_of_another_version_is_refused_with_the_version_that_can_read_it() {
    let dir = tempfile::tempdir().unwrap();
    let _ = one_queue(&dir, false);
    let path = dir.path().join(PATH);
    for (magic, says) in [(b"FERINF04", "version 4"), (b"FERINF99", "version 99")] {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(magic);
        std::fs::write(&path, bytes).unwrap();
        let e = Table::open(&path, identity()).err().unwrap();
        assert!(matches!(e, TableError::OtherVersion { .. }), "{e}");
        assert!(e.to_string().contains(says) && e.to_string().contains("reads 5"), "{e}");
        assert!(ImageName::open(&path).unwrap().is_none());
    }
}

/// The first words of a table of this version, from a program of this version: each offset with its
/// word. If this fails, the layout has changed: give it the next version, and read this one, too.
#[test]
fn a_stored_table_of_this_version_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(PATH);
    let mut bytes = Vec::new();
    for line in include_str!("stored-05.txt").lines() {
        let (at, word) = line.split_once(' ').unwrap();
        let at: usize = at.parse().unwrap();
        bytes.resize(bytes.len().max(at + 8), 0);
        bytes[at..at + 8].copy_from_slice(&u64::from_str_radix(word, 16).unwrap().to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
    let resume = one_queue(&dir, true).resume(10).unwrap();
    assert_eq!((resume.req_cons, resume.rsp_prod), (12, 10));
    let indirect = vec![RawSegment { gref: 5, first_sect: 1, last_sect: 6 }; 2];
    let unanswered = [(3, 10, vec![]), (1, 11, indirect)].map(|(entry, req_index, indirect)| {
        Unanswered { entry, req_index, slot: slot(req_index), indirect }
    });
    assert_eq!(resume.unanswered, unanswered);
    let image = ImageName::open(&path).unwrap().unwrap().get();
    assert_eq!(image, identity().image);
}

#[test]
fn rings_that_the_same_guest_has_made_since_are_told_from_all_else() {
    let dir = tempfile::tempdir().unwrap();
    let _ = one_queue(&dir, false);
    let path = dir.path().join(PATH);
    let made_since = [
        Identity { rings: "ring-ref=9 event-channel=3".to_owned(), ..identity() },
        Identity { protocol: Protocol::X86_32, ..identity() },
        Identity { ring_order: 1, queues: 1, max_segments: 32, ..identity() },
    ];
    for identity in made_since {
        let e = Table::open(&path, identity.clone()).err().unwrap();
        assert!(matches!(e, TableError::OtherRings { .. }), "{e}");
        let image = DiskIdentity { key: "raw, inode 6".into(), path: "/srv/a.img".into() };
        let e = Table::open(&path, Identity { image, ..identity }).err().unwrap();
        assert!(matches!(e, TableError::OtherImage { .. }), "{e}");
    }
}

#[test]
fn a_table_of_another_image_is_refused_and_names_both_under_whatever_path() {
    let dir = tempfile::tempdir().unwrap();
    let _ = one_queue(&dir, false);
    let path = dir.path().join(PATH);
    let with = |key: &str, path: &str| {
        let image = DiskIdentity { key: key.into(), path: path.into() };
        Identity { image, ..identity() }
    };
    let e = Table::open(&path, with("raw, inode 6", "/srv/b.img")).err().unwrap();
    assert!(matches!(e, TableError::OtherImage { .. }), "{e}");
    for named in ["/srv/a.img (raw, inode 5)", "/srv/b.img (raw, inode 6)"] {
        assert!(e.to_string().contains(named), "{e}");
    }
    assert!(Table::open(&path, with("raw, inode 5", "/srv/renamed.img")).is_ok());
    // Only the part of the name that does not fit is cut off.
    let long = with("raw, inode 5", &"x".repeat(5000));
    Table::create(&path, long.clone()).unwrap();
    Table::open(&path, long).unwrap();
}

/// The steps of the module's text, and where the process may be killed.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// 1 to 3, or only 1 and 2.
    Take { recorded: bool },
    /// 5 and 6 for one request that was taken.
    Answer(prop::sample::Index),
    /// 7, then 8, then 9 for so many of the batch.
    Publish { recorded: bool, freed: usize },
}

fn steps() -> impl Strategy<Value = Vec<(Step, bool)>> {
    let step = prop_oneof![
        3 => Just(Step::Take { recorded: true }),
        2 => any::<prop::sample::Index>().prop_map(Step::Answer),
        1 => Just(Step::Publish { recorded: true, freed: usize::MAX }),
    ];
    // After some steps the process is killed.
    prop::collection::vec((step, prop::bool::weighted(0.2)), 1..120)
}

/// The guest's view: which requests it sees answered.
#[derive(Default)]
struct Model {
    taken: u32,
    published: u32,
    answered: Vec<u32>,
    /// Of the living process: entry and request of what it has in hand, then of its batch.
    in_hand: Vec<(u32, u32)>,
    batch: Vec<(u32, u32)>,
}

impl Model {
    fn free_entry(&self) -> Option<u32> {
        let used = |e| self.in_hand.iter().chain(&self.batch).any(|&(entry, _)| entry == e);
        (0..32).find(|&e| !used(e))
    }

    fn step(&mut self, table: &QueueTable, step: Step) {
        match step {
            Step::Take { recorded } => {
                let Some(entry) = self.free_entry() else { return };
                table.take(entry, self.taken, &slot(self.taken));
                if !recorded {
                    table.shm.store_u32(table.base + REQ_CONS_AT, self.taken);
                }
                self.in_hand.push((entry, self.taken));
                self.taken += 1;
            }
            Step::Answer(which) => {
                if self.in_hand.is_empty() {
                    return;
                }
                let (entry, request) = self.in_hand.swap_remove(which.index(self.in_hand.len()));
                table.answer(entry, self.published + self.batch.len() as u32);
                self.batch.push((entry, request));
            }
            Step::Publish { recorded, freed } => {
                self.published += self.batch.len() as u32;
                self.answered.extend(self.batch.iter().map(|&(_, request)| request));
                if recorded {
                    table.published(self.published);
                    for &(entry, _) in self.batch.iter().take(freed) {
                        table.free(entry);
                    }
                }
                self.batch.clear();
            }
        }
    }

    /// The process dies; its memory is gone, and a successor asks the table.
    fn kill(&mut self, table: &QueueTable) -> Result<(), TestCaseError> {
        self.batch.clear();
        self.in_hand.clear();
        let resume = table.resume(self.published).expect("the producer is ours");
        prop_assert_eq!(resume.req_cons, self.taken);
        prop_assert_eq!(resume.rsp_prod, self.published);
        for u in &resume.unanswered {
            prop_assert_eq!(u.slot, slot(u.req_index));
            prop_assert!(!self.answered.contains(&u.req_index), "answered twice");
            self.in_hand.push((u.entry, u.req_index));
        }
        prop_assert_eq!(self.in_hand.len() + self.answered.len(), self.taken as usize);
        Ok(())
    }
}

proptest! {
    /// Killed between any two steps, any number of times, even while taking over: every request
    /// is answered once, none is lost.
    #[test]
    fn each_request_is_answered_once_whenever_the_process_dies(
        steps in steps(),
        partial in any::<(bool, u8)>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let table = one_queue(&dir, false);
        table.start(0, 0);
        let mut model = Model::default();
        for (step, killed) in steps {
            // The step that the process dies in may have come only part of its way.
            let step = match step {
                Step::Take { .. } if killed => Step::Take { recorded: partial.0 },
                Step::Publish { .. } if killed => {
                    Step::Publish { recorded: partial.0, freed: usize::from(partial.1) }
                }
                whole => whole,
            };
            model.step(&table, step);
            if killed {
                model.kill(&table)?;
                model.kill(&table)?;
            }
        }
        while !model.in_hand.is_empty() {
            let first = any::<prop::sample::Index>().new_tree(&mut TestRunner::deterministic());
            model.step(&table, Step::Answer(first.unwrap().current()));
        }
        model.step(&table, Step::Publish { recorded: true, freed: usize::MAX });
        model.answered.sort_unstable();
        prop_assert_eq!(model.answered, (0..model.taken).collect::<Vec<_>>());
    }
}

/// A process that goes about its work, and the guest's view of it.
struct Process<'a> {
    table: &'a QueueTable,
    req_cons: u32,
    /// On the ring, for the guest to see.
    rsp_prod: u32,
    /// Entry and request of what is in hand.
    in_hand: Vec<(u32, u32)>,
    /// Requests whose answers the guest can see, in that order.
    answered: Vec<u32>,
}

impl Process<'_> {
    fn take(&mut self, entry: u32) {
        self.table.take(entry, self.req_cons, &slot(self.req_cons));
        if entry.is_multiple_of(3) {
            let segment = RawSegment { gref: entry, first_sect: 0, last_sect: 7 };
            self.table.add_indirect(entry, &[segment; 2]);
        }
        self.in_hand.push((entry, self.req_cons));
        self.req_cons = self.req_cons.wrapping_add(1);
    }

    /// Answers these, of what is in hand, as one batch.
    fn answer(&mut self, which: std::ops::Range<usize>) {
        let batch: Vec<_> = self.in_hand.drain(which).collect();
        for (i, (entry, _)) in batch.iter().enumerate() {
            self.table.answer(*entry, self.rsp_prod.wrapping_add(i as u32));
        }
        let rsp_prod = self.rsp_prod.wrapping_add(batch.len() as u32);
        // The guest's page is memory like the table's.
        if lives() {
            self.rsp_prod = rsp_prod;
            self.answered.extend(batch.iter().map(|&(_, request)| request));
        }
        self.table.published(rsp_prod);
        batch.iter().for_each(|&(entry, _)| self.table.free(entry));
    }

    /// Batches of several sizes, entries used again, requests overtaken, and a take-over between.
    fn work(&mut self) {
        (0..5).for_each(|entry| self.take(entry));
        self.answer(1..4);
        (1..4).for_each(|entry| self.take(entry));
        self.answer(0..1);
        self.answer(2..4);
        let resume = self.table.resume(self.rsp_prod);
        // One that was killed meanwhile finds out nothing.
        assert!(resume.is_some() || STORES_LEFT.get() == 0);
        (5..8).for_each(|entry| self.take(entry));
        self.answer(0..3);
    }
}

/// A process that was killed before this store, unless it came to its end before.
fn killed_before<'a>(table: &'a QueueTable, blank: &[u8], stores: usize) -> (Process<'a>, bool) {
    table.shm.copy_in(0, blank);
    // Indices wrap around in the middle of it.
    let start = u32::MAX - 3;
    table.start(start, start);
    STORES_LEFT.set(stores);
    let (in_hand, answered) = (Vec::new(), Vec::new());
    let (req_cons, rsp_prod) = (start, start);
    let mut process = Process { table, req_cons, rsp_prod, in_hand, answered };
    process.work();
    let was_killed = STORES_LEFT.get() == 0;
    STORES_LEFT.set(usize::MAX);
    (process, was_killed)
}

/// The process is killed before any one store, and the guest then sets the producer as it likes. Repeated requests were
/// never answered and have room for their answers, or there is no take-over.
#[test]
fn whatever_the_guest_does_to_the_producer_after_any_kill_is_refused_or_served() {
    let dir = tempfile::tempdir().unwrap();
    let table = one_queue(&dir, false);
    let blank = bytes_of(&table);
    let (mut served, mut refused) = (0, 0);
    for stores in 0.. {
        let (process, was_killed) = killed_before(&table, &blank, stores);
        let left = bytes_of(&table);
        // Killed between the two stores, it has answers on the ring that the table knows nothing of.
        let published = table.shm.load_u32(table.base + RSP_PUBLISHED_AT);
        let untold = process.rsp_prod.wrapping_sub(published).cast_signed();
        for lie in -40i32..=40 {
            table.shm.copy_in(0, &left);
            let producer = process.rsp_prod.wrapping_add_signed(lie);
            let Some(resume) = table.resume(producer) else {
                assert!(lie != 0, "killed before store {stores}: the guest did nothing");
                assert!(bytes_of(&table) == left, "a refusal has changed the table");
                refused += 1;
                continue;
            };
            served += 1;
            let unanswered = resume.unanswered;
            let room = resume.req_cons.wrapping_sub(producer);
            assert_eq!(unanswered.len() as u32, room, "before store {stores}, {lie}");
            // A guest that takes these back gets them again, and no others.
            let kept = process.answered.len().saturating_add_signed(lie.clamp(-untold, 0) as isize);
            let seen = &process.answered[..kept];
            assert!(unanswered.iter().all(|u| !seen.contains(&u.req_index)));
            assert!(unanswered.iter().all(|u| u.slot == slot(u.req_index)));
            let entries: std::collections::BTreeSet<_> =
                unanswered.iter().map(|u| u.entry).collect();
            assert_eq!(entries.len(), unanswered.len());
            // A second successor, after this one is killed at once, sees the same.
            let again = table.resume(producer).unwrap();
            assert_eq!((again.req_cons, again.unanswered), (resume.req_cons, unanswered));
        }
        if !was_killed {
            break;
        }
    }
    assert!(served > 100 && refused > 1000, "{served} served, {refused} refused");
}

/// The successor is killed, too, after any store but none. By then the table has the responses that it has found on the
/// ring.
#[test]
fn answers_that_a_successor_has_found_are_not_taken_back_when_it_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let table = one_queue(&dir, false);
    let blank = bytes_of(&table);
    for stores in 0.. {
        let (process, was_killed) = killed_before(&table, &blank, stores);
        let left = bytes_of(&table);
        for more in 1.. {
            table.shm.copy_in(0, &left);
            STORES_LEFT.set(more);
            let _ = table.resume(process.rsp_prod);
            let has_ended = STORES_LEFT.get() > 0;
            STORES_LEFT.set(usize::MAX);
            for lie in 1..10 {
                let resume = table.resume(process.rsp_prod.wrapping_sub(lie));
                assert!(resume.is_none(), "before stores {stores} and {more}: {lie} taken back");
            }
            if has_ended {
                break;
            }
        }
        if !was_killed {
            break;
        }
    }
}

fn bytes_of(table: &QueueTable) -> Vec<u8> {
    let mut bytes = vec![0; table.shm.len()];
    table.shm.copy_out(0, &mut bytes);
    bytes
}

/// 64 queues (`--queues`) with rings of 16 pages, and numbers as long as they get.
#[test]
fn the_largest_connection_has_a_table() {
    let rings = vec!["4294967295"; 16].join(",");
    let rings = vec![format!("ring={rings} port=4294967295"); 64].join("; ");
    let identity = Identity { rings, ring_order: 4, queues: 64, ..identity() };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(PATH);
    Table::create(&path, identity.clone()).unwrap();
    Table::open(&path, identity).unwrap();
}

#[test]
fn a_process_that_is_killed_while_it_names_another_image_has_named_one_of_the_two() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(PATH);
    let image = |n: usize| DiskIdentity {
        key: format!("raw, inode {n}{}", "k".repeat(n % 7)),
        path: format!("/srv/{}.img", "p".repeat(n % 5)),
    };
    let first = Identity { image: image(0), ..identity() };
    drop(Table::create(&path, first).unwrap());
    let mut counts = 0;
    for n in 1..40 {
        STORES_LEFT.set(n % 6);
        ImageName::open(&path).unwrap().unwrap().set(&image(n));
        STORES_LEFT.set(usize::MAX);
        let named = ImageName::open(&path).unwrap().unwrap().get();
        if n % 6 == 5 {
            counts = n;
        }
        assert_eq!(named, image(counts), "killed before store {}", n % 6);
        let now = Identity { image: named, ..identity() };
        assert!(Table::open(&path, now).is_ok());
    }
}
