//! The counting of a queue's thread.
//!
//! Requests of one kind that were taken together and are answered together have one latency. So
//! they are counted together, which costs most requests a comparison and two additions.

use std::sync::atomic::Ordering::Relaxed;

use super::counts::{QueueCounters, add};
use super::histogram::bucket;
use super::layout::{ERRORS, HISTOGRAM, KIND_WORDS, KINDS_AT, SECTORS, SUBMITTED, SUM_NS};
use super::page::Page;
use crate::path::work::Action;
use crate::trace::Stages;

/// The kind of a request: the number of its block in the queue's page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    /// The request was refused before its kind was known. It has no block.
    Refused,
}

/// Number of kinds with a block.
const KINDS: usize = 4;

impl Kind {
    /// The kind of an action. A flush with data counts as a write, and so do a barrier and zeros. A
    /// query for data counts as a read.
    #[inline]
    pub(crate) fn of(action: Action) -> Kind {
        match action {
            Action::Read | Action::Status => Kind::Read,
            Action::Write | Action::FlushThenWrite | Action::Barrier | Action::Zero => Kind::Write,
            Action::Flush => Kind::Flush,
            Action::Discard => Kind::Discard,
        }
    }

    fn block(self) -> usize {
        debug_assert!(self != Kind::Refused);
        KINDS_AT + self as usize % KINDS * KIND_WORDS
    }
}

/// Requests that are counted together.
struct Run {
    kind: Kind,
    taken_ns: u64,
    answered_ns: u64,
    requests: u64,
    sectors: u64,
}

/// The access of one path to its page.
pub(crate) struct Account {
    page: Page,
    /// Requests of each kind that were begun, as the page is to show them.
    submitted: [u64; KINDS + 1],
    run: Run,
}

impl Account {
    /// An account of a path with nothing in flight.
    pub(crate) fn new(page: Page) -> Account {
        page.begin();
        let words = page.words();
        let mut submitted = [0; KINDS + 1];
        for (i, n) in submitted.iter_mut().take(KINDS).enumerate() {
            *n = words[KINDS_AT + i * KIND_WORDS + SUBMITTED].load(Relaxed);
        }
        let run =
            Run { kind: Kind::Read, taken_ns: u64::MAX, answered_ns: 0, requests: 0, sectors: 0 };
        Account { page, submitted, run }
    }

    pub(crate) fn page(&self) -> &Page {
        &self.page
    }

    #[inline]
    pub(crate) fn counters(&self) -> QueueCounters<'_> {
        self.page.counters()
    }

    /// Counts a request that begins.
    #[inline]
    pub(crate) fn submitted(&mut self, kind: Kind) {
        let n = &mut self.submitted[kind as usize];
        *n = n.wrapping_add(1);
    }

    /// Counts a request that was answered without an error.
    #[inline]
    pub(crate) fn done(&mut self, kind: Kind, stages: &Stages, sectors: u64) {
        if stages.taken_ns != self.run.taken_ns || kind != self.run.kind {
            self.settle();
            self.run.kind = kind;
            self.run.taken_ns = stages.taken_ns;
            self.run.answered_ns = stages.answered_ns;
        }
        self.run.requests = self.run.requests.wrapping_add(1);
        self.run.sectors = self.run.sectors.wrapping_add(sectors);
    }

    /// Counts a request that was answered with an error.
    #[cold]
    pub(crate) fn failed(&mut self, kind: Kind, stages: &Stages) {
        if kind == Kind::Refused {
            return self.counters().refused.add(1);
        }
        self.done(kind, stages, 0);
        add(&self.page.words()[kind.block() + ERRORS], 1);
    }

    /// Writes all answered requests to the page. Call it when a batch is answered.
    #[inline]
    pub(crate) fn settle(&mut self) {
        if self.run.requests > 0 {
            self.write();
        }
    }

    /// Writes everything to the page. Call it before the thread may wait.
    #[inline]
    pub(crate) fn settle_all(&mut self) {
        self.settle();
        let words = self.page.words();
        for (i, n) in self.submitted.iter().take(KINDS).enumerate() {
            words[KINDS_AT + i * KIND_WORDS + SUBMITTED].store(*n, Relaxed);
        }
    }

    #[inline(never)]
    fn write(&mut self) {
        let Run { kind, taken_ns, answered_ns, requests, sectors } = self.run;
        let latency_ns = answered_ns.saturating_sub(taken_ns);
        let (words, block) = (self.page.words(), kind.block());
        add(&words[block + SECTORS], sectors);
        add(&words[block + SUM_NS], latency_ns.wrapping_mul(requests));
        self.page.raise_max(block, latency_ns);
        add(&words[block + HISTOGRAM + bucket(latency_ns)], requests);
        (self.run.requests, self.run.sectors) = (0, 0);
        // The next batch has its own time.
        self.run.taken_ns = u64::MAX;
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.settle_all();
    }
}
