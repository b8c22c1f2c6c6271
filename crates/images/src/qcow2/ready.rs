//! Changes of an image for its writer: the mark of the journal, and in version 2 the bait.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;

use super::Qcow2;
use crate::image::format::ImageFormat;
use crate::qcow2::alloc::grow::is_full;
use crate::qcow2::format::header::{AUTOCLEAR_AT, BITMAPS_VALID};

impl Qcow2 {
    /// Prepares the image for the first write, and so for the first change that only the journal has. The mark of that
    /// journal is written to the header, durably, a file that ends within a cluster is made longer, and all tables get
    /// space. Other programs' autoclear features are cleared, since they are not maintained here: a bitmap flag that
    /// stays would make other programs trust a bitmap that lacks these writes.
    pub(in crate::qcow2) async fn make_ready(&self, port: &Port) -> io::Result<()> {
        self.ready_for(port, false).await
    }

    /// [`make_ready`](Self::make_ready); the caller may keep dirty bitmaps valid, since it changes no data.
    pub(in crate::qcow2) async fn ready_for(
        &self,
        port: &Port,
        keeps_bitmaps: bool,
    ) -> io::Result<()> {
        let _alone = self.readying.lock(&port.io).await?;
        if self.ready.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.autoclear.load(Ordering::Acquire) & BITMAPS_VALID != 0 && !keeps_bitmaps {
            tracing::warn!(
                "the dirty bitmaps inside of {} are out of date from now on, since this program does not \
                 track writes in them: the next incremental backup has to be a full one",
                self.medium().path().display()
            );
        }
        self.lengthen(port).await?;
        self.lay_bait(port).await?;
        self.ready.store(true, Ordering::Release);
        Ok(())
    }

    /// Writes the mark, and makes a file with whole clusters and without holes in its tables.
    async fn lengthen(&self, port: &Port) -> io::Result<()> {
        let _alone = self.alloc.pause(port).await?;
        self.set_autoclear(port, self.mark).await?;
        self.alloc.lengthen(port).await?;
        self.alloc.fill_holes_of_tables(port).await
    }

    /// Makes the bait, if there is none and one is needed. Without space there is none.
    async fn lay_bait(&self, port: &Port) -> io::Result<()> {
        if !self.state().needs_bait() {
            return Ok(());
        }
        let fresh = match self.alloc.take(port).await {
            Err(e) if is_full(&e) => return Ok(()),
            fresh => fresh?,
        };
        self.commit(port).await?;
        self.state().set_bait(fresh.refer());
        Ok(())
    }

    /// Removes the mark: the journal is empty, so it need not be looked for. That comes before the journal is removed,
    /// since a process that dies in between leaves an empty one. A mark without a journal means nothing, either; a
    /// later writer sets it again.
    pub(super) async fn unmark(&self, port: &Port) -> io::Result<()> {
        let marked = self.mark != 0 && self.autoclear.load(Ordering::Acquire) == self.mark;
        if marked && self.state().changes.journal.len() == 0 {
            self.ready.store(false, Ordering::Release);
            self.set_autoclear(port, 0).await?;
        }
        Ok(())
    }

    /// Sets these autoclear features in the header, durably; version 2 has none.
    pub(in crate::qcow2) async fn set_autoclear(
        &self,
        port: &Port,
        features: u64,
    ) -> io::Result<()> {
        if self.autoclear.load(Ordering::Acquire) == features {
            return Ok(());
        }
        let at = AUTOCLEAR_AT;
        let bytes = features.to_be_bytes();
        self.base.patch_header(port, |sector| sector[at..at + 8].copy_from_slice(&bytes)).await?;
        self.autoclear.store(features, Ordering::Release);
        Ok(())
    }
}
