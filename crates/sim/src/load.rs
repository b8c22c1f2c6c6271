//! Requests from several queues, several at a time each.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_disk::SyncWitness;
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::arena::Span;
use ferrite_simio::SimWorld;

use crate::format::{Disk, Queue};
use crate::model::{Change, Model, Ticket};
use crate::stamp;

/// Sectors of the largest request.
pub const MAX_REQUEST_SECTORS: u64 = 128;

/// The relative frequency of each kind of request.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Writes of zeros.
    pub zeroes: u64,
    /// Sectors of the largest request.
    pub max_sectors: u64,
    /// The percentage of requests near a hot spot of the format.
    pub near: u64,
    /// Requests have the largest size, adjacent, from the end to the beginning.
    pub whole: bool,
}

/// The state that all tasks of one load share.
pub struct Load<D> {
    /// The disk; each round has its own.
    pub disk: D,
    /// The allowed contents.
    pub model: Rc<RefCell<Model>>,
    /// The seed of the contents.
    pub seed: u64,
    /// The number of the next write; it continues from round to round.
    pub numbers: Rc<Cell<u64>>,
    /// The source of the next operations.
    pub random: RefCell<SplitMix64>,
    /// Requests that have not been issued yet.
    pub left: Cell<u64>,
    /// Tasks that have not ended.
    pub tasks: Cell<usize>,
    /// See [`crate::plan::Plan::trace`].
    pub trace: Option<u64>,
    /// The machine, which stops some steps after the beginning of a certain flush.
    pub world: SimWorld,
    /// Flushes until then; 0: it does not stop.
    pub flushes_left: Cell<u64>,
    /// The number of those steps.
    pub steps_into_flush: u64,
    /// The mix of requests.
    pub mix: Mix,
    /// See [`crate::format::Format::hot_spots`].
    pub hot_spots: Vec<u64>,
    /// Whether requests may fail.
    pub may_fail: bool,
    /// Whether the guest continues after a failed flush.
    pub goes_on: bool,
    /// Failed flushes while the guest continued.
    pub failures: Cell<u64>,
    /// The only faults are failed syncs.
    pub syncs_fail: bool,
    /// A flush has failed because of one.
    pub told_of_sync: Cell<bool>,
    /// A sync has failed, whichever request it was for.
    pub witness: Arc<Witness>,
    /// A flush has failed: no more requests are issued, as by a backend.
    pub flush_failed: Cell<bool>,
    /// Whether the medium may have no space.
    pub full: bool,
    /// An event of the medium during the load.
    pub midway: Midway,
    /// The first fault.
    pub trouble: RefCell<Option<String>>,
}

/// An action that is executed once, when only `left` requests are left.
#[derive(Default)]
pub struct Midway {
    /// The number of requests.
    pub left: u64,
    /// The action.
    pub work: Option<Box<dyn Fn() -> io::Result<()>>>,
}

/// A backend's record for the next process: no write succeeds any more, so writes that were answered during the sync
/// may be lost.
#[derive(Default)]
pub struct Witness(AtomicBool);

