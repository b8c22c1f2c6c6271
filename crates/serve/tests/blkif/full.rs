//! Full storage: an error or a wait, as the disk is configured. Other disks are not affected, the image stays intact,
//! and with space all requests succeed. Needs root; otherwise it passes and reports that.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend, Reply, Tag};
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_serve::counters::{Counters, snapshot, stats_file};
use ferrite_serve::nbd::Options;
use ferrite_serve::path::full::OnFull;
use ferrite_testkit::errno::ENOSPC;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::nbd::{Served, command, options};
use ferrite_testkit::places::{Small, dir_in_memory};
use ferrite_testkit::programs::check_clean;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images, wait_until};
use ferrite_xen::abi::{PlainOp, STATUS_ERROR};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const FORMATS: [&str; 3] = ["raw", "vhd", "qcow2"];
/// Bytes of a request.
const CHUNK: usize = 256 << 10;
const SECTORS: u64 = CHUNK as u64 / 512;
/// More requests than there is space for.
const CHUNKS: u64 = 32;
const NO_SPACE: u32 = 28;

/// An image on a file system that has less space than the image.
struct Place {
    image: PathBuf,
    small: Small,
    _dirs: [TempDir; 2],
}

impl Place {
    fn new(format: &str) -> Option<Place> {
        let (dir, state) = (dir_in_memory(), dir_in_memory());
        let small = Small::mount(dir.path(), "size=5m")?;
        let image = images::make(dir.path(), format, 64 * MIB);
        // The journal of answered writes is in another folder, as in production.
        symlink(state.path(), images::state_dir(&image)).unwrap();
        Some(Place { image, small, _dirs: [dir, state] })
    }

    /// A backend with fewer buffers than waiting requests.
    fn rig(&self, on_full: OnFull) -> Rig {
        let image = Some(self.image.clone());
        Rig::new(Plan { image, on_full, pool_bytes: 2 << 20, ..Plan::default() })
    }

    /// Checks that the image is intact.
    fn is_whole(&self) {
        images::check(&self.image);
        if self.image.extension().is_some_and(|extension| extension == "qcow2") {
            check_clean(&self.image);
        }
    }
}

/// A guest that writes more than there is space for.
struct Guest {
    front: Frontend,
    buffers: Vec<Buffer>,
    /// The requests of the writes, by chunk.
    tags: Vec<Tag>,
    /// Chunks that have been written.
    done: Vec<u64>,
}

impl Guest {
    fn new(rig: &Rig) -> Guest {
        let options = FrontOptions { max_indirect: 64, order: 2, ..FrontOptions::default() };
        let front = rig.connect(&options);
        let buffers = (0..=CHUNKS).map(|_| front.space().buffer(CHUNK / 4096).unwrap()).collect();
        Guest { front, buffers, tags: Vec::new(), done: Vec::new() }
    }

    fn queue(&mut self) -> &mut FrontQueue {
        &mut self.front.queues[0]
    }

    fn write(&mut self, chunk: u64) {
        let buffer = &self.buffers[chunk as usize];
        buffer.fill(0, CHUNK, chunk as u8 + 1);
        self.tags.push(self.front.queues[0].write(chunk * SECTORS, buffer, 0, CHUNK).unwrap());
    }

    /// Sends all writes at once.
    fn write_all(&mut self) {
        (self.tags, self.done) = (Vec::new(), Vec::new());
        (0..CHUNKS).for_each(|chunk| self.write(chunk));
        self.queue().push().unwrap();
    }

    /// Sends all writes at once, and reads the answers of those that had space. Returns the number of errors.
    fn write_all_and_hear(&mut self) -> usize {
        self.write_all();
        let mut errors = 0;
        for _ in 0..CHUNKS {
            let reply = self.queue().next_reply(PATIENCE).unwrap();
            match reply.status {
                STATUS_ERROR => errors += 1,
                _ => self.is_done(&reply),
            }
        }
        errors
    }

    /// Sends all writes at once, until the rest waits.
    fn write_until_full(&mut self, rig: &Rig) {
        self.write_all();
        self.wait_until_full(rig);
        assert!(!self.done.is_empty());
    }

    /// Waits until all unanswered requests wait for space.
    fn wait_until_full(&mut self, rig: &Rig) {
        wait_until("a full disk", || {
            while let Some(reply) = self.queue().take().unwrap() {
                self.is_done(&reply);
            }
            waiting(rig) > 0 && waiting(rig) == self.queue().in_flight() as u64
        });
    }

