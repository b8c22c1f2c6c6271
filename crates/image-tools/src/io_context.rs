//! An engine and memory for an operation, and the disks that it works on.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use ferrite_disk::Disk;
use ferrite_disk_base::dirty::REGION_BYTES;
use ferrite_disk_base::{Port, SCRATCH_BYTES};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::reactor::Reactor;
use ferrite_io::remote::Backing;
use ferrite_io::scratch::Scratch;
use ferrite_store::owned::OpenEngine;

use super::ImageTools;

/// Scratch memory for two disks.
const SCRATCHES: usize = 2;
/// Bytes of a buffer.
pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// See the module text. It belongs to one thread.
pub(super) struct IoContext {
    scratch: Scratch,
    /// The free buffers.
    buffers: Vec<Span>,
    /// Its drop waits for operations on memory and files.
    reactor: Reactor,
}

impl IoContext {
    /// A context with memory for so many buffers.
    pub(super) fn new(tools: &ImageTools<'_>, buffers: usize) -> io::Result<IoContext> {
        IoContext::on(tools.engine, buffers)
    }

    /// A context on an engine that this opens.
    pub(super) fn on(engine: OpenEngine<'_>, buffers: usize) -> io::Result<IoContext> {
        let scratch_bytes = SCRATCHES * SCRATCH_BYTES;
        let arena = Arena::new(buffers * BUFFER_BYTES + scratch_bytes)?;
        let scratch = Scratch::new(arena.clone(), arena.span(0, scratch_bytes));
        let buffer = |i| arena.span(scratch_bytes + i * BUFFER_BYTES, BUFFER_BYTES);
        let buffers = (0..buffers).map(buffer).collect();
        Ok(IoContext { scratch, buffers, reactor: Reactor::new(engine(arena)?) })
    }

    /// A port to a disk's files.
    pub(super) fn port(&mut self, disk: &Disk) -> io::Result<Port> {
        self.port_on(disk.backings())
    }

    /// A port to files.
    pub(super) fn port_of(&mut self, files: Vec<Arc<OwnedFd>>) -> io::Result<Port> {
        self.port_on(files.into_iter().map(Backing::File).collect())
    }

    fn port_on(&mut self, backings: Vec<Backing>) -> io::Result<Port> {
        let files = backings.into_iter().map(|b| self.reactor.add(b, &self.scratch));
        let files = files.collect::<io::Result<_>>()?;
        Ok(Port { io: self.reactor.io(), files, scratch: self.scratch.clone() })
    }

    /// One of the buffers.
    pub(super) fn buffer(&mut self) -> io::Result<Span> {
        self.buffers.pop().ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Free buffers that follow each other, for a region of a dirty map.
    pub(super) fn region(&mut self) -> io::Result<Span> {
        let mut whole = self.buffer()?;
        while (whole.len() as u64) < REGION_BYTES {
            // They are given out from the last to the first.
            let before = self.buffer()?;
            whole = before.join(whole).ok_or(io::ErrorKind::OutOfMemory)?;
        }
        Ok(whole)
    }

    /// Runs a future to its end.
    pub(super) fn run<T>(&mut self, future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        self.reactor.block_on(future)?
    }
}

/// Whether one of several tasks has failed, so that the others end early.
#[derive(Clone, Default)]
pub(super) struct Stop(Rc<Cell<bool>>);

impl Stop {
    pub(super) fn raise(&self) {
        self.0.set(true);
    }

    pub(super) fn is_raised(&self) -> bool {
        self.0.get()
    }
}

/// Runs all futures to their ends, concurrently; the first error counts.
pub(super) async fn all<'a>(
    mut futures: Vec<Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>>,
) -> io::Result<()> {
    let mut first = Ok(());
    poll_fn(|cx| {
        futures.retain_mut(|future| match future.as_mut().poll(cx) {
            Poll::Pending => true,
            Poll::Ready(done) => {
                if first.is_ok() {
                    first = done;
                }
                false
            }
        });
        if futures.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    first
}
