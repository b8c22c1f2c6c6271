//! One story: its events follow from its seed, the allowed contents from the model.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ferrite_host::clock::{Random, SplitMix64};

use crate::format::{Disk, Format, Operation};
use crate::load::{MAX_REQUEST_SECTORS, Mix};
use crate::machine::Machine;
use crate::model::{After, Model};
use crate::paths;
use crate::plan::{Cut, Plan, Scenario, Told, Violation};

mod examine;
mod operations;
mod using;

/// Many large writes, so that the layers below have many data.
const DENSE: Mix = Mix {
    reads: 0,
    writes: 92,
    flushes: 4,
    discards: 0,
    zeroes: 4,
    max_sectors: MAX_REQUEST_SECTORS,
    near: 85,
    whole: false,
};

/// The disk from its end to its beginning, repeatedly.
const FULL: Mix = Mix { writes: 100, flushes: 0, zeroes: 0, whole: true, ..DENSE };

/// Few sectors in many places.
const SPARSE: Mix = Mix { reads: 0, writes: 100, flushes: 0, zeroes: 0, max_sectors: 1, ..DENSE };

/// The offset of the formats' first metadata.
const FIRST_METADATA: u64 = 16 << 10;

/// Sectors of the largest disk.
const LARGEST: u64 = 5 * 4096 + 8;

/// The most layers of a chain.
const MAX_LAYERS: u64 = 4;

