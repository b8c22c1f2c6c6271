//! Lack of memory, descriptors or space in every call for a guest (threats.md T6, XSA-362): a request gets an error or
//! is done after all, a connection is made later, and no guest loses its disk by a lack of the host's resources.

mod nth;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use ferrite_loopback::front::{Buffer, FrontOptions, Frontend, Reply};
use ferrite_loopback::{CopyWith, GuestOptions};
use ferrite_serve::blkif::lifecycle::{Outcome, ServeError};
use ferrite_testkit::errno::{EAGAIN, EINTR, EIO, ENOMEM, ENOSPC};
use ferrite_testkit::faulty::Kind;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images, scale};
use ferrite_xen::abi::{OP_BARRIER, OP_FLUSH, PlainOp, STATUS_ERROR, STATUS_OKAY};

use nth::{Call, FailingHypervisor, Nth};
use tempfile::TempDir;

const ERRNOS: [i32; 5] = [ENOMEM, EAGAIN, EINTR, ENOSPC, EIO];
const BYTES: u64 = 1 << 20;
/// A raw file, instead of the format of an image.
const RAW: &str = "raw";
/// The calls of a kind that fail in turn, in a run of the usual length.
const CALLS: u64 = 24;

/// Panics of threads that serve queues. Their end would look like an error of the host.
static PANICS: AtomicU32 = AtomicU32::new(0);

fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let is_queue = |name: &str| name.starts_with("queue-");
            if std::thread::current().name().is_some_and(is_queue) {
                PANICS.fetch_add(1, Ordering::SeqCst);
            }
            usual(info);
        }));
    });
}

fn plan() -> Plan {
    let guest = GuestOptions { frames: 512, grants: 1024, ports: 4 };
    Plan { bytes: BYTES, pool_bytes: 4 << 20, guest, ..Plan::default() }
}

fn two_queues() -> FrontOptions {
    FrontOptions { queues: 2, check_release: false, ..FrontOptions::default() }
}

/// A disk's life with one fault.
struct Life {
    rig: Rig,
    front: Frontend,
    buffer: Buffer,
    nth: Arc<Nth>,
    /// The number of backends that have ended with an error.
    ended: u32,
    errors: usize,
    _image_dir: TempDir,
}

impl Life {
    /// With an image in this format, or a raw file.
    fn new(format: &str, nth: Arc<Nth>) -> Life {
        count_panics();
        let dir = ferrite_testkit::places::dir_in_memory();
        let image = (format != RAW).then(|| images::make(dir.path(), format, BYTES));
        let rig = Rig::without_backend(Plan { engine: nth.faults.factory(), image, ..plan() });
        let front = rig.frontend();
        let buffer = front.space().buffer(40).unwrap();
        let mut life = Life { rig, front, buffer, nth, ended: 0, errors: 0, _image_dir: dir };
        life.start();
        life
    }

    fn start(&mut self) {
        let store = nth::store(self.rig.machine.backend().unwrap().store, &self.nth);
        let inner = self.rig.machine.loopback(CopyWith::Memcpy).unwrap();
        let hypervisor = FailingHypervisor { inner, nth: self.nth.clone() };
        self.rig.start_with(store, Box::new(hypervisor));
    }

    /// Waits for `done`; a backend that has ended with a valid reason is replaced.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Life) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            self.blames_nobody(what);
            if !self.rig.is_running() {
                self.succeed(what);
            }
            assert!(Instant::now() < end, "{what} does not happen after {:?}", self.nth);
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Checks that the backend does not close a disk that its guest uses.
    fn blames_nobody(&mut self, what: &str) {
        let uses = (1..5).contains(&self.front.state().unwrap());
        let state = self.front.backend_state().unwrap();
        assert!(!uses || ![5, 6].contains(&state), "{what}: {state} after {:?}", self.nth);
    }

    fn succeed(&mut self, what: &str) {
        let Err(error) = self.rig.join() else { panic!("{what}: ended well, {:?}", self.nth) };
        let reason = error.to_string();
        assert!(!matches!(error, ServeError::Attachment(_)), "{what}: {reason}, {:?}", self.nth);
        assert!(!reason.contains("its thread ended"), "{what}: {reason}, {:?}", self.nth);
        self.blames_nobody(what);
        self.ended += 1;
        assert!(self.ended <= 3, "{what}: {reason}, {:?}", self.nth);
        self.start();
    }

    fn connect(&mut self) {
        self.until("the offer", |life| life.front.backend_state().unwrap() == 2);
        self.front.read_features().unwrap();
        self.front.offer(&two_queues()).unwrap();
        self.until("the connection", |life| life.front.backend_state().unwrap() == 4);
        self.front.set_state(4).unwrap();
    }

