//! Compares the contents of two disks.

use std::cell::Cell;
use std::io;

use ferrite_disk::Disk;
use ferrite_disk::pieces::{What, look};
use ferrite_disk_base::{DiskError, ImageName, Port, SECTOR_BYTES};
use ferrite_io::arena::Span;

use super::io_context::{BUFFER_BYTES, IoContext};
use super::{Comparison, Difference, ImageTools, Progress, allocation, broken};

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
        if zeros {
            bytes.fill(0);
            return Ok(());
        }
        let span = self.buf.slice(0, bytes.len());
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
        let mut context = IoContext::new(self, 2).map_err(cannot)?;
        let a = Side::new(&mut context, &disks[0]).map_err(cannot)?;
        let b = Side::new(&mut context, &disks[1]).map_err(cannot)?;
        let shorter = a.bytes.min(b.bytes);
        let end = if strict { shorter } else { a.bytes.max(b.bytes) };
        let first = context.run(self.first_difference(&a, &b, end)).map_err(cannot)?;
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

    async fn first_difference(
        &self,
        a: &Side<'_>,
        b: &Side<'_>,
        end: u64,
    ) -> io::Result<Option<u64>> {
        let (mut bytes_a, mut bytes_b) = (vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]);
        let mut told = 0;
        let mut at = 0;
        while at < end {
            let ((zeros_a, len_a), (zeros_b, len_b)) =
                (a.ahead(at, end - at).await?, b.ahead(at, end - at).await?);
            let mut len = len_a.min(len_b);
            if !(zeros_a && zeros_b) {
                len = len.min(BUFFER_BYTES as u64);
                let (bytes_a, bytes_b) =
                    (&mut bytes_a[..len as usize], &mut bytes_b[..len as usize]);
                a.read(at, zeros_a, bytes_a).await?;
                b.read(at, zeros_b, bytes_b).await?;
                // Whole pieces first: byte by byte takes many times as long.
                if bytes_a != bytes_b {
                    let differ = bytes_a.iter().zip(&*bytes_b).position(|(a, b)| a != b);
                    return Ok(differ.map(|i| at + i as u64));
                }
            }
            at += len;
            if at - told >= BUFFER_BYTES as u64 {
                told = at;
                if !(self.progress)(Progress { done_bytes: at, total_bytes: end }) {
                    return Err(io::ErrorKind::Interrupted.into());
                }
            }
        }
        Ok(None)
    }
}
