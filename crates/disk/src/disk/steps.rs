//! The operations of a disk that take several steps, and may wait.

use std::io;

use ferrite_disk_base::Port;
use ferrite_io::arena::Span;

use super::{Disk, Work};

impl Disk {
    /// Reads a range, with all steps that this takes.
    ///
    /// # Errors
    /// `InvalidInput`: not inside the disk. `InvalidData`: metadata is damaged. Errors of the kernel.
    pub fn read<'a>(&'a self, port: &'a Port, offset: u64, buf: Span) -> Work<'a, ()> {
        Box::pin(async move {
            if !self.contains(offset, buf.len() as u64) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            match self {
                Disk::Raw(d) => d.read(port, offset, buf).await,
                Disk::Image(d) => d.read(port, offset, buf).await,
                Disk::Store(d) => d.read(port, offset, buf).await,
                Disk::Elsewhere(d) => d.read(port, offset, buf).await,
                Disk::Mirror(d) => d.read(port, offset, buf).await,
                Disk::Remote(_) => port.io.read_exact(port.files[0], offset, buf).await,
                Disk::Null(_) => {
                    port.memory().fill(buf, 0);
                    Ok(())
                }
            }
        })
    }

    /// Writes a range, with all steps that this takes. It is visible, and survives the death of this process, when this
    /// returns `Ok`; [`flush`](Disk::flush) makes it durable.
    ///
    /// # Errors
    /// As [`read`](Disk::read); `PermissionDenied`: read-only; `StorageFull`.
    pub fn write<'a>(&'a self, port: &'a Port, offset: u64, buf: Span) -> Work<'a, ()> {
        Box::pin(async move {
            self.check_change(offset, buf.len() as u64)?;
            self.mark(port, offset, buf.len() as u64).await?;
            match self {
                Disk::Raw(_) | Disk::Remote(_) => {
                    port.io.write_all(port.files[0], offset, buf).await
                }
                Disk::Image(d) => d.write(port, offset, buf).await,
                Disk::Store(d) => d.write(port, offset, buf).await,
                Disk::Mirror(d) => d.write(port, offset, buf).await,
                Disk::Elsewhere(_) | Disk::Null(_) => Ok(()),
            }
        })
    }

    /// Everything written before is on the medium when this returns `Ok`.
    ///
    /// # Errors
    /// Errors of the kernel. It reports a lost write once only, so the caller must not trust a later success (blkif.md
    /// 2, rule 3).
    pub fn flush<'a>(&'a self, port: &'a Port) -> Work<'a, ()> {
        Box::pin(async move {
            match self {
                Disk::Raw(d) => d.flush(port).await,
                Disk::Image(_) if self.read_only() => Ok(()),
                Disk::Image(d) => d.flush(port).await,
                Disk::Store(d) => d.flush(port).await,
                Disk::Remote(d) => d.flush(port).await,
                Disk::Mirror(d) => d.flush(port).await,
                Disk::Elsewhere(_) | Disk::Null(_) => Ok(()),
            }
        })
    }

    /// The last operation on a disk: a flush, and the completion of its image for other programs. Nothing may be in
    /// flight.
    ///
    /// # Errors
    /// As [`flush`](Disk::flush).
    pub fn close<'a>(&'a self, port: &'a Port) -> Work<'a, ()> {
        Box::pin(async move {
            match self {
                Disk::Image(d) if !self.read_only() => d.close(port).await?,
                Disk::Store(d) => d.close(port).await?,
                Disk::Mirror(d) => return d.close(port).await,
                _ => self.flush(port).await?,
            }
            self.end_tracking(port).await
        })
    }

    /// Tells the medium that a range is not needed any more. It then reads as zeros or as before, or, in an image with
    /// a parent, as the parent; bytes outside of it are never changed, however it is aligned (threats.md T20).
    ///
    /// # Errors
    /// `Unsupported`: this medium has no discard. `PermissionDenied`: read-only. `InvalidInput`: not inside the disk.
    /// Errors of the kernel.
    pub fn discard<'a>(&'a self, port: &'a Port, offset: u64, len: u64) -> Work<'a, ()> {
        Box::pin(async move {
            self.check_change(offset, len)?;
            let mut done = 0;
            while done < len {
                done += self.discard_part(port, offset + done, len - done).await?;
                port.io.yield_to_others().await;
            }
            Ok(())
        })
    }

    /// The beginning of a [`discard`](Disk::discard): a bounded amount of work, however long the range is and whatever
    /// the image has in it. Returns the bytes that are done; 0: metadata was read, call again. Between two parts
    /// callers [let others go first][yield], and may end.
    ///
    /// [yield]: ferrite_io::reactor::Io::yield_to_others
    ///
    /// # Errors
    /// As [`discard`](Disk::discard).
    pub fn discard_part<'a>(&'a self, port: &'a Port, offset: u64, len: u64) -> Work<'a, u64> {
        Box::pin(async move {
            self.check_change(offset, len)?;
            let len = self.mark_part(port, offset, len).await?;
            match self {
                Disk::Raw(d) => d.discard_part(&port.io, &port.files, offset, len).await,
                Disk::Image(d) => d.discard_part(port, offset, len).await,
                Disk::Store(d) => d.discard_part(port, offset, len).await,
                Disk::Remote(d) => d.discard_part(port, offset, len).await,
                Disk::Mirror(d) => d.discard_part(port, offset, len).await,
                Disk::Elsewhere(_) | Disk::Null(_) => Ok(len),
            }
        })
    }

    /// Makes a range read as zeros, by the cheapest means of the medium. The last of these writes `zeros` repeatedly,
    /// memory full of zeros whose length is a multiple of [`block_bytes`](Disk::block_bytes).
    ///
    /// # Errors
    /// `PermissionDenied`: read-only. `InvalidInput`: not inside the disk, or not aligned to
    /// [`block_bytes`](Disk::block_bytes). Errors of the kernel.
    pub fn write_zeroes<'a>(
        &'a self,
        port: &'a Port,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> Work<'a, ()> {
        Box::pin(async move {
            self.check_change(offset, len)?;
            self.mark(port, offset, len).await?;
            match self {
                Disk::Raw(d) => d.empty(&port.io, &port.files, offset, len, zeros).await,
                Disk::Image(d) => d.write_zeroes(port, offset, len, zeros).await,
                Disk::Store(d) => d.write_zeroes(port, offset, len).await,
                Disk::Remote(d) => d.write_zeroes(port, offset, len, zeros).await,
                Disk::Mirror(d) => d.write_zeroes(port, offset, len, zeros).await,
                Disk::Elsewhere(_) | Disk::Null(_) => Ok(()),
            }
        })
    }

    /// The second line of defence for ranges and read-only disks (threats.md T10).
    fn check_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.read_only() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if !self.contains(offset, len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(())
    }
}