    fn is_done(&mut self, reply: &Reply) {
        assert!(reply.is_ok(), "{}", reply.status);
        let chunk = self.tags.iter().position(|tag| *tag == reply.tag).unwrap() as u64;
        assert!(!self.done.contains(&chunk), "{chunk}");
        self.done.push(chunk);
    }

    /// Waits for this request. A request that has waited may be answered earlier: it needs less space than several at
    /// once.
    fn hear(&mut self, tag: Tag) {
        loop {
            let reply = self.queue().next_reply(PATIENCE).unwrap();
            if reply.tag == tag {
                assert!(reply.is_ok(), "{}", reply.status);
                return;
            }
            self.is_done(&reply);
        }
    }

    /// Checks the data of a chunk.
    fn has(&mut self, chunk: u64, fill: u8) {
        let buffer = &self.buffers[CHUNKS as usize];
        buffer.fill(0, CHUNK, 0xEE);
        let tag = self.front.queues[0].read(chunk * SECTORS, buffer, 0, CHUNK).unwrap();
        self.hear(tag);
        let buffer = &self.buffers[CHUNKS as usize];
        assert!(buffer.to_vec(0, CHUNK).iter().all(|byte| *byte == fill), "chunk {chunk}");
    }

    /// Checks that all answered writes are there.
    fn has_what_is_done(&mut self) {
        self.done.clone().into_iter().for_each(|chunk| self.has(chunk, chunk as u8 + 1));
    }

    /// Checks that all unanswered writes are done, and are there.
    fn goes_on(&mut self) {
        while (self.done.len() as u64) < CHUNKS {
            let reply = self.queue().next_reply(PATIENCE).unwrap();
            self.is_done(&reply);
        }
        self.flush();
        self.has_what_is_done();
    }

    fn flush(&mut self) {
        let tag = self.queue().flush().unwrap();
        self.hear(tag);
    }
}

/// The guest's waiting requests.
fn waiting(rig: &Rig) -> u64 {
    rig.counters.counts().waiting_for_space()
}

fn end(rig: &mut Rig) {
    let disk = rig.disk.clone();
    rig.machine.unplug(&disk).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
}

#[test]
fn writes_that_find_no_space_are_errors_and_the_image_stays_whole() {
    for format in FORMATS {
        let Some(place) = Place::new(format) else { return };
        let mut rig = place.rig(OnFull::Error);
        let mut guest = Guest::new(&rig);
        let errors = guest.write_all_and_hear();
        assert!(errors > 0 && !guest.done.is_empty(), "{format}: {errors} errors");
        guest.flush();
        guest.has_what_is_done();
        assert_eq!(waiting(&rig), 0);
        // The rest can be written when there is space.
        place.small.change("size=64m");
        assert_eq!(guest.write_all_and_hear(), 0);
        guest.front.close(PATIENCE).unwrap();
        end(&mut rig);
        place.is_whole();
    }
}

#[test]
fn an_image_whose_disk_is_full_when_it_is_closed_is_whole() {
    for format in FORMATS {
        let Some(place) = Place::new(format) else { return };
        let mut rig = place.rig(OnFull::Error);
        let mut guest = Guest::new(&rig);
        assert!(guest.write_all_and_hear() > 0);
        guest.front.close(PATIENCE).unwrap();
        end(&mut rig);
        place.is_whole();
    }
}

