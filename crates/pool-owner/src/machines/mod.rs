//! The real shell on several simulated machines, in one process: servers whose disks lose what was not synced, owners, and the
//! connections between them, in simulated time.
//!
//! Real: the owner's [`Set`] and `link`, all of `ferrite_member` (connection, copy, files, state), and each byte between them. Simulated:
//! the servers' power, the owners' clocks, the network (each message has a time, and cuts hold it up), and the record of etcd. The
//! threads of servers are real ones: the driver waits for their answers, and which of two comes first is the kernel's choice. So
//! a seed makes nearly the same history each time, and any history is judged.

#[path = "../../../pool/tests/histories/check.rs"]
mod check;
mod faults;
#[path = "../../../pool/tests/histories/random.rs"]
mod random;
mod wire;

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use ferrite_member::Server;
use ferrite_member::power::Power;
use ferrite_pool::{Event, Failure, MemberId, OwnerId, Record, Revision, Said};
use ferrite_pool_map::{Copy, Id};
use tempfile::TempDir;

use crate::link::Payload;
use crate::member::Place;
use crate::parts::Parts;
use crate::records::Wanted;
use crate::set::{Set, Wish};
use check::Access;
use random::Random;
use wire::{Message, Wire};

const POOL: [u8; 16] = [7; 16];
const BLOCK: u64 = 512;
/// The blocks that are used.
const BLOCKS: u64 = 10;
/// Milliseconds in which everything goes wrong that may, and until which all has to be in order again.
const TROUBLE: u64 = 10_000;
const END: u64 = 130_000;
const TICK: u64 = 100;
const MOST_OUTSTANDING: usize = 4;

thread_local! {
    /// Nanoseconds of the clock of the owner that is called.
    static NOW: Cell<u64> = const { Cell::new(0) };
}

fn now() -> u64 {
    NOW.get()
}

enum What {
    Tick(usize),
    Client(usize),
    Connect(usize, MemberId),
    /// Along a connection: to its server, or to its owner.
    Arrives(u64, bool, Message),
    Transacted(usize, Revision, Record, Outcome),
    Said(usize, Said),
    Fault,
    StartServer(MemberId),
    StartOwner,
    Heal,
    LastLook,
}

/// The outcome of a change of the record.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Known,
    Unknown,
    Never,
    Late,
    /// Its owner was told already that it is not known.
    LateNow,
}

/// A server with its machine.
struct Machine {
    folder: TempDir,
    power: Power,
    server: Option<Server>,
    place: Place,
}

struct Host {
    set: Arc<Set>,
    is_alive: bool,
    paused_until: u64,
    no_record_until: u64,
    /// Its clock counts this many thousandths more.
    fast: u64,
    connects: BTreeMap<MemberId, Receiver<()>>,
    records: Receiver<Wanted>,
    outstanding: BTreeMap<u64, Vec<usize>>,
}

/// A request that has ended: its host, its number, whether it was done, and what was read.
type Ended = (usize, u64, bool, Vec<u8>);

struct World {
    random: Random,
    bytes: u64,
    first_block: u64,
    now: u64,
    stamp: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, What>,
    machines: BTreeMap<MemberId, Machine>,
    hosts: Vec<Host>,
    wires: BTreeMap<u64, Wire>,
    /// Host, member, and whether it is the way to the server: held up until then.
    cuts: BTreeMap<(usize, MemberId, bool), u64>,
    revision: u64,
    record: Record,
    ended: Arc<Mutex<Vec<Ended>>>,
    accesses: Vec<Access>,
    values: u64,
    wrong: Option<String>,
    calm: bool,
}

/// Runs the history of a seed, and says what is wrong in it. `lies`: media that sync nothing. `false`: all servers had lost power, so
/// the disk has failed.
fn run(seed: u64, lies: bool) -> Result<bool, String> {
    let mut world = World::new(seed, lies);
    world.at(0, What::StartOwner);
    world.at(500, What::Fault);
    world.at(TROUBLE, What::Heal);
    while let Some(Reverse((time, id))) = world.queue.pop() {
        let Some(what) = world.events.remove(&id) else { continue };
        (world.now, world.stamp) = (time, world.stamp + 1);
        world.happen(what);
        world.settle();
        if let Some(why) = world.wrong.take() {
            return Err(why);
        }
        // A change of an owner that is dead may be carried out late.
        let is_superseded = world.last_failure() == Some(Failure::Superseded);
        if is_superseded && world.calm && world.now < TROUBLE + 9_000 {
            world.start_owner();
        }
        if world.is_over() {
            break;
        }
    }
    check::check(&world.accesses)?;
    world.last_state()
}

