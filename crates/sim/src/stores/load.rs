//! Requests to the volumes of a store from several queues, and operations on the store meanwhile.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::Disk;
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::arena::Span;
use ferrite_store::journal::Name;
use ferrite_store::live::{BackgroundTask, Live, Operation};
use ferrite_store::owned::{Owned, StoreHandle};
use ferrite_store::pace::Pace;

use super::book::{Book, Deed, parts};
use super::content::{self, PER_BLOCK};
use crate::format::{Disk as Used, Queue};
use crate::load::MAX_REQUEST_SECTORS;
use crate::model::Change;
use crate::stamp::SECTOR;

/// The interval of checks whether a volume is unused.
const AGAIN: Duration = Duration::from_millis(1);

/// The relative frequency of each kind of request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mix {
    pub(super) reads: u64,
    pub(super) writes: u64,
    pub(super) flushes: u64,
    pub(super) discards: u64,
    pub(super) zeroes: u64,
    pub(super) deeds: u64,
    pub(super) passes: u64,
    pub(super) checkpoints: u64,
    /// Steps of the store's background work.
    pub(super) tends: u64,
    /// The percentage of writes with contents that were written before.
    pub(super) again: u64,
    /// The percentage of requests near the ends of leaves.
    pub(super) near: u64,
    /// Writes have the largest size.
    pub(super) large: bool,
    /// Volumes get other names and sizes.
    pub(super) alters: bool,
}

/// Opens a volume, for writing or not.
type Open = Box<dyn Fn(&str, bool) -> Result<Disk, String>>;

/// The state that all tasks of one process share.
pub(super) struct Load {
    pub(super) store: Arc<Owned>,
    /// Keeps the store open in this process, whatever volumes are open.
    pub(super) _handle: StoreHandle,
    pub(super) open: Open,
    pub(super) disks: RefCell<BTreeMap<String, Rc<Disk>>>,
    pub(super) book: Rc<RefCell<Book>>,
    pub(super) seed: u64,
    /// Sectors of new volumes.
    pub(super) sizes: &'static [u64],
    /// The number of the next content.
    pub(super) numbers: Rc<Cell<u64>>,
    pub(super) random: RefCell<SplitMix64>,
    pub(super) left: Cell<u64>,
    pub(super) tasks: Cell<usize>,
    pub(super) trace: Option<u64>,
    pub(super) mix: Mix,
    /// Requests may fail.
    pub(super) may_fail: bool,
    /// There may be no room.
    pub(super) may_be_full: bool,
    /// A flush has failed, and was answered: no later one succeeds.
    pub(super) has_failed: Cell<bool>,
    pub(super) trouble: RefCell<Option<String>>,
}

enum Request {
    Read,
    Write,
    Zeroes,
    Discard,
    Flush,
    Deed,
    Pass,
    Checkpoint,
    Tend,
}

impl Load {
    fn live(&self) -> &Live {
        self.store.live()
    }

    /// A task: issues one request after the other, with its data in `buf`.
    pub(super) async fn task(self: Rc<Self>, queue: Queue, buf: Span) {
        while self.left.get() > 0 && self.trouble.borrow().is_none() {
            self.left.set(self.left.get() - 1);
            let done = match self.next() {
                Request::Read => self.read(&queue, buf).await,
                Request::Write => self.write(&queue, buf).await,
                Request::Zeroes => self.empty(&queue, Change::Zero).await,
                Request::Discard => self.empty(&queue, Change::Discard).await,
                Request::Flush => self.flush(&queue).await,
                Request::Deed => self.do_deed(&queue).await,
                Request::Pass => self.passed(self.live().gc(&queue.port).await.map(drop), "a pass"),
                Request::Checkpoint => {
                    self.passed(self.live().checkpoint(&queue.port).await, "a checkpoint")
                }
                Request::Tend => {
                    self.passed(self.run_background_task(&queue).await, "work behind service")
                }
            };
            if let Err(text) = done {
                self.trouble.borrow_mut().get_or_insert(text);
            }
        }
        self.tasks.set(self.tasks.get() - 1);
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.borrow_mut().below(bound)
    }