/// Runs the story.
///
/// # Errors
/// The finding.
pub fn tell<F: Format>(format: &F, plan: &Plan) -> Result<Told, Box<Violation>> {
    let mut told = Told::default();
    let fail = |round, step, what| {
        let (format, plan) = (format.name(), plan.clone());
        Box::new(Violation { format, plan, round, step, what })
    };
    let mut story = Story::begin(format, plan).map_err(|what| fail(0, 0, what))?;
    for round in 0..story.rounds {
        paths::taken();
        let done = story.round(round, &mut told);
        if plan.cut.is_none() {
            told.paths.add(&paths::taken());
        }
        let step = story.machine.world.step();
        told.steps = step;
        if let Err(what) = done {
            let note = plan.keep.as_ref().map_or(String::new(), |dir| story.machine.kept(dir));
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
    /// Readable bytes differ from the medium, which no program can detect.
    over: bool,
    ended_at: u64,
    layers: u64,
    /// The number of clones and copies that were made.
    copies: u64,
    /// The number of layers that other programs made. Numbers of layers are never reused.
    overlays: u64,
    /// A parent may have a journal that the leaf lacks.
    unrecovered: bool,
    /// Sectors that are always examined: the ends of the disk before it grew.
    edges: Vec<u64>,
    /// The faults of this round are failed syncs.
    syncs_fail: bool,
    /// The medium is full.
    full: bool,
    /// The last process was killed: it may have left a journal.
    died: bool,
}

impl<'a, F: Format> Story<'a, F> {
    fn begin(format: &'a F, plan: &'a Plan) -> Result<Self, String> {
        let mut random = SplitMix64::new(plan.seed ^ 0x5717_0000);
        let mut machine = Machine::new(plan.seed).map_err(|e| e.to_string())?;
        paths::of(&machine.world);
        machine.place.tight = plan.scenario == Scenario::Growth && plan.seed.is_multiple_of(2);
        machine.place.usual_units = plan.scenario == Scenario::Emptied;
        let sectors = match plan.scenario {
            _ if machine.place.tight => LARGEST,
            Scenario::Full => 256 + random.below(1792),
            _ => sizes(&mut random),
        };
        let rounds = match plan.scenario {
            Scenario::Close => 5,
            Scenario::Compressed => 3,
            Scenario::Operations | Scenario::Chains => 6,
            Scenario::Live => 7,
            Scenario::Growth => 4,
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
            overlays: 0,
            unrecovered: false,
            edges: Vec::new(),
            syncs_fail: false,
            full: false,
            died: false,
        })
    }
    /// A round: load, its end, and the examination.
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
                    } else if self.plan.scenario == Scenario::Full {
                        self.begin_filled()?;
                    } else if self.plan.scenario == Scenario::Emptied {
                        self.begin_full()?;
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
        } else if self.plan.scenario == Scenario::Growth {
            self.grow(forced, told)?;
        } else if self.plan.scenario == Scenario::Chains {
            self.change_chain(forced, told)?;
        } else if self.plan.scenario == Scenario::Live {
            self.change_in_pause(forced, told)?;
        } else if !self.full && self.layers < MAX_LAYERS && self.random.below(3) == 0 {
            let snapshot = Operation::Snapshot(self.layers);
            if self.format.can(snapshot) {
                self.do_whole(snapshot)?;
            }
        }
        // A cut that has ended the operation is done.
        self.use_and_look(forced.filter(|_| !operations && told.cut_round.is_none()), told)
    }

    /// Makes data that can be compressed.
    fn begin_compressed(&mut self) -> Result<(), String> {
        self.use_disk(false, (0, 0), None)?;
        let sectors = self.model.borrow().sectors();
        self.examine(After::Close, &[sectors])?;
        self.change_by_others()
    }

    /// Has another program change the image, after it was closed in good order.
    fn change_by_others(&mut self) -> Result<(), String> {
        self.trouble(false);
        self.close_whole()?;
        self.format.change_by_others(&self.machine.place, &mut self.random)?;
        let sectors = self.model.borrow().sectors();
        self.examine(After::Death, &[sectors]).map_err(|e| format!("after others: {e}"))
    }

    /// Opens the disk and closes it, without faults.
    fn close_whole(&mut self) -> Result<(), String> {
        let disk = self.format.open(&self.machine.place)?;
        let disk = self.format.begin_use(&self.machine.place, disk).map_err(|e| e.to_string())?;
        let mut threads = self.machine.queues(1, &disk.files()).map_err(|e| e.to_string())?;
        let queue = threads[0].queue.clone();
        let close = async move { disk.close(&queue).await };
        let closed = self.machine.run(&mut threads[0], close)?;
        drop(threads);
        if !matches!(closed, Some(Ok(()))) {
            return Err(format!("closing failed where nothing was wrong: {closed:?}"));
        }
        Ok(())
    }

    /// One of three stories begins on a parent with data.
    fn begin_chain(&mut self) -> Result<(), String> {
        let snapshot = Operation::Snapshot(self.layers);
        let tight = self.machine.place.tight;
        if self.random.below(3) > 0 || !self.format.can(snapshot) || tight {
            return Ok(());
        }
        self.use_and_close(None)?;
        self.do_whole(snapshot)
    }

    /// Fills much of the disk. Then other programs change the image, or it gets a leaf with a little of everything.
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

    /// Writes and compresses the whole disk, on a device without free space.
    fn begin_filled(&mut self) -> Result<(), String> {
        let all = self.model.borrow().sectors().div_ceil(MAX_REQUEST_SECTORS);
        self.use_and_close(Some((FULL, all)))?;
        self.full = self.format.fill_up(&self.machine.place)?;
        let sectors = self.model.borrow().sectors();
        self.examine(After::Close, &[sectors])
    }

    /// Writes everything, in one layer or in two, and closes it, so that other programs see it.
    fn begin_full(&mut self) -> Result<(), String> {
        let snapshot = Operation::Snapshot(self.layers);
        let all = self.model.borrow().sectors().div_ceil(MAX_REQUEST_SECTORS);
        let requests = all / 2 + self.random.below(all);
        self.use_and_close(Some((FULL, requests)))?;
        if self.random.below(2) == 0 && self.format.can(snapshot) {
            self.do_whole(snapshot)?;
            self.use_and_close(Some((FULL, requests)))?;
        }
        Ok(())
    }

    /// Use without faults, with this mix, and with so many requests.
    fn use_and_close(&mut self, work: Option<(Mix, u64)>) -> Result<(), String> {
        self.use_disk(false, (0, 0), work)?;
        let sectors = self.model.borrow().sectors();
        self.examine(After::Close, &[sectors])
    }

    /// In a cut round only the part that can be cut counts.
    fn count_anew(&self, forced: Option<Cut>) {
        if forced.is_some() {
            paths::taken();
        }
    }

    fn one_of<T: Copy, const N: usize>(&mut self, all: [T; N]) -> T {
        all[self.random.below(N as u64) as usize]
    }

    /// Ends the process in one of the ways.
    fn end(&mut self, after: After, told: &mut Told) -> Result<(), String> {
        let world = &self.machine.world;
        self.ended_at = world.step();
        world.set_faults(Vec::new());
        world.stop_at(None);
        let broken = |e| format!("the simulator: {e}");
        self.unrecovered &= after != After::PowerCut;
        self.died = after == After::Death;
        match after {
            After::PowerCut => {
                told.cuts += 1;
                self.machine.cut_power().map_err(broken)?;
            }
            After::Death => {
                told.deaths += 1;
                self.machine.kill_process().map_err(broken)?;
            }
            After::Close => told.closes += 1,
        }
        self.format.administer(&self.machine.place).map_err(broken)
    }
}

/// Sectors of a story's disk: few, so that requests overlap.
fn sizes(random: &mut SplitMix64) -> u64 {
    let sizes = [1, 9, 2048, 4096, 3 * 4096, 3 * 4096 + 1, LARGEST];
    sizes[random.below(sizes.len() as u64) as usize]
}
