//! A disk with an engine and memory of its own, for one thread: for offline tools, and for the end of serving.

use std::future::Future;
use std::io;
use std::sync::Arc;

use ferrite_disk_base::{Port, Rare};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::Engine;
use ferrite_io::pool::{Pool, QueuePool, SLAB_BYTES};
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::Scratch;

use crate::Disk;

/// Bytes that are recovered at once.
const RECOVERY_BYTES: usize = 1 << 20;

/// See the module text.
pub struct Session {
    disk: Arc<Disk>,
    port: Port,
    pool: Arc<Pool>,
    buffers: QueuePool,
    /// The last field, as its drop waits for operations on all of the above.
    reactor: Reactor,
}

impl Session {
    /// Registers the disk's files with an engine that `open` makes on a new arena.
    ///
    /// # Errors
    /// No memory, no engine, or it does not accept the files.
    pub fn new(
        disk: Arc<Disk>,
        open: impl FnOnce(Arc<Arena>) -> io::Result<Box<dyn Engine>>,
    ) -> io::Result<Session> {
        let pool = Pool::with_scratch(SLAB_BYTES, 1, disk.scratch_bytes())?;
        let mut reactor = Reactor::new(open(pool.arena().clone())?);
        let scratch = Scratch::new(pool.arena().clone(), pool.scratch(0));
        let backings = disk.backings().into_iter().map(|b| reactor.add(b, &scratch));
        let files = backings.collect::<io::Result<_>>()?;
        let port = Port { io: reactor.io(), files, scratch };
        let buffers = pool.queue(0);
        Ok(Session { disk, port, pool, buffers, reactor })
    }

    /// The disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// The port that the disk's `async fn`s run on.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Memory that stays zero, 4096 bytes.
    pub fn zero_page(&self) -> Span {
        self.pool.zero_page()
    }

    /// Runs a future to its end, and tasks meanwhile.
    ///
    /// # Errors
    /// See [`Reactor::block_on`].
    pub fn run<T>(&mut self, future: impl Future<Output = T>) -> io::Result<T> {
        self.reactor.block_on(future)
    }

    /// Reads into `to`, at most 1 MiB.
    ///
    /// # Errors
    /// See [`Disk::read`].
    ///
    /// # Panics
    /// If `to` is empty or longer than that.
    pub fn read(&mut self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let buffer = self.buffer(to.len())?;
        let span = buffer.span().slice(0, to.len());
        let done = self.reactor.block_on(self.disk.read(&self.port, offset, span));
        self.pool.arena().copy_out(span, to);
        self.buffers.free(buffer);
        done?
    }

    /// Writes `from`, at most 1 MiB.
    ///
    /// # Errors
    /// See [`Disk::write`].
    ///
    /// # Panics
    /// If `from` is empty or longer than that.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        let buffer = self.buffer(from.len())?;
        let span = buffer.span().slice(0, from.len());
        self.pool.arena().copy_in(span, from);
        let done = self.reactor.block_on(self.disk.write(&self.port, offset, span));
        self.buffers.free(buffer);
        done?
    }

    fn buffer(&mut self, bytes: usize) -> io::Result<ferrite_io::pool::Buf> {
        self.buffers.alloc(bytes).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Flushes the disk, as [`Disk::flush`] does and with its errors.
    pub fn flush(&mut self) -> io::Result<()> {
        self.reactor.block_on(self.disk.flush(&self.port))?
    }

    /// Discards `len` bytes from `offset` on, as [`Disk::discard`] does and with its errors.
    pub fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.reactor.block_on(self.disk.discard(&self.port, offset, len))?
    }

    /// Makes `len` bytes from `offset` on zeros, as [`Disk::write_zeroes`] does and with its errors.
    pub fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let zeros = self.zero_page();
        self.reactor.block_on(self.disk.write_zeroes(&self.port, offset, len, zeros))?
    }

    /// Copies the journals of the disk's parents into the disk's own image, durably; returns the bytes that were
    /// copied. The caller is the only user of the disk.
    ///
    /// # Errors
    /// Errors of reading and writing the disk. A second call continues.
    pub fn recover_parents(&mut self) -> io::Result<u64> {
        let disk = self.disk.clone();
        let Disk::Image(image) = &*disk else { return Ok(0) };
        let (mut copied, mut bytes) = (0, vec![0; RECOVERY_BYTES]);
        for part in image.unrecovered() {
            let mut at = part.start;
            while at < part.end {
                let (lacks, len) = self.reactor.block_on(image.lacks(&self.port, part, at))??;
                let len = len.min(RECOVERY_BYTES as u64);
                if lacks {
                    let bytes = &mut bytes[..len as usize];
                    self.read(at, bytes)?;
                    self.write(at, bytes)?;
                    copied += len;
                }
                at += len;
            }
        }
        self.flush()?;
        if copied > 0 {
            Rare::ParentRecovered.taken();
        }
        Ok(copied)
    }

    /// Closes the disk, as [`Disk::close`] does and with its errors.
    pub fn close(mut self) -> io::Result<()> {
        self.reactor.block_on(self.disk.close(&self.port))?
    }
}
