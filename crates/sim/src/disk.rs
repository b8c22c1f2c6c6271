//! The disks of this project, used as a backend uses them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use ferrite_disk::{Extent, SyncWitness};
use ferrite_io::arena::Span;

use crate::format::{Disk, Queue};

impl Disk for ferrite_disk::Disk {
    fn sectors(&self) -> u64 {
        self.sectors()
    }

    fn files(&self) -> Vec<Arc<OwnedFd>> {
        self.files()
    }

    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        self.witness_syncs(witness);
    }

    async fn read(&self, queue: &Queue, offset: u64, to: Span) -> io::Result<()> {
        let mut done = 0;
        while done < to.len() {
            let (at, left) = (offset + done as u64, to.slice(done, to.len() - done));
            let (len, is_done) = self.while_mapped(read_mapped(self, queue, at, left)).await?;
            if !is_done {
                self.read(&queue.port, at, left.slice(0, len)).await?;
            }
            done += len;
        }
        Ok(())
    }

    async fn write(&self, queue: &Queue, offset: u64, from: Span) -> io::Result<()> {
        let mut done = 0;
        while done < from.len() {
            let (at, left) = (offset + done as u64, from.slice(done, from.len() - done));
            let (len, is_done) = self.while_mapped(write_mapped(self, queue, at, left)).await?;
            if !is_done {
                self.write(&queue.port, at, left.slice(0, len)).await?;
            }
            done += len;
        }
        Ok(())
    }

    async fn flush(&self, queue: &Queue) -> io::Result<()> {
        self.flush(&queue.port).await
    }

    async fn discard(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        self.discard(&queue.port, offset, len).await
    }

    async fn write_zeroes(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        self.write_zeroes(&queue.port, offset, len, queue.zeros).await
    }

    async fn close(&self, queue: &Queue) -> io::Result<()> {
        self.close(&queue.port).await
    }
}

/// Reads the beginning of a range if it is mapped; returns its length, and whether it was read. Otherwise it takes
/// steps, which must not be counted with mapped operations.
async fn read_mapped(
    disk: &ferrite_disk::Disk,
    queue: &Queue,
    at: u64,
    to: Span,
) -> io::Result<(usize, bool)> {
    match disk.map(at, to.len() as u64) {
        Extent::Zeros { len } => {
            queue.memory().fill(to.slice(0, len as usize), 0);
            Ok((len as usize, true))
        }
        Extent::Data { file, offset, len } => {
            let (port, part) = (&queue.port, to.slice(0, len as usize));
            port.io.read_exact(port.files[file], offset, part).await?;
            let is_sure = !disk.has_checks() || disk.check(queue.memory(), at, part);
            Ok((part.len(), is_sure))
        }
        Extent::Slow { len } => Ok((len as usize, false)),
    }
}

/// Writes the beginning of a range if it has a place, as `read_mapped` reads.
async fn write_mapped(
    disk: &ferrite_disk::Disk,
    queue: &Queue,
    at: u64,
    from: Span,
) -> io::Result<(usize, bool)> {
    match disk.reserve(at, from.len() as u64) {
        Extent::Zeros { len } => Ok((len as usize, true)),
        Extent::Data { file, offset, len } => {
            let (port, part) = (&queue.port, from.slice(0, len as usize));
            port.io.write_all(port.files[file], offset, part).await?;
            disk.written(at, len);
            Ok((part.len(), true))
        }
        Extent::Slow { len } => Ok((len as usize, false)),
    }
}
