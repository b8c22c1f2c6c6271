//! What an image says of whoever writes to it: the mark of the journal, and in version 2 the bait.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;

use super::Qcow2;
use crate::qcow2::alloc::grow::is_full;
use crate::qcow2::format::header::AUTOCLEAR_AT;

impl Qcow2 {
    /// What has to be done before the first write, and so before the first change that only the
    /// journal knows: the mark of that journal is in the header, durably, a file that ends
    /// within a cluster is made longer, and all tables have space. Autoclear features of others
    /// are cleared, since they are not kept up to date (one that stays would make other programs
    /// believe a bitmap that lacks what is written now).
    pub(in crate::qcow2) async fn make_ready(&self, port: &Port) -> io::Result<()> {
        let _alone = self.readying.lock(&port.io).await?;
        if self.ready.load(Ordering::Acquire) {
            return Ok(());
        }
        self.lengthen(port).await?;
        self.lay_bait(port).await?;
        self.ready.store(true, Ordering::Release);
        Ok(())
    }

    /// The mark, and a file with whole clusters and without holes in its tables.
    async fn lengthen(&self, port: &Port) -> io::Result<()> {
        let _alone = self.alloc.pause(port).await?;
        self.set_autoclear(port, self.mark).await?;
        self.alloc.lengthen(port).await?;
        self.alloc.fill_holes_of_tables(port).await
    }

    /// Lays the bait, where there is none and one is needed. Does without where there is no space.
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

    /// Nothing is in the journal any more, so it need not be looked for. Before that is removed: a
    /// process that dies in between leaves an empty one. A mark without a journal says nothing,
    /// either; whoever writes after this sets it again.
    pub(super) async fn unmark(&self, port: &Port) -> io::Result<()> {
        let marked = self.mark != 0 && self.autoclear.load(Ordering::Acquire) == self.mark;
        if marked && self.state().changes.journal.len() == 0 {
            self.ready.store(false, Ordering::Release);
            self.set_autoclear(port, 0).await?;
        }
        Ok(())
    }

    /// Makes the header have these autoclear features, durably; version 2 has none.
    async fn set_autoclear(&self, port: &Port, features: u64) -> io::Result<()> {
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