    fn next(&self) -> Request {
        let mix = self.mix;
        let all = [
            (mix.reads, Request::Read),
            (mix.writes, Request::Write),
            (mix.zeroes, Request::Zeroes),
            (mix.discards, Request::Discard),
            (mix.flushes, Request::Flush),
            (mix.deeds, Request::Deed),
            (mix.passes, Request::Pass),
            (mix.checkpoints, Request::Checkpoint),
            (mix.tends, Request::Tend),
        ];
        let mut at = self.below(all.iter().map(|(share, _)| share).sum());
        for (share, request) in all {
            if at < share {
                return request;
            }
            at -= share;
        }
        Request::Flush
    }

    /// Chooses a volume and its disk. It is in use until [`end`](Load::end).
    fn begin(&self, to_write: bool) -> Option<(String, Rc<Disk>)> {
        let mut book = self.book.borrow_mut();
        let is_good = |e: &super::book::Entry| !to_write || !e.is_snapshot;
        let name = book.any(&mut self.random.borrow_mut(), is_good)?;
        let disk = self.disks.borrow().get(&name)?.clone();
        book.entry(&name).uses += 1;
        Some((name, disk))
    }

    fn end(&self, name: &str) {
        self.book.borrow_mut().entry(name).uses -= 1;
    }

    /// Chooses a range: mostly whole blocks, and mostly near the ends of leaves and of the volume.
    fn range(&self, sectors: u64, most: u64) -> (u64, u64) {
        let mut random = self.random.borrow_mut();
        let leaf = 512 * PER_BLOCK;
        let max = [PER_BLOCK, 3 * PER_BLOCK, most][random.below(3) as usize];
        let max = if self.mix.large { most } else { max };
        let mut len = 1 + random.below(max);
        let mut first = match random.below(100) < self.mix.near {
            true => {
                let spots = sectors.div_ceil(leaf) + 1;
                let spot = (random.below(spots) * leaf).min(sectors);
                (spot + random.below(96)).saturating_sub(48)
            }
            false => random.below(sectors),
        };
        if random.below(4) > 0 {
            first -= first % PER_BLOCK;
            len = len.next_multiple_of(PER_BLOCK);
        }
        let len = len.min(sectors).min(most);
        (first.min(sectors - len), len)
    }

    fn trace(&self, name: &str, first: u64, sectors: u64, what: &dyn std::fmt::Debug) {
        if self.trace.is_some_and(|sector| (first..first + sectors).contains(&sector)) {
            println!("{name} {first}+{sectors}: {what:?}");
        }
    }

    async fn read(&self, queue: &Queue, buf: Span) -> Result<(), String> {
        let Some((name, disk)) = self.begin(false) else { return Ok(()) };
        let (first, sectors) = self.range(disk.sectors(), MAX_REQUEST_SECTORS);
        let ticket = self.book.borrow_mut().entry(&name).model.issue_read(first, sectors);
        let to = buf.slice(0, sectors as usize * SECTOR);
        let done = Used::read(&*disk, queue, first * SECTOR as u64, to).await;
        self.end(&name);
        let mut book = self.book.borrow_mut();
        let model = &mut book.entry(&name).model;
        match done {
            Ok(()) => {
                let mut bytes = vec![0; to.len()];
                queue.memory().copy_out(to, &mut bytes);
                let found = content::read_all(&bytes, self.seed, first);
                let found: Vec<_> = found.into_iter().map(|(_, value)| value).collect();
                model.answer_read(ticket, Some(&found)).map_err(|e| format!("{name}, {e}"))
            }
            Err(e) => {
                model.answer_read(ticket, None)?;
                drop(book);
                self.passed(Err(e), &format!("a read of {name}, {first}+{sectors}"))
            }
        }
    }

