//! The counters' page of one queue.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use ferrite_host::shm::Shm;

use super::counts::QueueCounters;
use super::layout::{
    HISTOGRAM, KIND_WORDS, KINDS_AT, MAX_NS, PAGE_BYTES, PAGE_WORDS, SPACE_SINCE_AT, SUBMITTED,
};

/// One queue's page, mapped.
#[derive(Clone, Debug)]
pub(crate) struct Page(Arc<Shm>);

/// A page, while a path keeps it mapped.
#[derive(Debug, Default)]
pub(super) struct WeakPage(Weak<Shm>);

impl WeakPage {
    pub(super) fn upgrade(&self) -> Option<Page> {
        self.0.upgrade().map(Page)
    }
}

impl Page {
    /// The page in a mapping of the size of a page.
    pub(super) fn of(shm: Shm) -> Page {
        debug_assert_eq!(shm.len(), PAGE_BYTES);
        Page(Arc::new(shm))
    }

    /// A page in memory of this process.
    pub(super) fn private() -> io::Result<Page> {
        Shm::private(PAGE_BYTES).map(Page::of)
    }

    pub(super) fn downgrade(&self) -> WeakPage {
        WeakPage(Arc::downgrade(&self.0))
    }

    #[inline]
    pub(super) fn words(&self) -> &[AtomicU64; PAGE_WORDS] {
        match self.0.words().first_chunk() {
            Some(words) => words,
            None => unreachable!("it is as long as a page"),
        }
    }

    #[inline]
    pub(crate) fn counters(&self) -> QueueCounters<'_> {
        QueueCounters::of(self.words())
    }

    /// A copy of the page's words.
    pub(super) fn copy(&self) -> [u64; PAGE_WORDS] {
        std::array::from_fn(|i| self.words()[i].load(Relaxed))
    }

    /// Counts all requests of a dead process as ended, since the queue begins with nothing in
    /// flight.
    pub(super) fn begin(&self) {
        let counters = self.counters();
        let (waits, ended) = (counters.space_waits, counters.space_waits_ended);
        ended.add(waits.value().wrapping_sub(ended.value()));
        let words = self.words();
        for kind in (KINDS_AT..PAGE_WORDS).step_by(KIND_WORDS) {
            let histogram = &words[kind + HISTOGRAM..kind + KIND_WORDS];
            let answered =
                histogram.iter().fold(0u64, |n, word| n.wrapping_add(word.load(Relaxed)));
            words[kind + SUBMITTED].store(answered, Relaxed);
        }
    }

    /// Counts a request that begins to wait for space.
    pub(crate) fn space_ends(&self) {
        let counters = self.counters();
        if counters.space_waits.value() == counters.space_waits_ended.value() {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
            self.words()[SPACE_SINCE_AT].store(now, Relaxed);
        }
        counters.space_waits.add(1);
    }

    /// Raises the longest latency of a kind.
    pub(super) fn raise_max(&self, kind: usize, latency_ns: u64) {
        let max = &self.words()[kind + MAX_NS];
        if latency_ns > max.load(Relaxed) {
            max.store(latency_ns, Relaxed);
        }
    }
}
