//! A frontend without a ring: a client in another thread sends requests, and a model has the expected data of every
//! read. This file has everything that a request path needs of a frontend.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use ferrite_disk::{Disk, OpenOptions, SECTOR_BYTES, Session};
use ferrite_host::clock::SystemClock;
use ferrite_io::engine::{Engine, Op};
use ferrite_io::engines::test_engine;
use ferrite_io::pool::Pool;
use ferrite_io::reactor::Wait;
use ferrite_serve::counters::Counters;
use ferrite_serve::path::device::Device;
use ferrite_serve::path::shared::Shared;
use ferrite_serve::path::work::{Action, Outcome, Work};
use ferrite_serve::path::{Admitted, Data, FRONTEND_TOKENS, RequestPath, Ticket};
use ferrite_serve::tuning::Tuning;
use ferrite_serve::waker::Waker;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::{PATIENCE, few_or_all, images};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

const SECTORS: u64 = 4096;
const POOL_BYTES: usize = 8 << 20;
/// Requests in flight of a path.
const ENTRIES: u32 = 8;
const CLUSTER_SECTORS: u64 = 128;
/// The most sectors of a request.
const LONGEST: u64 = 64;

/// A request of a client.
#[derive(Clone, Copy, Debug)]
struct Ask {
    work: Work,
    /// The byte that a write fills its sectors with.
    fill: u8,
}

impl Ask {
    fn has_data(&self) -> bool {
        self.work.action == Action::Read || self.work.action.takes_data()
    }

    fn meets(&self, other: &Ask) -> bool {
        let end = |ask: &Ask| ask.work.sector + ask.work.sectors;
        self.work.sector < end(other) && other.work.sector < end(self)
    }
}

/// The result of a request.
#[derive(Debug)]
struct Reply {
    ask: Ask,
    outcome: Outcome,
    /// The bytes that were read.
    read: Vec<u8>,
}

/// The frontend's end, instead of a ring.
struct Inbox {
    asks: Receiver<Ask>,
    bell: Arc<Waker>,
    replies: Sender<Reply>,
}

/// The frontend, on the thread of its path.
struct Script {
    path: RequestPath,
    shared: Arc<Shared>,
    inbox: Inbox,
    /// Requests that have not been taken yet.
    waiting: VecDeque<Ask>,
    /// The taken requests, by entry.
    asks: Vec<Option<Ask>>,
}

impl Script {
    fn new(shared: Arc<Shared>, index: usize, inbox: Inbox) -> Script {
        let engine = test_engine().open(shared.pool.arena().clone(), 64).unwrap();
        Script::on(engine, shared, index, inbox)
    }

    fn on(engine: Box<dyn Engine>, shared: Arc<Shared>, index: usize, inbox: Inbox) -> Script {
        let path = RequestPath::new(shared.clone(), index, engine, ENTRIES).unwrap();
        Script { path, shared, inbox, waiting: VecDeque::new(), asks: vec![None; 8] }
    }

    /// Serves its client until the connection is stopped.
    fn run(mut self) {
        self.listen();
        let (mut completions, mut tickets) = (Vec::new(), Vec::new());
        loop {
            self.path.follow().unwrap();
            let fetch = self.take();
            self.path.order_buffers();
            for ticket in fetch {
                self.fetch(&ticket);
                self.path.fetched(ticket, true, 1);
            }
            let started = self.path.start();
            self.answer(&mut tickets);
            if let Some(ticket) = self.path.take_alone() {
                self.fetch(&ticket);
                self.path.alone_fetched(ticket, true, 1);
            }
            if self.path.may_end() {
                return;
            }
            let busy = started || self.path.is_pending() || self.path.has_yielded();
            let more = !self.waiting.is_empty() && !self.path.is_held_back();
            // Waiting requests overlap one in flight, whose end is a completion.
            let wait =
                if busy || (more && self.path.is_idle()) { Wait::No } else { Wait::Until(None) };
            self.path.turn(wait, &mut completions).unwrap();
            for completion in completions.drain(..) {
                match completion.token {
                    FRONTEND_TOKENS => {
                        self.inbox.bell.clear();
                        self.listen();
                    }
                    _ => self.path.completed(completion, 1).unwrap(),
                }
            }
            self.path.collect_tasks(1);
            self.path.read(&mut tickets);
            tickets.drain(..).for_each(|ticket| self.path.delivered(ticket, true, 1));
            self.answer(&mut tickets);
        }
    }

    fn listen(&mut self) {
        let fd = self.inbox.bell.fd().as_raw_fd();
        self.path.reactor().push(FRONTEND_TOKENS, Op::Readable { fd });
    }