    /// All answers to the requests.
    fn replies(&mut self) -> Vec<Reply> {
        let mut replies = Vec::new();
        for queue in &mut self.front.queues {
            queue.push().unwrap();
        }
        self.until("the answer", |life| {
            for queue in &mut life.front.queues {
                while let Some(reply) = queue.take().unwrap() {
                    assert!([STATUS_OKAY, STATUS_ERROR].contains(&reply.status), "{reply:?}");
                    life.errors += usize::from(!reply.is_ok());
                    replies.push(reply);
                }
                // Requests the next event, as a guest does.
                queue.final_check();
            }
            life.front.queues.iter().all(|queue| queue.in_flight() == 0)
        });
        replies
    }

    /// Sends requests of all kinds; whether a flush among them failed.
    fn work(&mut self) -> bool {
        for (q, queue) in self.front.queues.iter_mut().enumerate() {
            let (buffer, at) = (&self.buffer, q as u64 * 512);
            for i in 0..4 {
                queue.write(at + i * 16, buffer, i as usize * 8192, 4096).unwrap();
                queue.read(at + i * 16, buffer, i as usize * 8192 + 4096, 4096).unwrap();
            }
            queue.write(at + 256, buffer, 0, 20 * 4096).unwrap();
            queue.read(at + 256, buffer, 20 * 4096, 20 * 4096).unwrap();
        }
        let mut replies = self.replies();
        for queue in &mut self.front.queues {
            queue.flush().unwrap();
            queue.discard(64, 64, false).unwrap();
            queue.plain(PlainOp::Barrier, 8, &[self.buffer.segment(0, 0, 7)]).unwrap();
        }
        replies.extend(self.replies());
        assert_eq!(replies.len(), 26);
        let is_flush = |reply: &&Reply| [OP_FLUSH, OP_BARRIER].contains(&reply.operation);
        replies.iter().filter(is_flush).any(|reply| !reply.is_ok())
    }

    /// Checks that the disk works as before once the fault is over. A failed flush may still forbid
    /// writes.
    fn works(&mut self, flush_failed: bool, over: bool) {
        let before = self.errors;
        for queue in &mut self.front.queues {
            queue.read(0, &self.buffer, 0, 30 * 4096).unwrap();
            if !flush_failed {
                queue.write(0, &self.buffer, 0, 30 * 4096).unwrap();
            }
        }
        self.replies();
        assert!(!over || self.errors == before, "after {:?}", self.nth);
    }

    fn close(&mut self) {
        self.front.set_state(5).unwrap();
        self.until("closing", |life| [5, 6].contains(&life.front.backend_state().unwrap()));
        self.front.set_state(6).unwrap();
        self.until("closed", |life| life.front.backend_state().unwrap() == 6);
        let queues = std::mem::take(&mut self.front.queues);
        queues.into_iter().for_each(|queue| queue.release().unwrap());
        assert_eq!(self.front.space().memory().grants().users(), 0);
    }

    fn unplug(&mut self) {
        let disk = self.rig.disk.clone();
        self.rig.machine.unplug(&disk).unwrap();
        let end = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < end, "it is not unplugged after {:?}", self.nth);
            if self.rig.is_running() {
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            match self.rig.join() {
                Ok(outcome) => return assert_eq!(outcome, Outcome::Unplugged),
                Err(_) => self.start(),
            }
        }
    }
}

/// The result of one run with a fault.
struct Lived {
    reached: bool,
    ended: u32,
    errors: usize,
}

fn live(call: Call, n: u64, times: u64, errno: i32) -> Lived {
    live_on(RAW, call, n, times, errno)
}

fn live_on(format: &str, call: Call, n: u64, times: u64, errno: i32) -> Lived {
    let nth = Nth::new(call, n, times, errno);
    let mut life = Life::new(format, nth.clone());
    life.connect();
    let flush_failed = life.work();
    let over = nth.was_reached() && times == 1;
    life.works(flush_failed, over);
    life.close();
    life.unplug();
    assert_eq!(PANICS.load(Ordering::SeqCst), 0, "{nth:?}");
    if format != RAW {
        images::check(&life.rig.image);
    }
    Lived { reached: nth.was_reached(), ended: life.ended, errors: life.errors }
}

/// Runs one life for each call of this kind that can fail (with each commit for a part of them, each with another error;
/// by night for all, with all errors).
fn each(call: Call, most: u64, check: impl Fn(u64, Lived)) {
    each_on(RAW, call, most, check);
}

fn each_on(format: &str, call: Call, most: u64, check: impl Fn(u64, Lived)) {
    let mut n = 1;
    while n <= most * u64::from(scale()) {
        let turn = n as usize % ERRNOS.len();
        let errnos = if scale() > 1 { &ERRNOS[..] } else { &ERRNOS[turn..=turn] };
        for errno in errnos {
            let lived = live_on(format, call, n, 1, *errno);
            if !lived.reached {
                println!("{call:?}: {} calls", n - 1);
                assert!(n > 1, "{call:?} is never called");
                return;
            }
            check(n, lived);
        }
        // With each commit the first few, and every third of the others.
        n += if scale() > 1 || n < 4 { 1 } else { 3 };
    }
}

