//! Stories of stores: many volumes that share contents, on one machine whose power fails (docs/simulator.md).
//!
//! * `medium`: the store and its file or device.
//! * `book`: the volumes, and the allowed contents of each.
//! * `content`: the contents that are written.
//! * `load`: requests, and operations on whole volumes and on the store.
//! * `look`: comparisons after an end, and of the used space at the end of a story.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_simio::{Fault, On, SyncAfter};
use ferrite_store::owned::StoreHandle;

mod book;
mod content;
mod load;
mod look;
mod medium;

use book::{Book, Deed};
use load::{Load, Mix};
use medium::StoreMedium;

use crate::images::Medium;
use crate::machine::{MAX_DEPTH, MAX_QUEUES, Machine, Thread};
use crate::model::After;
use crate::paths;
use crate::plan::{Cut, Plan, Scenario, Told, Violation};

const EIO: i32 = 5;

/// Sectors of volumes: small ones, and those with several leaves.
const SIZES: [u64; 6] = [8, 320, 4096, 4104, 8192, 24_576];
/// Two of these are larger than the store.
const LARGE: [u64; 2] = [16_384, 24_576];

/// The scenarios that apply to stores.
pub const SCENARIOS: [Scenario; 8] = [
    Scenario::Mixed,
    Scenario::FlushStorm,
    Scenario::Discards,
    Scenario::Close,
    Scenario::Full,
    Scenario::Operations,
    Scenario::Failures,
    Scenario::Emptied,
];

/// A part of a story that can be cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Round {
    /// The store is used.
    Use,
    /// It is opened, which replays the journal, and nothing else.
    Recover,
}

/// Runs the story.
///
/// # Errors
/// The finding.
pub fn tell(on: Medium, plan: &Plan) -> Result<Told, Box<Violation>> {
    let mut told = Told::default();
    let format = match on {
        Medium::Files => "--format store",
        Medium::Devices => "--format store --medium device",
    };
    let fail = |round, step, what| {
        let (format, plan) = (format.to_owned(), plan.clone());
        Box::new(Violation { format, plan, round, step, what })
    };
    let mut story = Story::begin(on, plan).map_err(|what| fail(0, 0, what))?;
    for round in 0..story.rounds.len() as u64 {
        let done = story.round(round, &mut told);
        told.steps = story.machine.world.step();
        if let Err(what) = done {
            let note = plan.keep.as_ref().map_or(String::new(), |dir| story.machine.kept(dir));
            return Err(fail(round, story.ended_at, what + &note));
        }
    }
    let last = story.rounds.len() as u64;
    story.finish().map_err(|what| fail(last, story.machine.world.step(), what))?;
    told.steps = story.machine.world.step();
    Ok(told)
}

struct Story<'a> {
    plan: &'a Plan,
    machine: Machine,
    medium: StoreMedium,
    book: Rc<RefCell<Book>>,
    numbers: Rc<Cell<u64>>,
    random: SplitMix64,
    rounds: Vec<Round>,
    /// The ends since the last examination.
    after: Option<After>,
    ended_at: u64,
}

/// The end of a process.
#[derive(PartialEq, Eq)]
enum Ended {
    Closed,
    /// A flush, or closing, has failed.
    Failed,
    Stopped,
}

impl<'a> Story<'a> {
    fn begin(on: Medium, plan: &'a Plan) -> Result<Self, String> {
        let mut random = SplitMix64::new(plan.seed ^ 0x570E_0000);
        let machine = Machine::new(plan.seed).map_err(|e| e.to_string())?;
        paths::of(&machine.world);
        let medium = StoreMedium::choose(on, &mut random);
        let uses = if plan.scenario == Scenario::Close { 4 } else { 1 + random.below(3) };
        let mut rounds = Vec::new();
        for _ in 0..uses {
            rounds.push(Round::Use);
            while random.below(3) == 0 {
                rounds.push(Round::Recover);
            }
        }
        if let Some(cut) = plan.cut {
            rounds.truncate(cut.round as usize + 1);
        }
        let (book, numbers) = (Rc::default(), Rc::new(Cell::new(1)));
        let (after, ended_at) = (None, 0);
        let mut story =
            Story { plan, machine, medium, book, numbers, random, rounds, after, ended_at };
        story.medium.create(&story.machine)?;
        story.make_volumes()?;
        story.machine.world.set_lie(plan.lie.clone());
        Ok(story)
    }

    /// The first volumes: two of one domain, one of the other.
    fn make_volumes(&mut self) -> Result<(), String> {
        let load = self.load(false, 0)?.ok_or("a new store cannot be opened")?;
        let mut threads = self.threads(&load, 1)?;
        for (i, domain) in [0, 1, 0].into_iter().enumerate() {
            let sizes = self.sizes();
            let sectors = sizes[self.random.below(sizes.len() as u64) as usize];
            let deed = Deed::Create { name: format!("first{i}"), sectors, domain };
            let (at, queue) = (load.clone(), threads[0].queue.clone());
            let done = async move { at.carry_out(&queue, deed).await };
            match self.machine.run(&mut threads[0], done)? {
                Some(Ok(())) => {}
                other => return Err(format!("a new store gets no volumes: {other:?}")),
            }
        }
        self.close(&load, &mut threads[0])?;
        Ok(())
    }