    async fn write(&self, queue: &Queue, buf: Span) -> Result<(), String> {
        let Some((name, disk)) = self.begin(true) else { return Ok(()) };
        let (first, sectors) = self.range(disk.sectors(), MAX_REQUEST_SECTORS);
        let blocks = (first + sectors).div_ceil(PER_BLOCK) - first / PER_BLOCK;
        let next = self.numbers.get();
        // Recent or old content; no volume may reference the old one any more.
        let back = if self.below(2) == 0 { next.min(64) } else { next };
        let is_new = self.below(100) >= self.mix.again;
        let number = if is_new { next } else { next - self.below(back) };
        self.numbers.set(next.max(number + blocks));
        let mut bytes = vec![0; sectors as usize * SECTOR];
        let mut at = bytes.chunks_exact_mut(SECTOR);
        for (part, len, number) in parts(first, sectors, number) {
            for sector in part..part + len {
                let to = at.next().ok_or("a write has less bytes than sectors")?;
                content::write(to, self.seed, sector, number);
            }
        }
        let from = buf.slice(0, bytes.len());
        queue.memory().copy_in(from, &bytes);
        let tickets = self.book.borrow_mut().issue_write(&name, first, sectors, number);
        self.trace(&name, first, sectors, &("write", number));
        let done = Used::write(&*disk, queue, first * SECTOR as u64, from).await;
        self.trace(&name, first, sectors, &("written", number, &done));
        self.end(&name);
        let mut book = self.book.borrow_mut();
        for ticket in tickets {
            book.entry(&name).model.answer(ticket, done.is_ok());
        }
        if is_new && done.is_ok() {
            book.has_gone_on(&name);
        }
        drop(book);
        self.passed(done, &format!("a write of {name}, {first}+{sectors}"))
    }

    async fn empty(&self, queue: &Queue, change: Change) -> Result<(), String> {
        let Some((name, disk)) = self.begin(true) else { return Ok(()) };
        let all = disk.sectors();
        let most = if self.below(6) == 0 { all } else { MAX_REQUEST_SECTORS };
        let (first, sectors) = match self.below(12) {
            0 => (0, all),
            _ => self.range(all, most),
        };
        let ticket = self.book.borrow_mut().entry(&name).model.issue(first, sectors, change);
        let (offset, len) = (first * SECTOR as u64, sectors * SECTOR as u64);
        self.trace(&name, first, sectors, &change);
        let done = match change {
            Change::Discard => Used::discard(&*disk, queue, offset, len).await,
            _ => Used::write_zeroes(&*disk, queue, offset, len).await,
        };
        self.trace(&name, first, sectors, &(change, &done));
        self.end(&name);
        self.book.borrow_mut().entry(&name).model.answer(ticket, done.is_ok());
        self.passed(done, &format!("{change:?} of {name}, {first}+{sectors}"))
    }

    async fn flush(&self, queue: &Queue) -> Result<(), String> {
        let Some((name, disk)) = self.begin(false) else { return Ok(()) };
        let issued = self.book.borrow_mut().issue_flush();
        let had_failed = self.has_failed.get();
        let done = disk.flush(&queue.port).await;
        if self.trace.is_some() {
            println!("flush: {done:?}");
        }
        self.end(&name);
        match done {
            Ok(()) if had_failed => Err("a flush has succeeded after one that has failed".into()),
            Ok(()) => {
                self.book.borrow_mut().flushed(&issued);
                Ok(())
            }
            Err(e) => {
                self.has_failed.set(true);
                self.passed(Err(e), "a flush")
            }
        }
    }

    /// Some steps of the store's background work: compaction, scrubbing, and passes if they are wanted.
    async fn run_background_task(&self, queue: &Queue) -> io::Result<()> {
        let live = self.live();
        match self.below(4) {
            0 => live.begin_scrub(),
            1 | 2 => live.begin_compaction(),
            _ => {}
        }
        for _ in 0..1 + self.below(12) {
            if live.run_background_task(&queue.port, &Pace::unbounded()).await?
                == BackgroundTask::Idle
            {
                break;
            }
        }
        Ok(())
    }

    /// Finishes all background work, with a check of all content.
    pub(super) async fn tend_to_the_end(&self, queue: &Queue) -> io::Result<()> {
        let live = self.live();
        live.begin_scrub();
        while live.run_background_task(&queue.port, &Pace::unbounded()).await?
            == BackgroundTask::Ran
        {}
        Ok(())
    }

    /// Executes an operation on whole volumes, if there is one.
    async fn do_deed(&self, queue: &Queue) -> Result<(), String> {
        let deed = {
            let random = &mut *self.random.borrow_mut();
            self.book.borrow_mut().choose(random, self.sizes, self.mix.alters)
        };
        match deed {
            Some(deed) => self.carry_out(queue, deed).await,
            None => Ok(()),
        }
    }

