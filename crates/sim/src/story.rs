//! One story: what happens follows from its seed, what may be found afterwards from the model.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use ferrite_io::clock::{Random, SplitMix64};
use ferrite_io::directory::Directory;
use ferrite_io::sim::{Fault, On};

use crate::format::{Disk, Format, Operation};
use crate::load::{Load, MAX_REQUEST_SECTORS, Mix};
use crate::machine::{MAX_DEPTH, MAX_QUEUES, Machine, Thread};
use crate::model::{After, Model};
use crate::plan::{Cut, Plan, Scenario, Told, Violation};
use crate::stamp;

/// Many large writes, so that what is below has much.
const DENSE: Mix = Mix {
    reads: 0,
    writes: 92,
    flushes: 4,
    discards: 0,
    zeroes: 4,
    max_sectors: MAX_REQUEST_SECTORS,
    near: 85,
};

/// Few sectors in many places.
const SPARSE: Mix = Mix { reads: 0, writes: 100, flushes: 0, zeroes: 0, max_sectors: 1, ..DENSE };

/// Layers of a chain at most.
const MAX_LAYERS: u64 = 4;

/// EIO, as the kernel gives it.
const EIO: i32 = 5;

/// Tells the story.
///
/// # Errors
/// What was found.
pub fn tell<F: Format>(format: &F, plan: &Plan) -> Result<Told, Box<Violation>> {
    let mut told = Told::default();
    let fail = |round, step, what| {
        let (format, plan) = (format.name(), plan.clone());
        Box::new(Violation { format, plan, round, step, what })
    };
    let mut story = Story::begin(format, plan).map_err(|what| fail(0, 0, what))?;
    for round in 0..story.rounds {
        let done = story.round(round, &mut told);
        let step = story.machine.world.step();
        told.steps = step;
        if let Err(what) = done {
            let kept = plan.keep.as_ref().map(|dir| story.machine.keep(dir));
            let note = match (kept, &plan.keep) {
                (Some(Err(e)), _) => format!("; the files could not be kept: {e}"),
                (Some(Ok(())), Some(dir)) => format!("; the files are in {}", dir.display()),
                _ => String::new(),
            };
            return Err(fail(round, story.ended_at, what + &note));
        }
        if story.over {
            break;
        }
    }
    Ok(told)
}

struct Story<'a, F: Format> {
    format: &'a F,
    plan: &'a Plan,
    machine: Machine,
    model: Rc<RefCell<Model>>,
    numbers: Rc<Cell<u64>>,
    random: SplitMix64,
    rounds: u64,
    /// What can be read is not what is on the medium, and no program can know that.
    over: bool,
    ended_at: u64,
    layers: u64,
    /// Clones and copies that were made.
    copies: u64,
}

impl<'a, F: Format> Story<'a, F> {
    fn begin(format: &'a F, plan: &'a Plan) -> Result<Self, String> {
        let mut random = SplitMix64::new(plan.seed ^ 0x5717_0000);
        let machine = Machine::new(plan.seed).map_err(|e| e.to_string())?;
        let sectors = sizes(&mut random);
        let rounds = match plan.scenario {
            Scenario::Close => 5,
            Scenario::Compressed => 3,
            Scenario::Operations => 6,
            _ => 1 + random.below(3),
        };
        let rounds = plan.cut.map_or(rounds, |cut| rounds.min(cut.round + 1));
        let model = Rc::new(RefCell::new(Model::new(sectors)));
        let numbers = Rc::new(Cell::new(1));
        Ok(Story {
            format,
            plan,
            machine,
            model,
            numbers,
            random,
            rounds,
            over: false,
            ended_at: 0,
            layers: 1,
            copies: 0,
        })
    }