    /// Takes all possible requests, in order; returns those with data to fetch.
    fn take(&mut self) -> Vec<Ticket> {
        self.waiting.extend(self.inbox.asks.try_iter());
        let mut fetch = Vec::new();
        if !self.path.enter() {
            return fetch;
        }
        while let Some(ask) = self.waiting.front().copied() {
            // Requests in flight together have no order.
            let meets = self.asks.iter().flatten().any(|other| ask.meets(other));
            if meets || self.path.is_holding_back() || self.path.next_entry().is_none() {
                break;
            }
            let buf = match ask.has_data() {
                true => match self.path.buffer(ask.work.bytes() as usize) {
                    Some(buf) => Some(buf),
                    None => break,
                },
                false => None,
            };
            let ticket = self.path.take(7, 0, buf, 1).unwrap();
            self.waiting.pop_front();
            self.asks[ticket.entry()] = Some(ask);
            match self.path.admit(ticket, ask.work) {
                Admitted::Taken => {}
                Admitted::Fetch(ticket) => fetch.push(ticket),
            }
        }
        self.path.leave_if_idle();
        fetch
    }

    /// Puts a write's data into its buffer.
    fn fetch(&mut self, ticket: &Ticket) {
        let Some(Data::At(span)) = self.path.data(ticket) else { return };
        let ask = self.asks[ticket.entry()].unwrap();
        self.shared.pool.arena().fill(span, ask.fill);
    }

    fn answer(&mut self, tickets: &mut Vec<Ticket>) {
        self.path.finished(tickets);
        for ticket in tickets.drain(..) {
            let ask = self.asks[ticket.entry()].take().unwrap();
            let mut read = Vec::new();
            if ask.work.action == Action::Read {
                read = vec![0; ask.work.bytes() as usize];
                if let Some(Data::At(span)) = self.path.data(&ticket) {
                    self.shared.pool.arena().copy_out(span, &mut read);
                }
            }
            let outcome = self.path.outcome(&ticket);
            self.path.release(ticket);
            self.inbox.replies.send(Reply { ask, outcome, read }).unwrap();
        }
        self.path.leave_if_idle();
    }
}

/// The client: it sends requests, and compares the answers.
struct Client {
    asks: Sender<Ask>,
    bell: Arc<Waker>,
    replies: Receiver<Reply>,
    /// The value of each sector; `None` after a discard, which may leave or zero it.
    model: Vec<Option<u8>>,
}

impl Client {
    /// Sends a request for a whole cluster, or a flush.
    fn ask(&self, action: Action, cluster: u64, fill: u8) {
        let sectors = if action == Action::Flush { 0 } else { CLUSTER_SECTORS };
        let work = Work { action, sector: cluster * CLUSTER_SECTORS, sectors };
        self.asks.send(Ask { work, fill }).unwrap();
        self.bell.wake();
    }

    fn hear(&self) -> Reply {
        self.replies.recv_timeout(PATIENCE).expect("every request is answered")
    }

    fn outcome(&self, action: Action, cluster: u64, fill: u8) -> Outcome {
        self.ask(action, cluster, fill);
        self.hear().outcome
    }

    /// Sends all requests at once, and compares each answer with the model after all earlier requests that overlap it.
    fn play(&mut self, script: &[Ask]) {
        let mut expected: Vec<(Ask, Vec<Option<u8>>)> = Vec::new();
        for ask in script {
            let range = ask.work.sector as usize..(ask.work.sector + ask.work.sectors) as usize;
            expected.push((*ask, self.model[range.clone()].to_vec()));
            match ask.work.action {
                Action::Read | Action::Flush => {}
                Action::Discard => self.model[range].fill(None),
                _ => self.model[range].fill(Some(ask.fill)),
            }
            self.asks.send(*ask).unwrap();
        }
        self.bell.wake();
        for _ in script {
            let reply = self.replies.recv_timeout(PATIENCE).expect("every request is answered");
            let same =
                |(ask, _): &(Ask, _)| ask.work == reply.ask.work && ask.fill == reply.ask.fill;
            let at = expected.iter().position(same).expect("each request is answered once");
            let (ask, before) = expected.remove(at);
            assert_eq!(reply.outcome, Outcome::Done, "{ask:?}");
            for (sector, fill) in reply.read.chunks(SECTOR_BYTES as usize).zip(&before) {
                let first = fill.unwrap_or(sector[0]);
                assert!(sector.iter().all(|byte| *byte == first), "{ask:?}");
            }
        }
    }
}

