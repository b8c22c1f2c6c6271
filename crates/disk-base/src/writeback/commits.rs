//! One commit at a time, for all that wait for it.
//!
//! A flush is answered by a commit that began after the flush had come: what was written before the
//! flush was dirty then. So flushes that come while a commit runs wait for the next one, which
//! serves all of them: 16 at once cost two commits, and not 16. The commit that runs is no good to
//! them, since it may have missed what was written just before they came.
//!
//! Commits are numbered as they begin ([`Turns`]). Who waits gets the lock in the order of coming,
//! and finds either that a commit of a high enough number has ended, or that it is his to make. All
//! who waited for a commit that has failed get its error. A commit that was dropped with its task
//! answers nobody.
//!
//! # A sync that fails
//! It has made the kernel forget what was not written, and the next sync is told nothing of it. So
//! from then on no sync, no commit and no flush succeeds, also those that an earlier commit could
//! answer, until the image is opened again. The journal is void at once: the next process does not
//! bring back what is perhaps lost. Before that the witnesses are told, who remember it for the next
//! process: what another task has answered meanwhile is not in its journal any more.
//!
//! The kernel tells of a lost write once for each open file, to any of the syncs that are under way.
//! So there is one at a time ([`sync`](Commits::sync)): whoever comes after one that has failed finds
//! that, and does not get a success for what another was told is lost. A sync that is dropped with
//! its task counts as failed, unless it is known to have succeeded; if nobody can know, the journal
//! stays.

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

/// The commits of a disk, which flushes that come at once share.
#[derive(Default)]
pub struct Commits {
    /// Held by the commit that runs.
    running: SharedLock,
    turns: Mutex<Turns>,
    /// Held by the sync that is under way.
    syncing: SharedLock,
    /// A sync has failed. Set while `syncing` is held.
    faulty: AtomicBool,
    /// The journal's, if there is one.
    void: OnceLock<Void>,
    /// They know of a failed sync before anybody is told.
    witnesses: Witnesses,
    /// Whether they are told of a doubt, too.
    serves_many: bool,
}

impl fmt::Debug for Commits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commits").field("faulty", &self.faulty).finish_non_exhaustive()
    }
}

impl Commits {
    /// Commits of a disk that has its medium for itself.
    pub fn new() -> Commits {
        Commits::default()
    }

    /// Commits of a medium that several disks have their data on. A doubt is a failure to its witnesses: the
    /// disk whose task was dropped may be gone, and the others have heard of nothing.
    pub fn of_many() -> Commits {
        Commits { serves_many: true, ..Commits::default() }
    }

    /// Gives the journal that a failed sync makes void. An image has one at most.
    pub fn end_with(&self, journal: Option<Void>) {
        if let Some(void) = journal {
            // The first is the only one.
            let _ = self.void.set(void);
        }
    }

    /// Adds who is told of a failed sync, also of one that was before.
    pub fn witness(&self, witness: Weak<dyn SyncWitness>) {
        self.witnesses.add(witness, || self.is_faulty());
    }

    /// From now on everybody finds that a sync has failed. `true`: the first time.
    fn end(&self) -> bool {
        !self.faulty.swap(true, Ordering::AcqRel)
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the outcome of a commit that began after this was called: of `commit`, or of another's, and
    /// then `commit` is dropped before its first step.
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

    /// No commit runs as long as this is held. What the holder commits answers nobody else.
    pub async fn pause(&self, io: &Io) -> io::Result<Held<'_>> {
        let running = self.running.lock(io).await?;
        self.check()?;
        Ok(running)
    }

    /// Syncs the image. One sync that fails is the last.
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

    /// Nobody knows any more what is on the medium: nothing is committed from now on. The next process
    /// may recover what was answered, as after a death in the middle of it.
    pub fn doubt(&self) {
        if self.serves_many {
            let e = io::Error::other("the result of a sync is unknown");
            self.witnesses.tell(&e, || self.end());
        } else {
            self.end();
        }
    }

    /// The kernel has forgotten what was not written. Witnesses know it first: from the moment that the
    /// journal is void the next process does not find what is answered meanwhile, and must not vouch for it.
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

    /// Refuses to go on after that.
    fn check(&self) -> io::Result<()> {
        if !self.is_faulty() {
            return Ok(());
        }
        let text = "a sync of this image has failed, and what was written before may be lost: \
                    nothing is committed until it is opened again";
        Err(io::Error::other(text))
    }
}

/// The first commit that is good enough for a flush.
#[derive(Clone, Copy)]
struct Arrival(u64);

/// A commit that has begun.
struct Turn(u64);

/// Which commits have begun, and how the last one ended that was not dropped.
#[derive(Default)]
struct Turns {
    begun: u64,
    /// Its number; 0: none has ended.
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

/// An error that several are told.
#[derive(Clone, Debug)]
pub struct Failure {
    kind: io::ErrorKind,
    errno: Option<i32>,
    text: String,
}

impl Failure {
    /// Keeps what can be told again of an error.
    pub fn of(e: &io::Error) -> Failure {
        Failure { kind: e.kind(), errno: e.raw_os_error(), text: e.to_string() }
    }

    /// Makes the error anew, for one more who is told.
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
