//! The simulator finds what it is there to find: formats with wrong orders of writes and syncs.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrite_disk::{Format as Kind, SyncWitness};
use ferrite_io::arena::Span;
use ferrite_sim::format::{Disk, Format, Place, Queue};
use ferrite_sim::images::{Images, Medium};
use ferrite_sim::model::After;
use ferrite_sim::plan::{Cut, Plan, Scenario, Violation};
use ferrite_sim::story::tell;
use ferrite_simio::Lie;
use ferrite_testkit::rounds;

/// The first of so many fixed seeds whose story ends badly.
fn find(format: &impl Format, scenario: Scenario, seeds: u64) -> Option<Box<Violation>> {
    let plan = |seed| Plan::new(seed, scenario);
    (0..seeds).find_map(|seed| tell(format, &plan(seed)).err())
}

/// Raw, and a flush that tells the guest what it wants to hear.
struct DeafFlush;
const RAW: Images = Images::new(ferrite_disk::Format::Raw);
struct DeafDisk(ferrite_disk::Disk);

impl Format for DeafFlush {
    type Disk = DeafDisk;

    fn name(&self) -> String {
        "deaf".into()
    }

    fn create(&self, place: &Place, sectors: u64) -> Result<(), String> {
        RAW.create(place, sectors)
    }

    fn open(&self, place: &Place) -> Result<DeafDisk, String> {
        RAW.open(place).map(DeafDisk)
    }

    fn check(&self, _: &Place, _: bool) -> Result<(), String> {
        Ok(())
    }

    fn hot_spots(&self, place: &Place, sectors: u64) -> Vec<u64> {
        RAW.hot_spots(place, sectors)
    }
}

impl Disk for DeafDisk {
    fn sectors(&self) -> u64 {
        Disk::sectors(&self.0)
    }

    fn files(&self) -> Vec<Arc<OwnedFd>> {
        Disk::files(&self.0)
    }

    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        Disk::witness_syncs(&self.0, witness);
    }

    async fn read(&self, queue: &Queue, offset: u64, to: Span) -> io::Result<()> {
        Disk::read(&self.0, queue, offset, to).await
    }

    async fn write(&self, queue: &Queue, offset: u64, from: Span) -> io::Result<()> {
        Disk::write(&self.0, queue, offset, from).await
    }

    async fn flush(&self, _: &Queue) -> io::Result<()> {
        Ok(())
    }

    async fn discard(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        Disk::discard(&self.0, queue, offset, len).await
    }

    async fn write_zeroes(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        Disk::write_zeroes(&self.0, queue, offset, len).await
    }

    async fn close(&self, queue: &Queue) -> io::Result<()> {
        Disk::close(&self.0, queue).await
    }
}

/// The mistake of a toy image.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// Nothing: data, sync, map, sync, and an answer only then.
    Right,
    /// Data and map, sync: the map may be durable before the data.
    MissingSync,
    /// The map is in this process's memory until a flush, and what was answered dies with it.
    AnswerTooEarly,
}

/// A disk whose sectors are put one behind the other as they are first written: a header, then
/// slots of two sectors: the number of the disk's sector plus one, and its content. The content is
/// never written in place again: old slots of a sector are passed over.
struct Toy(Order);

#[derive(Default)]
struct ToyMap {
    slots: BTreeMap<u64, u64>,
    /// Slots given to writes whose data are not there yet; an old life may have left some.
    pending: BTreeMap<u64, u64>,
    next: u64,
    /// Slots whose numbers are written.
    committed: BTreeSet<u64>,
    /// Slots with data whose numbers are not written yet.
    dirty: Vec<(u64, u64)>,
    committing: bool,
}

struct ToyDisk {
    file: Arc<OwnedFd>,
    order: Order,
    sectors: u64,
    map: RefCell<ToyMap>,
}

const IMAGE: &str = "toy";

impl Format for Toy {
    type Disk = ToyDisk;

    fn name(&self) -> String {
        "toy".into()
    }

    fn create(&self, place: &Place, sectors: u64) -> Result<(), String> {
        let made = File::create_new(place.image(IMAGE)).and_then(|f| {
            f.write_all_at(&sectors.to_le_bytes(), 0)?;
            f.set_len(512 + sectors * 1024)
        });
        made.map_err(|e| e.to_string())
    }

    fn open(&self, place: &Place) -> Result<ToyDisk, String> {
        let open = || -> io::Result<ToyDisk> {
            let file = File::options().read(true).write(true).open(place.image(IMAGE))?;
            let number = |offset| -> io::Result<u64> {
                let mut word = [0; 8];
                file.read_exact_at(&mut word, offset)?;
                Ok(u64::from_le_bytes(word))
            };
            let sectors = number(0)?;
            let mut map = ToyMap::default();
            for slot in 0..sectors {
                if let Some(sector) = number(512 + slot * 1024)?.checked_sub(1) {
                    map.slots.insert(sector, slot);
                    map.committed.insert(slot);
                    map.next = slot + 1;
                }
            }
            let order = self.0;
            Ok(ToyDisk { file: Arc::new(file.into()), order, sectors, map: RefCell::new(map) })
        };
        open().map_err(|e| e.to_string())
    }