impl World {
    fn new(seed: u64, lies: bool) -> World {
        let mut random = Random::new(seed);
        // One small region, or a large one with a small one behind it.
        let (bytes, first_block) =
            if seed.is_multiple_of(4) { ((1 << 20) + 8192, 2044) } else { (BLOCKS * BLOCK, 0) };
        let count = if random.chance(60) { 2 } else { 3 };
        let members: Vec<MemberId> = (0..count).map(MemberId).collect();
        let machine = |member: &MemberId| {
            let power = Power::new(seed << 8 | u64::from(member.0));
            if lies {
                power.lie();
            }
            let (server, id, name) = (format!("s{}", member.0), Id::random(), "d".to_owned());
            let copy = Copy { member: member.0, server, id, name, leaves: false, start: None };
            let place = Place::of(&copy, bytes, None);
            (
                *member,
                Machine {
                    folder: TempDir::new_in("/dev/shm").unwrap(),
                    power,
                    server: None,
                    place,
                },
            )
        };
        let record = Record {
            generation: ferrite_pool::Generation(0),
            owner: OwnerId(0),
            in_sync: members.iter().copied().collect(),
            out: Default::default(),
            nonce: 0,
        };
        let mut world = World {
            random,
            bytes,
            first_block,
            now: 0,
            stamp: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            machines: members.iter().map(machine).collect(),
            hosts: Vec::new(),
            wires: BTreeMap::new(),
            cuts: BTreeMap::new(),
            revision: 1,
            record,
            ended: Arc::default(),
            accesses: Vec::new(),
            values: 0,
            wrong: None,
            calm: false,
        };
        for member in members {
            world.start_server(member);
            world.machines[&member].make();
        }
        world
    }

    fn at(&mut self, delay: u64, what: What) {
        self.at_time(self.now + delay, what);
    }

    fn at_time(&mut self, time: u64, what: What) {
        self.values += 1;
        self.queue.push(Reverse((time, self.values)));
        self.events.insert(self.values, what);
    }

    fn soon(&mut self) -> u64 {
        let is_rare = self.random.chance(3) && !self.calm;
        if is_rare { self.random.between(5, 2000) } else { self.random.between(1, 5) }
    }