#[test]
fn writes_that_find_no_space_wait_for_it_and_what_needs_none_goes_on() {
    for format in FORMATS {
        let Some(place) = Place::new(format) else { return };
        let mut rig = place.rig(OnFull::Wait);
        let mut guest = Guest::new(&rig);
        let other = Rig::new(Plan::default());
        let mut beside = other.connect(&FrontOptions::default());
        guest.write_until_full(&rig);
        // Reads work, and flushes of answered writes, though more requests wait than there are buffers.
        guest.has_what_is_done();
        guest.flush();
        let buffer = beside.space().buffer(1).unwrap();
        for n in 0..100 {
            beside.queues[0].write(n * 8, &buffer, 0, 4096).unwrap();
            assert!(beside.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        }
        guest.wait_until_full(&rig);
        let seen = snapshot::read(&stats_file(rig.run_dir())).unwrap();
        assert!(seen.full_since_unix_s.is_some_and(|since| since >= seen.made_unix_s));
        place.small.change("size=64m");
        guest.goes_on();
        wait_until("no request waits", || waiting(&rig) == 0);
        assert_eq!(snapshot::read(&stats_file(rig.run_dir())).unwrap().full_since_unix_s, None);
        guest.front.close(PATIENCE).unwrap();
        end(&mut rig);
        place.is_whole();
    }
}

/// A request is retried after a pause, and again after a longer one, so that a full disk gets few requests.
#[test]
fn requests_that_wait_are_tried_now_and_then() {
    let Some(place) = Place::new("raw") else { return };
    let rig = place.rig(OnFull::Wait);
    let mut guest = Guest::new(&rig);
    guest.write_until_full(&rig);
    let (before, begin) = (rig.counters.counts().transfers, Instant::now());
    wait_until("more tries", || rig.counters.counts().transfers >= before + 2);
    assert!(begin.elapsed() >= Duration::from_secs(1));
    place.small.change("size=64m");
    guest.goes_on();
    guest.front.close(PATIENCE).unwrap();
}

/// Metadata without space is as dirty as before: nothing is lost.
#[test]
fn a_flush_whose_metadata_finds_no_space_waits_for_it() {
    for format in ["vhd", "qcow2"] {
        let (faults, dir) = (Faults::none(), dir_in_memory());
        let image = Some(images::make(dir.path(), format, 64 * MIB));
        let (engine, on_full) = (faults.factory(), OnFull::Wait);
        let rig = Rig::new(Plan { image, engine, on_full, ..Plan::default() });
        let mut guest = Guest::new(&rig);
        guest.write(0);
        let tag = guest.tags[0];
        guest.hear(tag);
        faults.set([Ops::from(Kind::Write).fail(ENOSPC)]);
        let tag = guest.queue().flush().unwrap();
        guest.queue().push().unwrap();
        wait_until("the flush waits", || waiting(&rig) == 1);
        guest.has(0, 1);
        faults.clear();
        guest.hear(tag);
        guest.write(1);
        let tag = guest.tags[1];
        guest.hear(tag);
        guest.front.close(PATIENCE).unwrap();
    }
}

#[test]
fn a_backend_that_stops_leaves_what_waits_to_the_next_one() {
    for format in FORMATS {
        let Some(place) = Place::new(format) else { return };
        let mut rig = place.rig(OnFull::Wait);
        let mut guest = Guest::new(&rig);
        guest.write_until_full(&rig);
        for _ in 0..2 {
            assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
            assert_eq!(waiting(&rig), 0);
            rig.start();
            guest.wait_until_full(&rig);
            guest.has_what_is_done();
        }
        place.small.change("size=64m");
        guest.goes_on();
        guest.front.close(PATIENCE).unwrap();
        end(&mut rig);
        place.is_whole();
    }
}

#[test]
fn a_disk_is_exchanged_for_one_with_space_while_writes_wait() {
    let Some(place) = Place::new("raw") else { return };
    let rig = place.rig(OnFull::Wait);
    let mut guest = Guest::new(&rig);
    guest.write_until_full(&rig);
    let roomy = dir_in_memory();
    let next = roomy.path().join("next.raw");
    let (disk, away) = rig.device().park(PATIENCE).unwrap();
    drop(disk);
    std::fs::copy(&place.image, &next).unwrap();
    let disk = Disk::open(&next, &OpenOptions::default()).unwrap();
    away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
    guest.goes_on();
    guest.front.close(PATIENCE).unwrap();
}

#[test]
fn a_guest_that_closes_waits_until_it_lets_go_of_its_rings() {
    let Some(place) = Place::new("vhd") else { return };
    let mut rig = place.rig(OnFull::Wait);
    let mut guest = Guest::new(&rig);
    guest.write_until_full(&rig);
    let disk = rig.disk.clone();
    // The toolstack has requested the end, and the guest is closing: waiting requests are answered if there is space in
    // time.
    rig.machine.unplug(&disk).unwrap();
    guest.front.set_state(5).unwrap();
    guest.front.wait_for_backend(&[5], PATIENCE).unwrap();
    guest.has_what_is_done();
    guest.wait_until_full(&rig);
    // The guest no longer waits for answers.
    let waits = guest.queue().in_flight();
    guest.front.set_state(6).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    assert_eq!(waiting(&rig), 0);
    for _ in 0..waits {
        assert_eq!(guest.queue().take().unwrap().unwrap().status, STATUS_ERROR);
    }
    place.is_whole();
}

#[test]
fn a_guest_that_is_destroyed_while_writes_wait_leaves_nothing() {
    let Some(place) = Place::new("qcow2") else { return };
    let mut rig = place.rig(OnFull::Wait);
    let mut guest = Guest::new(&rig);
    guest.write_until_full(&rig);
    rig.machine.destroy(rig.domid).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    assert_eq!(waiting(&rig), 0);
    place.is_whole();
}

#[test]
fn a_barrier_comes_after_the_writes_before_it_that_wait_and_before_those_after_it() {
    let Some(place) = Place::new("raw") else { return };
    let mut rig = place.rig(OnFull::Wait);
    let mut guest = Guest::new(&rig);
    guest.write_until_full(&rig);
    let segments = [guest.buffers[0].segment(0, 0, 7)];
    let barrier = guest.queue().plain(PlainOp::Barrier, 0, &segments).unwrap();
    let after = guest.front.queues[0].read(0, &guest.buffers[CHUNKS as usize], 0, 4096).unwrap();
    guest.queue().push().unwrap();
    let behind = 2;
    let waits = guest.queue().in_flight() - behind;
    // A backend that stops loses none of them.
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    rig.start();
    wait_until("the next one waits", || waiting(&rig) as usize == waits);
    place.small.change("size=64m");
    let mut order = Vec::new();
    for _ in 0..waits + behind {
        let reply = guest.queue().next_reply(PATIENCE).unwrap();
        assert!(reply.is_ok());
        order.push(reply.tag);
    }
    assert_eq!(order[order.len() - 2..], [barrier, after]);
    guest.front.close(PATIENCE).unwrap();
    end(&mut rig);
}

/// It holds the gate by then, and without the gate no request can be retried.
#[test]
fn a_barrier_that_has_begun_to_wait_for_others_lets_them_wait_for_space() {
    let faults = Faults::none();
    let (engine, on_full) = (faults.factory(), OnFull::Wait);
    let rig = Rig::new(Plan { engine, on_full, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(1).unwrap();
    faults.set([Ops::from(Kind::Write).meet(Fault::Held(Some(ENOSPC)))]);
    let held = faults.hold();
    front.queues[1].write(0, &buffer, 0, 4096).unwrap();
    front.queues[1].push().unwrap();
    faults.wait_for(Kind::Write, 1);
    front.queues[0].plain(PlainOp::Barrier, 0, &[]).unwrap();
    front.queues[0].push().unwrap();
    wait_until("the barrier is taken", || rig.counters.counts().sweeps == 2);
    // The test also passes without this pause. With it, the gate is closed before the write has failed.
    std::thread::sleep(Duration::from_millis(20));
    drop(held);
    wait_until("the write waits", || waiting(&rig) == 1);
    assert!(!front.queues[0].has_response());
    faults.clear();
    assert!(front.queues[1].next_reply(PATIENCE).unwrap().is_ok());
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    front.close(PATIENCE).unwrap();
}

#[test]
fn clients_of_nbd_wait_too_and_those_that_go_are_not_waited_for() {
    const EACH: u64 = 24;
    let Some(place) = Place::new("qcow2") else { return };
    let rig = place.rig(OnFull::Wait);
    let counters = Counters::default();
    let options = Options { counters: Some(counters.clone()), ..options() };
    let mut served = Served::of(dir_in_memory(), rig.device(), options);
    let [mut stays, mut goes, mut reads] = [served.client(), served.client(), served.client()];
    let data = vec![7; CHUNK];
    for chunk in 0..EACH {
        stays.send(command::WRITE, 0, chunk * CHUNK as u64, CHUNK as u32, &data);
        goes.send(command::WRITE, 0, (EACH + chunk) * CHUNK as u64, CHUNK as u32, &data);
    }
    // There is space for less than half of them.
    wait_until("most wait", || counters.counts().waiting_for_space() > EACH);
    drop(goes);
    wait_until("one is gone", || counters.counts().waiting_for_space() <= EACH);
    assert_eq!(reads.read(48 * MIB, 512), [0; 512]);
    served.stop();
    let errors: Vec<u32> = (0..EACH).map(|_| stays.reply().error).collect();
    assert!(errors.iter().all(|error| [0, NO_SPACE].contains(error)), "{errors:?}");
    assert!(errors.contains(&NO_SPACE) && stays.is_closed());
}
