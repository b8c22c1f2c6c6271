//! Compares the contents of two disks.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::Pin;

use ferrite_disk::Disk;
use ferrite_disk::pieces::{What, look};
use ferrite_disk_base::{DiskError, ImageName, Port, SECTOR_BYTES};
use ferrite_io::arena::Span;
use ferrite_io::shared_lock::SharedLock;

use super::io_context::{BUFFER_BYTES, IoContext, Stop, all};
use super::{Comparison, Difference, ImageTools, Progress, allocation, broken};

/// Pieces that are compared at a time.
const IN_FLIGHT: usize = 4;

/// A disk, a port to it, memory for 1 MiB of it, and its size.
pub(super) struct Side<'a> {
    pub(super) disk: &'a Disk,
    pub(super) port: Port,
    pub(super) buf: Span,
    pub(super) bytes: u64,
    /// Whether there are zeros, and their end: computed once for each part of the disk, as some file systems (tmpfs)
    /// walk all of it for the answer.
    part: Cell<(bool, u64)>,
}

impl<'a> Side<'a> {
    pub(super) fn new(context: &mut IoContext, disk: &'a Disk) -> io::Result<Side<'a>> {
        let bytes = disk.sectors() * SECTOR_BYTES;
        let part = Cell::new((false, 0));
        Ok(Side { disk, port: context.port(disk)?, buf: context.buffer()?, bytes, part })
    }
}

impl Side<'_> {
    /// The number of bytes from `at` on that are known to be zeros, and if none, the number that can be read.
    pub(super) async fn ahead(&self, at: u64, len: u64) -> io::Result<(bool, u64)> {
        // Past the end of the shorter disk there are zeros.
        if at >= self.bytes {
            return Ok((true, len));
        }
        if self.part.get().1 <= at {
            let piece = look(self.disk, &self.port, at, self.bytes - at).await?;
            self.part.set((piece.what == What::Zeros, at + piece.len));
        }
        let (zeros, end) = self.part.get();
        Ok((zeros, len.min(end - at)))
    }

    /// Fills `bytes` with the disk's bytes from `at` on: memory that the caller uses for all pieces.
    pub(super) async fn read(&self, at: u64, zeros: bool, bytes: &mut [u8]) -> io::Result<()> {
        self.read_by(self.buf, at, zeros, bytes).await
    }

    /// [`read`](Self::read), by memory of a task's own.
    async fn read_by(&self, buf: Span, at: u64, zeros: bool, bytes: &mut [u8]) -> io::Result<()> {
        if zeros {
            bytes.fill(0);
            return Ok(());
        }
        let span = buf.slice(0, bytes.len());
        self.disk.read(&self.port, at, span).await?;
        self.port.memory().copy_out(span, bytes);
        Ok(())
    }
}

impl ImageTools<'_> {
    /// Compares the contents of two disks. Their sizes may differ if the rest is zeros. With `strict` a different size
    /// is a difference at the end of the shorter one, and so is a part that only one of them has allocated.
    ///
    /// # Errors
    /// One of them cannot be opened or read; `Interrupted` if the progress callback stopped it.
    pub fn compare(
        &self,
        a: &ImageName,
        b: &ImageName,
        strict: bool,
    ) -> Result<Comparison, DiskError> {
        let disks = [self.open(a, true)?, self.open(b, true)?];
        let cannot =
            |e| broken(format!("cannot compare {} and {}", a.path.display(), b.path.display()), e);
        let mut context = IoContext::new(self, 2 + 2 * IN_FLIGHT).map_err(cannot)?;
        let a = Side::new(&mut context, &disks[0]).map_err(cannot)?;
        let b = Side::new(&mut context, &disks[1]).map_err(cannot)?;
        let shorter = a.bytes.min(b.bytes);
        let end = if strict { shorter } else { a.bytes.max(b.bytes) };
        let comparing = Comparing::new(self, &mut context, [&a, &b], end).map_err(cannot)?;
        let first = context.run(comparing.run()).map_err(cannot)?;
        let mut first = first.map(|at| (at, Difference::Content));
        if strict && first.is_none() {
            let by_size = (a.bytes != b.bytes).then_some((shorter, Difference::Size));
            let allocated = context.run(allocation::first_difference(&a, &b, shorter));
            let allocated = allocated.map_err(cannot)?.map(|at| (at, Difference::Allocation));
            first = allocated.or(by_size);
        }
        Ok(Comparison {
            identical: first.is_none(),
            first_difference_bytes: first.map(|(at, _)| at),
            difference: first.map(|(_, what)| what),
            virtual_bytes: [a.bytes, b.bytes],
        })
    }
}