    fn check(&self, place: &Place, _: bool) -> Result<(), String> {
        self.open(place).map(drop)
    }

    fn hot_spots(&self, _: &Place, sectors: u64) -> Vec<u64> {
        vec![0, sectors / 2]
    }
}

impl ToyDisk {
    /// Where a sector is, or will be.
    fn place(&self, sector: u64) -> u64 {
        let mut map = self.map.borrow_mut();
        if let Some(slot) = map.slots.get(&sector).or_else(|| map.pending.get(&sector)) {
            return *slot;
        }
        let slot = map.next;
        map.next += 1;
        map.pending.insert(sector, slot);
        slot
    }

    async fn write_sector(&self, queue: &Queue, sector: u64, from: Span) -> io::Result<()> {
        let slot = self.place(sector);
        queue.port.io.write_all(queue.port.files[0], 1024 + slot * 1024, from).await?;
        let mut map = self.map.borrow_mut();
        map.pending.remove(&sector);
        map.slots.insert(sector, slot);
        if !map.committed.contains(&slot) {
            map.dirty.push((sector, slot));
        }
        Ok(())
    }

    async fn sync(&self, queue: &Queue) -> io::Result<()> {
        loop {
            match queue.port.io.sync(queue.port.files[0]).await {
                Err(e) if matches!(e.raw_os_error(), Some(4 | 11)) => {}
                done => return done,
            }
        }
    }

    /// One commit at a time: a second one waits for the first.
    async fn commit(&self, queue: &Queue) -> io::Result<()> {
        while self.map.borrow().committing {
            queue.port.io.sleep(Duration::from_micros(10)).await?;
        }
        self.map.borrow_mut().committing = true;
        let dirty = std::mem::take(&mut self.map.borrow_mut().dirty);
        let done = self.commit_alone(queue, &dirty).await;
        let mut map = self.map.borrow_mut();
        map.committing = false;
        match done {
            Ok(()) => map.committed.extend(dirty.iter().map(|(_, slot)| *slot)),
            Err(_) => map.dirty.extend(dirty),
        }
        done
    }

    async fn commit_alone(&self, queue: &Queue, dirty: &[(u64, u64)]) -> io::Result<()> {
        if self.order != Order::MissingSync {
            self.sync(queue).await?;
        }
        // The first sector of the page of zeros, which nothing else here uses.
        let head = queue.zeros.slice(0, 8);
        for (sector, slot) in dirty {
            queue.memory().copy_in(head, &(sector + 1).to_le_bytes());
            queue.port.io.write_all(queue.port.files[0], 512 + slot * 1024, head).await?;
        }
        self.sync(queue).await
    }

    /// Without memory that outlives the process, an answer needs the map to be in the file.
    async fn before_answer(&self, queue: &Queue) -> io::Result<()> {
        if self.order == Order::AnswerTooEarly { Ok(()) } else { self.commit(queue).await }
    }
}

impl Disk for ToyDisk {
    fn sectors(&self) -> u64 {
        self.sectors
    }

    fn files(&self) -> Vec<Arc<OwnedFd>> {
        vec![self.file.clone()]
    }

    /// It has no journal that a failed sync would end.
    fn witness_syncs(&self, _: Weak<dyn SyncWitness>) {}

    async fn read(&self, queue: &Queue, offset: u64, to: Span) -> io::Result<()> {
        for i in 0..to.len() / 512 {
            let slot = self.map.borrow().slots.get(&(offset / 512 + i as u64)).copied();
            let part = to.slice(i * 512, 512);
            match slot {
                Some(slot) => {
                    queue.port.io.read_exact(queue.port.files[0], 1024 + slot * 1024, part).await?;
                }
                None => queue.memory().fill(part, 0),
            }
        }
        Ok(())
    }

    async fn write(&self, queue: &Queue, offset: u64, from: Span) -> io::Result<()> {
        for i in 0..from.len() / 512 {
            let sector = offset / 512 + i as u64;
            self.write_sector(queue, sector, from.slice(i * 512, 512)).await?;
        }
        self.before_answer(queue).await
    }

    async fn flush(&self, queue: &Queue) -> io::Result<()> {
        self.commit(queue).await
    }

