//! A disk that is open without a guest: a tap, as XAPI opens one before it attaches it.
//!
//! Clients of NBD are served meanwhile. A guest that comes is followed on the same line
//! ([`FollowConfig::ahead`](super::FollowConfig::ahead)), and the image stays open when it goes.

use std::os::fd::BorrowedFd;

use super::carry_out::facts;
use super::config::Ahead;
use super::error::ServeError;
use super::messages::{Failure, Order};
use super::remote::line::Line;
use super::tune::Tune;
use super::worker_handle::WorkerHandle as _;
use crate::blkif::negotiate::DiskFacts;
use crate::waker::Waker;

/// The orders to a worker whose disk has no guest. One may have gone while no follower saw it; it
/// waits for no request any more.
pub(super) const HELD: [Order; 4] = [Order::Remember, Order::Stop, Order::Forget, Order::Enter];

/// Has a worker open its image, calls `opened` as
/// [`follow_notifying`](super::follow_notifying) does, and waits until `stop` is woken.
///
/// # Errors
/// [`ServeError::Open`], [`ServeError::WorkerLost`], and errors of `opened`. The image may be open.
pub fn hold(
    line: BorrowedFd<'_>,
    ahead: Ahead,
    stop: &Waker,
    tune: &Tune,
    opened: impl FnOnce(&DiskFacts, Result<(), ServeError>) -> Result<(), ServeError>,
) -> Result<(), ServeError> {
    let mut line = Line::new(line, stop);
    let held = |line: &mut Line<'_>| {
        line.open(ahead.read_only, false, false)?;
        let tuned = line.tune(tune)?;
        for order in HELD {
            line.carry_out(order)?;
        }
        Ok::<_, Failure>(tuned)
    };
    match held(&mut line) {
        Err(Failure::Left) => return Ok(()),
        tuned => {
            let tuned = tuned?;
            opened(&facts(&mut line)?, tuned)?;
        }
    }
    match line.idle() {
        Err(Failure::Left) | Ok(()) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