    pub(super) async fn carry_out(&self, queue: &Queue, deed: Deed) -> Result<(), String> {
        self.book.borrow_mut().hold(&deed, true);
        while deed.is_alone() && self.book.borrow_mut().entry(deed.name()).uses > 0 {
            if let Err(e) = queue.port.io.sleep(AGAIN).await {
                return self.passed(Err(e), "a wait");
            }
        }
        if deed.is_alone() {
            // An open volume is in use.
            drop(self.disks.borrow_mut().remove(deed.name()));
        }
        self.book.borrow_mut().issue(&deed);
        let flush = self.book.borrow_mut().issue_flush();
        let operation = self.operation(&deed)?;
        let done = self.live().operate(&queue.port, operation).await.map(drop);
        if self.trace.is_some() {
            println!("{deed:?}: {done:?}");
        }
        match done.is_err() && deed.is_alteration() {
            true => self.book.borrow_mut().fail_alteration(&deed, self.is_in_memory(&deed)),
            false => self.book.borrow_mut().answer(&deed, done.is_ok()),
        }
        self.book.borrow_mut().hold(&deed, false);
        let name = self.book.borrow().name_of(&deed).clone();
        // Its state in memory is known, unless a sync has failed: then it is not used.
        if done.is_ok() || !self.live().is_faulty() {
            self.open_again(&name)?;
        } else if let Some(entry) = self.book.borrow_mut().entries.get_mut(&name) {
            entry.is_held = true;
        }
        if done.is_ok() {
            // All writes that were answered before are durable with it.
            self.book.borrow_mut().flushed(&flush);
        }
        self.passed(done, &format!("{deed:?}"))
    }

    /// Whether memory has a rename or resize.
    fn is_in_memory(&self, deed: &Deed) -> bool {
        match deed {
            Deed::Rename { to, .. } => self.live().volume(to).is_some(),
            Deed::Resize { name, sectors } => {
                let found = self.live().volume_called(name);
                found.is_some_and(|found| found.blocks == sectors / PER_BLOCK)
            }
            _ => false,
        }
    }

    fn operation(&self, deed: &Deed) -> Result<Operation, String> {
        let number =
            |name: &String| self.live().volume(name).ok_or(format!("{name} is not there any more"));
        let called = |name: &String| Name::new(name).ok_or("no name".to_owned());
        Ok(match deed {
            Deed::Create { name, sectors, domain } => {
                Operation::Create(called(name)?, sectors / PER_BLOCK, *domain)
            }
            Deed::Share { name, of, is_snapshot: true } => {
                Operation::Snapshot(called(name)?, number(of)?)
            }
            Deed::Share { name, of, .. } => Operation::Clone(called(name)?, number(of)?),
            Deed::Rollback { name, to } => Operation::Rollback(number(name)?, number(to)?),
            Deed::Delete { name } => Operation::Delete(number(name)?),
            Deed::Rename { name, to } => Operation::Rename(number(name)?, called(to)?),
            Deed::Resize { name, sectors } => Operation::Resize(number(name)?, sectors / PER_BLOCK),
        })
    }

    /// Opens all existing volumes.
    pub(super) fn open_all(&self) -> Result<(), String> {
        let names: Vec<String> = self.book.borrow().entries.keys().cloned().collect();
        names.iter().try_for_each(|name| self.open_again(name))
    }

    /// Opens a volume without a disk, if one has that name.
    fn open_again(&self, name: &str) -> Result<(), String> {
        let known = self.book.borrow().entries.get(name).map(|entry| entry.is_snapshot);
        let Some(is_snapshot) = known else { return Ok(()) };
        let disk = (self.open)(name, !is_snapshot)?;
        self.disks.borrow_mut().insert(name.to_owned(), Rc::new(disk));
        Ok(())
    }

    /// Whether this result is allowed.
    fn passed(&self, done: io::Result<()>, what: &str) -> Result<(), String> {
        match done {
            Err(e) if e.kind() == io::ErrorKind::StorageFull && self.may_be_full => Ok(()),
            Err(e) if !self.may_fail => Err(format!("{what} failed where nothing was wrong: {e}")),
            _ => Ok(()),
        }
    }
}
