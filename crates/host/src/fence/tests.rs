//! Hosts, each with a disk, on one LUN. While one of them is between two commands, others act; a process ends at any command; a
//! host starts again under another name; the target starts again.

use std::cell::{Cell, RefCell};
use std::io;

use super::lun::{Abilities, Lun, Outcome, Reservation};
use super::model::Model;
use super::record::{Entry, Record};
use super::rules::{self, Refusal};
use crate::clock::{Random as _, SplitMix64};

const HOSTS: usize = 3;

#[derive(Default)]
struct Host {
    port: Cell<u32>,
    record: RefCell<Entry>,
    /// Its disk writes, as far as it knows.
    writes: Cell<bool>,
    acts: Cell<bool>,
    /// Its process has ended in the middle of an act.
    ended: Cell<bool>,
}

struct World {
    lun: RefCell<Model>,
    hosts: [Host; HOSTS],
    random: RefCell<SplitMix64>,
    ports: Cell<u32>,
    /// The steps that were done, for the message of a failure.
    story: RefCell<Vec<String>>,
    interrupts: bool,
}

impl Record for Host {
    fn get(&self) -> io::Result<Entry> {
        Ok(self.record.borrow().clone())
    }

    fn set(&self, keys: &[u64], is_held: bool) -> io::Result<()> {
        if self.ended.get() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        *self.record.borrow_mut() = Entry { keys: keys.to_vec(), is_held };
        Ok(())
    }
}

/// The LUN as one host has it.
struct At<'a>(&'a World, usize);

impl At<'_> {
    fn command<T>(&self, what: impl FnOnce(&mut Model, u32) -> T) -> io::Result<T> {
        let At(world, host) = *self;
        let me = &world.hosts[host];
        if world.interrupts && world.one_in(5) {
            world.act_of_another(host);
        }
        if world.interrupts && world.one_in(40) {
            world.note(format!("{host} ends"));
            me.ended.set(true);
        }
        if me.ended.get() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let done = what(&mut world.lun.borrow_mut(), me.port.get());
        world.check();
        Ok(done)
    }
}

impl Lun for At<'_> {
    fn abilities(&self) -> io::Result<Abilities> {
        self.command(|lun, _| lun.abilities())
    }

    fn reservation(&self) -> io::Result<Option<Reservation>> {
        self.command(|lun, _| lun.reservation())
    }

    fn keys(&self) -> io::Result<Vec<u64>> {
        self.command(|lun, _| lun.keys())
    }

    fn register(&self, old: Option<u64>, new: u64) -> io::Result<Outcome> {
        self.command(|lun, port| lun.register(port, old, new))
    }

    fn reserve(&self, key: u64) -> io::Result<Outcome> {
        self.command(|lun, port| lun.reserve(port, key))
    }

    fn release(&self, key: u64) -> io::Result<Outcome> {
        self.command(|lun, port| lun.release(port, key))
    }

    fn preempt(&self, own: u64, victim: u64) -> io::Result<Outcome> {
        self.command(|lun, port| lun.preempt(port, own, victim))
    }
}

impl World {
    fn new(seed: u64, persists: bool, interrupts: bool) -> World {
        let world = World {
            lun: RefCell::new(Model::new(persists)),
            hosts: std::array::from_fn(|_| Host::default()),
            random: RefCell::new(SplitMix64::new(seed)),
            ports: Cell::new(0),
            story: RefCell::default(),
            interrupts,
        };
        world.hosts.iter().for_each(|host| world.new_port(host));
        world
    }

    fn new_port(&self, host: &Host) {
        self.ports.set(self.ports.get() + 1);
        host.port.set(self.ports.get());
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.borrow_mut().below(bound)
    }

