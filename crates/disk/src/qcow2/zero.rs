//! Discard and zeros. Clusters of the image's own keep their place, and the file system gets their
//! space back; others lose it, if the format can say "zeros" (version 3).

use std::io;

use ferrite_io::arena::Span;

use super::entry::{self, Cluster};
use super::{CLUSTER_LOCKS, Qcow2};
use crate::Port;
use crate::image::{Below, Found};

/// What to do about the beginning of a range.
enum Step {
    /// It is written in place.
    InPlace { offset: u64, len: u64 },
    /// A place is given to writes that are not done, or have failed: what they left there must not
    /// come up when the next one makes it visible.
    Pending { offset: u64, len: u64 },
    /// It reads as zeros already.
    Nothing { len: u64 },
    /// Whole clusters that the entry can call zeros.
    Flag { cluster: u64, entry: u64 },
    /// Zeros have to be written, with whatever that takes.
    Write { len: u64 },
    /// First of all, metadata.
    Prepare,
}

impl Qcow2 {
    /// See [`Disk::discard`](crate::Disk::discard).
    pub(crate) async fn discard(
        &self,
        port: &Port,
        below: Below<'_>,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let (at, left) = (offset + done, len - done);
            done += match self.step(below, at, left) {
                Step::InPlace { offset, len } => {
                    self.medium.discard(&port.io, &port.files, offset, len).await?;
                    len
                }
                // A hint: what cannot be freed as a whole stays as it is.
                Step::Pending { len, .. } | Step::Write { len } | Step::Nothing { len } => len,
                Step::Flag { cluster, entry } => self.flag(port, cluster, entry, at, left).await?,
                Step::Prepare => {
                    self.prepare_entry(port, at).await?;
                    0
                }
            };
        }
        Ok(())
    }

    /// See [`Disk::write_zeroes`](crate::Disk::write_zeroes).
    pub(crate) async fn write_zeroes(
        &self,
        port: &Port,
        below: Below<'_>,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let (at, left) = (offset + done, len - done);
            done += match self.step(below, at, left) {
                Step::InPlace { offset, len } => {
                    self.medium.write_zeroes(&port.io, &port.files, offset, len, zeros).await?;
                    len
                }
                Step::Pending { offset, len } => {
                    self.medium.write_zeroes(&port.io, &port.files, offset, len, zeros).await?;
                    self.wrote(at, len);
                    len
                }
                Step::Nothing { len } => len,
                Step::Flag { cluster, entry } => self.flag(port, cluster, entry, at, left).await?,
                Step::Write { len } => {
                    let part = zeros.slice(0, zeros.len().min(len as usize));
                    self.write_copying(port, below, at, part).await?;
                    part.len() as u64
                }
                Step::Prepare => {
                    self.prepare_entry(port, at).await?;
                    0
                }
            };
        }
        Ok(())
    }

    fn step(&self, below: Below<'_>, offset: u64, len: u64) -> Step {
        let (cluster, within) = self.split(offset);
        let size = self.cluster_bytes();
        let one = len.min(size - within);
        let l1 = self.l1_entry(cluster);
        if let Some(host) = self.state().pending.get(&cluster) {
            return Step::Pending { offset: host + within, len: one };
        }
        let found = self.find(offset, len);
        if let Found::Below { .. } = found
            && self.zeros_below(below, cluster)
        {
            return Step::Nothing { len: one };
        }
        // The last cluster of the disk may be a part.
        let whole = within == 0 && (one == size || offset + one == self.bytes());
        match found {
            Found::Zeros { len } => Step::Nothing { len },
            Found::Slow { .. } => Step::Prepare,
            _ if !self.writable(l1) => Step::Prepare,
            _ => match self.entry(cluster) {
                None => Step::Prepare,
                Some(e) if self.in_place(e).is_some() => match self.place(below, offset, len) {
                    Found::Data { offset, len } => Step::InPlace { offset, len },
                    _ => Step::Prepare,
                },
                Some(entry) if whole && self.header.version >= 3 => Step::Flag { cluster, entry },
                Some(_) => Step::Write { len: one },
            },
        }
    }

    /// Makes a cluster read as zeros by its entry alone; the bytes of the range that this was.
    async fn flag(
        &self,
        port: &Port,
        cluster: u64,
        entry: u64,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let lock = &self.clusters[(cluster % CLUSTER_LOCKS as u64) as usize];
        let _alone = lock.lock(&port.io).await?;
        // A place of its own is kept, and a shared one left.
        let zero = match self.decode(entry) {
            Some(Cluster::Zero { host: Some(host), copied: true }) => super::own(host),
            _ => 0,
        } | entry::ZERO;
        if self.publish_if(cluster, entry, zero) {
            return Ok(len.min(self.cluster_bytes()));
        }
        // Changed meanwhile, or no room to note it: look again.
        self.prepare_entry(port, offset).await?;
        Ok(0)
    }
}