    fn sizes(&self) -> &'static [u64] {
        if self.plan.scenario == Scenario::Full { &LARGE } else { &SIZES }
    }

    /// A round: use, its end, and the examination.
    fn round(&mut self, round: u64, told: &mut Told) -> Result<(), String> {
        let forced = self.plan.cut.filter(|cut| cut.round == round);
        let faulty = self.random.below(4) == 0 && forced.is_none();
        let faulty = faulty || self.plan.scenario == Scenario::Failures && forced.is_none();
        self.trouble(faulty);
        let began = self.machine.world.step();
        self.choose_stop(forced);
        let used = match self.rounds[round as usize] {
            Round::Use => self.use_it(faulty)?,
            Round::Recover => self.recover(faulty)?,
        };
        let ends = [After::Death, After::PowerCut];
        let any = ends[self.random.below(2) as usize];
        let after = match (forced, used) {
            (Some(cut), _) => cut.after,
            (None, Ended::Closed) if any == After::Death => After::Close,
            (None, _) => any,
        };
        self.end(after, told)?;
        if forced.is_some() {
            told.cut_round = Some(began..=self.ended_at);
        }
        // Of several ends in a row the one counts that loses most.
        let after = match self.after {
            Some(After::PowerCut) => After::PowerCut,
            _ if after == After::Close && self.after.is_some() => After::Death,
            _ => after,
        };
        self.after = Some(after);
        if self.rounds.get(round as usize + 1) == Some(&Round::Recover) {
            return Ok(());
        }
        self.after = None;
        self.examine(after)
    }

    /// Sets the faults of a round.
    fn trouble(&mut self, faulty: bool) {
        let random = &mut self.random;
        let nuisances = [(0, 0), (50, 20), (400, 200)][random.below(3) as usize];
        self.machine.world.set_nuisances(nuisances.0, nuisances.1);
        let mut faults = Vec::new();
        if faulty {
            let on = [On::Write, On::Write, On::Sync, On::Sync, On::Read, On::Change]
                [random.below(6) as usize];
            let per_mille = [5, 50, 300, 1000][random.below(4) as usize];
            let times = 1 + random.below(3);
            faults.push(Fault { on, range: 0..u64::MAX, per_mille, errno: EIO, times });
        }
        self.machine.world.set_faults(faults);
    }

    /// Chooses the step at which the world stops: many rounds end in a sync, when all changes since the last one are
    /// uncertain.
    fn choose_stop(&mut self, forced: Option<Cut>) {
        let world = &self.machine.world;
        world.stop_at(forced.map(|cut| cut.step));
        if forced.is_some() || self.plan.scenario == Scenario::Close {
            return;
        }
        match self.random.below(8) {
            0 => {}
            1..4 => {
                let reach = 2 << self.random.below(7);
                let sync = 1 + self.random.below(reach);
                world.stop_at_sync(SyncAfter::Anything, sync, self.random.below(6));
            }
            _ => {
                let reach = 32 << self.random.below(8);
                world.stop_at(Some(world.step() + 1 + self.random.below(reach)));
            }
        }
    }

    /// The store as opened by a process. `None`: it could not be opened because of a fault.
    fn load(&mut self, faulty: bool, requests: u64) -> Result<Option<Rc<Load>>, String> {
        let handle = match self.medium.handle(&self.machine) {
            Err(_) if faulty || self.machine.world.stopped() => return Ok(None),
            handle => handle?,
        };
        Ok(Some(self.load_of(handle, faulty, requests)))
    }

    fn load_of(&mut self, handle: StoreHandle, faulty: bool, requests: u64) -> Rc<Load> {
        let store = handle.store().clone();
        let (medium, place) = (self.medium.clone(), self.machine.place.clone());
        Rc::new(Load {
            store,
            _handle: handle,
            open: Box::new(move |name, writes| medium.volume(&place, name, !writes)),
            disks: RefCell::default(),
            book: self.book.clone(),
            seed: self.plan.seed,
            sizes: self.sizes(),
            numbers: self.numbers.clone(),
            random: RefCell::new(SplitMix64::new(self.random.next_u64())),
            left: Cell::new(requests),
            tasks: Cell::new(0),
            trace: self.plan.trace,
            mix: mix(self.plan.scenario),
            may_fail: faulty,
            may_be_full: self.plan.scenario == Scenario::Full,
            has_failed: Cell::new(false),
            trouble: RefCell::new(None),
        })
    }

    fn threads(&self, load: &Load, count: usize) -> Result<Vec<Thread>, String> {
        self.machine.queues(count, &load.store.files()).map_err(|e| e.to_string())
    }

    /// Opens the store and its volumes, and loads them until all is done or the world stops.
    fn use_it(&mut self, faulty: bool) -> Result<Ended, String> {
        let queues = 1 + self.random.below(MAX_QUEUES as u64) as usize;
        let depth = 1 + self.random.below(MAX_DEPTH as u64) as usize;
        let requests = match self.plan.scenario {
            Scenario::Close => 1 + self.random.below(12),
            Scenario::Full => 200 + self.random.below(400),
            _ => 8 + self.random.below(180),
        };
        let Some(load) = self.load(faulty, requests)? else { return Ok(Ended::Stopped) };
        load.open_all()?;
        let mut threads = match self.threads(&load, queues) {
            Err(_) if self.machine.world.stopped() => return Ok(Ended::Stopped),
            threads => threads?,
        };
        load.tasks.set(queues * depth);
        for thread in &threads {
            for i in 0..depth {
                thread.reactor.spawn(load.clone().task(thread.queue.clone(), thread.buffer(i)));
            }
        }
        self.machine.drive(&mut threads, || load.tasks.get() == 0)?;
        self.ended_at = self.machine.world.step();
        if let Some(text) = load.trouble.take() {
            return Err(text);
        }
        if load.has_failed.get() {
            return Ok(Ended::Failed);
        }
        self.close(&load, &mut threads[0])
    }

    /// A process that only opens the store; it dies or closes it.
    fn recover(&mut self, faulty: bool) -> Result<Ended, String> {
        let Some(load) = self.load(faulty, 0)? else { return Ok(Ended::Stopped) };
        if self.random.below(2) == 0 || self.machine.world.stopped() {
            return Ok(Ended::Stopped);
        }
        let mut threads = match self.threads(&load, 1) {
            Err(_) if self.machine.world.stopped() => return Ok(Ended::Stopped),
            threads => threads?,
        };
        let (at, queue) = (load.clone(), threads[0].queue.clone());
        let closed = async move { at.store.live().close(&queue.port).await };
        match self.machine.run(&mut threads[0], closed)? {
            Some(Err(e)) if !faulty && !self.machine.world.stopped() => {
                Err(format!("closing failed where nothing was wrong: {e}"))
            }
            _ => Ok(Ended::Stopped),
        }
    }

    /// Closes each volume, which promises as much as a flush.
    fn close(&mut self, load: &Rc<Load>, thread: &mut Thread) -> Result<Ended, String> {
        let issued = self.book.borrow_mut().issue_flush();
        let disks: BTreeMap<_, _> = std::mem::take(&mut *load.disks.borrow_mut());
        if disks.is_empty() {
            // Failed operations have taken all of them, and no volume is left to close the store.
            return Ok(Ended::Stopped);
        }
        for disk in disks.into_values() {
            let (at, port) = (disk.clone(), thread.queue.port.clone());
            match self.machine.run(thread, async move { at.close(&port).await })? {
                None => return Ok(Ended::Stopped),
                Some(Ok(())) => disk.unlock(),
                Some(Err(_)) if load.may_fail || self.machine.world.stopped() => {
                    return Ok(Ended::Failed);
                }
                Some(Err(e)) => return Err(format!("closing failed where nothing was wrong: {e}")),
            }
        }
        self.book.borrow_mut().flushed(&issued);
        Ok(Ended::Closed)
    }

    /// Ends the process in one of the ways.
    fn end(&mut self, after: After, told: &mut Told) -> Result<(), String> {
        let world = &self.machine.world;
        self.ended_at = world.step();
        world.set_faults(Vec::new());
        world.stop_at(None);
        let broken = |e| format!("the simulator: {e}");
        match after {
            After::PowerCut => {
                told.cuts += 1;
                self.machine.cut_power().map_err(broken)
            }
            After::Death => {
                told.deaths += 1;
                self.machine.kill_process().map_err(broken)
            }
            After::Close => {
                told.closes += 1;
                Ok(())
            }
        }
    }
}

fn mix(scenario: Scenario) -> Mix {
    let mix = Mix {
        reads: 20,
        writes: 45,
        flushes: 7,
        discards: 4,
        zeroes: 4,
        deeds: 8,
        passes: 2,
        checkpoints: 3,
        tends: 3,
        again: 50,
        near: 80,
        large: false,
        alters: false,
    };
    match scenario {
        Scenario::FlushStorm => Mix { reads: 5, flushes: 45, again: 30, ..mix },
        Scenario::Discards => Mix { reads: 10, discards: 20, zeroes: 20, passes: 5, ..mix },
        Scenario::Operations => Mix { reads: 10, deeds: 45, passes: 5, alters: true, ..mix },
        Scenario::Full => {
            Mix { reads: 2, writes: 90, passes: 1, again: 5, near: 5, large: true, ..mix }
        }
        // Garbage is found again as content while a pass is about to sweep it.
        Scenario::Emptied => {
            Mix { reads: 10, discards: 12, zeroes: 12, passes: 12, tends: 12, again: 90, ..mix }
        }
        _ => mix,
    }
}