    /// Load, its end, and what is there afterwards.
    fn round(&mut self, round: u64, told: &mut Told) -> Result<(), String> {
        let forced = self.plan.cut.filter(|cut| cut.round == round);
        let operations = self.plan.scenario == Scenario::Operations;
        if round > 0 && self.plan.scenario == Scenario::Compressed {
            self.change_by_others()?;
        }
        if round == 0 {
            if operations {
                self.machine.world.set_lie(self.plan.lie.clone());
            }
            let create = Operation::Create(self.model.borrow().sectors());
            match operations {
                true => self.operate(create, forced, told)?,
                false => {
                    self.format.create(&self.machine.place, self.model.borrow().sectors())?;
                    if self.plan.scenario == Scenario::Compressed {
                        self.begin_compressed()?;
                    } else if self.plan.scenario == Scenario::Past {
                        self.begin_past()?;
                    } else {
                        self.begin_chain()?;
                    }
                    self.machine.world.set_lie(self.plan.lie.clone());
                }
            }
        } else if operations {
            match self.choose() {
                copy @ (Operation::Clone(_) | Operation::Convert(_)) => {
                    self.copy(copy, forced, told)?;
                }
                operation => self.operate(operation, forced, told)?,
            }
        } else if self.layers < MAX_LAYERS && self.random.below(3) == 0 {
            let snapshot = Operation::Snapshot(self.layers);
            if self.format.can(snapshot) {
                self.do_whole(snapshot)?;
            }
        }
        self.use_and_look(forced.filter(|_| !operations), told)
    }

    /// Something to be compressed.
    fn begin_compressed(&mut self) -> Result<(), String> {
        self.use_disk(false, (0, 0), None)?;
        let sectors = self.model.borrow().sectors();
        self.examine(After::Close, &[sectors])?;
        self.change_by_others()
    }

    /// Another program works on the image, once it was closed in good order.
    fn change_by_others(&mut self) -> Result<(), String> {
        self.trouble(false);
        let disk = self.format.open(&self.machine.place)?;
        let mut threads = self.machine.queues(1, &disk.files()).map_err(|e| e.to_string())?;
        let queue = threads[0].queue.clone();
        let close = async move { disk.close(&queue).await };
        let closed = self.machine.run(&mut threads[0], close)?;
        drop(threads);
        if !matches!(closed, Some(Ok(()))) {
            return Err(format!("closing failed where nothing was wrong: {closed:?}"));
        }
        self.format.change_by_others(&self.machine.place, &mut self.random)?;
        let sectors = self.model.borrow().sectors();
        self.examine(After::Death, &[sectors]).map_err(|e| format!("after others: {e}"))
    }

    /// One of three stories begins on a parent that has something.
    fn begin_chain(&mut self) -> Result<(), String> {
        let snapshot = Operation::Snapshot(self.layers);
        if self.random.below(3) > 0 || !self.format.can(snapshot) {
            return Ok(());
        }
        self.use_and_close(None)?;
        self.do_whole(snapshot)
    }

    /// The disk has much. Then other programs do what they do to images, or it gets a leaf with a
    /// little of everything.
    fn begin_past(&mut self) -> Result<(), String> {
        let requests = 10 + self.random.below(40);
        self.use_and_close(Some((DENSE, requests)))?;
        let snapshot = Operation::Snapshot(self.layers);
        if self.random.below(4) > 0 && self.format.give_past(&self.machine.place)? {
            let sectors = self.model.borrow().sectors();
            return self.examine(After::Close, &[sectors]);
        }
        if self.format.can(snapshot) {
            self.do_whole(snapshot)?;
            let requests = 4 + self.random.below(12);
            self.use_and_close(Some((SPARSE, requests)))?;
        }
        Ok(())
    }

    /// Use in which nothing goes wrong; of this kind, and with so many requests.
    fn use_and_close(&mut self, work: Option<(Mix, u64)>) -> Result<(), String> {
        self.use_disk(false, (0, 0), work)?;
        let sectors = self.model.borrow().sectors();
        self.examine(After::Close, &[sectors])
    }

