//! Discards ranges that a guest does not need any more.
//!
//! In a file exactly the range is punched out: the file system frees whole blocks and writes zeros into the rest. A
//! device gets `BLKDISCARD`, which works in logical blocks only, so the range is shrunk to them. A discard is a hint;
//! changing neighbouring data would be an error (threats.md T20).

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_host::nvme::Namespace;
use ferrite_io::engine::FileId;
use ferrite_io::reactor::Io;
use rustix::fs::{Stat, fstat, ioctl_blksszget, major, minor};
use rustix::io::Errno;

use super::Raw;
use super::lock::Opened;
use super::medium::{Medium, sysfs_number};
use crate::DiscardLimits;

/// The bytes of one operation, so that each ends within reasonable time and a long discard lets other requests through
/// (blkif.md 2, rule 10).
const CHUNK_BYTES: u64 = 1 << 30;

/// A file that has no more space than this is punched at once, however large its holes are: the work depends on the
/// space that is freed.
const LITTLE_BYTES: u64 = 64 << 20;

/// The way in which this medium discards.
#[derive(Debug)]
pub(super) struct Discard {
    limits: DiscardLimits,
    /// The unit to which ranges are shrunk; 1: they are exact.
    unit_bytes: u64,
    chunk_bytes: u64,
    /// The kernel has reported that it cannot discard.
    refused: AtomicBool,
}

impl Discard {
    /// `None` if the medium cannot discard.
    pub(super) fn of(opened: &Opened, fixed_size: bool) -> Option<Discard> {
        match opened.medium {
            Medium::File if fixed_size => Some(for_fixed_file()),
            Medium::File => Some(for_file(opened)),
            Medium::BlockDevice | Medium::Nvme => for_device(opened),
        }
    }

    /// Discards by NVMe commands, in the namespace's blocks.
    pub(super) fn of_namespace(namespace: &Namespace) -> Option<Discard> {
        let block = namespace.block_bytes;
        namespace.deallocates.then_some(Discard {
            limits: DiscardLimits { granularity_bytes: block, alignment_bytes: 0 },
            unit_bytes: u64::from(block),
            chunk_bytes: CHUNK_BYTES,
            refused: AtomicBool::new(false),
        })
    }

    pub(super) fn limits(&self) -> Option<DiscardLimits> {
        (!self.refused.load(Ordering::Relaxed)).then_some(self.limits)
    }
}

/// Whether the file system can punch holes is only known after it has: a test past the end would change no data, but
/// the file's times. A guest that was offered discard in vain gets an error for its first one, and stops (blkif.md 2,
/// rule 4).
fn for_file(opened: &Opened) -> Discard {
    let block = u32::try_from(opened.stat.st_blksize).unwrap_or(0);
    let plausible = block.is_power_of_two() && (512..=1 << 20).contains(&block);
    Discard {
        limits: DiscardLimits {
            granularity_bytes: if plausible { block } else { 4096 },
            alignment_bytes: 0,
        },
        unit_bytes: 1,
        chunk_bytes: CHUNK_BYTES,
        refused: AtomicBool::new(false),
    }
}

/// A file that is used as a device is treated as a device.
fn for_fixed_file() -> Discard {
    let unit = crate::SECTOR_BYTES as u32;
    Discard {
        limits: DiscardLimits { granularity_bytes: unit, alignment_bytes: 0 },
        unit_bytes: u64::from(unit),
        chunk_bytes: CHUNK_BYTES,
        refused: AtomicBool::new(false),
    }
}

fn for_device(opened: &Opened) -> Option<Discard> {
    let device = (major(opened.stat.st_rdev), minor(opened.stat.st_rdev));
    let max = sysfs_number(device, "queue/discard_max_bytes").filter(|max| *max > 0)?;
    let number = |name| sysfs_number(device, name).and_then(|n| u32::try_from(n).ok());
    let logical = ioctl_blksszget(&opened.file).ok().filter(|b| b.is_power_of_two())?;
    let granularity = number("queue/discard_granularity").unwrap_or(0).max(logical);
    Some(Discard {
        limits: DiscardLimits {
            granularity_bytes: granularity,
            alignment_bytes: number("discard_alignment").unwrap_or(0) % granularity,
        },
        unit_bytes: u64::from(logical),
        chunk_bytes: device_chunk(max, u64::from(granularity.next_multiple_of(logical))),
        refused: AtomicBool::new(false),
    })
}

/// The most that the device takes at once, in whole steps. The kernel splits at the device's limit itself, so below 1
/// MiB there is no gain in doing it here.
fn device_chunk(max: u64, step: u64) -> u64 {
    let chunk = max.min(CHUNK_BYTES) / step * step;
    chunk.max((1u64 << 20).next_multiple_of(step))
}

