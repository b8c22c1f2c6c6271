//! The reservation of a LUN, had by this process or through its keeper.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::wire::{Answer, NAMES, Request, What};
use crate::fence::{self, Held, Refusal, Terms};

/// The operation on the LUN: the flags of the request.
const TAKE: u32 = 0;
const RELEASE: u32 = 1;
const HOLDER: u32 = 2;
/// The number of an answer about a reservation that is had, and about one that its target forgets. Those of [`Refusal`] are
/// above.
const HELD: i32 = 0;
const HELD_WEAKLY: i32 = -1;

/// As [`fence::take`].
///
/// # Errors
/// As [`fence::take`].
pub fn take(lun: BorrowedFd<'_>, terms: &Terms) -> Result<Held, Refusal> {
    match ask(lun, TAKE) {
        None => fence::take(lun, terms),
        Some(answer) => held(answer?),
    }
}

/// As [`fence::release`].
///
/// # Errors
/// As [`fence::release`].
pub fn release(lun: BorrowedFd<'_>, terms: &Terms) -> Result<(), Refusal> {
    match ask(lun, RELEASE) {
        None => fence::release(lun, &terms.records),
        Some(answer) => held(answer?).map(drop),
    }
}

/// The key of the host that has the LUN's reservation. `None`: no host has it, or the LUN does not say.
pub fn holder(lun: BorrowedFd<'_>, terms: &Terms) -> Option<u64> {
    let key = match ask(lun, HOLDER) {
        None => holder_now(lun, terms)?.key,
        Some(answer) => held(answer.ok()?).ok()?.key,
    };
    (key != 0).then_some(key)
}

fn holder_now(lun: BorrowedFd<'_>, terms: &Terms) -> Option<Held> {
    let status = fence::status(lun, &terms.records).ok()?;
    Some(Held { key: status.reservation?.key, is_weak: false })
}

/// The keeper's answer. `None`: this process has no keeper.
fn ask(lun: BorrowedFd<'_>, flags: u32) -> Option<Result<Answer, Refusal>> {
    let request = Request { flags, ..Request::of(What::Fence, Path::new("")) };
    let answer = super::BROKER.get()?.ask(&request, &[lun]);
    Some(answer.map_err(|e| Refusal::Io(format!("the keeper does not ask the LUN: {e}"))))
}

fn held(answer: Answer) -> Result<Held, Refusal> {
    let text = String::from_utf8_lossy(&answer.text);
    match answer.number {
        HELD | HELD_WEAKLY => Ok(Held {
            key: u64::from_str_radix(&text, 16).unwrap_or(0),
            is_weak: answer.number == HELD_WEAKLY,
        }),
        number => Err(Refusal::from_words(number, &text)),
    }
}

fn answer(done: Result<Held, Refusal>) -> Answer {
    let (number, text) = match done {
        Ok(Held { key, is_weak }) => (if is_weak { HELD_WEAKLY } else { HELD }, format!("{key:x}")),
        Err(refusal) => refusal.to_words(),
    };
    Answer { number, text: text.into_bytes(), file: None }
}

/// Does what a worker asks for on a thread of its own, which waits for the LUN in place of the keeper, and answers the worker.
/// `asks` is true meanwhile.
///
/// # Errors
/// `AGAIN`: there is such a thread. `INVAL`: nonsense is asked for. The kernel's: there can be no thread.
pub(super) fn begin(
    socket: BorrowedFd<'_>,
    lun: OwnedFd,
    terms: &Terms,
    (flags, asked): (u32, u32),
    asks: &Arc<AtomicBool>,
) -> Result<(), Errno> {
    if flags > HOLDER {
        return Err(Errno::INVAL);
    }
    let (socket, terms, asks) =
        (socket.try_clone_to_owned().map_err(|_| Errno::MFILE)?, terms.clone(), asks.clone());
    if asks.swap(true, Ordering::SeqCst) {
        return Err(Errno::AGAIN);
    }
    let ends = asks.clone();
    let work = move || {
        let done = match flags {
            RELEASE => fence::release(lun.as_fd(), &terms.records)
                .map(|()| Held { key: 0, is_weak: false }),
            HOLDER => {
                Ok(holder_now(lun.as_fd(), &terms).unwrap_or(Held { key: 0, is_weak: false }))
            }
            _ => fence::take(lun.as_fd(), &terms),
        };
        drop(lun);
        asks.store(false, Ordering::SeqCst);
        // A worker that is gone, or does not read, misses it.
        let _ = NAMES.try_send(&socket, &Answer::to_bytes(&Ok(answer(done)), asked), &[]);
    };
    std::thread::Builder::new().name("fence".into()).spawn(work).map(drop).map_err(|e| {
        ends.store(false, Ordering::SeqCst);
        Errno::from_io_error(&e).unwrap_or(Errno::AGAIN)
    })
}
