//! Shared commits: one runs at a time, for all flushes that wait for it.
//!
//! A flush is answered by a commit that began after the flush had come: all earlier writes were dirty then. So flushes
//! that come while a commit runs wait for the next one, which serves all of them: instead of 16 commits, 16 concurrent
//! flushes cost two. The present commit cannot serve them, since it may lack writes from just before they came.
//!
//! Commits are numbered as they begin ([`Turns`]). A waiter gets the lock in the order of arrival. Then either a commit
//! of a sufficient number has ended, or the waiter makes one. All waiters of a failed commit get its error. A commit
//! that was dropped with its task answers no flush.
//!
//! # A failed sync
//! The kernel has dropped unwritten data, and the next sync does not report it. So from then on no sync, no commit and
//! no flush succeeds, not even a flush that an earlier commit could answer, until the image is opened again. The
//! journal is void at once: the next process must not recover data that may be lost. Before that the witnesses are
//! told, which record the failure for the next process: changes that another task answers meanwhile are not in the
//! journal any more.
//!
//! The kernel reports a lost write once for each open file, to any of the concurrent syncs. So there is one at a time
//! ([`sync`](Commits::sync)): the next sync after a failed one finds the failure, and does not report success for data
//! that are lost. A sync that is dropped with its task counts as failed, unless it is known to have succeeded; if that
//! is unknown, the journal stays.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ferrite_io::reactor::{Io, Unheard};
use ferrite_io::shared_lock::{Held, SharedLock};

use super::void::Void;
use super::witnesses::{SyncWitness, Witnesses};
use crate::{Port, Rare};

/// The commits of a disk, which concurrent flushes share.
#[derive(Default)]
pub struct Commits {
    /// Held by the present commit.
    running: SharedLock,
    turns: Mutex<Turns>,
    /// Held by the present sync.
    syncing: SharedLock,
    /// A sync has failed. Set while `syncing` is held.
    faulty: AtomicBool,
    /// Makes the journal void, if there is one.
    void: OnceLock<Void>,
    /// They are told of a failed sync before any request is answered with it.
    witnesses: Witnesses,
    /// Whether witnesses are told of an unknown outcome, too.
    serves_many: bool,
}

impl fmt::Debug for Commits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commits").field("faulty", &self.faulty).finish_non_exhaustive()
    }
}

impl Commits {
    /// Commits of a disk that does not share its medium.
    pub fn new() -> Commits {
        Commits::default()
    }

    /// Commits of a medium that several disks share. Witnesses are told of an unknown outcome as of a failure: the disk
    /// whose task was dropped may be gone, and the others would not learn of it.
    pub fn of_many() -> Commits {
        Commits { serves_many: true, ..Commits::default() }
    }

    /// Sets the journal that a failed sync makes void. An image has at most one.
    pub fn end_with(&self, journal: Option<Void>) {
        if let Some(void) = journal {
            // The first one is the only one.
            let _ = self.void.set(void);
        }
    }

    /// Adds a witness of failed syncs, also of earlier ones.
    pub fn witness(&self, witness: Weak<dyn SyncWitness>) {
        self.witnesses.add(witness, || self.is_faulty());
    }

    /// Marks a sync as failed, for all callers. `true`: it is the first.
    fn end(&self) -> bool {
        !self.faulty.swap(true, Ordering::AcqRel)
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the outcome of a commit that began after this call: of `commit`, or of another task's; then `commit`
    /// is dropped before its first step.
    ///
    /// # Errors
    /// Those of the commit.
    pub async fn join(
        &self,
        io: &Io,
        commit: impl Future<Output = io::Result<()>>,
    ) -> io::Result<()> {
        let arrival = self.turns().arrive();
        let _running = self.running.lock(io).await?;
        self.check()?;
        if let Some(outcome) = self.turns().outcome(arrival) {
            return outcome;
        }
        let turn = self.turns().begin();
        let done = commit.await;
        self.turns().end(turn, &done);
        done
    }

    /// No commit runs while this is held. The holder's own commits answer no flush.
    pub async fn pause(&self, io: &Io) -> io::Result<Held<'_>> {
        let running = self.running.lock(io).await?;
        self.check()?;
        Ok(running)
    }

