//! A medium that grows under its guest.

use std::time::Duration;

use ferrite_disk::GrowthWatch;

use super::{Backend, ServeError};
use crate::log_limit::limited;

/// How often the medium is asked whether it has grown, while the guest is at work.
const RESIZE_CHECK: Duration = Duration::from_secs(1);

impl Backend<'_> {
    /// Asks for the medium's size, and says when to ask again: soon, while the guest is at work;
    /// when we are told, while it is not.
    pub(super) fn rest(
        &mut self,
        growth: &mut GrowthWatch,
        connected: bool,
    ) -> Result<Option<Duration>, ServeError> {
        let requests = self.config.counters.counts().requests;
        let idle = std::mem::replace(&mut self.requests, requests) == requests;
        growth.ignore();
        let told = idle && growth.listen();
        // After listening has begun: what comes later than this is told.
        self.check_size(connected)?;
        Ok((!told).then_some(RESIZE_CHECK))
    }

    /// Publishes a size that has grown: the new number, and our state once more, in one
    /// transaction, is what makes Linux look (blkif.md 3.7).
    fn check_size(&mut self, connected: bool) -> Result<(), ServeError> {
        let grown = match self.device.disk.refresh_size() {
            Ok(grown) => grown,
            Err(e) => {
                limited!(
                    warn,
                    self.device.log_limits.storage,
                    self.device.clock.now_ns(),
                    "cannot ask for the size of the image: {e}"
                );
                return Ok(());
            }
        };
        if let Some(sectors) = grown {
            tracing::info!("the image has grown to {sectors} sectors");
            self.grown = true;
        }
        if !self.grown {
            return Ok(());
        }
        let sectors = self.device.disk.sectors();
        let backend = &self.config.backend;
        self.update(|tx| {
            tx.write(&format!("{backend}/sectors"), sectors.to_string().as_bytes())?;
            let path = format!("{backend}/state");
            // It may be the toolstack's 5 by now.
            match tx.read(&path)? {
                Some(state) if connected && state == b"4" => tx.write(&path, &state),
                _ => Ok(()),
            }
        })?;
        self.grown = false;
        Ok(())
    }
}