    fn use_and_look(&mut self, forced: Option<Cut>, told: &mut Told) -> Result<(), String> {
        let faulty = self.random.below(4) == 0 && forced.is_none();
        self.trouble(faulty);
        let stop = self.end_of_round(forced);
        let began = self.machine.world.step();
        self.machine.world.stop_at(stop);
        let past = self.plan.scenario == Scenario::Past && forced.is_none();
        if past && self.random.below(4) > 0 {
            let syncs = 2 << self.random.below(5);
            let (sync, steps) = (1 + self.random.below(syncs), self.random.below(4));
            self.machine.world.stop_at(None);
            self.machine.world.stop_at_sync(sync, steps);
        }
        // One half ends while metadata is on its way.
        let in_flush = match self.random.below(2) == 0 && forced.is_none() && !past {
            true => (1 + self.random.below(4), 1 + self.random.below(24)),
            false => (0, 0),
        };
        let (disk_closed, flush_failed) = self.use_disk(faulty, in_flush, None)?;
        let after = match forced {
            Some(cut) => cut.after,
            None if flush_failed => self.one_of([After::Death, After::PowerCut]),
            None if disk_closed => self.one_of([After::Close, After::PowerCut]),
            None => self.one_of([After::Death, After::PowerCut]),
        };
        self.end(after, told)?;
        if forced.is_some() {
            told.cut_round = Some(began..=self.ended_at);
        }
        let sectors = self.model.borrow().sectors();
        // A process that dies with the news of a failed sync has told nobody.
        if !flush_failed && !self.machine.world.has_forgotten() {
            return self.examine(after, &[sectors]);
        }
        // Also without a power cut what no flush has promised may be gone.
        self.over = after == After::Death;
        self.examine(After::PowerCut, &[sectors])
    }

    fn one_of<T: Copy, const N: usize>(&mut self, all: [T; N]) -> T {
        all[self.random.below(N as u64) as usize]
    }

    /// The end of a process, one way or the other.
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

    /// An operation that the format has.
    fn choose(&mut self) -> Operation {
        let sectors = self.model.borrow().sectors();
        let grown = sectors + self.one_of([1, 8, 4096, 9000]);
        let (clone, convert) = (Operation::Clone(self.copies), Operation::Convert(self.copies));
        let mut all = vec![Operation::Grow(grown), clone, convert];
        if self.layers < MAX_LAYERS {
            all.push(Operation::Snapshot(self.layers));
        }
        if self.layers > 1 {
            all.push(Operation::Coalesce);
        }
        all.retain(|operation| self.format.can(*operation));
        match all.len() as u64 {
            0 => Operation::Create(sectors),
            n => all[self.random.below(n) as usize],
        }
    }

    /// An operation that nothing interrupts.
    fn do_whole(&mut self, operation: Operation) -> Result<(), String> {
        let issued = self.model.borrow_mut().issue_flush();
        let done = self.format.operate(&self.machine.place, operation);
        if self.plan.trace.is_some() {
            println!("step {}: {operation:?}: {done:?}", self.machine.world.step());
        }
        done.map_err(|e| format!("{operation:?} failed where nothing was wrong: {e}"))?;
        let mut model = self.model.borrow_mut();
        model.flushed(issued);
        match operation {
            Operation::Snapshot(_) => {
                model.snapshot();
                self.layers += 1;
            }
            Operation::Coalesce => self.layers -= 1,
            Operation::Grow(sectors) => model.grow(sectors),
            Operation::Create(_) | Operation::Clone(_) | Operation::Convert(_) => {}
        }
        Ok(())
    }

