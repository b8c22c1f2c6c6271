//! Making a range read as zeros, by the cheapest means that the medium has.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;
use ferrite_io::reactor::Io;

use rustix::fs::{fstatfs, major, minor};

use super::Raw;
use super::discard::{chunks, is_unsupported};
use super::lock::Opened;
use super::medium::{Medium, sysfs_number};

/// The means. Each is one system call, and moves no data on most media.
#[derive(Clone, Copy)]
enum Means {
    /// The space stays reserved, or becomes so.
    ZeroRange = 1,
    /// The space is given back.
    PunchHole = 2,
}

/// The fate of the space of a range that is zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    /// The range has space afterwards.
    Held,
    /// The range has space afterwards, if there is a means for that.
    Kept,
    /// The range has none afterwards, if the medium can do that.
    Freed,
}

impl Space {
    /// The means, in the order in which they are tried.
    fn means(self) -> &'static [Means] {
        match self {
            Space::Held => &[Means::ZeroRange],
            Space::Kept => &[Means::ZeroRange, Means::PunchHole],
            Space::Freed => &[Means::PunchHole, Means::ZeroRange],
        }
    }
}

/// The bytes of one operation. A device may have to write every byte of it.
const FILE_CHUNK_BYTES: u64 = 1 << 30;
const DEVICE_CHUNK_BYTES: u64 = 64 << 20;

/// `statfs(2)` types of file systems that have both means: ext4, XFS, btrfs, F2FS.
const FILE_SYSTEMS: [u64; 4] = [0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010];
/// That of tmpfs, which punches holes only.
const TMPFS: u64 = 0x0102_1994;

/// The means that a medium is known to have without a try, which would change a file's times.
pub(super) fn known(opened: &Opened) -> u8 {
    let (range, hole) = (Means::ZeroRange as u8, Means::PunchHole as u8);
    match opened.medium {
        Medium::File => match fstatfs(&opened.file).map(|system| system.f_type as u64) {
            Ok(TMPFS) => hole,
            Ok(kind) if FILE_SYSTEMS.contains(&kind) => range | hole,
            _ => 0,
        },
        Medium::BlockDevice => {
            let device = (major(opened.stat.st_rdev), minor(opened.stat.st_rdev));
            let most = sysfs_number(device, "queue/write_zeroes_max_bytes").unwrap_or(0);
            if most > 0 { range | hole } else { 0 }
        }
        Medium::Nvme => 0,
    }
}

impl Raw {
    /// Whether whole blocks become zeros without a write of all their bytes, as far as that is known before it is
    /// tried.
    pub fn zeroes_fast(&self) -> bool {
        let usable = self.zero_has & !self.zero_lacks.load(Ordering::Relaxed);
        let space = if self.keeps_allocated() { Space::Held } else { Space::Freed };
        space.means().iter().any(|means| usable & *means as u8 != 0)
    }

    /// Makes `len` bytes from `offset` on zeros, by the cheapest means of the medium; with space for them, if it has
    /// such means. `zeros` is memory that stays zero, for a medium without any.
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
        self.zero(Space::Kept, io, files, offset, len, zeros).await
    }

    /// Makes `len` bytes from `offset` on zeros, and frees their space: a thin medium stays thin. A medium whose space
    /// is [kept](crate::OpenOptions::keep_allocated) keeps it. `zeros` is as for
    /// [`write_zeroes`](Self::write_zeroes).
    ///
    /// # Errors
    /// As [`write_zeroes`](Self::write_zeroes).
    pub async fn empty(
        &self,
        io: &Io,
        files: &[FileId],
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        let space = if self.keeps_allocated() { Space::Held } else { Space::Freed };
        self.zero(space, io, files, offset, len, zeros).await
    }

    async fn zero(
        &self,
        space: Space,
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
            self.zero_chunk(space, io, files[0], offset, len, zeros).await?;
        }
        Ok(())
    }

    /// Zeros one chunk. A means that the medium lacks is not tried again.
    async fn zero_chunk(
        &self,
        space: Space,
        io: &Io,
        file: FileId,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        for means in space.means().iter().copied() {
            if self.zero_lacks.load(Ordering::Relaxed) & means as u8 != 0 {
                continue;
            }
            let done = match means {
                Means::ZeroRange => io.zero_range(file, offset, len).await,
                Means::PunchHole => io.punch_hole(file, offset, len).await,
            };
            match done {
                Err(e) if is_unsupported(&e) => {
                    self.zero_lacks.fetch_or(means as u8, Ordering::Relaxed);
                }
                // The range has whole sectors, but not whole blocks of a device with larger ones.
                Err(e)
                    if e.kind() == io::ErrorKind::InvalidInput
                        && self.medium == Medium::BlockDevice =>
                {
                    break;
                }
                done => {
                    self.runs.forget();
                    return done;
                }
            }
        }
        write_memory(io, file, offset, len, zeros).await
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
