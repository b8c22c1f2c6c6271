//! Making a range read as zeros, by the cheapest means that the medium has.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;
use ferrite_io::reactor::Io;

use super::Raw;
use super::discard::{chunks, is_unsupported};
use super::medium::Medium;

/// The means, in the order in which they are tried. The first two are one system call and move no data on most media;
/// the first also keeps the space reserved.
const ZERO_RANGE: u8 = 0;
const PUNCH_HOLE: u8 = 1;

/// The bytes of one operation. A device may have to write every byte of it.
const FILE_CHUNK_BYTES: u64 = 1 << 30;
const DEVICE_CHUNK_BYTES: u64 = 64 << 20;

impl Raw {
    /// Makes `len` bytes from `offset` on zeros, by the cheapest means of the medium. `zeros` is memory that stays
    /// zero, for a medium without such means.
    ///
    /// # Errors
    /// `InvalidInput` if the range or the memory is not of whole blocks. Errors of the kernel.
    pub async fn write_zeroes(
        &self,
        io: &Io,
        files: &[FileId],
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        let block = u64::from(self.block_bytes());
        let memory = zeros.len() as u64;
        if [offset, len, memory].iter().any(|n| !n.is_multiple_of(block)) || memory == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let chunk = match self.medium {
            Medium::File => FILE_CHUNK_BYTES,
            Medium::BlockDevice | Medium::Nvme => DEVICE_CHUNK_BYTES,
        };
        for (offset, len) in chunks(offset, len, chunk) {
            self.zero_chunk(io, files[0], offset, len, zeros).await?;
        }
        Ok(())
    }

    /// Zeros one chunk. A means that the medium lacks is not tried again.
    async fn zero_chunk(
        &self,
        io: &Io,
        file: FileId,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        loop {
            let means = self.zero_means.load(Ordering::Relaxed);
            let done = match means {
                ZERO_RANGE => io.zero_range(file, offset, len).await,
                PUNCH_HOLE => io.punch_hole(file, offset, len).await,
                _ => return write_memory(io, file, offset, len, zeros).await,
            };
            match done {
                Err(e) if is_unsupported(&e) => {
                    self.zero_means.fetch_max(means + 1, Ordering::Relaxed);
                }
                // The range has whole sectors, but not whole blocks of a device with larger ones.
                Err(e)
                    if e.kind() == io::ErrorKind::InvalidInput
                        && self.medium == Medium::BlockDevice =>
                {
                    return write_memory(io, file, offset, len, zeros).await;
                }
                done => return done,
            }
        }
    }
}

async fn write_memory(io: &Io, file: FileId, offset: u64, len: u64, zeros: Span) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let n = (len - done).min(zeros.len() as u64);
        io.write_all(file, offset + done, zeros.slice(0, n as usize)).await?;
        done += n;
    }
    Ok(())
}