    /// An operation that may be interrupted, and is done again then.
    fn operate(
        &mut self,
        operation: Operation,
        forced: Option<Cut>,
        told: &mut Told,
    ) -> Result<(), String> {
        if matches!(operation, Operation::Create(_)) && self.format.exists(&self.machine.place) {
            return Ok(());
        }
        let before = self.model.borrow().sectors();
        let stop = self.end_of_round(forced);
        let began = self.machine.world.step();
        self.trouble(false);
        self.machine.world.stop_at(stop);
        let done = self.do_whole(operation);
        self.ended_at = self.machine.world.step();
        let stopped = self.machine.world.stopped();
        let finished = done.is_ok();
        let after = self.end_of_operation(forced, stopped);
        if forced.is_some() {
            told.cut_round = Some(began..=self.ended_at);
        }
        if stopped {
            self.machine.set_aside().map_err(|e| e.to_string())?;
            // Not done, or done and not told: a discard may show what was there in either case.
            if let (Err(_), Operation::Snapshot(_)) = (&done, operation) {
                self.model.borrow_mut().snapshot();
            }
        } else {
            done?;
        }
        self.end(after, told)?;
        if self.format.exists(&self.machine.place) {
            let sizes = match operation {
                Operation::Grow(sectors) if stopped => vec![before, sectors],
                _ => vec![self.model.borrow().sectors()],
            };
            self.examine(after, &sizes)?;
        } else if !matches!(operation, Operation::Create(_)) {
            return Err(format!("after {after:?} in {operation:?} there is no image"));
        } else if !stopped {
            return Err(format!("after {after:?} a new image is not there"));
        }
        // Within seconds a file system writes its journal, whether who asked for it lives or not.
        let place = &self.machine.place;
        place.directory.sync(&place.images).map_err(|e| e.to_string())?;
        let made = matches!(operation, Operation::Create(_)) && self.format.exists(place);
        if finished || made {
            return Ok(());
        }
        self.do_whole(operation).map_err(|e| format!("again, after {after:?}: {e}"))?;
        let sectors = self.model.borrow().sectors();
        self.examine(After::Close, &[sectors])
    }

    /// What goes wrong in a round.
    fn trouble(&mut self, faulty: bool) {
        let random = &mut self.random;
        let nuisances = [(0, 0), (50, 20), (400, 200)][random.below(3) as usize];
        self.machine.world.set_nuisances(nuisances.0, nuisances.1);
        let mut faults = Vec::new();
        if faulty {
            let on = [On::Read, On::Write, On::Sync, On::Change][random.below(4) as usize];
            let per_mille = [5, 50, 300][random.below(3) as usize];
            let times = 1 + random.below(5);
            faults.push(Fault { on, range: 0..u64::MAX, per_mille, errno: EIO, times });
        }
        self.machine.world.set_faults(faults);
    }

    /// At which step the world stops; none: when all is done.
    fn end_of_round(&mut self, forced: Option<Cut>) -> Option<u64> {
        if let Some(cut) = forced {
            return Some(cut.step);
        }
        if self.plan.scenario == Scenario::Close || self.random.below(8) == 0 {
            return None;
        }
        let reach = 1 << (4 + self.random.below(7));
        Some(self.machine.world.step() + 1 + self.random.below(reach))
    }

    /// What ends a process that has made an operation, or was stopped while it did.
    fn end_of_operation(&mut self, forced: Option<Cut>, stopped: bool) -> After {
        match (forced, stopped) {
            (Some(cut), _) => cut.after,
            (None, false) => self.one_of([After::Close, After::PowerCut]),
            (None, true) => self.one_of([After::Death, After::PowerCut]),
        }
    }

