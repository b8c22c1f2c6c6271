//! A xenstore that does not answer, or has ended: the guest's data do not wait for it (threats.md T12).

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ferrite_loopback::CopyWith;
use ferrite_loopback::front::{FrontOptions, Frontend, RingWord};
use ferrite_serve::blkif::lifecycle::{Outcome, ServeError};
use ferrite_testkit::PATIENCE;
use ferrite_testkit::faulty::Faults;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_xen::store::Store;

const BYTES: u64 = 1 << 20;
/// How long the backend waits for a reply: long enough for those that are not withheld.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Time for an event to be seen. Too little makes a test weaker, but not wrong.
const A_WHILE: Duration = Duration::from_millis(300);

/// A proxy between a backend and the store.
#[derive(Clone)]
struct Between {
    client: Arc<UnixStream>,
    /// Replies are withheld.
    silent: Arc<(Mutex<bool>, Condvar)>,
    /// A request for this begins the silence.
    silent_at: Arc<Mutex<Option<&'static str>>>,
    /// Messages or parts of them that were sent to the store.
    asked: Arc<AtomicUsize>,
}

impl Between {
    fn new(server: OwnedFd) -> (Between, Store) {
        let (theirs, client) = UnixStream::pair().unwrap();
        let server = UnixStream::from(server);
        server.set_nonblocking(false).unwrap();
        let between = Between {
            client: Arc::new(client.try_clone().unwrap()),
            silent: Arc::default(),
            silent_at: Arc::default(),
            asked: Arc::default(),
        };
        let (up, down) = (between.clone(), between.clone());
        let (up_from, up_to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        std::thread::spawn(move || forward(up_from, up_to, |bytes| up.asks(bytes)));
        std::thread::spawn(move || forward(server, client, |_| down.wait()));
        (between, Store::from_fd(theirs.into()).with_timeout(TIMEOUT))
    }

    fn asks(&self, bytes: &[u8]) {
        let at = *self.silent_at.lock().unwrap();
        if at.is_some_and(|at| bytes.windows(at.len()).any(|here| here == at.as_bytes())) {
            self.be_silent(true);
        }
        self.asked.fetch_add(1, Ordering::SeqCst);
    }

    fn wait(&self) {
        let silent = self.silent.0.lock().unwrap();
        drop(self.silent.1.wait_while(silent, |silent| *silent).unwrap());
    }

    fn be_silent(&self, silent: bool) {
        *self.silent.0.lock().unwrap() = silent;
        self.silent.1.notify_all();
    }

    fn be_silent_at(&self, asked: Option<&'static str>) {
        *self.silent_at.lock().unwrap() = asked;
        self.be_silent(false);
    }

    /// Waits until a request has timed out and another was made, with `meanwhile` repeated.
    fn wait_for_timeout(&self, mut meanwhile: impl FnMut()) {
        let end = Instant::now() + PATIENCE;
        while !*self.silent.0.lock().unwrap() {
            assert!(Instant::now() < end, "what silence waits for is not asked for");
            std::thread::yield_now();
        }
        let first = self.asked.load(Ordering::SeqCst);
        while self.asked.load(Ordering::SeqCst) < first + 2 {
            meanwhile();
            assert!(Instant::now() < end, "xenstore is not asked any more");
        }
    }
}

fn forward(mut from: UnixStream, mut to: UnixStream, before: impl Fn(&[u8])) {
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        before(&bytes[..n]);
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn rig() -> (Rig, Between) {
    rig_with(Plan { bytes: BYTES, ..Plan::default() })
}

fn rig_with(plan: Plan) -> (Rig, Between) {
    let mut rig = Rig::without_backend(plan);
    let (between, store) = Between::new(rig.machine.backend().unwrap().store);
    let hypervisor = rig.machine.loopback(CopyWith::Memcpy).unwrap();
    rig.start_with(store, Box::new(hypervisor));
    (rig, between)
}

fn works(rig: &Rig, front: &mut Frontend) {
    assert!(rig.is_running());
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
}

#[test]
fn a_store_that_does_not_answer_holds_no_data_up_and_is_followed_when_it_does() {
    let (mut rig, between) = rig();
    let mut front = rig.connect(&FrontOptions::default());
    // The new size cannot be written.
    between.be_silent_at(Some("/sectors"));
    let image = std::fs::OpenOptions::new().write(true).open(&rig.image).unwrap();
    image.set_len(2 * BYTES).unwrap();
    between.wait_for_timeout(|| works(&rig, &mut front));
    front.set_state(5).unwrap();
    works(&rig, &mut front);
    between.be_silent_at(None);
    front.wait_for_backend(&[5], PATIENCE).unwrap();
    let end = Instant::now() + PATIENCE;
    while front.read_features().unwrap().sectors != 2 * BYTES / 512 {
        assert!(Instant::now() < end, "the new size is not published");
        works(&rig, &mut front);
    }
    front.close(PATIENCE).unwrap();
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    works(&rig, &mut front);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
}

#[test]
fn a_store_that_does_not_take_the_word_that_a_guest_is_connected_is_told_again() {
    let (mut rig, between) = rig();
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    front.read_features().unwrap();
    between.be_silent_at(Some("physical-sector-size"));
    front.offer(&FrontOptions::default()).unwrap();
    between.wait_for_timeout(std::thread::yield_now);
    between.be_silent_at(None);
    front.finish(PATIENCE).unwrap();
    works(&rig, &mut front);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
}

#[test]
fn a_store_that_is_gone_ends_the_backend_when_it_is_stopped_and_no_sooner() {
    let (mut rig, between) = rig();
    let mut front = rig.connect(&FrontOptions::default());
    between.client.shutdown(Shutdown::Both).unwrap();
    for _ in 0..50 {
        works(&rig, &mut front);
    }
    let error = rig.stop().unwrap_err();
    assert!(matches!(error, ServeError::Store(_)), "{error}");
    assert_eq!(front.backend_state().unwrap(), 4);
    rig.start();
    works(&rig, &mut front);
    front.close(PATIENCE).unwrap();
}

/// Both failures are pending when the store ends: nothing wakes the control thread for the second.
#[test]
fn a_queue_that_has_failed_ends_the_backend_behind_one_that_the_store_cannot_be_told_of() {
    let faults = Faults::none();
    let plan = Plan { bytes: BYTES, engine: faults.factory(), ..Plan::default() };
    let (mut rig, between) = rig_with(plan);
    let options = FrontOptions { queues: 2, check_release: false, ..FrontOptions::default() };
    let mut front = rig.connect(&options);
    works(&rig, &mut front);
    // It reads the frontend, and waits.
    between.be_silent(true);
    front.set_state(4).unwrap();
    std::thread::sleep(A_WHILE);
    let ring = front.queues[0].ring();
    ring.store(RingWord::ReqProd, front.queues[0].req_prod().wrapping_add(1 << 20));
    front.queues[0].notify().unwrap();
    std::thread::sleep(A_WHILE);
    faults.break_engine("queue-1");
    front.queues[1].notify().unwrap();
    std::thread::sleep(A_WHILE);
    between.client.shutdown(Shutdown::Both).unwrap();
    between.be_silent(false);
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::Host { .. }), "{error}");
}
