//! Compares a store after an end with the book, and its used space at the end of a story with a full count.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ferrite_host::clock::Random;
use ferrite_store::check::{Outcome, Stats};

use super::load::Load;
use super::{Ended, Story, content};
use crate::format::Disk as Used;
use crate::load::MAX_REQUEST_SECTORS;
use crate::machine::Thread;
use crate::model::After;
use crate::stamp::{SECTOR, Value};

type Found = Vec<(u64, Result<Value, String>)>;

/// Nonzero blocks by volume, and the number of different contents in a domain.
#[derive(Default)]
struct Count {
    mapped: BTreeMap<String, u64>,
    distinct: BTreeSet<(u16, Vec<Value>)>,
}

impl Story<'_> {
    /// Examines the store's own check, the existing volumes, and the contents of each.
    pub(super) fn examine(&mut self, after: After) -> Result<(), String> {
        is_sound(&self.medium.check(&self.machine)?)?;
        let load = self.open_whole().map_err(|e| format!("after {after:?}: {e}"))?;
        let mut threads = self.threads(&load, 1)?;
        self.look(after, &load, &mut threads[0]).map(drop)
    }

    /// Opens the store with all present volumes, without faults.
    fn open_whole(&mut self) -> Result<Rc<Load>, String> {
        self.machine.world.set_nuisances(0, 0);
        let load = self.load(false, 0)?.ok_or("the world stands still")?;
        let names = load.store.live().list().into_iter().map(|volume| volume.name).collect();
        self.book.borrow_mut().reconcile(&names)?;
        load.open_all()?;
        Ok(load)
    }

    fn look(
        &mut self,
        after: After,
        load: &Rc<Load>,
        thread: &mut Thread,
    ) -> Result<Count, String> {
        let mut count = Count::default();
        let disks: Vec<_> =
            load.disks.borrow().iter().map(|(name, disk)| (name.clone(), disk.clone())).collect();
        let all = self.random.below(16) == 0;
        for (name, disk) in disks {
            let sectors = disk.sectors();
            let mut found = Found::new();
            for first in self.pieces(&name, sectors, all) {
                let sectors = (sectors - first).min(MAX_REQUEST_SECTORS);
                let (to, offset) =
                    (thread.buffer(0).slice(0, sectors as usize * SECTOR), first * SECTOR as u64);
                let (at, queue) = (disk.clone(), thread.queue.clone());
                let read = async move { Used::read(&*at, &queue, offset, to).await };
                match self.machine.run(thread, read)? {
                    Some(Ok(())) => {}
                    other => {
                        return Err(format!("after {after:?} {name} cannot be read: {other:?}"));
                    }
                }
                let mut bytes = vec![0; to.len()];
                thread.queue.memory().copy_out(to, &mut bytes);
                found.extend(content::read_all(&bytes, self.plan.seed, first));
            }
            if let Some((at, value)) = found.iter().find(|(at, _)| self.plan.trace == Some(*at)) {
                println!("step {}: {name} {at} after {after:?}: {value:?}", self.ended_at);
            }
            let mut book = self.book.borrow_mut();
            let entry = book.entry(&name);
            entry.examine(after, sectors, &found).map_err(|e| format!("{name}, {e}"))?;
            count.add(&name, entry.domain, &found);
        }
        Ok(count)
    }

    /// The parts of a volume that were ever changed, and one more; at times all of them.
    fn pieces(&mut self, name: &str, sectors: u64, all: bool) -> BTreeSet<u64> {
        let piece = MAX_REQUEST_SECTORS;
        let mut book = self.book.borrow_mut();
        let mut pieces: BTreeSet<u64> = match all {
            true => (0..sectors.div_ceil(piece)).collect(),
            false => book.entry(name).touched().map(|sector| sector / piece).collect(),
        };
        pieces.insert(self.random.below(sectors) / piece);
        pieces.into_iter().map(|at| at * piece).filter(|at| *at < sectors).collect()
    }

    /// Checks that two passes leave no garbage, and lose nothing.
    pub(super) fn finish(&mut self) -> Result<(), String> {
        let load = self.open_whole()?;
        let mut threads = self.threads(&load, 1)?;
        let (at, queue) = (load.clone(), threads[0].queue.clone());
        let tended = async move { at.tend_to_the_end(&queue).await };
        match self.machine.run(&mut threads[0], tended)? {
            Some(Ok(())) => {}
            other => return Err(format!("work behind service: {other:?}")),
        }
        if let Some(finding) = load.store.live().scrub_findings().listed.first() {
            return Err(format!("scrubbing says: {finding:?}"));
        }
        for _ in 0..2 {
            let (at, queue) = (load.clone(), threads[0].queue.clone());
            let pass = async move { at.store.live().gc(&queue.port).await };
            match self.machine.run(&mut threads[0], pass)? {
                Some(Ok(_)) => {}
                other => return Err(format!("the last passes: {other:?}")),
            }
        }
        let count = self.look(After::Death, &load, &mut threads[0])?;
        if self.close(&load, &mut threads[0])? != Ended::Closed {
            return Err("the story does not come to its end".into());
        }
        drop(threads);
        drop(load);
        self.machine.cut_power().map_err(|e| format!("the simulator: {e}"))?;
        let outcome = self.medium.check(&self.machine)?;
        is_sound(&outcome)?;
        if let Some(finding) = outcome.findings.listed.first() {
            return Err(format!("after two passes and a close its check says: {finding:?}"));
        }
        count.is(&outcome.stats.ok_or("its check has counted nothing")?)
    }
}

/// Checks that there is no damage after a cut.
fn is_sound(outcome: &Outcome) -> Result<(), String> {
    let counts = outcome.findings.counts;
    match outcome.findings.listed.first() {
        Some(finding) if counts.damage + counts.unsupported + counts.foreign > 0 => {
            Err(format!("its check says: {finding:?}"))
        }
        _ => Ok(()),
    }
}

impl Count {
    fn add(&mut self, name: &str, domain: u16, found: &Found) {
        let mut mapped = 0;
        for block in found.chunks(8) {
            let values: Vec<Value> = block.iter().filter_map(|(_, v)| v.clone().ok()).collect();
            if values.iter().any(|value| *value != Value::Zeros) {
                mapped += 1;
                self.distinct.insert((domain, values));
            }
        }
        self.mapped.insert(name.to_owned(), mapped);
    }

    /// Whether this is all used space.
    fn is(&self, stats: &Stats) -> Result<(), String> {
        let blocks = |bytes: u64| bytes / 4096;
        let found: BTreeMap<String, u64> =
            stats.volumes.iter().map(|v| (v.name.clone(), blocks(v.mapped_bytes))).collect();
        if found != self.mapped {
            return Err(format!("volumes have {found:?} blocks, a count finds {:?}", self.mapped));
        }
        let (all, distinct) = (self.mapped.values().sum::<u64>(), self.distinct.len() as u64);
        if !(distinct..=all).contains(&blocks(stats.distinct_bytes)) {
            let says = blocks(stats.distinct_bytes);
            return Err(format!("{says} contents are in use, a count finds {distinct} of {all}"));
        }
        if stats.garbage_bytes > 0 {
            return Err(format!("two passes leave {} dead blocks", blocks(stats.garbage_bytes)));
        }
        Ok(())
    }
}