/// A part of both disks, of which one at least may have data.
struct Piece {
    at: u64,
    len: u64,
    /// Which of the two has zeros there.
    zeros: [bool; 2],
}

/// A comparison of contents: several pieces at a time.
struct Comparing<'a> {
    tools: &'a ImageTools<'a>,
    sides: [&'a Side<'a>; 2],
    /// Of each worker, for both disks.
    buffers: Vec<[Span; 2]>,
    end: u64,
    next: Cell<u64>,
    /// Held by the worker that looks for the next piece.
    looking: SharedLock,
    /// The first difference that was found so far.
    first: Cell<Option<u64>>,
    stop: Stop,
}

impl<'a> Comparing<'a> {
    fn new(
        tools: &'a ImageTools<'a>,
        context: &mut IoContext,
        sides: [&'a Side<'a>; 2],
        end: u64,
    ) -> io::Result<Comparing<'a>> {
        let mut both = || -> io::Result<[Span; 2]> { Ok([context.buffer()?, context.buffer()?]) };
        let buffers = (0..IN_FLIGHT).map(|_| both()).collect::<io::Result<_>>()?;
        Ok(Comparing {
            tools,
            sides,
            buffers,
            end,
            next: Cell::new(0),
            looking: SharedLock::new(),
            first: Cell::new(None),
            stop: Stop::default(),
        })
    }

    /// The first byte that differs.
    async fn run(&self) -> io::Result<Option<u64>> {
        let worker = |buffers: &[Span; 2]| -> Task<'_> {
            let buffers = *buffers;
            Box::pin(async move {
                let done = self.work(buffers).await;
                if done.is_err() {
                    self.stop.raise();
                }
                done
            })
        };
        all(self.buffers.iter().map(worker).collect()).await?;
        Ok(self.first.get())
    }

    /// A worker: takes pieces as long as there are any.
    async fn work(&self, buffers: [Span; 2]) -> io::Result<()> {
        let mut memory = [vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]];
        while let Some(Piece { at, len, zeros }) = self.next().await? {
            let [a, b] = memory.each_mut().map(|bytes| &mut bytes[..len as usize]);
            self.sides[0].read_by(buffers[0], at, zeros[0], a).await?;
            self.sides[1].read_by(buffers[1], at, zeros[1], b).await?;
            // Whole pieces first: byte by byte takes many times as long.
            if a != b {
                let differ = a.iter().zip(&*b).position(|(a, b)| a != b);
                let here = differ.map(|i| at + i as u64);
                self.first.set(here.into_iter().chain(self.first.get()).min());
            }
        }
        Ok(())
    }

    /// The next piece that has to be read. Pieces are taken in order, so with a difference no further one is needed.
    async fn next(&self) -> io::Result<Option<Piece>> {
        let [a, b] = self.sides;
        let _held = self.looking.lock(&a.port.io).await?;
        loop {
            let at = self.next.get();
            if at >= self.end || self.first.get().is_some() || self.stop.is_raised() {
                return Ok(None);
            }
            let progress = Progress { done_bytes: at, total_bytes: self.end };
            if !(self.tools.progress)(progress) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let left = self.end - at;
            let ((zeros_a, len_a), (zeros_b, len_b)) =
                (a.ahead(at, left).await?, b.ahead(at, left).await?);
            let len = len_a.min(len_b);
            if zeros_a && zeros_b {
                self.next.set(at + len);
                continue;
            }
            let len = len.min(BUFFER_BYTES as u64);
            self.next.set(at + len);
            return Ok(Some(Piece { at, len, zeros: [zeros_a, zeros_b] }));
        }
    }
}

type Task<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>;