    /// Opens the disk, and loads it until all is done or the world stands still. Whether it was
    /// closed, and whether a flush had failed.
    /// `flush`, `steps`: see [`Load`]. `work`: this, and not what the scenario is about.
    fn use_disk(
        &mut self,
        faulty: bool,
        (flush, steps): (u64, u64),
        work: Option<(Mix, u64)>,
    ) -> Result<(bool, bool), String> {
        let disk = self.format.open(&self.machine.place)?;
        let queues = 1 + self.random.below(MAX_QUEUES as u64) as usize;
        let depth = 1 + self.random.below(MAX_DEPTH as u64) as usize;
        let left = match self.plan.scenario {
            _ if work.is_some() => 0,
            Scenario::Close | Scenario::Operations => 1 + self.random.below(12),
            Scenario::Compressed => 40 + self.random.below(400),
            _ => 8 + self.random.below(180),
        };
        let (mix, left) = work.unwrap_or((self.plan.scenario.mix(), left));
        let sectors = disk.sectors();
        let files = disk.files();
        let load = Rc::new(Load {
            disk,
            model: self.model.clone(),
            seed: self.plan.seed,
            numbers: self.numbers.clone(),
            trace: self.plan.trace,
            random: RefCell::new(SplitMix64::new(self.random.next_u64())),
            left: Cell::new(left),
            tasks: Cell::new(queues * depth),
            world: self.machine.world.clone(),
            flushes_left: Cell::new(flush),
            steps_into_flush: steps,
            mix,
            hot_spots: self.format.hot_spots(&self.machine.place, sectors),
            may_fail: faulty,
            flush_failed: Cell::new(false),
            trouble: RefCell::new(None),
        });
        let mut threads = match self.machine.queues(queues, &files) {
            Err(_) if self.machine.world.stopped() => return Ok((false, false)),
            threads => threads.map_err(|e| e.to_string())?,
        };
        for thread in &threads {
            for i in 0..depth {
                let task = load.clone().task(thread.queue.clone(), thread.buffer(i));
                thread.reactor.spawn(task);
            }
        }
        self.machine.drive(&mut threads, || load.tasks.get() == 0)?;
        if let Some(text) = load.trouble.take() {
            self.ended_at = self.machine.world.step();
            return Err(text);
        }
        let failed = load.flush_failed.get();
        let mut closed = (false, failed);
        if !failed && !self.machine.world.stopped() {
            closed = self.close(&load, &mut threads[0], faulty)?;
        }
        if self.machine.world.stopped() {
            self.machine.set_aside().map_err(|e| e.to_string())?;
        }
        Ok(closed)
    }

    fn close(
        &mut self,
        load: &Rc<Load<F::Disk>>,
        thread: &mut Thread,
        faulty: bool,
    ) -> Result<(bool, bool), String> {
        let issued = self.model.borrow_mut().issue_flush();
        let (at, queue) = (load.clone(), thread.queue.clone());
        let closed = self.machine.run(thread, async move { at.disk.close(&queue).await })?;
        match closed {
            None => Ok((false, false)),
            Some(Ok(())) => {
                self.model.borrow_mut().flushed(issued);
                Ok((true, false))
            }
            Some(Err(_)) if faulty => Ok((false, true)),
            Some(Err(e)) => Err(format!("closing failed where nothing was wrong: {e}")),
        }
    }

    /// Checks the image, opens it, compares all that was ever touched, and now and then the rest.
    fn examine(&mut self, after: After, sizes: &[u64]) -> Result<(), String> {
        let thorough = self.random.below(16) == 0;
        let place = &self.machine.place;
        // After a death, too: the power may be cut before anybody looks at what is in memory.
        self.format.check(place, thorough).map_err(|e| format!("its check says: {e}"))?;
        let disk = Rc::new(self.format.open(place).map_err(|e| format!("after {after:?}: {e}"))?);
        let sectors = disk.sectors();
        if !sizes.contains(&sectors) {
            return Err(format!("after {after:?} it has {sectors} sectors, and not {sizes:?}"));
        }
        self.model.borrow_mut().grow(sectors);
        let mut threads = self.machine.queues(1, &disk.files()).map_err(|e| e.to_string())?;
        for range in self.ranges(sectors) {
            self.compare(after, &disk, &mut threads[0], range, true)?;
        }
        Ok(())
    }

    /// An operation that makes another image of the leaf, and may be interrupted. The leaf stays as
    /// it is, and what has the other's name is whole.
    fn copy(
        &mut self,
        operation: Operation,
        forced: Option<Cut>,
        told: &mut Told,
    ) -> Result<(), String> {
        self.copies += 1;
        let stop = self.end_of_round(forced);
        let began = self.machine.world.step();
        self.trouble(false);
        self.machine.world.stop_at(stop);
        let done = self.format.operate(&self.machine.place, operation);
        self.ended_at = self.machine.world.step();
        let stopped = self.machine.world.stopped();
        let after = self.end_of_operation(forced, stopped);
        if forced.is_some() {
            told.cut_round = Some(began..=self.ended_at);
        }
        match stopped {
            true => self.machine.set_aside().map_err(|e| e.to_string())?,
            false => done.map_err(|e| format!("{operation:?}, nothing was wrong: {e}"))?,
        }
        self.end(after, told)?;
        // It promises no more of the leaf than that it does not change.
        let after = if after == After::Close { After::Death } else { after };
        let sectors = self.model.borrow().sectors();
        // First, with what the leaf was when it was copied: the power may have taken from it since.
        let whole = self.examine_copy(operation)?;
        self.examine(after, &[sectors])?;
        if !whole && !stopped {
            return Err(format!("after {after:?} what {operation:?} made is not there"));
        }
        let place = &self.machine.place;
        place.directory.sync(&place.images).map_err(|e| e.to_string())?;
        if stopped {
            let again = self.format.operate(place, operation);
            again.map_err(|e| format!("again, after {after:?} in {operation:?}: {e}"))?;
            self.examine(After::Death, &[sectors])?;
            if !self.examine_copy(operation)? {
                return Err(format!("what {operation:?} made again is not there"));
            }
        }
        self.format.remove_copy(&self.machine.place, operation)
    }

