//! Growth of the store itself (store.md 8): more segments behind those that it has.
//!
//! The order of what becomes durable:
//!
//! 1. The file gets its new length. The store of before is whole in a longer file.
//! 2. Both space pages of each new segment, and the block that leads to the second home. No superblock knows them.
//! 3. A checkpoint with the new layout (section 5). Its sync before the superblock covers 2, and the superblock decides:
//!    a cut finds the store of before, or the one that has grown.
//! 4. Only behind both homes of that superblock are new places and numbers given. So no record of the journal has one that
//!    the superblock does not know.

use std::io;

use ferrite_disk_base::Port;
use ferrite_io::shared_lock::Held;

use super::BLOCK_BYTES;
use super::volumes::Volumes;
use crate::layout::Layout;
use crate::opening::write_free_segments;
use crate::signpost;

fn in_bytes(layout: &Layout) -> u64 {
    layout.blocks * BLOCK_BYTES as u64
}

impl Volumes {
    /// Begins no operation until the guard is dropped.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) async fn hold(&self, port: &Port) -> io::Result<Held<'_>> {
        self.operating.lock(&port.io).await
    }

    /// As [`Live::grow`](super::Live::grow). The caller holds operations, and the pass, which knows how many places there
    /// are.
    pub(super) async fn grow_store(
        &self,
        port: &Port,
        bytes: u64,
        file_bytes: Option<u64>,
    ) -> io::Result<()> {
        // A growth that has failed is tried again, or ends this.
        drop(self.committer.hold(port).await?);
        let before = self.shared.layout();
        let layout = before.grown(bytes);
        let layout = layout.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        let too_short = file_bytes.filter(|length| *length < in_bytes(&layout));
        let ballast = self.shared.medium.ballast();
        if too_short.is_some() {
            ballast.move_to(port, in_bytes(&layout)).await?;
        }
        if let Err(e) = self.write_new_segments(port, &before, &layout).await {
            if let Some(length) = too_short {
                // No superblock knows what is behind that.
                let _ = ballast.move_to(port, length).await;
            }
            return Err(e);
        }
        self.committer.checkpoint_grown(port, layout).await
    }

    /// Writes the new segments to the medium, before a superblock knows them. It spends no ballast.
    async fn write_new_segments(
        &self,
        port: &Port,
        before: &Layout,
        layout: &Layout,
    ) -> io::Result<()> {
        let (id, medium) = (self.shared.core().id, &self.shared.medium);
        write_free_segments(medium, port, layout, &id, before.segments).await?;
        let Some(place) = layout.signpost() else { return Ok(()) };
        let page = signpost::encode(&id, layout.first_blocks);
        medium.write_blocks(port, place, [page.as_slice()].into_iter()).await
    }
}
