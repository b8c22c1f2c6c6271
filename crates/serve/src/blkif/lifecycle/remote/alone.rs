//! The steps of a worker by itself when it starts and no daemon runs.

use super::super::ahead::HELD;
use super::super::config::Ahead;
use super::super::error::ServeError;
use super::super::messages::{Failure, Order, Reply};
use super::super::orphan::Orphan;
use super::super::tune::Tune;
use super::work::WorkerProcess;

impl WorkerProcess<'_> {
    /// Opens the image of a disk without a guest, as its follower would have requested.
    pub(super) fn open_ahead(&mut self, ahead: Ahead, tune: Tune) -> Result<(), ServeError> {
        self.open(ahead.read_only, false)?;
        self.order(Order::Tune(tune))?;
        for order in HELD {
            self.order(order)?;
        }
        tracing::info!("no daemon runs: opened the image for clients");
        Ok(())
    }

    /// Takes over a guest that a predecessor has left, as its follower would have requested. A
    /// follower that comes meanwhile requests the same, and finds it done.
    pub(super) fn take_over_orphan(&mut self, orphan: Orphan) -> Result<(), ServeError> {
        let Orphan { domid, read_only, keeps_all, rings, told_sectors, tune } = orphan;
        // A failure here may be temporary: the next worker tries again.
        self.open(read_only, keeps_all)?;
        if self.config.stays {
            self.order(Order::Guest(domid.0))?;
        }
        self.order(Order::Tune(*tune))?;
        self.order(Order::Remember)?;
        self.order(Order::Enter)?;
        match self.order(Order::TakeOver { rings, told_sectors }) {
            Ok(Reply::Connected { how, undone }) => {
                tracing::info!("no daemon runs: took over, {undone} requests to finish: {how}");
            }
            Ok(reply) => tracing::error!("{reply:?}: this is a bug in ferrite"),
            Err(
                failure @ (Failure::Refused(_) | Failure::OtherRings(_) | Failure::WrongImage(_)),
            ) => {
                let why = ServeError::from(failure);
                tracing::warn!("the guest waits until a daemon runs: {why}");
            }
            Err(failure) => return Err(failure.into()),
        }
        Ok(())
    }
}
