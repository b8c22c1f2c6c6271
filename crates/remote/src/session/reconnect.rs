//! The steps when a connection is lost.
//!
//! A request without an answer may or may not have been executed, and the server may still execute it. To send it again
//! is right only if the server does not execute the first one later: by then newer data of the guest may be there. So
//! 1. a server of ours is told the session's name. It ends the rest of the older connection before it answers.
//! 2. With any other server changes are sent again only after `drain_s` seconds without a connection. If the server did not
//!    end the old connection itself, these begin when it answers again: it may have been stopped with requests before it.
//!
//! Requests that have failed meanwhile, as the server was lost for too long, may be executed late likewise. So both
//! rules hold for each change that had no answer, whether it is sent again or not.
//!
//! Reads and flushes may be executed as often as one likes. They wait likewise, since they may depend on the order.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ferrite_nbd::client::Refusal;

use super::{Lost, Phase, Session, libc_eio};
use crate::link::{self, Link, Waiting};

/// The pause before the second attempt; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// The time of one attempt.
const ATTEMPT: Duration = Duration::from_secs(10);

/// A connection that has lasted so long was a good one.
const STEADY: Duration = Duration::from_secs(5);

/// The pause before the next connection, after one that has lasted `lived` and was preceded by a pause: a server that
/// accepts and disconnects is not asked in a loop.
pub(super) fn pause_after(lived: Duration, before: Duration) -> Duration {
    match lived >= STEADY {
        true => Duration::ZERO,
        false => (before * 2).clamp(FIRST_PAUSE, MAX_PAUSE),
    }
}

impl Session {
    /// Takes back what has no answer, and fails what has waited for too long.
    pub(super) fn lost(&self, why: &Lost) {
        if self.has_ended.get() {
            return;
        }
        let uri = &self.disk.uri;
        let longest = uri.deadline + uri.reconnect;
        let now = Instant::now();
        let late = {
            let mut inner = self.inner.borrow_mut();
            inner.take_back();
            let is_unsettled = inner.waiting.iter().any(|part| part.sent && part.command.changes());
            self.is_unsettled.set(self.is_unsettled.get() || is_unsettled);
            self.was_silent.set(self.was_silent.get() || is_unsettled && !why.was_heard());
            let (late, waiting): (VecDeque<_>, VecDeque<_>) = inner
                .waiting
                .drain(..)
                .partition(|part| now.duration_since(part.op.born) >= longest);
            inner.waiting = waiting;
            late
        };
        late.into_iter().for_each(|part| part.ended(Some(libc_eio())));
        if self.disk.may_log() {
            tracing::warn!("{}: the connection is lost: {why}", self.disk.text);
        }
        if uri.reconnect.is_zero() {
            self.give_up("it is not connected again, as reconnect_s=0 says");
        }
    }

    /// From now on all requests of the disk fail.
    fn give_up(&self, why: &str) {
        tracing::error!(
            "{}: the disk fails from now on: {why}; close it and open it again",
            self.disk.text
        );
        self.disk.fail();
        self.fail_all(libc_eio());
    }

    /// Connects, and again until it succeeds. None: the disk has failed for good.
    pub(super) async fn connect(&self, lost_at: Instant, is_first: bool) -> Option<Link> {
        let (mut attempt, mut pause) = (0, FIRST_PAUSE);
        let limit =
            lost_at + self.disk.uri.reconnect.max(if is_first { ATTEMPT } else { Duration::ZERO });
        loop {
            if self.disk.has_failed() {
                self.fail_all(libc_eio());
                return None;
            }
            let now = Instant::now();
            if now >= limit && self.phase.get() == Phase::Takes {
                self.refuse();
            }
            let end = match self.phase.get() {
                Phase::Takes => limit.min(now + ATTEMPT),
                Phase::Refuses => now + ATTEMPT,
            };
            let wanted = self.disk.wanted(self.number);
            let waiting = Waiting::On(&self.io);
            match link::open(&waiting, &self.disk.address, attempt, wanted, end).await {
                Ok(link) => return self.connected(link, lost_at, is_first).await,
                Err(refusal) => self.say(&refusal),
            }
            attempt = attempt.wrapping_add(1);
            let until_limit = limit.saturating_duration_since(Instant::now());
            let some = match self.phase.get() {
                Phase::Takes => pause.min(until_limit.max(FIRST_PAUSE)),
                Phase::Refuses => pause,
            };
            // A failed sleep ends at once, and the next attempt has its own limit.
            let _ = self.io.sleep(some).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Uses a new connection if it is to the same disk, when nothing can come late any more.
    async fn connected(&self, link: Link, lost_at: Instant, is_first: bool) -> Option<Link> {
        if let Err(why) = self.disk.compare(&link.export) {
            self.give_up(&format!("the server's export has changed: {why}"));
            return None;
        }
        let drain = self.disk.uri.drain;
        let (since, is_unsafe) = match is_first {
            true => (self.disk.opened, self.disk.drains_first),
            // A server that was stopped has the old requests before it when it goes on, which is now.
            false if self.was_silent.get() => (Instant::now(), !link.export.fenced),
            false => (lost_at, !link.export.fenced && self.is_unsettled.get()),
        };
        let left = (since + drain).saturating_duration_since(Instant::now());
        if is_unsafe && !left.is_zero() {
            // The old connection's requests end meanwhile, or so it is hoped.
            let _ = self.io.sleep(left).await;
        }
        self.is_unsettled.set(false);
        self.was_silent.set(false);
        self.last_refusal.take();
        if !is_first && self.disk.may_log() {
            tracing::warn!("{}: it is connected again", self.disk.text);
        }
        Some(link)
    }

    /// The server has been lost for too long.
    fn refuse(&self) {
        self.phase.set(Phase::Refuses);
        if self.disk.may_log() {
            let seconds = self.disk.uri.reconnect.as_secs();
            tracing::error!(
                "{}: no connection for {seconds} s: requests fail until the server is back",
                self.disk.text
            );
        }
        self.fail_all(libc_eio());
    }

    fn say(&self, refusal: &Refusal) {
        // The same once.
        if *self.last_refusal.borrow() == refusal.why {
            return;
        }
        self.last_refusal.replace(refusal.why.clone());
        if self.disk.may_log() {
            tracing::warn!("{}: {}; {}", self.disk.text, refusal.why, refusal.help);
        }
    }
}