    /// Calls an owner at its time, if it lives. `false`: it is paused.
    fn tell(&mut self, host: usize, what: impl FnOnce(&Arc<Set>)) -> bool {
        let known = &self.hosts[host];
        if known.paused_until > self.now {
            return false;
        }
        NOW.set((self.now * 1_000 + self.now * known.fast) * 1_000);
        if known.is_alive {
            what(&known.set);
        }
        true
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Tick(host) => {
                self.tell(host, |set| set.happened(Event::Tick));
                if self.hosts[host].is_alive {
                    self.at(TICK, What::Tick(host));
                }
            }
            What::Client(host) => self.client(host),
            What::Connect(host, member) => self.connect(host, member),
            What::Arrives(wire, to_server, message) => self.arrives(wire, to_server, message),
            What::Transacted(host, compare, record, outcome) => {
                self.transacted(host, compare, record, outcome);
            }
            What::Said(host, said) => {
                let again = said.clone();
                if !self.tell(host, |set| set.happened(Event::Said(said))) {
                    self.at_time(self.hosts[host].paused_until, What::Said(host, again));
                }
            }
            What::Fault => self.fault(),
            What::StartServer(member) => self.start_server(member),
            What::StartOwner if self.calm => {}
            What::StartOwner => self.start_owner(),
            What::Heal => self.heal(),
            What::LastLook => {
                let last = self.hosts.len() - 1;
                (0..BLOCKS).for_each(|block| self.ask(last, 1, block, 1));
            }
        }
    }

    /// Takes up what owners want, what they and servers have sent, and what has ended.
    fn settle(&mut self) {
        for host in 0..self.hosts.len() {
            let known = &self.hosts[host];
            let connects = known.connects.iter();
            let connects = connects.flat_map(|(member, asked)| asked.try_iter().map(|()| *member));
            let connects: Vec<MemberId> = connects.collect();
            let records: Vec<Wanted> = known.records.try_iter().collect();
            let cut = known.no_record_until.saturating_sub(self.now);
            for member in connects {
                let delay = self.soon();
                self.at(delay, What::Connect(host, member));
            }
            for Wanted { compare, record, .. } in records {
                let outcome = match self.random.below(20) {
                    0 => Outcome::Unknown,
                    1 => Outcome::Never,
                    2 => Outcome::Late,
                    _ => Outcome::Known,
                };
                let outcome = if self.calm { Outcome::Known } else { outcome };
                let delay = cut + self.soon();
                self.at(delay, What::Transacted(host, compare, record, outcome));
            }
        }
        self.pump();
        self.see_cuts();
        let ended = std::mem::take(&mut *self.ended.lock().unwrap());
        for (host, id, is_done, data) in ended {
            let Some(of) = self.hosts[host].outstanding.remove(&id) else { continue };
            for (place, index) in of.into_iter().enumerate() {
                let access = &mut self.accesses[index];
                if !access.is_write && is_done {
                    let block = data.as_chunks::<512>().0[place].as_chunks::<8>().0;
                    access.value = u64::from_le_bytes(block[0]);
                    if block.iter().any(|word| *word != block[0]) {
                        self.wrong = Some(format!("block {} is no block", access.block));
                    }
                }
                access.ended = is_done.then_some(self.stamp);
            }
        }
    }

    fn transacted(&mut self, host: usize, compare: Revision, record: Record, outcome: Outcome) {
        if outcome == Outcome::Late {
            let delay = self.random.between(100, 8_000);
            let record = record.clone();
            self.at(delay, What::Transacted(host, compare, record, Outcome::LateNow));
        }
        let may = !matches!(outcome, Outcome::Late | Outcome::Never);
        let is_won = may && compare.0 == self.revision;
        if is_won {
            self.revision += 1;
            self.record = record;
        }
        let delay = self.soon();
        let said = match outcome {
            Outcome::LateNow => return,
            Outcome::Known if is_won => Said::Won(Revision(self.revision)),
            Outcome::Known => Said::Lost(Revision(self.revision), self.record.clone()),
            _ => return self.at(delay + 200, What::Said(host, Said::Unknown)),
        };
        self.at(delay, What::Said(host, said));
    }

    /// The disk's user does something.
    fn client(&mut self, host: usize) {
        let is_last = host + 1 == self.hosts.len();
        if !self.hosts[host].is_alive || (self.calm && !is_last) {
            return;
        }
        let pause = self.random.between(20, 300);
        if !self.calm || self.now < TROUBLE + 1_000 {
            self.at(pause, What::Client(host));
        }
        let is_busy = self.hosts[host].outstanding.len() >= MOST_OUTSTANDING;
        if is_busy || self.hosts[host].paused_until > self.now {
            return;
        }
        let start = self.random.below(BLOCKS);
        let count = self.random.between(1, 4).min(BLOCKS - start);
        let what = self.random.below(10);
        self.ask(host, what, start, count);
    }

    /// Flushes (0), reads (1 to 5) or writes.
    fn ask(&mut self, host: usize, what: u64, start: u64, count: u64) {
        self.values += 1;
        let (value, begun, is_write) = (self.values, self.stamp, what > 5);
        let count = if what == 0 { 0 } else { count };
        let access = |block| Access { block, value, is_write, begun, ended: None };
        let first = self.accesses.len();
        self.accesses.extend((start..start + count).map(access));
        let indices = (first..self.accesses.len()).collect();
        self.hosts[host].outstanding.insert(value, indices);
        let (at, bytes) = ((self.first_block + start) * BLOCK, count * BLOCK);
        let data: Vec<u8> = value.to_le_bytes().repeat(bytes as usize / 8);
        let wish = match what {
            0 => Wish::Flush,
            1..=5 => Wish::Read { start: at, bytes },
            _ => {
                let len = data.len();
                Wish::Write { start: at, bytes, data: Payload::Shared(Arc::new(data), 0..len) }
            }
        };
        let ended = self.ended.clone();
        let done: ferrite_helper::Done = Box::new(move |result, data| {
            ended.lock().unwrap().push((host, value, result.is_ok(), data));
        });
        let read = if what > 0 && what < 6 { vec![0; bytes as usize] } else { Vec::new() };
        let parts = Parts::new(1, bytes as usize, read, done);
        self.tell(host, |set| set.ask(wish, parts.part(0..bytes as usize)));
    }

    fn last(&self) -> &Host {
        &self.hosts[self.hosts.len() - 1]
    }

    fn last_failure(&self) -> Option<Failure> {
        self.hosts.last().and_then(|last| last.set.is_serving().err())
    }

    fn is_over(&self) -> bool {
        if !self.calm || self.now < TROUBLE + 10_000 {
            return false;
        }
        let last = self.last();
        let has_failed = last.set.is_serving().is_err();
        has_failed || self.now > END || (last.outstanding.is_empty() && last.set.is_settled())
    }

    fn last_state(&self) -> Result<bool, String> {
        let last = self.last();
        match last.set.is_serving() {
            Err(Failure::Incomplete) => return Ok(false),
            Err(failure) => return Err(format!("the last owner has failed: {failure:?}")),
            Ok(_) => {}
        }
        if !last.set.is_settled() || !last.outstanding.is_empty() {
            return Err(format!("the disk does not come to rest: {:?}", self.record));
        }
        let content = |machine: &Machine| {
            let file = std::fs::File::open(machine.folder.path().join("d.raw")).unwrap();
            let mut bytes = vec![0; self.bytes as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        let mut all = self.machines.values().map(content);
        let first = all.next().unwrap_or_default();
        match all.all(|other| other == first) {
            true => Ok(true),
            false => Err("the copies differ at the end".to_owned()),
        }
    }
}

/// A seed's history is right.
#[track_caller]
fn is_right(seed: u64) -> bool {
    run(seed, false).unwrap_or_else(|why| panic!("seed {seed}: {why}"))
}

#[test]
fn all_reads_are_right_and_all_copies_equal_in_the_end() {
    let count = std::env::var("FERRITE_POOL_MACHINES").ok().and_then(|n| n.parse().ok());
    let count = count.unwrap_or(100);
    let lasted = (0..count).filter(|seed| is_right(*seed)).count();
    println!("{lasted} of {count} disks have lasted");
    assert!(lasted > 0);
}

#[test]
fn media_that_sync_nothing_are_found() {
    let found = (0..400).find_map(|seed| Some((seed, run(seed, true).err()?)));
    println!("{:?}", found.expect("not found"));
}
