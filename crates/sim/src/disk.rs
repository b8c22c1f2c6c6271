//! The disks of this project, used as a backend uses them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ferrite_disk::Extent;
use ferrite_io::arena::Span;

use crate::format::{Disk, Queue};

impl Disk for ferrite_disk::Disk {
    fn sectors(&self) -> u64 {
        self.sectors()
    }

    fn files(&self) -> Vec<Arc<OwnedFd>> {
        self.files()
    }

    async fn read(&self, queue: &Queue, offset: u64, to: Span) -> io::Result<()> {
        let fits = async {
            read(self, queue, offset, to).await?;
            io::Result::Ok(!self.has_checks() || self.check(queue.memory(), offset, to))
        };
        // As the request path does: what is doubtful is read again, step by step.
        match self.while_mapped(fits).await? {
            true => Ok(()),
            false => self.read(&queue.port, offset, to).await,
        }
    }

    async fn write(&self, queue: &Queue, offset: u64, from: Span) -> io::Result<()> {
        self.while_mapped(write(self, queue, offset, from)).await
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

async fn read(disk: &ferrite_disk::Disk, queue: &Queue, offset: u64, to: Span) -> io::Result<()> {
    let mut done = 0;
    while done < to.len() {
        let (at, left) = (offset + done as u64, (to.len() - done) as u64);
        done += match disk.map(at, left) {
            Extent::Zeros { len } => {
                queue.memory().fill(to.slice(done, len as usize), 0);
                len as usize
            }
            Extent::Data { file, offset, len } => {
                let (port, part) = (&queue.port, to.slice(done, len as usize));
                port.io.read_exact(port.files[file], offset, part).await?;
                part.len()
            }
            Extent::Slow { len } => {
                let part = to.slice(done, len as usize);
                disk.read(&queue.port, at, part).await?;
                part.len()
            }
        };
    }
    Ok(())
}

async fn write(
    disk: &ferrite_disk::Disk,
    queue: &Queue,
    offset: u64,
    from: Span,
) -> io::Result<()> {
    let mut done = 0;
    while done < from.len() {
        let (at, left) = (offset + done as u64, (from.len() - done) as u64);
        done += match disk.reserve(at, left) {
            Extent::Zeros { len } => len as usize,
            Extent::Data { file, offset, len } => {
                let (port, part) = (&queue.port, from.slice(done, len as usize));
                port.io.write_all(port.files[file], offset, part).await?;
                disk.written(at, len);
                part.len()
            }
            Extent::Slow { len } => {
                let part = from.slice(done, len as usize);
                disk.write(&queue.port, at, part).await?;
                part.len()
            }
        };
    }
    Ok(())
}
