//! A chain of images with an engine and memory of its own, for tests. It is what crate `disk` adds to this one, without
//! checks of ranges.

use std::future::Future;
use std::io;
use std::sync::Arc;

use ferrite_disk_base::{Port, SCRATCH_BYTES};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::Engine;
use ferrite_io::pool::{Buf, Pool, QueuePool, SLAB_BYTES};
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::Scratch;

use crate::Image;

/// See the module text.
pub(crate) struct Session {
    image: Arc<Image>,
    port: Port,
    pool: Arc<Pool>,
    buffers: QueuePool,
    /// The last field, as its drop waits for operations on all of the above.
    reactor: Reactor,
}

impl Session {
    pub(crate) fn new(
        image: Arc<Image>,
        open: impl FnOnce(Arc<Arena>) -> io::Result<Box<dyn Engine>>,
    ) -> io::Result<Session> {
        let pool = Pool::with_scratch(SLAB_BYTES, 1, SCRATCH_BYTES)?;
        let mut reactor = Reactor::new(open(pool.arena().clone())?);
        let files = image.files().into_iter().map(|f| reactor.add_file(f));
        let files = files.collect::<io::Result<_>>()?;
        let scratch = Scratch::new(pool.arena().clone(), pool.scratch(0));
        let port = Port { io: reactor.io(), files, scratch };
        let buffers = pool.queue(0);
        Ok(Session { image, port, pool, buffers, reactor })
    }

    pub(crate) fn disk(&self) -> &Arc<Image> {
        &self.image
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    pub(crate) fn run<T>(&mut self, future: impl Future<Output = T>) -> io::Result<T> {
        self.reactor.block_on(future)
    }

    pub(crate) fn read(&mut self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let (buffer, span) = self.buffer(to.len())?;
        let done = self.reactor.block_on(self.image.read(&self.port, offset, span));
        self.pool.arena().copy_out(span, to);
        self.buffers.free(buffer);
        done?
    }

    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        let (buffer, span) = self.buffer(from.len())?;
        self.pool.arena().copy_in(span, from);
        let done = self.reactor.block_on(self.image.write(&self.port, offset, span));
        self.buffers.free(buffer);
        done?
    }

    fn buffer(&mut self, bytes: usize) -> io::Result<(Buf, Span)> {
        let buffer = self.buffers.alloc(bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        let span = buffer.span().slice(0, bytes);
        Ok((buffer, span))
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.reactor.block_on(self.image.flush(&self.port))?
    }

    pub(crate) fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let (image, port) = (self.image.clone(), self.port.clone());
        self.reactor.block_on(async {
            let mut done = 0;
            while done < len {
                done += image.discard_part(&port, offset + done, len - done).await?;
                port.io.yield_to_others().await;
            }
            Ok(())
        })?
    }

    pub(crate) fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let zeros = self.pool.zero_page();
        self.reactor.block_on(self.image.write_zeroes(&self.port, offset, len, zeros))?
    }

    pub(crate) fn close(mut self) -> io::Result<()> {
        self.reactor.block_on(self.image.close(&self.port))?
    }
}
