//! Stories: a store is used, and its process or the power ends at any step.

use super::*;

/// The event before the volumes are examined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Nothing,
    Death,
    Cut,
}

/// A story: a store is used, and its process or the power ends, some times.
pub(super) struct Story {
    pub(super) machine: Machine,
    random: SplitMix64,
    model: Model,
    /// The one that was under way at the end of the process.
    pending: Option<(Operation, Model)>,
    names: u32,
    fails: Option<On>,
}

impl Story {
    pub(super) fn new(seed: u64, fails: Option<On>) -> Story {
        let (machine, random) = (Machine::new(seed), SplitMix64::new(seed));
        let mut process = Process::of(&machine).unwrap();
        let name = |name| Name::new(name).unwrap();
        for (domain, key) in [("a", 1), ("b", 2)] {
            process.operate(Operation::Domain(name(domain), DomainKey([key; 32]))).unwrap();
        }
        process.operate(Operation::Create(name("v0"), BLOCKS, 0)).unwrap();
        process.operate(Operation::Create(name("v1"), BLOCKS, 1)).unwrap();
        let model = ["v0", "v1"].map(|name| (name.to_owned(), BTreeMap::new())).into();
        drop(process);
        machine.world.cut_power().unwrap();
        Story { machine, random, model, pending: None, names: 2, fails }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    fn any_volume(&mut self) -> String {
        let at = self.random.below(self.model.len() as u64) as usize;
        self.model.keys().nth(at).unwrap().clone()
    }

    fn any_write(&mut self) -> Write {
        let volume = loop {
            let volume = self.any_volume();
            if !volume.starts_with('s') {
                break volume;
            }
        };
        let zone = ZONES[self.below(3) as usize].clone();
        let (first, end) = (zone.start * PER_BLOCK, zone.end * PER_BLOCK);
        let mut begin = first + self.below(end - first);
        let mut len = 1 + self.below(12);
        if self.below(3) > 0 {
            begin -= begin % PER_BLOCK;
            len = PER_BLOCK * (1 + self.below(20));
        }
        // Few values, so that content is found again.
        let value = self.below(6) as u8;
        Write { volume, sectors: begin..end.min(begin + len), value }
    }

    /// Some writes at once.
    fn write(&mut self, process: &mut Process) -> io::Result<()> {
        let writes: Vec<Write> = (0..1 + self.below(4)).map(|_| self.any_write()).collect();
        // Each of these writes may be on the medium, whether it succeeds or not.
        for write in &writes {
            let sectors = self.model.get_mut(&write.volume).unwrap();
            for sector in write.sectors.clone() {
                let sector = sectors.entry(sector).or_insert_with(zeros);
                sector.now.insert(write.value);
                sector.durable.insert(write.value);
            }
        }
        let beside = match self.below(16) {
            0 | 1 => Beside::Checkpoint,
            2 => Beside::Pass,
            3 => Beside::Check,
            _ => Beside::Nothing,
        };
        let done = process.write_beside(&writes, beside)?;
        let ended: Vec<&Write> =
            writes.iter().zip(&done).filter(|d| d.1.is_ok()).map(|d| d.0).collect();
        for write in &ended {
            for at in write.sectors.clone() {
                // A write that has ended well has replaced the content before it.
                let others = writes.iter().filter(|w| w.volume == write.volume);
                let others = others.filter(|w| w.sectors.contains(&at)).map(|w| w.value);
                let sector = self.model.get_mut(&write.volume).unwrap().get_mut(&at).unwrap();
                sector.now = others.collect();
            }
        }
        let passing =
            |e: &io::Error| self.fails.is_some() || e.kind() == io::ErrorKind::StorageFull;
        match done.into_iter().find(|done| done.as_ref().is_err_and(|e| !passing(e))) {
            Some(failed) => failed,
            None => Ok(()),
        }
    }

    /// A flush, or what has one in it, has ended well.
    pub(super) fn all_durable(&mut self) {
        for sector in self.model.values_mut().flat_map(BTreeMap::values_mut) {
            sector.durable.clone_from(&sector.now);
        }
    }

    fn name(&mut self, kind: char) -> (Name, String) {
        self.names += 1;
        let name = format!("{kind}{}", self.names);
        (Name::new(&name).unwrap(), name)
    }

    fn operate(&mut self, process: &mut Process) -> io::Result<()> {
        let of = self.any_volume();
        let number = process.volume(&of);
        let mut after = self.model.clone();
        let operation = match self.below(4) {
            0 if self.model.len() < 6 => {
                let (name, text) = self.name('s');
                after.insert(text, self.model[&of].clone());
                Operation::Snapshot(name, number)
            }
            1 if self.model.len() < 6 => {
                let (name, text) = self.name('c');
                after.insert(text, self.model[&of].clone());
                Operation::Clone(name, number)
            }
            2 if of.starts_with('s') || of.starts_with('c') => {
                after.remove(&of);
                Operation::Delete(number)
            }
            _ => {
                let domain = |name: &str| {
                    let volume = process.volume(name);
                    process.live.shared.core().volumes.entries()[&volume].domain
                };
                let is_to = |name: &&String| name.starts_with('s') && domain(name) == domain(&of);
                let Some(to) = self.model.keys().find(is_to) else { return Ok(()) };
                if of.starts_with('s') {
                    return Ok(());
                }
                after.insert(of.clone(), self.model[to].clone());
                Operation::Rollback(number, process.volume(to))
            }
        };
        self.pending = Some((operation.clone(), after));
        process.operate(operation)?;
        self.model = self.pending.take().unwrap().1;
        self.all_durable();
        Ok(())
    }

    /// Steps until the machine stops, or enough of them. A failed sync ends the process.
    pub(super) fn use_it(&mut self, process: &mut Process, steps: u64) -> io::Result<()> {
        for _ in 0..steps {
            match self.below(12) {
                0 | 1 => {
                    process.flush()?;
                    self.all_durable();
                }
                2 => self.operate(process)?,
                3 => {
                    let name = self.any_volume();
                    self.examine(process, &name, After::Nothing);
                }
                _ => self.write(process)?,
            }
        }
        Ok(())
    }

    /// A volume has contents that it may have; after a replay it has these from now on.
    fn examine(&mut self, process: &mut Process, name: &str, after: After) {
        for zone in ZONES {
            let sectors = zone.start * PER_BLOCK..zone.end * PER_BLOCK;
            let found = match process.read(name, sectors.clone()) {
                Ok(found) => found,
                Err(_) if self.machine.world.stopped() => return,
                Err(e) => panic!("{name}: {e}"),
            };
            for (sector, found) in sectors.zip(found) {
                let known = self.model.get_mut(name).unwrap().entry(sector).or_insert_with(zeros);
                let may = if after == After::Cut { &known.durable } else { &known.now };
                assert!(may.contains(&found), "{name}, sector {sector}: {found} of {may:?}");
                // A write that has failed may come back with a replay, but not behind one.
                if after != After::Nothing {
                    known.now = [found].into();
                }
            }
        }
    }

    /// The next process: which volumes there are, and what they have.
    pub(super) fn reopen(&mut self, after: After) -> Process {
        let mut process = Process::of(&self.machine).unwrap_or_else(|e| panic!("opening: {e}"));
        if let Some((_, other)) = self.pending.take() {
            // It is done, or not: volumes say which, and of a rollback each sector does.
            let found =
                |model: &Model| model.keys().all(|name| process.live.volume(name).is_some());
            let is_smaller = other.len() < self.model.len();
            match found(&other) && (!is_smaller || !found(&self.model)) {
                true if other.len() == self.model.len() => self.either(&other),
                true => self.model = other,
                false => {}
            }
        }
        let names: Vec<String> = self.model.keys().cloned().collect();
        for name in names {
            self.examine(&mut process, &name, after);
        }
        // A replay ends with a checkpoint.
        self.all_durable();
        process
    }

    fn either(&mut self, after: &Model) {
        for (name, sectors) in after {
            let before = self.model.get_mut(name).unwrap();
            let numbers: BTreeSet<u64> = sectors.keys().chain(before.keys()).copied().collect();
            for number in numbers {
                let other = sectors.get(&number).cloned().unwrap_or_else(zeros);
                let sector = before.entry(number).or_insert_with(zeros);
                sector.now.extend(other.now);
                sector.durable.extend(other.durable);
            }
        }
    }

    /// Runs the story. Gives how often it was stopped.
    pub(super) fn tell(mut self, stop: Option<u64>, rounds: u64) -> u32 {
        let mut stopped = 0;
        let mut after = After::Cut;
        for _ in 0..rounds {
            let mut process = self.reopen(after);
            let begun = self.machine.world.step();
            self.machine.world.stop_at(stop.map(|stop| begun + stop));
            if let Some(on) = self.fails {
                let first = self.below(BYTES);
                let fault =
                    Fault { on, range: first / 4..BYTES, per_mille: 150, errno: 5, times: 2 };
                self.machine.world.set_faults(vec![fault]);
            }
            let ended = self.use_it(&mut process, 40);
            self.machine.world.set_faults(Vec::new());
            stopped += u32::from(self.machine.world.stopped());
            let is_expected = self.machine.world.stopped() || self.fails.is_some();
            assert!(ended.is_ok() || is_expected, "{ended:?}");
            let is_faulty = process.live.is_faulty();
            drop(process);
            let is_cut = self.below(2) == 0;
            after = if is_cut || is_faulty { After::Cut } else { After::Death };
            match is_cut && !is_faulty {
                true => self.machine.world.cut_power().unwrap(),
                false => self.machine.world.kill_process().unwrap(),
            }
            if is_faulty {
                // The contents that the next process has found are durable, whatever the kernel had forgotten.
                drop(self.reopen(After::Cut));
                self.machine.world.cut_power().unwrap();
            }
        }
        let mut process = self.reopen(after);
        passes::nothing_is_lost_and_nothing_left(&mut process);
        let names: Vec<String> = self.model.keys().cloned().collect();
        for name in names {
            self.examine(&mut process, &name, After::Nothing);
        }
        stopped
    }
}
