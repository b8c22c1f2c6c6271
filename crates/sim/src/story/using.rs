//! A round of load, and its faults.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use ferrite_disk::SyncWitness;
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_simio::{Fault, On, SyncAfter};

use super::Story;
use crate::format::{Disk, Format};
use crate::load::{Load, Midway, Mix, Witness};
use crate::machine::{MAX_DEPTH, MAX_QUEUES, Thread};
use crate::model::After;
use crate::paths;
use crate::plan::{Cut, Scenario, Told};

/// EIO, as the kernel returns it.
const EIO: i32 = 5;

/// The result of a use.
#[derive(Default)]
pub(super) struct Used {
    closed: bool,
    /// A flush has failed, or closing has, and the use ended with that.
    flush_failed: bool,
    /// A flush has failed because of a sync.
    told_of_sync: bool,
    /// A sync has failed, and perhaps no request was answered with that yet.
    sync_failed: bool,
}

impl<F: Format> Story<'_, F> {
    pub(super) fn use_and_look(
        &mut self,
        forced: Option<Cut>,
        told: &mut Told,
    ) -> Result<(), String> {
        let scenario = self.plan.scenario;
        let faulty = self.random.below(4) == 0 && forced.is_none();
        let faulty = faulty && !self.machine.place.tight || scenario == Scenario::Failures;
        self.trouble(faulty);
        let stop = self.end_of_round(forced);
        let began = self.machine.world.step();
        self.count_anew(forced);
        self.machine.world.stop_at(stop);
        let in_flush = match forced {
            Some(_) => (0, 0),
            None => self.end_in_metadata(),
        };
        let used = self.use_disk(faulty, in_flush, None)?;
        let dies = match scenario {
            Scenario::Chains | Scenario::Live => self.random.below(2) == 0,
            Scenario::Full => self.random.below(4) > 0,
            _ => false,
        };
        let after = match forced {
            Some(cut) => cut.after,
            None if used.flush_failed => self.one_of([After::Death, After::PowerCut]),
            None if dies && !used.closed => After::Death,
            None if self.metadata_fails() && self.random.below(2) == 0 => After::PowerCut,
            None if used.closed => self.one_of([After::Close, After::PowerCut]),
            None => self.one_of([After::Death, After::PowerCut]),
        };
        self.end(after, told)?;
        if forced.is_some() {
            told.cut_round = Some(began..=self.ended_at);
            told.paths = paths::taken();
        }
        let sectors = self.model.borrow().sectors();
        let forgotten = self.machine.world.has_forgotten();
        let goes_on = self.goes_on();
        if after == After::Death && goes_on && used.told_of_sync {
            return self.succeed(sectors);
        }
        // A process that dies after an unreported failed sync has told only the next process.
        if !used.flush_failed && !used.sync_failed && !forgotten {
            return self.examine(after, &[sectors]);
        }
        // Data that no flush has promised may be lost without a power cut, too.
        self.over = after == After::Death;
        self.examine(After::PowerCut, &[sectors])
    }

    /// Many rounds end during writes of metadata: in one of the syncs, or in a flush, which this chooses (see
    /// [`Load`]).
    fn end_in_metadata(&mut self) -> (u64, u64) {
        let scenario = self.plan.scenario;
        let in_sync = [Scenario::Past, Scenario::Failures].contains(&scenario);
        if in_sync && self.random.below(4) > 0 {
            let (after, syncs, reach) = match scenario {
                Scenario::Failures if self.metadata_fails() => (SyncAfter::Fault, 2, 2),
                Scenario::Failures => (SyncAfter::Fault, 8, 4),
                _ => (SyncAfter::Anything, 2 << self.random.below(5), 4),
            };
            let (sync, steps) = (1 + self.random.below(syncs), self.random.below(reach));
            self.machine.world.stop_at(None);
            self.machine.world.stop_at_sync(after, sync, steps);
        }
        if in_sync || self.random.below(2) == 0 {
            return (0, 0);
        }
        let flushes = if scenario == Scenario::Full { 16 } else { 4 };
        (1 + self.random.below(flushes), 1 + self.random.below(24))
    }

    /// Whether a write of metadata fails, and the next commit is tested.
    fn metadata_fails(&self) -> bool {
        self.plan.scenario == Scenario::Failures && !self.plan.seed.is_multiple_of(2)
    }

    /// Whether the guest continues after a failed flush.
    fn goes_on(&self) -> bool {
        let failures = self.plan.scenario == Scenario::Failures;
        failures && self.format.can_go_on(&self.machine.place)
    }

    /// The guest got the failure of a sync, and the process died. The next one finds the state after a power cut, and
    /// nothing that it makes durable refers to lost data.
    fn succeed(&mut self, sectors: u64) -> Result<(), String> {
        self.look(After::PowerCut, &[sectors], false)?;
        self.trouble(false);
        self.close_whole()?;
        self.machine.cut_power().map_err(|e| format!("the simulator: {e}"))?;
        self.examine(After::PowerCut, &[sectors])
    }

    /// Sets the faults of a round.
    pub(super) fn trouble(&mut self, faulty: bool) {
        let metadata = self.metadata_fails();
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
        if faulty && self.plan.scenario == Scenario::Failures {
            // One write of metadata fails, and the next may succeed; or any write fails.
            let range = if metadata { self.format.first_table() } else { 0..u64::MAX };
            let on = if metadata || random.below(3) == 0 { On::Write } else { On::Sync };
            let per_mille = [300, 1000][random.below(2) as usize];
            faults = vec![Fault { on, range, per_mille, errno: EIO, times: 1 }];
        }
        self.syncs_fail = faults.iter().any(|fault| fault.on == On::Sync);
        self.machine.world.set_faults(faults);
    }

    /// Chooses the step at which the world stops; none: when all is done.
    pub(super) fn end_of_round(&mut self, forced: Option<Cut>) -> Option<u64> {
        if let Some(cut) = forced {
            return Some(cut.step);
        }
        if self.plan.scenario == Scenario::Close || self.random.below(8) == 0 {
            return None;
        }
        let reach = 1 << (4 + self.random.below(7));
        Some(self.machine.world.step() + 1 + self.random.below(reach))
    }

    /// Opens the disk, and loads it until all is done or the world stops. `flush`, `steps`: see [`Load`]. `work`: a
    /// load instead of the scenario's.
    pub(super) fn use_disk(
        &mut self,
        faulty: bool,
        (flush, steps): (u64, u64),
        work: Option<(Mix, u64)>,
    ) -> Result<Used, String> {
        let disk = self.format.open(&self.machine.place)?;
        let disk = match self.format.begin_use(&self.machine.place, disk) {
            Err(_) if faulty || self.machine.world.stopped() => return self.stopped(),
            disk => disk.map_err(|e| format!("what parents' journals have: {e}"))?,
        };
        self.unrecovered = false;
        let queues = 1 + self.random.below(MAX_QUEUES as u64) as usize;
        let depth = 1 + self.random.below(MAX_DEPTH as u64) as usize;
        let left = match self.plan.scenario {
            _ if work.is_some() => 0,
            Scenario::Chains | Scenario::Live => 8 + self.random.below(40),
            Scenario::Close | Scenario::Operations => 1 + self.random.below(12),
            // Many requests find no space.
            Scenario::Compressed | Scenario::Full => 40 + self.random.below(400),
            _ => 8 + self.random.below(180),
        };
        let (mix, left) = work.unwrap_or((self.plan.scenario.mix(), left));
        let sectors = disk.sectors();
        let files = disk.files();
        let enlarger = self.format.enlarger(&self.machine.place, sectors);
        let full = enlarger.is_some() || self.full;
        let midway = match self.plan.scenario {
            Scenario::Live if work.is_none() => self.live_copy(faulty),
            _ => enlarger,
        };
        let witness = Arc::<Witness>::default();
        let weak: Weak<dyn SyncWitness> = Arc::downgrade(&witness) as Weak<Witness>;
        disk.witness_syncs(weak);
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
            goes_on: self.goes_on(),
            failures: Cell::new(0),
            syncs_fail: self.syncs_fail,
            told_of_sync: Cell::new(false),
            witness,
            flush_failed: Cell::new(false),
            full,
            midway: Midway { left: left / 2, work: midway },
            trouble: RefCell::new(None),
        });
        let mut threads = match self.machine.queues(queues, &files) {
            Err(_) if self.machine.world.stopped() => return self.stopped(),
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
        let told_of_sync = load.told_of_sync.get();
        let flush_failed = load.flush_failed.get();
        let mut used = Used { flush_failed, told_of_sync, ..Used::default() };
        if !flush_failed && !self.machine.world.stopped() {
            (used.closed, used.flush_failed) = self.close(&load, &mut threads[0], faulty)?;
        }
        used.sync_failed = load.witness.knows();
        if self.machine.world.stopped() {
            self.machine.set_aside().map_err(|e| e.to_string())?;
        }
        Ok(used)
    }

    /// The copy of a merge, while the disk is in use. A fault may end it.
    fn live_copy(&self, faulty: bool) -> Option<Box<dyn Fn() -> io::Result<()>>> {
        let copy = self.format.live_copy(&self.machine.place, self.layers)?;
        Some(Box::new(move || match copy() {
            Err(_) if faulty => Ok(()),
            copied => copied,
        }))
    }

    /// The result if the world stopped before the disk was open.
    fn stopped(&self) -> Result<Used, String> {
        if self.machine.world.stopped() {
            self.machine.set_aside().map_err(|e| e.to_string())?;
        }
        Ok(Used::default())
    }

    /// Closes the disk; whether it was closed, and whether that failed.
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
}