#[test]
fn an_engine_that_cannot_be_built_is_built_by_a_successor() {
    for call in [Kind::Make, Kind::AddFile].map(Call::Engine) {
        each(call, CALLS, |n, lived| {
            // The engine after those of the two queues is for closing: the guest is served until then.
            let least = u32::from(n <= 2);
            assert!((least..=1).contains(&lived.ended) && lived.errors == 0, "{call:?} {n}");
        });
    }
}

#[test]
fn an_engine_that_fails_as_a_whole_is_followed_by_one_that_does_what_is_left() {
    for call in [Kind::Submit, Kind::Wait, Kind::Wakeup].map(Call::Engine) {
        each(call, CALLS, |n, lived| {
            assert!(lived.ended <= 1 && lived.errors == 0, "{call:?} {n}");
        });
    }
}

#[test]
fn storage_that_fails_fails_its_requests_or_is_asked_again() {
    each(Call::Storage, 2 * CALLS, |n, lived| assert_eq!(lived.ended, 0, "{n}"));
    for errno in ERRNOS {
        let lived = live(Call::Storage, 1, u64::MAX, errno);
        assert!(lived.ended == 0 && lived.errors >= 24, "{errno}: {} errors", lived.errors);
    }
}

#[test]
fn a_grant_copy_that_fails_fails_its_requests_and_no_other() {
    each(Call::Copy, CALLS, |n, lived| {
        assert!(lived.ended == 0 && lived.errors > 0, "{n}: {} errors", lived.errors);
    });
    each(Call::CopySegment, CALLS, |n, lived| {
        assert!(lived.ended == 0 && lived.errors == 1, "{n}: {} errors", lived.errors);
    });
    for errno in ERRNOS {
        for call in [Call::Copy, Call::CopySegment] {
            let lived = live(call, 1, u64::MAX, errno);
            assert!(lived.ended == 0 && lived.errors > 20, "{errno}: {} errors", lived.errors);
        }
    }
}

#[test]
fn a_ring_that_cannot_be_mapped_is_mapped_by_a_successor() {
    each(Call::Connect, CALLS, |n, lived| {
        assert_eq!((lived.ended, lived.errors), (1, 0), "{n}");
    });
}

#[test]
fn an_event_channel_that_fails_ends_the_backend_and_not_the_disk() {
    for call in [Call::Notify, Call::TakeEvent, Call::Rearm] {
        each(call, CALLS, |n, lived| {
            assert!(lived.ended <= 1 && lived.errors == 0, "{call:?} {n}");
        });
    }
}

#[test]
fn a_store_that_refuses_anything_once_costs_nobody_a_disk() {
    each(Call::Store, 1000, |n, lived| {
        assert!(lived.ended <= 1 && lived.errors == 0, "request {n}");
    });
}

/// Other work of an image: allocating space, reading and writing metadata, commits.
fn an_image_outlives_the_same(format: &str) {
    each_on(format, Call::Storage, 2 * CALLS, |n, lived| {
        assert_eq!(lived.ended, 0, "{format} {n}");
    });
    for call in [Kind::AddFile, Kind::Submit, Kind::Wait, Kind::Wakeup].map(Call::Engine) {
        each_on(format, call, CALLS / 4, |n, lived| {
            // A request may have waited for another one's metadata.
            let bearable = usize::from(call == Call::Engine(Kind::Wakeup));
            let Lived { ended, errors, .. } = lived;
            let what = format!("{format} {call:?} {n}: {ended} ended, {errors} errors");
            assert!(ended <= 1 && errors <= bearable, "{what}");
        });
    }
    for call in [Call::Copy, Call::CopySegment] {
        each_on(format, call, CALLS / 4, |n, lived| {
            assert!(lived.ended == 0 && lived.errors > 0, "{format} {call:?} {n}");
        });
    }
    for errno in ERRNOS {
        let lived = live_on(format, Call::Storage, 1, u64::MAX, errno);
        assert_eq!(lived.ended, 0, "{format} {errno}");
        // Every write; unwritten ranges are read without storage.
        assert!(lived.errors >= 10, "{format} {errno}: {} errors", lived.errors);
    }
}

#[test]
fn a_vhd_on_a_parent_outlives_what_raw_disks_outlive_and_is_in_order_afterwards() {
    an_image_outlives_the_same("chain.vhd");
}

#[test]
fn a_qcow2_image_outlives_what_raw_disks_outlive_and_is_in_order_afterwards() {
    an_image_outlives_the_same("qcow2");
}
