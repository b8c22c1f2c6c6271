//! The blocks' part in a change of the headers: the end of the file for itself, and a place there.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Port, Raw};
use ferrite_io::shared_lock::Held;

use super::Blocks;
use crate::vhd::format::footer;

/// How often space is made for a place that others use first.
const TRIES: usize = 64;

impl Blocks {
    /// Keeps all other tasks from changing the end of the file and the footers.
    ///
    /// # Errors
    /// This thread's engine has failed.
    pub(in crate::vhd) async fn hold_end(&self, port: &Port) -> io::Result<Held<'_>> {
        self.growing.lock(&port.io).await
    }

    /// The footer that is on the medium.
    pub(in crate::vhd) fn footer(&self) -> [u8; footer::BYTES] {
        *self.footer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the footer on the medium is another one. The caller [holds the end](Self::hold_end).
    pub(in crate::vhd) fn set_footer(&self, footer: [u8; footer::BYTES]) {
        *self.footer.lock().unwrap_or_else(PoisonError::into_inner) = footer;
    }

    /// The place of the footer at the end; `None`: the file has grown, and has none until it is closed.
    pub(in crate::vhd) fn end_footer(&self) -> Option<u64> {
        let is_cut = self.lock().cut;
        let last = self.last_sector.load(Ordering::Acquire);
        (!self.is_file || !is_cut).then_some(last)
    }

    /// Takes a place of so many bytes, whole sectors, behind all blocks. No block gets it. Returns it, with the end
    /// [held](Self::hold_end). In a file, the footer at the end is cut off then.
    ///
    /// # Errors
    /// There is no space. Only the end of the file was changed.
    pub(in crate::vhd) async fn set_aside(
        &self,
        port: &Port,
        raw: &Raw,
        bytes: u64,
    ) -> io::Result<(Held<'_>, u64)> {
        let wanted = bytes.div_ceil(self.layout.stride()) as usize;
        for _ in 0..TRIES {
            self.refill(port, raw, wanted).await?;
            let held = self.hold_end(port).await?;
            let mut state = self.lock();
            let from = state.next;
            if from + bytes <= state.run_end {
                state.next = from + bytes;
                state.changed = true;
                drop(state);
                return Ok((held, from));
            }
        }
        Err(io::Error::new(io::ErrorKind::StorageFull, "its guest uses all new space first"))
    }

    /// Gives such a place back, unless a block was placed behind it.
    pub(in crate::vhd) fn give_aside_back(&self, from: u64, to: u64) {
        let mut state = self.lock();
        if state.next == to {
            state.next = from;
        }
    }
}
