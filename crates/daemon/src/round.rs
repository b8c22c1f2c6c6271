//! Disks that are served by one worker get another program together: all of them have let go of the image before
//! one of their threads exchanges it, and if one has not, nobody does.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Failure;

/// How often who waits looks whether it is to stop.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct Round {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Disks of which it is not known yet.
    left: usize,
    /// One of them could not let go.
    failure: Option<Failure>,
    /// Somebody does the exchange.
    is_done: bool,
    outcome: Option<Result<(), Failure>>,
}

/// One disk's part in it. A disk that goes before it is asked holds nobody up.
#[derive(Debug)]
pub(crate) struct Ticket(Arc<Round>);

impl Ticket {
    /// For so many disks.
    pub(crate) fn of(disks: usize) -> Vec<Ticket> {
        let state = Mutex::new(State { left: disks, ..State::default() });
        let round = Arc::new(Round { state, changed: Condvar::new() });
        (0..disks).map(|_| Ticket(round.clone())).collect()
    }

    /// The disk has let go, or could not. What came of it for all. One of them does the exchange.
    pub(crate) fn meet(
        self,
        let_go: Result<(), Failure>,
        exchange: impl FnOnce() -> Result<(), Failure>,
        is_stopped: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let round = self.0.clone();
        if let Err(failure) = let_go {
            round.state().failure.get_or_insert(failure);
        }
        drop(self);
        let mut state = round.state();
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            if state.left == 0 && !state.is_done {
                state.is_done = true;
                let failure = state.failure.clone();
                drop(state);
                let outcome = failure.map_or_else(exchange, Err);
                round.state().outcome = Some(outcome.clone());
                round.changed.notify_all();
                return outcome;
            }
            let waited = round.changed.wait_timeout(state, LOOK_AGAIN);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if is_stopped() && state.outcome.is_none() {
                let why = "the daemon stops, or the disk is needed elsewhere".to_owned();
                return Err(Failure { why, help: "ask again".to_owned() });
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.state().left -= 1;
        self.0.changed.notify_all();
    }
}

impl Round {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::scope;

    use super::*;

    fn failure() -> Failure {
        Failure { why: "no".to_owned(), help: String::new() }
    }

    /// What comes of it for each, and how often there was an exchange.
    fn meet(all: &[Result<(), Failure>], gone: usize) -> (Vec<Result<(), Failure>>, usize) {
        let mut tickets = Ticket::of(all.len() + gone);
        let (let_go, exchanges) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let outcomes = scope(|scope| {
            let threads: Vec<_> = all
                .iter()
                .map(|own| {
                    let (ticket, let_go, exchanges) = (tickets.pop().unwrap(), &let_go, &exchanges);
                    scope.spawn(move || {
                        let_go.fetch_add(1, Ordering::SeqCst);
                        let exchange = || {
                            assert_eq!(let_go.load(Ordering::SeqCst), all.len());
                            exchanges.fetch_add(1, Ordering::SeqCst);
                            Ok(())
                        };
                        ticket.meet(own.clone(), exchange, || false)
                    })
                })
                .collect();
            drop(tickets);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (outcomes, exchanges.into_inner())
    }

    #[test]
    fn all_let_go_before_one_exchanges_and_nobody_does_when_one_could_not() {
        for _ in 0..100 {
            assert_eq!(meet(&[Ok(())], 0), (vec![Ok(())], 1));
            assert_eq!(meet(&[Ok(()), Ok(()), Ok(())], 2), (vec![Ok(()); 3], 1));
            let one = [Ok(()), Err(failure()), Ok(())];
            assert_eq!(meet(&one, 1), (vec![Err(failure()); 3], 0));
        }
    }

    #[test]
    fn who_is_to_stop_waits_for_nobody() {
        let mut tickets = Ticket::of(2);
        let exchange = || panic!("one has not let go");
        assert!(tickets.remove(0).meet(Ok(()), exchange, || true).is_err());
    }
}
