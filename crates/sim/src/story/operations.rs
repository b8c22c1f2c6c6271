//! Operations on images that are not open, which may be interrupted.

use std::rc::Rc;

use ferrite_host::clock::Random;
use ferrite_host::directory::Directory;
use ferrite_simio::SyncAfter;

use super::{FIRST_METADATA, MAX_LAYERS, Story};
use crate::format::{Disk, Format, Operation};
use crate::model::After;
use crate::paths;
use crate::plan::{Cut, Scenario, Told};

impl<F: Format> Story<'_, F> {
    /// Chooses an operation that the format supports.
    pub(super) fn choose(&mut self) -> Operation {
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

    /// Grows the disk, unless the device is what grows.
    pub(super) fn grow(&mut self, forced: Option<Cut>, told: &mut Told) -> Result<(), String> {
        let sectors = self.model.borrow().sectors();
        let grown = Operation::Grow(sectors + self.one_of([1, 8, 4096, 9000]));
        match self.format.can(grown) && !self.machine.place.tight {
            true => self.operate(grown, forced, told),
            false => Ok(()),
        }
    }

    /// Adds or removes a layer.
    pub(super) fn change_chain(
        &mut self,
        forced: Option<Cut>,
        told: &mut Told,
    ) -> Result<(), String> {
        let number = MAX_LAYERS + self.overlays;
        let mut all = Vec::new();
        if self.layers < MAX_LAYERS {
            all.push(Operation::Snapshot(number));
            all.extend(vec![Operation::Overlay(number); if self.died { 4 } else { 1 }]);
        }
        if self.layers > 2 {
            all.extend([Operation::CoalesceInner(self.layers); 2]);
        }
        if self.layers > 1 {
            all.push(Operation::Coalesce);
        }
        all.retain(|operation| self.format.can(*operation));
        if all.is_empty() {
            return Ok(());
        }
        self.overlays += 1;
        match all[self.random.below(all.len() as u64) as usize] {
            overlay @ Operation::Overlay(_) => self.do_whole(overlay),
            operation => self.operate(operation, forced, told),
        }
    }

    /// Makes a change in a pause of a running disk: a snapshot, or the last steps of a merge.
    pub(super) fn change_in_pause(
        &mut self,
        forced: Option<Cut>,
        told: &mut Told,
    ) -> Result<(), String> {
        let snapshot = Operation::Snapshot(MAX_LAYERS + self.overlays);
        let merge = Operation::MergeStretch(self.layers);
        let operation = match self.layers {
            MAX_LAYERS.. => merge,
            3 if self.random.below(2) == 0 => merge,
            _ => snapshot,
        };
        if !self.format.can(operation) {
            return Ok(());
        }
        self.overlays += 1;
        self.operate(operation, forced, told)
    }

    /// Whether an operation makes all answered writes durable: not if it leaves the leaf alone, and not those in the
    /// journal of a parent.
    fn promises(&self, operation: Operation) -> bool {
        !self.unrecovered
            && !matches!(
                operation,
                Operation::Overlay(_) | Operation::CoalesceInner(_) | Operation::MergeStretch(_)
            )
    }

    /// Executes an operation without interruption.
    pub(super) fn do_whole(&mut self, operation: Operation) -> Result<(), String> {
        let issued = self.model.borrow_mut().issue_flush();
        let done = self.format.operate(&self.machine.place, operation);
        if self.plan.trace.is_some() {
            println!("step {}: {operation:?}: {done:?}", self.machine.world.step());
        }
        done.map_err(|e| format!("{operation:?} failed where nothing was wrong: {e}"))?;
        let promises = self.promises(operation);
        let mut model = self.model.borrow_mut();
        if promises {
            model.flushed(issued);
        }
        match operation {
            Operation::Snapshot(_) => {
                model.snapshot();
                self.layers += 1;
            }
            Operation::Overlay(_) => {
                model.overlay();
                self.layers += 1;
                self.unrecovered = true;
            }
            Operation::Coalesce | Operation::CoalesceInner(_) | Operation::MergeStretch(_) => {
                self.layers -= 1;
            }
            Operation::Grow(sectors) => {
                self.edges.push(model.sectors());
                model.grow(sectors);
            }
            Operation::Create(_) | Operation::Clone(_) | Operation::Convert(_) => {}
        }
        Ok(())
    }

    /// Executes an operation that may be interrupted, and is then repeated.
    pub(super) fn operate(
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
        self.count_anew(forced);
        self.trouble(false);
        self.machine.world.stop_at(stop);
        let often =
            [Scenario::Growth, Scenario::Chains, Scenario::Live].contains(&self.plan.scenario);
        if often && forced.is_none() && self.random.below(4) > 0 {
            // References to other images are often at the beginning.
            let head = self.random.below(2) == 0;
            let (after, syncs, reach) = match head {
                true => (SyncAfter::Write(0..FIRST_METADATA), 4, 2),
                false => (SyncAfter::Anything, 8, 6),
            };
            let (sync, steps) = (1 + self.random.below(syncs), self.random.below(reach));
            self.machine.world.stop_at(None);
            self.machine.world.stop_at_sync(after, sync, steps);
        }
        let done = self.do_whole(operation);
        self.ended_at = self.machine.world.step();
        let stopped = self.machine.world.stopped();
        let finished = done.is_ok();
        let after = self.end_of_operation(forced, stopped);
        if forced.is_some() {
            told.cut_round = Some(began..=self.ended_at);
            told.paths = paths::taken();
        }
        if stopped {
            self.machine.set_aside().map_err(|e| e.to_string())?;
            // Not done, or done and unreported: in either case a discard may reveal the layers below.
            if let (Err(_), Operation::Snapshot(_)) = (&done, operation) {
                self.model.borrow_mut().snapshot();
            }
        } else {
            done?;
        }
        self.end(after, told)?;
        // After an interrupted grow the old end or the new one may be found.
        if let Operation::Grow(_) = operation {
            self.edges.push(before);
        }
        let promises = self.promises(operation);
        let after = if !promises && after == After::Close { After::Death } else { after };
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
        // A file system writes its journal within seconds, also after the death of the process.
        let place = &self.machine.place;
        place.directory.sync(&place.images).map_err(|e| e.to_string())?;
        let made = matches!(operation, Operation::Create(_)) && self.format.exists(place);
        if finished || made {
            return Ok(());
        }
        self.do_whole(operation).map_err(|e| format!("again, after {after:?}: {e}"))?;
        let sectors = self.model.borrow().sectors();
        let after = if promises { After::Close } else { After::Death };
        self.examine(after, &[sectors])
    }

    /// Ends a process that has executed an operation, or was stopped during it.
    pub(super) fn end_of_operation(&mut self, forced: Option<Cut>, stopped: bool) -> After {
        match (forced, stopped) {
            (Some(cut), _) => cut.after,
            (None, false) => self.one_of([After::Close, After::PowerCut]),
            (None, true) => self.one_of([After::Death, After::PowerCut]),
        }
    }

    /// Executes an operation that makes another image of the leaf, and may be interrupted. The leaf stays unchanged,
    /// and an image with the other name is complete.
    pub(super) fn copy(
        &mut self,
        operation: Operation,
        forced: Option<Cut>,
        told: &mut Told,
    ) -> Result<(), String> {
        self.copies += 1;
        let stop = self.end_of_round(forced);
        let began = self.machine.world.step();
        self.count_anew(forced);
        self.trouble(false);
        self.machine.world.stop_at(stop);
        let done = self.format.operate(&self.machine.place, operation);
        self.ended_at = self.machine.world.step();
        let stopped = self.machine.world.stopped();
        let after = self.end_of_operation(forced, stopped);
        if forced.is_some() {
            told.cut_round = Some(began..=self.ended_at);
            told.paths = paths::taken();
        }
        match stopped {
            true => self.machine.set_aside().map_err(|e| e.to_string())?,
            false => done.map_err(|e| format!("{operation:?}, nothing was wrong: {e}"))?,
        }
        self.end(after, told)?;
        // The operation promises only that the leaf does not change.
        let after = if after == After::Close { After::Death } else { after };
        let sectors = self.model.borrow().sectors();
        // First, with the leaf's contents at the time of the copy: a power cut may have lost some since.
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

    /// Compares the result of such an operation with the leaf; returns whether it exists.
    pub(super) fn examine_copy(&mut self, operation: Operation) -> Result<bool, String> {
        let of = |e| format!("what {operation:?} made: {e}");
        let disk = self.format.open_copy(&self.machine.place, operation).map_err(of)?;
        let Some(disk) = disk.map(Rc::new) else { return Ok(false) };
        // A device may have more room.
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
}
