//! A medium that grows in use.

use super::carry_out::unexpected;
use super::messages::{Order, Reply};
use super::{Backend, ServeError};

impl Backend<'_> {
    /// Publishes the medium's size if it has grown, and schedules the next check.
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

    /// Publishes a new size. Linux reads it when the number and the unchanged state are written in
    /// one transaction (blkif.md 3.7).
    fn publish_size(&mut self, sectors: u64) -> Result<(), ServeError> {
        let connected = self.xenbus.is_connected();
        let backend = self.backend;
        self.update(|tx| {
            tx.write(&format!("{backend}/sectors"), sectors.to_string().as_bytes())?;
            let path = format!("{backend}/state");
            // The toolstack may have written 5 meanwhile.
            match tx.read(&path)? {
                Some(state) if connected && state == b"4" => tx.write(&path, &state),
                _ => Ok(()),
            }
        })?;
        Ok(())
    }
}