    /// Compares what such an operation has made with the leaf. Whether there is anything.
    fn examine_copy(&mut self, operation: Operation) -> Result<bool, String> {
        let of = |e| format!("what {operation:?} made: {e}");
        let disk = self.format.open_copy(&self.machine.place, operation).map_err(of)?;
        let Some(disk) = disk.map(Rc::new) else { return Ok(false) };
        // A device may have room for more.
        let sectors = self.model.borrow().sectors();
        if disk.sectors() < sectors {
            return Err(of(format!("{} sectors instead of {sectors}", disk.sectors())));
        }
        let mut threads = self.machine.queues(1, &disk.files()).map_err(|e| e.to_string())?;
        for range in self.ranges(sectors) {
            self.compare(After::Death, &disk, &mut threads[0], range, false).map_err(of)?;
        }
        Ok(true)
    }

    /// What to look at, in pieces.
    fn ranges(&mut self, sectors: u64) -> Vec<Range<u64>> {
        let all = self.random.below(8) == 0;
        let piece = MAX_REQUEST_SECTORS;
        let model = self.model.borrow();
        let mut pieces: Vec<u64> = match all {
            true => (0..sectors.div_ceil(piece)).collect(),
            false => model.touched().map(|s| s / piece).collect(),
        };
        pieces.push(self.random.below(sectors) / piece);
        pieces.sort_unstable();
        pieces.dedup();
        pieces.iter().map(|p| p * piece..((p + 1) * piece).min(sectors)).collect()
    }

    fn compare(
        &mut self,
        after: After,
        disk: &Rc<F::Disk>,
        thread: &mut Thread,
        range: Range<u64>,
        settle: bool,
    ) -> Result<(), String> {
        let len = (range.end - range.start) as usize * stamp::SECTOR;
        let (to, offset) = (thread.buffer(0).slice(0, len), range.start * 512);
        let (at, queue) = (disk.clone(), thread.queue.clone());
        let read = async move { at.read(&queue, offset, to).await };
        let read = self.machine.run(thread, read)?;
        match read {
            Some(Ok(())) => {}
            other => return Err(format!("after {after:?} {range:?} cannot be read: {other:?}")),
        }
        let mut bytes = vec![0; len];
        thread.queue.memory().copy_out(to, &mut bytes);
        let mut model = self.model.borrow_mut();
        for (sector, bytes) in range.zip(bytes.chunks_exact(stamp::SECTOR)) {
            let found = stamp::read(bytes, self.plan.seed, sector);
            if self.plan.trace == Some(sector) {
                println!("step {}: after {after:?}: {found:?}", self.ended_at);
            }
            model.check_after(after, sector, &found)?;
            if let (Ok(value), true) = (found, settle) {
                model.settle(after, sector, value);
            }
        }
        Ok(())
    }
}

/// Sectors of a story's disk: small, so that requests meet.
fn sizes(random: &mut SplitMix64) -> u64 {
    let sizes = [1, 9, 2048, 4096, 3 * 4096, 3 * 4096 + 1, 5 * 4096 + 8];
    sizes[random.below(sizes.len() as u64) as usize]
}