impl Witness {
    /// Whether a sync has failed.
    pub fn knows(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl SyncWitness for Witness {
    fn sync_has_failed(&self, _: &io::Error) {
        self.0.store(true, Ordering::Relaxed);
    }
}

enum Request {
    Read(u64, u64),
    Change(u64, u64, Change),
    Flush,
}

impl<D: Disk> Load<D> {
    /// A task: issues one request after the other, with its data in `buf`.
    pub async fn task(self: Rc<Self>, queue: Queue, buf: Span) {
        while self.left.get() > 0 && !self.flush_failed.get() && self.trouble.borrow().is_none() {
            self.left.set(self.left.get() - 1);
            if let (Some(work), true) = (&self.midway.work, self.left.get() == self.midway.left)
                && let Err(e) = work()
            {
                self.trouble.borrow_mut().get_or_insert(format!("the simulator: {e}"));
            }
            let done = match self.next() {
                Request::Read(first, sectors) => self.read(&queue, buf, first, sectors).await,
                Request::Change(first, sectors, change) => {
                    self.change(&queue, buf, first, sectors, change).await
                }
                Request::Flush => self.flush(&queue).await,
            };
            if let Err(text) = done {
                self.trouble.borrow_mut().get_or_insert(text);
            }
        }
        self.tasks.set(self.tasks.get() - 1);
    }

    fn next(&self) -> Request {
        let mut random = self.random.borrow_mut();
        let mix = self.mix;
        let all = mix.reads + mix.writes + mix.flushes + mix.discards + mix.zeroes;
        let mut kind = random.below(all);
        let mut is = |share: u64| {
            let yes = kind < share;
            kind = kind.wrapping_sub(share);
            yes
        };
        if is(mix.flushes) {
            return Request::Flush;
        }
        let (reads, writes, discards) = (is(mix.reads), is(mix.writes), is(mix.discards));
        let large = !writes && !reads;
        let (first, sectors) = self.range(&mut random, large);
        if reads {
            Request::Read(first, sectors)
        } else if writes {
            let number = self.numbers.get();
            self.numbers.set(number + 1);
            Request::Change(first, sectors, Change::Write(number))
        } else if discards {
            Request::Change(first, sectors, Change::Discard)
        } else {
            Request::Change(first, sectors, Change::Zero)
        }
    }

    /// Chooses a range. Many requests are small and near changes of metadata. Requests without data may be `large`.
    fn range(&self, random: &mut SplitMix64, large: bool) -> (u64, u64) {
        let all = self.disk.sectors();
        let mut max = [1, 8, self.mix.max_sectors][random.below(3) as usize];
        if large && random.below(12) == 0 {
            max = all;
        }
        let sectors = 1 + random.below(max.min(all));
        let sectors = if random.below(4) == 0 { sectors.next_multiple_of(8) } else { sectors };
        let sectors = sectors.min(if large { all } else { all.min(MAX_REQUEST_SECTORS) });
        if self.mix.whole {
            let first = self.left.get() % all.div_ceil(MAX_REQUEST_SECTORS) * MAX_REQUEST_SECTORS;
            return (first, MAX_REQUEST_SECTORS.min(all - first));
        }
        let first = if random.below(100) < self.mix.near {
            let spot = self.hot_spots[random.below(self.hot_spots.len() as u64) as usize];
            (spot + random.below(24)).saturating_sub(12)
        } else {
            random.below(all)
        };
        (first.min(all - sectors), sectors)
    }

    fn trace(&self, ticket: Ticket, what: &dyn std::fmt::Debug) {
        if self.trace.is_some_and(|sector| ticket.range().contains(&sector)) {
            println!("{:?}: {what:?}", ticket.range());
        }
    }

    async fn read(&self, queue: &Queue, buf: Span, first: u64, sectors: u64) -> Result<(), String> {
        let ticket = self.model.borrow_mut().issue_read(first, sectors);
        let to = buf.slice(0, sectors as usize * stamp::SECTOR);
        let done = self.disk.read(queue, first * 512, to).await;
        let mut model = self.model.borrow_mut();
        match done {
            Ok(()) => {
                let mut bytes = vec![0; to.len()];
                queue.memory().copy_out(to, &mut bytes);
                let values = bytes.chunks_exact(stamp::SECTOR).zip(ticket.range());
                let found: Vec<_> = values.map(|(b, s)| stamp::read(b, self.seed, s)).collect();
                model.answer_read(ticket, Some(&found))
            }
            Err(e) => {
                model.answer_read(ticket, None)?;
                self.failed("read", ticket, &e)
            }
        }
    }

    async fn change(
        &self,
        queue: &Queue,
        buf: Span,
        first: u64,
        sectors: u64,
        change: Change,
    ) -> Result<(), String> {
        let ticket = self.model.borrow_mut().issue(first, sectors, change);
        self.trace(ticket, &change);
        let (offset, len) = (first * 512, sectors * 512);
        let (what, done) = match change {
            Change::Write(number) => {
                let from = buf.slice(0, len as usize);
                let mut bytes = vec![0; from.len()];
                for (sector, to) in ticket.range().zip(bytes.chunks_exact_mut(stamp::SECTOR)) {
                    stamp::write(to, self.seed, sector, number);
                }
                queue.memory().copy_in(from, &bytes);
                ("write", self.disk.write(queue, offset, from).await)
            }
            Change::Zero => ("write of zeros", self.disk.write_zeroes(queue, offset, len).await),
            Change::Discard => ("discard", self.disk.discard(queue, offset, len).await),
        };
        // The guest gets the answer that the medium does not support it.
        let cannot = matches!(&done, Err(e) if e.kind() == io::ErrorKind::Unsupported);
        self.trace(ticket, &(change, &done));
        self.model.borrow_mut().answer(ticket, done.is_ok());
        match done {
            Ok(()) => Ok(()),
            Err(_) if cannot && change == Change::Discard => Ok(()),
            Err(e) => self.failed(what, ticket, &e),
        }
    }

    async fn flush(&self, queue: &Queue) -> Result<(), String> {
        if self.flushes_left.get() > 0 {
            self.flushes_left.set(self.flushes_left.get() - 1);
            if self.flushes_left.get() == 0 && !self.world.stopped() {
                self.world.stop_at(Some(self.world.step() + self.steps_into_flush));
            }
        }
        let issued = self.model.borrow_mut().issue_flush();
        let failures = self.failures.get();
        let done = self.disk.flush(queue).await;
        if self.trace.is_some() {
            println!("flush: {done:?}");
        }
        match done {
            // A flush concurrent with a failed one may not have got the failure.
            Ok(()) if !self.flush_failed.get() && failures == self.failures.get() => {
                self.model.borrow_mut().flushed(issued);
                Ok(())
            }
            Ok(()) => Ok(()),
            Err(_) if self.may_fail => {
                self.failures.set(self.failures.get() + 1);
                self.told_of_sync.set(self.syncs_fail);
                self.flush_failed.set(!self.goes_on);
                Ok(())
            }
            Err(e) => Err(format!("a flush failed where nothing was wrong: {e}")),
        }
    }

    fn failed(&self, what: &str, ticket: Ticket, e: &io::Error) -> Result<(), String> {
        let full = self.full && e.kind() == io::ErrorKind::StorageFull;
        if self.may_fail || full {
            return Ok(());
        }
        let range = ticket.range();
        Err(format!("a {what} of sectors {range:?} failed where nothing was wrong: {e}"))
    }
}