/// The change of the disk while it is parked.
#[derive(Clone, Copy)]
enum Change {
    /// None: the paths go on with the same disk and its dirty metadata.
    None,
    /// It is closed, and opened again.
    Reopened,
    /// It is dropped as by a death, and opened again with the journal.
    Recovered,
}

/// Parks the device repeatedly until the clients have ended; returns how often.
fn park(device: &Arc<Device>, image: &Path, ended: &AtomicBool) -> usize {
    let mut count = 0;
    while !ended.load(Ordering::SeqCst) {
        let (disk, away) = device.park(PATIENCE).unwrap();
        let change = [Change::None, Change::Reopened, Change::Recovered][count % 3];
        let disk = match change {
            Change::None => disk,
            Change::Reopened => {
                let engine = |arena| test_engine().open(arena, 32);
                Session::new(Arc::new(disk), engine).unwrap().close().unwrap();
                open(image)
            }
            Change::Recovered => {
                drop(disk);
                open(image)
            }
        };
        away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
        count += 1;
        // Lets the clients run.
        thread::yield_now();
    }
    count
}

/// Plays each client's scripts, on a path of its own, on a disk of that format. At the end the disk must match the
/// models. Returns how often it was parked meanwhile, if it is to be.
fn play(format: &str, clients: &[Vec<Vec<Ask>>], parks: bool) -> usize {
    let dir = ferrite_testkit::places::dir_in_memory();
    let image = images::make(dir.path(), format, SECTORS * SECTOR_BYTES);
    let shared = shared(&image, clients.len());
    let (ended, mut parked) = (AtomicBool::new(!parks), 0);
    let models: Vec<_> = thread::scope(|scope| {
        let parker = scope.spawn(|| park(&shared.device, &image, &ended));
        let serve = |(index, scripts): (usize, &'_ Vec<Vec<Ask>>)| {
            let (mut client, inbox) = connect();
            let served = shared.clone();
            scope.spawn(move || {
                Script::new(served.clone(), index, inbox).run();
            });
            let scripts = scripts.clone();
            scope.spawn(move || {
                scripts.iter().for_each(|script| client.play(script));
                client.model
            })
        };
        let players: Vec<_> = clients.iter().enumerate().map(serve).collect();
        let models = players.into_iter().map(|player| player.join()).collect();
        ended.store(true, Ordering::SeqCst);
        parked = parker.join().unwrap();
        shared.stop();
        models
    });
    drop(shared);
    let contents = images::contents(&image);
    for (index, model) in models.into_iter().enumerate() {
        let model = model.unwrap();
        for sector in of_client(index, clients.len()) {
            let bytes = &contents[sector as usize * 512..][..512];
            let fill = model[sector as usize].unwrap_or(bytes[0]);
            assert!(bytes.iter().all(|byte| *byte == fill), "{format}: sector {sector}");
        }
    }
    images::check(&image);
    parked
}

fn open(image: &Path) -> Disk {
    let state_dir = Some(images::state_dir(image));
    // A ring releases its files a moment later.
    let wait_for_lock = Some(PATIENCE);
    let options = OpenOptions { state_dir, wait_for_lock, ..OpenOptions::default() };
    Disk::open(image, &options).unwrap()
}

fn shared(image: &Path, paths: usize) -> Arc<Shared> {
    shared_by(open(image), paths)
}

fn shared_by(disk: Disk, paths: usize) -> Arc<Shared> {
    let device = Arc::new(Device::new(disk, SystemClock::shared()));
    let pool = Pool::with_scratch(POOL_BYTES, paths, Disk::MAX_SCRATCH_BYTES).unwrap();
    let (processors, counters) = (Arc::default(), Counters::default());
    Arc::new(Shared::new(device, pool, paths, Tuning::default(), processors, counters).unwrap())
}

fn connect() -> (Client, Inbox) {
    let (ask, asks) = mpsc::channel();
    let (reply, replies) = mpsc::channel();
    let bell = Arc::new(Waker::new().unwrap());
    let model = vec![Some(0); SECTORS as usize];
    let client = Client { asks: ask, bell: bell.clone(), replies, model };
    (client, Inbox { asks, bell, replies: reply })
}

/// The part of the disk of a client, which no other client uses.
fn of_client(index: usize, clients: usize) -> std::ops::Range<u64> {
    let each = SECTORS / clients as u64;
    index as u64 * each..(index as u64 + 1) * each
}