    fn one_in(&self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn note(&self, what: String) {
        self.story.borrow_mut().push(what);
    }

    /// Never two hosts whose writes are executed.
    fn check(&self) {
        let lun = self.lun.borrow();
        let writers = self
            .hosts
            .iter()
            .filter(|host| host.writes.get() && lun.executes_write(host.port.get()));
        assert!(writers.count() < 2, "two writers:\n{}\n{lun:?}", self.story.borrow().join("\n"));
    }

    fn act_of_another(&self, than: usize) {
        let host = self.below(HOSTS as u64) as usize;
        if host != than && !self.hosts[host].acts.get() {
            self.act(host);
        }
    }

    fn others_write(&self, host: usize) -> bool {
        self.hosts.iter().enumerate().any(|(other, it)| other != host && it.writes.get())
    }

    fn take(&self, host: usize) -> Result<rules::Held, Refusal> {
        let taken = rules::take(&At(self, host), &self.hosts[host], false);
        self.note(format!("{host} takes: {taken:?}"));
        self.hosts[host].writes.set(taken.is_ok());
        self.check();
        taken
    }

    fn steal(&self, host: usize) -> Result<Option<u64>, Refusal> {
        let stolen = rules::steal(&At(self, host), &self.hosts[host], false);
        self.note(format!("{host} steals: {stolen:?}"));
        stolen
    }

    fn seize(&self, host: usize) -> Result<rules::Seized, Refusal> {
        // A process that seizes the LUN is the only one of its host that has it open: the one before has ended.
        self.hosts[host].writes.set(false);
        let seized = rules::seize(&At(self, host), &self.hosts[host], false);
        self.note(format!("{host} seizes: {seized:?}"));
        self.hosts[host].writes.set(seized.is_ok());
        self.check();
        seized
    }

    fn release(&self, host: usize) -> Result<(), Refusal> {
        self.hosts[host].writes.set(false);
        let released = rules::release(&At(self, host), &self.hosts[host]);
        self.note(format!("{host} releases: {released:?}"));
        released
    }

    fn act(&self, host: usize) {
        let me = &self.hosts[host];
        me.acts.set(true);
        me.ended.set(false);
        match (self.below(8), me.writes.get()) {
            (0..=2, false) => drop(self.take(host)),
            (3, false) => drop(self.steal(host).map(|_| self.take(host))),
            // Its keeper or worker was killed, and the next one goes on.
            (0..=2, true) => {
                me.writes.set(false);
                let _ = self.take(host);
            }
            // Without a reservation a host that was shut out can write again: its guest has to be ended first.
            (3, true) if !self.others_write(host) => drop(self.release(host)),
            (4, _) => {
                self.note(format!("{host} starts again"));
                me.writes.set(false);
                me.record.borrow_mut().is_held = false;
                self.new_port(me);
            }
            (5, _) => {
                self.note(format!("{host} logs in anew"));
                self.new_port(me);
            }
            (6, _) => self.lun.borrow_mut().restart(),
            // It may take the LUN from any host.
            (7, false) => drop(self.seize(host)),
            _ => {}
        }
        me.acts.set(false);
        self.check();
    }
}

#[test]
fn there_are_never_two_writers_and_a_lun_can_always_be_had_in_the_end() {
    let mut taken = 0;
    for seed in 0..20_000 {
        let world = World::new(seed, true, true);
        for _ in 0..25 {
            world.act(world.below(HOSTS as u64) as usize);
        }
        taken += usize::from(world.hosts.iter().any(|host| host.writes.get()));
        world.hosts.iter().for_each(|host| {
            host.writes.set(false);
            host.ended.set(false);
        });
        let calm = World { interrupts: false, ..world };
        // Its guest has ended, and its disk is detached.
        calm.release(0).unwrap();
        calm.steal(0).unwrap();
        calm.take(0).unwrap_or_else(|e| panic!("{e}:\n{}", calm.story.borrow().join("\n")));
        calm.release(0).unwrap();
        assert_eq!(calm.lun.borrow().holder(), None);
        calm.release(1).unwrap();
        calm.take(1).unwrap();
    }
    assert!(taken > 5_000, "{taken}");
}

/// Two hosts without interruptions.
fn two() -> World {
    World::new(1, true, false)
}

#[test]
fn another_host_is_refused_until_it_steals_and_then_no_write_of_the_first_is_executed() {
    let world = two();
    let key = world.take(0).unwrap().key;
    assert_eq!(world.take(1), Err(Refusal::InUse(key)));
    // Being refused leaves nothing at the LUN by which it could write.
    assert_eq!(world.lun.borrow().keys(), [key]);
    assert_eq!(world.steal(1), Ok(Some(key)));
    assert!(!world.lun.borrow().executes_write(world.hosts[0].port.get()));
    let next = world.take(1).unwrap().key;
    // The guest that goes on at the first host is told who has it.
    assert_eq!(world.take(0), Err(Refusal::Taken(Some(next))));
    // Its release leaves the other host's reservation.
    world.release(0).unwrap();
    assert_eq!(world.take(0), Err(Refusal::InUse(next)));
    assert_eq!(world.lun.borrow().holder(), Some(next));
    world.release(1).unwrap();
    assert!(world.lun.borrow().keys().is_empty());
}

#[test]
fn who_may_have_a_lun_whoever_has_it_shuts_all_others_out_each_time() {
    let world = two();
    let mut last = None;
    for host in [0, 1, 0, 0, 1] {
        let seized = world.seize(host).unwrap();
        assert_eq!(seized.was_ours, last == Some(host));
        assert_eq!(world.lun.borrow().keys(), [seized.held.key]);
        assert!(!world.lun.borrow().executes_write(world.hosts[1 - host].port.get()));
        last = Some(host);
    }
    // It was another host's, and no host has it reserved now.
    world.release(1).unwrap();
    assert!(!world.seize(0).unwrap().was_ours);
}

#[test]
fn the_same_host_goes_on_by_the_same_key_and_by_a_new_one_after_its_restart() {
    let world = two();
    let key = world.take(0).unwrap().key;
    assert_eq!(world.take(0).unwrap().key, key);
    world.lun.borrow_mut().restart();
    assert_eq!(world.take(0).unwrap().key, key);
    world.new_port(&world.hosts[0]);
    let next = world.take(0).unwrap().key;
    assert_ne!(next, key);
    assert_eq!(world.lun.borrow().keys(), [next]);
    world.new_port(&world.hosts[0]);
    world.release(0).unwrap();
    assert!(world.lun.borrow().keys().is_empty());
}

#[test]
fn a_target_that_forgets_is_refused_or_weak() {
    let world = World::new(1, false, false);
    assert_eq!(world.take(0), Err(Refusal::Forgetful));
    assert!(world.lun.borrow().keys().is_empty());
    let weak = |host: usize| rules::take(&At(&world, host), &world.hosts[host], true);
    assert!(weak(0).unwrap().is_weak);
    world.lun.borrow_mut().restart();
    assert!(weak(1).unwrap().is_weak);
    let key = world.lun.borrow().holder();
    assert_eq!(weak(0), Err(Refusal::Taken(key)));
}

#[test]
fn a_guest_that_goes_on_is_told_that_another_host_had_the_lun_in_between() {
    let world = two();
    world.take(0).unwrap();
    world.steal(1).unwrap();
    world.take(1).unwrap();
    world.hosts[0].writes.set(false);
    world.release(1).unwrap();
    assert_eq!(world.take(0), Err(Refusal::Taken(None)));
    // A disk that is attached anew has no guest with older data in memory.
    world.release(0).unwrap();
    world.take(0).unwrap();
}

#[test]
fn a_host_that_loses_the_race_for_a_lun_cannot_write_to_it() {
    /// The LUN as a host has it whose rival takes it before this command.
    struct Late<'a>(At<'a>, Cell<bool>);
    impl Lun for Late<'_> {
        fn abilities(&self) -> io::Result<Abilities> {
            self.0.abilities()
        }
        fn reservation(&self) -> io::Result<Option<Reservation>> {
            self.0.reservation()
        }
        fn keys(&self) -> io::Result<Vec<u64>> {
            self.0.keys()
        }
        fn register(&self, old: Option<u64>, new: u64) -> io::Result<Outcome> {
            if !self.1.replace(true) {
                self.0.0.take(1).unwrap();
            }
            self.0.register(old, new)
        }
        fn reserve(&self, key: u64) -> io::Result<Outcome> {
            self.0.reserve(key)
        }
        fn release(&self, key: u64) -> io::Result<Outcome> {
            self.0.release(key)
        }
        fn preempt(&self, own: u64, victim: u64) -> io::Result<Outcome> {
            self.0.preempt(own, victim)
        }
    }
    let world = two();
    let taken = rules::take(&Late(At(&world, 0), Cell::new(false)), &world.hosts[0], false);
    let key = world.lun.borrow().holder().unwrap();
    assert_eq!(taken, Err(Refusal::InUse(key)));
    assert_eq!(world.lun.borrow().keys(), [key]);
    assert!(!world.lun.borrow().executes_write(world.hosts[0].port.get()));
}

#[test]
fn registrations_of_others_end_when_it_is_taken() {
    let world = two();
    world.lun.borrow_mut().register(77, None, 5);
    let key = world.take(0).unwrap().key;
    assert_eq!(world.lun.borrow().keys(), [key]);
}

#[test]
fn a_refusal_survives_the_way_between_processes() {
    for refusal in [
        Refusal::InUse(7),
        Refusal::Foreign(u64::MAX),
        Refusal::Taken(Some(1)),
        Refusal::Taken(None),
        Refusal::Forgetful,
        Refusal::Unsuitable("a".into()),
        Refusal::Record("b".into()),
        Refusal::Io("c".into()),
    ] {
        let (number, text) = refusal.to_words();
        assert_eq!(Refusal::from_words(number, &text), refusal);
        assert!(!refusal.help("/dev/x").is_empty() && !refusal.to_string().is_empty());
    }
}