impl Raw {
    /// Discards a range of whole blocks: `len` bytes from `offset` on. `files` are those of the caller's
    /// [`Port`](crate::Port).
    ///
    /// # Errors
    /// `Unsupported` if the medium has no discard. Others as the kernel gives them.
    pub async fn discard(
        &self,
        io: &Io,
        files: &[FileId],
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            done += self.discard_part(io, files, offset + done, len - done).await?;
        }
        Ok(())
    }

    /// Discards the beginning of a range by one operation, and returns how many bytes that was.
    ///
    /// # Errors
    /// As [`discard`](Self::discard).
    pub async fn discard_part(
        &self,
        io: &Io,
        files: &[FileId],
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let Some(how) = self.discard.as_ref().filter(|d| d.limits().is_some()) else {
            return Err(unsupported());
        };
        let at_once = len > how.chunk_bytes && self.frees_little();
        let chunk = if at_once { u64::MAX } else { how.chunk_bytes };
        let Some((_, part)) = chunks(offset, len, chunk).next() else { return Ok(0) };
        // Chunks end at whole units, so a part shrinks only at the range's own ends.
        let Some((offset, len)) = shrink(offset, part, how.unit_bytes) else { return Ok(part) };
        let done = match self.is_file() {
            true => self.punch(io, files[0], offset, len).await,
            false => io.discard(files[0], offset, len).await,
        };
        match done {
            Err(e) if is_unsupported(&e) => {
                how.refused.store(true, Ordering::Relaxed);
                Err(unsupported())
            }
            done => done.map(|()| part),
        }
    }

    async fn punch(&self, io: &Io, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        let done = io.punch_hole(file, offset, len).await;
        self.runs.forget();
        done
    }

    fn frees_little(&self) -> bool {
        let allocated = |stat: Stat| {
            u64::try_from(stat.st_blocks).map_or(u64::MAX, |blocks| blocks.saturating_mul(512))
        };
        self.is_file() && fstat(&self.file).is_ok_and(|stat| allocated(stat) <= LITTLE_BYTES)
    }
}

/// Whether the error means that the kernel will never do this.
pub(super) fn is_unsupported(e: &io::Error) -> bool {
    let errno = e.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY))
}

fn unsupported() -> io::Error {
    Errno::OPNOTSUPP.into()
}

/// The part of a range that consists of whole units; `None` if there is no such part.
fn shrink(offset: u64, len: u64, unit: u64) -> Option<(u64, u64)> {
    let start = offset.checked_next_multiple_of(unit)?;
    let end = (offset + len) / unit * unit;
    (start < end).then(|| (start, end - start))
}

/// Splits a range at the multiples of `chunk`, so that only its own ends are uneven.
pub(super) fn chunks(offset: u64, len: u64, chunk: u64) -> impl Iterator<Item = (u64, u64)> {
    let (mut at, end) = (offset, offset + len);
    std::iter::from_fn(move || {
        let from = at;
        at = (from / chunk * chunk).saturating_add(chunk).min(end);
        (from < end).then(|| (from, at - from))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_within_a_unit_shrinks_to_nothing() {
        assert_eq!(shrink(512, 3584, 4096), None);
        assert_eq!(shrink(4608, 7168, 4096), None);
        assert_eq!(shrink(512, 8192, 4096), Some((4096, 4096)));
        assert_eq!(shrink(4096, 4096, 4096), Some((4096, 4096)));
        assert_eq!(shrink(7, 0, 1), None);
        assert_eq!(shrink(7, 3, 1), Some((7, 3)));
    }

    #[test]
    fn a_device_is_given_whole_steps() {
        assert_eq!(device_chunk(u64::MAX, 4096), CHUNK_BYTES);
        assert_eq!(device_chunk(4_294_966_784, 512), CHUNK_BYTES);
        assert_eq!(device_chunk((4 << 20) + 512, 4096), 4 << 20);
        assert_eq!(device_chunk(65536, 65536), 1 << 20);
        assert_eq!(device_chunk(65536, 3 << 20), 3 << 20);
    }

    proptest! {
        #[test]
        fn shrinking_keeps_inside_and_drops_less_than_two_units(
            offset in 0u64..1 << 40, len in 0u64..1 << 40, shift in 0u32..20,
        ) {
            let unit = 1u64 << shift;
            match shrink(offset, len, unit) {
                None => prop_assert!(len < 2 * unit),
                Some((start, left)) => {
                    prop_assert!(start >= offset && start + left <= offset + len);
                    prop_assert!(start % unit == 0 && left % unit == 0);
                    prop_assert!(len - left < 2 * unit);
                }
            }
        }

        #[test]
        fn chunks_cover_a_range_once_and_break_only_at_multiples(
            offset in 0u64..1 << 20, len in 0u64..1 << 20, chunk in 1u64 << 14..1 << 18,
        ) {
            let mut at = offset;
            for (from, n) in chunks(offset, len, chunk) {
                prop_assert!(from == at && n > 0 && n <= chunk);
                prop_assert!(from == offset || from % chunk == 0);
                at += n;
            }
            prop_assert_eq!(at, offset + len);
        }
    }
}