/// Scripts for one of several clients.
fn scripts(index: usize, clients: usize) -> impl Strategy<Value = Vec<Vec<Ask>>> {
    let part = of_client(index, clients);
    let action = prop_oneof![
        6 => Just(Action::Read),
        6 => Just(Action::Write),
        1 => Just(Action::Flush),
        1 => Just(Action::FlushThenWrite),
        1 => Just(Action::Barrier),
        1 => Just(Action::Discard),
    ];
    let ask = (action, part.clone(), 1..=LONGEST, 1..=u8::MAX).prop_map(
        move |(action, sector, sectors, fill)| {
            let sectors = if action == Action::Flush { 0 } else { sectors.min(part.end - sector) };
            Ask { work: Work { action, sector, sectors }, fill }
        },
    );
    prop::collection::vec(prop::collection::vec(ask, 1..40), 1..4)
}

#[test]
fn a_frontend_that_is_no_ring_reads_what_it_has_written() {
    let config = ProptestConfig::with_cases(6 * ferrite_testkit::scale());
    for format in ["raw"].into_iter().chain(images::FORMATS) {
        let mut runner = TestRunner::new(config.clone());
        let clients = scripts(0, 1).prop_map(|scripts| vec![scripts]);
        runner
            .run(&clients, |clients| {
                play(format, &clients, false);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn paths_with_barriers_and_parts_of_blocks_wait_for_each_other_and_go_on() {
    let config = ProptestConfig::with_cases(6 * ferrite_testkit::scale());
    let clients = (scripts(0, 2), scripts(1, 2)).prop_map(|(one, two)| vec![one, two]);
    let mut runner = TestRunner::new(config);
    runner
        .run(&clients, |clients| {
            play("qcow2", &clients, false);
            play("raw", &clients, false);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_disk_that_is_parked_and_exchanged_again_and_again_has_all_that_was_answered() {
    let clients = (scripts(0, 2), scripts(1, 2)).prop_map(|(one, two)| vec![one, two]);
    let mut runner = TestRunner::default();
    for format in ["raw"].into_iter().chain(images::FORMATS) {
        let mut parked = 0;
        while parked < few_or_all(60, 1000) as usize {
            parked += play(format, &clients.new_tree(&mut runner).unwrap().current(), true);
        }
    }
}

/// Stops the paths, also after a failed test.
struct Stop<'a>(&'a Shared);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// A read of one path hangs in its engine. The other path discards that range, and writes until its device is full.
#[test]
fn a_place_that_a_read_hangs_on_is_given_out_when_it_has_ended() {
    let dir = ferrite_testkit::places::dir_in_memory();
    let image = images::make(dir.path(), "qcow2", SECTORS * SECTOR_BYTES);
    std::fs::File::options().write(true).open(&image).unwrap().set_len(1 << 20).unwrap();
    let options =
        OpenOptions { fixed_size: true, wait_for_lock: Some(PATIENCE), ..OpenOptions::default() };
    let shared = shared_by(Disk::open(&image, &options).unwrap(), 2);
    let faults = Faults::none();
    let ((reader, to_reader), (writer, to_writer)) = (connect(), connect());
    thread::scope(|scope| {
        let (first, second) = (shared.clone(), shared.clone());
        let engines = faults.clone();
        scope.spawn(move || {
            let engine = engines.open(first.pool.arena().clone(), 64).unwrap();
            Script::on(engine, first, 0, to_reader).run();
        });
        scope.spawn(move || Script::new(second, 1, to_writer).run());
        let _stop = Stop(&shared);
        let done = |action, cluster, fill| {
            assert_eq!(writer.outcome(action, cluster, fill), Outcome::Done, "{action:?}");
        };
        done(Action::Write, 0, 7);
        done(Action::Flush, 0, 0);
        assert_eq!(reader.outcome(Action::Read, 0, 0), Outcome::Done);
        let held = faults.hold();
        faults.forget();
        faults.once(Kind::Read, Fault::Held(None));
        reader.ask(Action::Read, 0, 0);
        faults.wait_for(Kind::Read, 1);
        done(Action::Discard, 0, 0);
        (0..4).for_each(|_| done(Action::Flush, 0, 0));
        let failed = |cluster: &u64| writer.outcome(Action::Write, *cluster, 8) != Outcome::Done;
        let full = (1..SECTORS / CLUSTER_SECTORS).find(failed).expect("the device is full");
        drop(held);
        let reply = reader.hear();
        assert!(reply.outcome == Outcome::Done && reply.read.iter().all(|byte| *byte == 7));
        done(Action::Flush, 0, 0);
        done(Action::Write, full, 8);
    });
}