    /// Syncs the image. After one failure all later syncs fail.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub async fn sync(&self, port: &Port) -> io::Result<()> {
        let _alone = self.syncing.lock(&port.io).await?;
        self.check()?;
        let unheard = |unheard| match unheard {
            Unheard::Failed => {
                self.fail(&io::Error::other("a sync has failed after its task had ended"))
            }
            Unheard::Unknown => self.doubt(),
        };
        port.io.sync_heard(port.files[0], unheard).await.inspect_err(|e| self.fail(e))
    }

    /// Marks the state of the medium as unknown: nothing is committed from now on. The next process may recover
    /// answered changes, as after a death in the middle of the sync.
    pub fn doubt(&self) {
        if self.serves_many {
            let e = io::Error::other("the result of a sync is unknown");
            self.witnesses.tell(&e, || self.end());
        } else {
            self.end();
        }
    }

    /// Handles a failed sync: the kernel has dropped unwritten data. Witnesses are told first: once the journal is
    /// void, the next process does not find changes that are answered meanwhile, and must not vouch for them.
    fn fail(&self, e: &io::Error) {
        if self.witnesses.tell(e, || self.end()) {
            Rare::SyncFailed.taken();
            self.void.get().inspect(|void| void.set());
        }
    }

    /// Whether a sync has failed.
    #[inline]
    pub fn is_faulty(&self) -> bool {
        self.faulty.load(Ordering::Acquire)
    }

    /// The error after a failed sync.
    fn check(&self) -> io::Result<()> {
        if !self.is_faulty() {
            return Ok(());
        }
        let text = "a sync of this image has failed, and what was written before may be lost: \
                    nothing is committed until it is opened again";
        Err(io::Error::other(text))
    }
}

/// The first commit that can answer a flush.
#[derive(Clone, Copy)]
struct Arrival(u64);

/// A commit that has begun.
struct Turn(u64);

/// The commits that have begun, and the result of the last one that was not dropped.
#[derive(Default)]
struct Turns {
    begun: u64,
    /// The number of that last one; 0: none has ended.
    ended: u64,
    failure: Option<Failure>,
}

impl Turns {
    fn arrive(&self) -> Arrival {
        Arrival(self.begun + 1)
    }

    fn outcome(&self, arrival: Arrival) -> Option<io::Result<()>> {
        let failed = || self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.error()));
        (self.ended >= arrival.0).then(failed)
    }

    fn begin(&mut self) -> Turn {
        self.begun += 1;
        Turn(self.begun)
    }

    fn end(&mut self, turn: Turn, done: &io::Result<()>) {
        self.ended = turn.0;
        self.failure = done.as_ref().err().map(Failure::of);
    }
}

/// An error that is returned to several callers.
#[derive(Clone, Debug)]
pub struct Failure {
    kind: io::ErrorKind,
    errno: Option<i32>,
    text: String,
}

impl Failure {
    /// Stores the parts of an error that can be repeated.
    pub fn of(e: &io::Error) -> Failure {
        Failure { kind: e.kind(), errno: e.raw_os_error(), text: e.to_string() }
    }

    /// Makes the error again, for one more caller.
    pub fn error(&self) -> io::Error {
        match self.errno {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::Error::new(self.kind, self.text.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(outcome: Option<io::Result<()>>) -> Option<(io::ErrorKind, Option<i32>, String)> {
        let e = outcome?.err()?;
        Some((e.kind(), e.raw_os_error(), e.to_string()))
    }

    #[test]
    fn who_comes_before_a_commit_begins_is_answered_by_it_and_who_comes_later_is_not() {
        let mut turns = Turns::default();
        let before = turns.arrive();
        assert!(turns.outcome(before).is_none());
        let turn = turns.begin();
        let during = turns.arrive();
        turns.end(turn, &Ok(()));
        assert!(matches!(turns.outcome(before), Some(Ok(()))));
        assert!(turns.outcome(during).is_none(), "what it wrote may have been missed");
        let turn = turns.begin();
        turns.end(turn, &Ok(()));
        assert!(matches!(turns.outcome(during), Some(Ok(()))));
    }

    #[test]
    fn all_who_waited_for_a_commit_that_failed_get_its_error() {
        let mut turns = Turns::default();
        let waiting = [turns.arrive(), turns.arrive()];
        let turn = turns.begin();
        let later = turns.arrive();
        turns.end(turn, &Err(io::Error::from_raw_os_error(28)));
        for arrival in waiting {
            let (kind, errno, _) = failed(turns.outcome(arrival)).unwrap();
            assert_eq!((kind, errno), (io::ErrorKind::StorageFull, Some(28)));
        }
        assert!(turns.outcome(later).is_none());
        let turn = turns.begin();
        turns.end(turn, &Err(io::Error::new(io::ErrorKind::InvalidData, "an entry")));
        let (kind, errno, text) = failed(turns.outcome(later)).unwrap();
        assert_eq!((kind, errno, &text[..]), (io::ErrorKind::InvalidData, None, "an entry"));
    }

    #[test]
    fn a_commit_that_was_dropped_answers_nobody() {
        let mut turns = Turns::default();
        let waiting = turns.arrive();
        let _dropped = turns.begin();
        assert!(turns.outcome(waiting).is_none());
        let turn = turns.begin();
        turns.end(turn, &Ok(()));
        assert!(matches!(turns.outcome(waiting), Some(Ok(()))));
    }
}
