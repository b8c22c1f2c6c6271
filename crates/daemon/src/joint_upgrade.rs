//! A joint upgrade of all disks of one worker. All of them close their images before one of their
//! threads replaces the worker's program. If one cannot, the program stays.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Failure;

/// How often a waiting thread checks whether it has to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
/// The state that the threads of all participating disks share.
struct JointUpgrade {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
/// The progress of the upgrade.
struct State {
    /// Participants that have not closed their image yet.
    pending: usize,
    /// The first participant's failure to close its image.
    failure: Option<Failure>,
    /// Whether a thread replaces the program, or has done so.
    is_running: bool,
    outcome: Option<Result<(), Failure>>,
}

/// One disk's part in the upgrade. Dropping it counts as done, so a disk that goes away holds up no
/// other.
#[derive(Debug)]
pub(crate) struct Participant(Arc<JointUpgrade>);

impl Participant {
    /// One part for each of `disks` disks.
    pub(crate) fn of(disks: usize) -> Vec<Participant> {
        let state = Mutex::new(State { pending: disks, ..State::default() });
        let joint = Arc::new(JointUpgrade { state, changed: Condvar::new() });
        (0..disks).map(|_| Participant(joint.clone())).collect()
    }

    /// Reports whether this disk's image was closed, and waits for the other disks. One thread
    /// calls `replace`. Returns the result for all.
    pub(crate) fn finish(
        self,
        retired: Result<(), Failure>,
        replace: impl FnOnce() -> Result<(), Failure>,
        is_stopped: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let joint = self.0.clone();
        if let Err(failure) = retired {
            joint.state().failure.get_or_insert(failure);
        }
        drop(self);
        let mut state = joint.state();
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            if state.pending == 0 && !state.is_running {
                state.is_running = true;
                let failure = state.failure.clone();
                drop(state);
                let outcome = failure.map_or_else(replace, Err);
                joint.state().outcome = Some(outcome.clone());
                joint.changed.notify_all();
                return outcome;
            }
            let waited = joint.changed.wait_timeout(state, POLL_INTERVAL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if is_stopped() && state.outcome.is_none() {
                let why = "interrupted: the daemon stops, or a later attachment needs the image"
                    .to_owned();
                return Err(Failure { why, help: "try again".to_owned() });
            }
        }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.0.state().pending -= 1;
        self.0.changed.notify_all();
    }
}

impl JointUpgrade {
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

    /// The result of each disk, and the number of replacements.
    fn finish(all: &[Result<(), Failure>], gone: usize) -> (Vec<Result<(), Failure>>, usize) {
        let mut participants = Participant::of(all.len() + gone);
        let (retired, replacements) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let outcomes = scope(|scope| {
            let threads: Vec<_> = all
                .iter()
                .map(|own| {
                    let (participant, retired, replacements) =
                        (participants.pop().unwrap(), &retired, &replacements);
                    scope.spawn(move || {
                        retired.fetch_add(1, Ordering::SeqCst);
                        let replace = || {
                            assert_eq!(retired.load(Ordering::SeqCst), all.len());
                            replacements.fetch_add(1, Ordering::SeqCst);
                            Ok(())
                        };
                        participant.finish(own.clone(), replace, || false)
                    })
                })
                .collect();
            drop(participants);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (outcomes, replacements.into_inner())
    }

    #[test]
    fn all_let_go_before_one_exchanges_and_nobody_does_when_one_could_not() {
        for _ in 0..100 {
            assert_eq!(finish(&[Ok(())], 0), (vec![Ok(())], 1));
            assert_eq!(finish(&[Ok(()), Ok(()), Ok(())], 2), (vec![Ok(()); 3], 1));
            let one = [Ok(()), Err(failure()), Ok(())];
            assert_eq!(finish(&one, 1), (vec![Err(failure()); 3], 0));
        }
    }

    #[test]
    fn who_is_to_stop_waits_for_nobody() {
        let mut participants = Participant::of(2);
        let replace = || panic!("one image is still open");
        assert!(participants.remove(0).finish(Ok(()), replace, || true).is_err());
    }
}
