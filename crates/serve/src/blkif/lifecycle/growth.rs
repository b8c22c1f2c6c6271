//! A medium that grows under its guest.

use super::carry_out::unexpected;
use super::messages::{Order, Reply};
use super::{Backend, ServeError};

impl Backend<'_> {
    /// Publishes the medium's size if it has grown, and sees to it that it is asked for again.
    pub(super) fn check_size(&mut self) -> Result<(), ServeError> {
        let (grown, ask_again) = match self.worker.carry_out(Order::CheckSize)? {
            Reply::Size { grown, ask_again } => (grown, ask_again),
            reply => return Err(unexpected(&reply)),
        };
        self.listens = true;
        if let Some(ask_again) = ask_again {
            self.wait.at_most(ask_again);
        }
        self.grown = grown.or(self.grown);
        if let Some(sectors) = self.grown {
            self.publish_size(sectors)?;
            self.grown = None;
        }
        Ok(())
    }

    /// Publishes a size that has grown: the new number, and our state once more, in one
    /// transaction, is what makes Linux look (blkif.md 3.7).
    fn publish_size(&mut self, sectors: u64) -> Result<(), ServeError> {
        let connected = self.xenbus.is_connected();
        let backend = self.backend;
        self.update(|tx| {
            tx.write(&format!("{backend}/sectors"), sectors.to_string().as_bytes())?;
            let path = format!("{backend}/state");
            // It may be the toolstack's 5 by now.
            match tx.read(&path)? {
                Some(state) if connected && state == b"4" => tx.write(&path, &state),
                _ => Ok(()),
            }
        })?;
        Ok(())
    }
}