    async fn discard(&self, _: &Queue, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    async fn write_zeroes(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        for i in 0..len / 512 {
            self.write_sector(queue, offset / 512 + i, queue.zeros.slice(512, 512)).await?;
        }
        self.before_answer(queue).await
    }

    async fn close(&self, queue: &Queue) -> io::Result<()> {
        self.commit(queue).await
    }
}

#[test]
fn a_flush_that_is_not_passed_on_is_found_and_found_again_by_its_seed() {
    let found = find(&DeafFlush, Scenario::FlushStorm, 40).expect("a violation");
    assert!(found.what.contains("after a power cut: allowed:"), "{found}");
    let again = tell(&DeafFlush, &found.plan).unwrap_err();
    assert_eq!((&again.what, again.step), (&found.what, found.step));
}

#[test]
fn a_cut_of_a_later_round_is_found_again_by_what_is_printed() {
    let plan = |seed, step, after| {
        let cut = Some(Cut { round: 1, step, after });
        Plan { cut, ..Plan::new(seed, Scenario::FlushStorm) }
    };
    let found = (0..40).find_map(|seed| {
        let steps = tell(&DeafFlush, &plan(seed, u64::MAX, After::Death)).ok()?.cut_round?;
        let middle = (steps.start() + steps.end()) / 2;
        tell(&DeafFlush, &plan(seed, middle, After::PowerCut)).err()
    });
    let found = found.expect("a violation");
    let command = format!(" --cut 1:{}:power", found.step);
    assert!(found.round == 1 && found.to_string().contains(&command), "{found}");
    let again = tell(&DeafFlush, &found.plan).unwrap_err();
    assert_eq!((&again.what, again.step), (&found.what, found.step));
}

#[test]
fn every_round_of_a_story_can_be_cut_and_there_are_no_more() {
    let images = Images::new(Kind::Vhd);
    let mut end = 0;
    for round in 0..6 {
        let cut = Some(Cut { round, step: u64::MAX, after: After::Death });
        let told = tell(&images, &Plan { cut, ..Plan::new(3, Scenario::Operations) }).unwrap();
        let steps = told.cut_round.unwrap();
        assert!(end < *steps.end() && steps.start() < steps.end(), "{round}: {steps:?}");
        end = *steps.end();
    }
    let cut = Some(Cut { round: 6, step: u64::MAX, after: After::Death });
    let told = tell(&images, &Plan { cut, ..Plan::new(3, Scenario::Operations) }).unwrap();
    assert_eq!(told.cut_round, None);
}

#[test]
fn a_map_that_may_be_durable_before_its_data_is_found() {
    let found = find(&Toy(Order::MissingSync), Scenario::Bitmaps, 100).expect("a violation");
    // By the comparison, or by a read of the next round.
    assert!(found.what.contains("; found: "), "{found}");
}

#[test]
fn an_answered_write_that_dies_with_the_process_is_found() {
    let found = find(&Toy(Order::AnswerTooEarly), Scenario::Bitmaps, 100).expect("a violation");
    assert!(found.what.contains("after the death of the process"), "{found}");
}

#[test]
fn the_toy_that_does_nothing_wrong_is_left_alone() {
    if let Some(found) = find(&Toy(Order::Right), Scenario::Bitmaps, 40) {
        panic!("{found}");
    }
}

/// The first of these stories on a medium that lies so in which that is found.
fn find_lie(images: Images, lie: &Lie, seeds: impl IntoIterator<Item = u64>) -> Box<Violation> {
    let plan = |seed| Plan { lie: Some(lie.clone()), ..Plan::new(seed, Scenario::Past) };
    let found = seeds.into_iter().find_map(|seed| tell(&images, &plan(seed)).err());
    let found = found.unwrap_or_else(|| panic!("{lie:?} is not found in {}", images.name()));
    println!("{lie:?}: seed {}, {}: {}", found.plan.seed, images.name(), found.what);
    found
}

/// The seeds of `all`, first those from `known` on, which finds it today.
fn from(known: u64, all: Range<u64>) -> impl Iterator<Item = u64> {
    (known..all.end).chain(all.start..known)
}

/// All formats, in files and on devices.
fn served() -> impl Iterator<Item = Images> {
    let kinds = Kind::ALL.into_iter().map(Images::new);
    kinds.flat_map(|images| [images, images.on(Medium::Devices)])
}

#[test]
fn a_medium_that_ignores_each_sync_is_found_in_each_format() {
    served().for_each(|images| drop(find_lie(images, &Lie::Sync { of: 1, which: 0 }, 0..50)));
}

/// A commit has two syncs: without the first, references may be durable before what they refer to.
#[test]
fn a_medium_that_ignores_each_second_sync_is_found_in_each_format() {
    for which in 0..u64::from(rounds(2)) {
        for (images, known) in served().zip([19, 7, 11, 6, 56, 41]) {
            find_lie(images, &Lie::Sync { of: 2, which }, from(known, 0..200));
        }
    }
}

#[test]
fn a_medium_that_drops_writes_is_found_in_each_format() {
    served().for_each(|images| drop(find_lie(images, &Lie::Write { per_mille: 20 }, 0..50)));
}

/// The bytes behind both headers, where the table of a small VHD is: found in one of some 140
/// stories.
#[test]
fn a_table_of_a_vhd_that_is_written_ahead_of_the_data_is_found() {
    let images = Images::new(Kind::Vhd).on(Medium::Devices);
    find_lie(images, &Lie::SyncBefore(1536..4096), from(374, 350..450));
}

/// The header names the table of refcounts, which grows now and then, and has the mark of an image
/// that is open: found in one of some 490 stories.
#[test]
fn a_header_of_a_qcow2_image_that_is_written_ahead_of_the_table_is_found() {
    let images = Images::new(Kind::Qcow2).in_units(512);
    find_lie(images, &Lie::SyncBefore(0..512), from(139, 100..200));
}
