//! One file of a simulated world.
//!
//! The real file (sparse, on a tmpfs) has the bytes that a process would read now: the page cache. The states to which
//! a power cut may revert are kept here: for each sector that no sync has made durable, all its contents since, and the
//! list of changes of the file's size and allocation.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ftruncate, seek};
use rustix::io::Errno;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::engine::Op;

/// The unit that a medium writes atomically.
pub(super) const SECTOR_BYTES: u64 = 512;

const SECTOR: usize = SECTOR_BYTES as usize;

/// The unit that a device discards atomically.
const DISCARD_BYTES: u64 = 16 << 10;

type Sector = Box<[u8; SECTOR]>;

/// The content of a sector from some step on.
struct Version {
    /// The step at which it was written.
    at: u64,
    /// The change of allocation that made it; `None`: a write within the file. Data that make a file longer reach the
    /// medium before its new length (ext4 `data=ordered`, XFS, btrfs).
    change: Option<u64>,
    /// A sync failed to write it, and the kernel has dropped its dirty mark.
    lost: bool,
    /// `None`: zeros.
    bytes: Option<Sector>,
}

/// A change of size or allocation that is not durable. They become durable in order, as in the journal of a file
/// system.
struct Change {
    at: u64,
    size_before: u64,
    /// A power cut may leave a range half freed, but a size is the old or the new one.
    divisible: bool,
}

/// The choices of a power cut for unsynced sectors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fate {
    /// Of 100 sectors, how many keep their last content.
    newest: u64,
    /// Of 100 of the others, how many revert to the oldest.
    oldest: u64,
}

impl Fate {
    /// Chooses a fate. Evenly mixed ones hide faults that need almost all, or almost no, sectors written.
    pub(super) fn choose(random: &mut SplitMix64) -> Fate {
        let newest = [0, 3, 50, 97, 100][random.below(5) as usize];
        let oldest = [100, 50, 0][random.below(3) as usize];
        Fate { newest, oldest }
    }
}

/// The abilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Whether it can discard: parts of the range become zeros.
    pub discards: bool,
    /// Whether it can zero a range without transferring zeros.
    pub zeroes: bool,
}

pub(super) struct SimFile {
    file: File,
    size: u64,
    device: Option<Device>,
    sectors: BTreeMap<u64, Vec<Version>>,
    changes: Vec<Change>,
    /// The number of the first of `changes`, counted since the beginning.
    first_change: u64,
}

impl SimFile {
    /// A file whose present content is durable.
    pub(super) fn new(file: File) -> io::Result<SimFile> {
        let size = file.metadata()?.len();
        let (sectors, changes) = (BTreeMap::new(), Vec::new());
        Ok(SimFile { file, size, device: None, sectors, changes, first_change: 0 })
    }

    /// Makes it a device.
    pub(super) fn become_device(&mut self, device: Device) -> io::Result<()> {
        self.size = self.file.metadata()?.len();
        self.device = Some(device);
        Ok(())
    }

    /// The errno of an operation that it does not support.
    pub(super) fn refuses(&self, op: &Op) -> Option<i32> {
        let can = match (self.device, op) {
            (None, Op::Discard { .. }) | (Some(_), Op::Allocate { .. }) => false,
            (Some(device), Op::Discard { .. }) => device.discards,
            (Some(device), Op::PunchHole { .. } | Op::ZeroRange { .. }) => device.zeroes,
            (Some(_), Op::SetLen { .. }) => return Some(libc::EINVAL),
            _ => true,
        };
        (!can).then_some(libc::EOPNOTSUPP)
    }

    /// The bytes of a write that it accepts: a device at most those that it has.
    pub(super) fn room(&self, offset: u64, len: u64) -> u64 {
        match self.device {
            None => len,
            Some(_) => len.min(self.size.saturating_sub(offset)),
        }
    }

    /// Bytes read; 0 at the end of the file.
    pub(super) fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        let len = self.size.saturating_sub(offset).min(to.len() as u64) as usize;
        self.file.read_exact_at(&mut to[..len], offset)?;
        Ok(len)
    }

    /// Writes, and records the old content.
    pub(super) fn write(&mut self, at: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let first = offset / SECTOR_BYTES;
        let last = (offset + data.len() as u64 - 1) / SECTOR_BYTES;
        let mut area = vec![0u8; ((last - first + 1) as usize) * SECTOR];
        self.read(first * SECTOR_BYTES, &mut area)?;
        let before = area.clone();
        let start = (offset - first * SECTOR_BYTES) as usize;
        area[start..start + data.len()].copy_from_slice(data);
        let (old_end, end) = (self.size, offset + data.len() as u64);
        let longer = (end > old_end).then(|| self.change(at, false));
        for (i, sector) in (first..=last).enumerate() {
            let range = i * SECTOR..(i + 1) * SECTOR;
            let change = longer.filter(|_| sector * SECTOR_BYTES >= old_end);
            self.push(sector, &before[range.clone()], at, change, &area[range]);
        }
        self.file.write_all_at(data, offset)?;
        self.size = end.max(old_end);
        Ok(())
    }

    /// Zeros a range: a hole, or newly allocated space. A device does the same as for a write.
    pub(super) fn zero(&mut self, at: u64, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return Ok(());
        }
        if self.device.is_some() {
            return self.write_zeros(at, offset, end);
        }
        let change = self.change(at, true);
        self.forget(at, change, offset, end)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, offset, end - offset)?;
        Ok(())
    }

    fn write_zeros(&mut self, at: u64, offset: u64, end: u64) -> io::Result<()> {
        let mut from = offset;
        while let Some((start, stop)) = data_after(&self.file, from, end)? {
            let (start, stop) = (start.max(offset), stop.min(end));
            self.write(at, start, &vec![0; (stop - start) as usize])?;
            from = stop;
        }
        // Sectors that are zero already may be restored from an earlier step.
        let range = offset.div_ceil(SECTOR_BYTES)..end / SECTOR_BYTES;
        for (_, versions) in self.sectors.range_mut(range) {
            if versions.last().is_some_and(|v| v.at != at) {
                versions.push(Version { at, change: None, lost: false, bytes: None });
            }
        }
        Ok(())
    }

    /// Discards parts of a range of a device.
    pub(super) fn discard(
        &mut self,
        at: u64,
        offset: u64,
        len: u64,
        random: &mut SplitMix64,
    ) -> io::Result<()> {
        let end = offset.saturating_add(len).min(self.size);
        let (mut from, all) = (offset, random.below(2) == 0);
        while from < end {
            let stop = (from / DISCARD_BYTES * DISCARD_BYTES + DISCARD_BYTES).min(end);
            if all || random.below(2) == 0 {
                self.write_zeros(at, from, stop)?;
            }
            from = stop;
        }
        Ok(())
    }

    /// Makes the file at least as long as `end`.
    pub(super) fn allocate(&mut self, at: u64, end: u64) -> io::Result<()> {
        self.set_len(at, self.size.max(end))
    }

    /// Changes the size, to less or more.
    pub(super) fn set_len(&mut self, at: u64, size: u64) -> io::Result<()> {
        if size == self.size {
            return Ok(());
        }
        let change = self.change(at, false);
        if size < self.size {
            self.forget(at, change, size, self.size)?;
        }
        ftruncate(&self.file, size)?;
        self.size = size;
        Ok(())
    }

    /// Makes everything up to step `since` durable.
    pub(super) fn sync(&mut self, since: u64) {
        let done = self.changes.iter().take_while(|c| c.at <= since).count();
        self.changes.drain(..done);
        self.first_change += done as u64;
        self.sectors.retain(|_, versions| {
            let durable = versions.iter().rposition(|v| v.at <= since && !v.lost);
            if let Some(durable) = durable {
                versions.drain(..durable);
                versions[0].change = None;
            }
            versions.len() > 1
        });
    }

    /// Fails a sync: some dirty sectors are written, and the kernel drops the others' dirty marks.
    pub(super) fn fail_sync(&mut self, since: u64, random: &mut SplitMix64) {
        for versions in self.sectors.values_mut() {
            let Some(newest) = versions.iter().rposition(|v| v.at <= since) else { continue };
            let committed = versions[newest].change.is_none();
            if newest > 0 && random.below(2) == 0 && committed {
                versions.drain(..newest);
            } else {
                versions[..=newest].iter_mut().skip(1).for_each(|v| v.lost = true);
            }
        }
        self.sectors.retain(|_, versions| versions.len() > 1);
    }

    /// Notes that another program has changed it, durably.
    pub(super) fn changed_outside(&mut self) -> io::Result<()> {
        self.size = self.file.metadata()?.len();
        self.sectors.clear();
        self.changes.clear();
        Ok(())
    }

    /// Whether a power cut would change nothing.
    pub(super) fn is_durable(&self) -> bool {
        self.sectors.is_empty() && self.changes.is_empty()
    }

    /// Whether some content can be read that a failed sync has not written, and no later one will.
    pub(super) fn has_forgotten(&self) -> bool {
        self.sectors.values().flatten().any(|version| version.lost)
    }

    /// Reverts the file to one possible state after a power cut.
    pub(super) fn cut(&mut self, fate: Fate, random: &mut SplitMix64) -> io::Result<()> {
        let kept = match fate.newest {
            0 => 0,
            100 => self.changes.len(),
            _ => random.below(self.changes.len() as u64 + 1) as usize,
        };
        let size = self.changes.get(kept).map_or(self.size, |c| c.size_before);
        let half = self.changes.get(kept).is_some_and(|c| c.divisible);
        let (kept, half) = (self.first_change + kept as u64, half);
        // Setting the same size would change the file's times.
        if self.file.metadata()?.len() != size {
            ftruncate(&self.file, size)?;
        }
        for (sector, versions) in std::mem::take(&mut self.sectors) {
            let offset = sector * SECTOR_BYTES;
            if offset >= size {
                continue;
            }
            let half = half && random.below(2) == 0;
            let bytes = survivor(versions, kept, half, fate, random);
            let len = (size - offset).min(SECTOR_BYTES) as usize;
            let mut now = [0u8; SECTOR];
            self.file.read_exact_at(&mut now[..len], offset)?;
            let then = bytes.map_or([0; SECTOR], |b| *b);
            if now[..len] != then[..len] {
                self.file.write_all_at(&then[..len], offset)?;
            }
        }
        self.size = size;
        self.changes.clear();
        Ok(())
    }

    /// Records a change of size or allocation.
    fn change(&mut self, at: u64, divisible: bool) -> u64 {
        self.changes.push(Change { at, size_before: self.size, divisible });
        self.first_change + self.changes.len() as u64 - 1
    }

    fn push(&mut self, sector: u64, before: &[u8], at: u64, change: Option<u64>, after: &[u8]) {
        let versions = self.sectors.entry(sector).or_insert_with(|| {
            vec![Version { at: 0, change: None, lost: false, bytes: pack(before) }]
        });
        versions.push(Version { at, change, lost: false, bytes: pack(after) });
    }

    /// Records the old content of a range that becomes zero. Its ends may be within sectors.
    fn forget(&mut self, at: u64, change: u64, offset: u64, end: u64) -> io::Result<()> {
        let mut from = offset;
        while let Some((start, stop)) = data_after(&self.file, from, end)? {
            for sector in start / SECTOR_BYTES..stop.div_ceil(SECTOR_BYTES) {
                let base = sector * SECTOR_BYTES;
                let mut before = [0u8; SECTOR];
                self.read(base, &mut before)?;
                let mut after = before;
                let a = offset.saturating_sub(base).min(SECTOR_BYTES) as usize;
                let b = (end - base).min(SECTOR_BYTES) as usize;
                after[a..b].fill(0);
                if after != before || self.sectors.contains_key(&sector) {
                    self.push(sector, &before, at, Some(change), &after);
                }
            }
            from = stop.next_multiple_of(SECTOR_BYTES);
        }
        // Sectors that are zero now, perhaps in a hole, and may be restored from an earlier step.
        let range = offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES);
        for (sector, versions) in self.sectors.range_mut(range) {
            let whole = sector * SECTOR_BYTES >= offset;
            if whole && versions.last().is_some_and(|v| v.at != at) {
                versions.push(Version { at, change: Some(change), lost: false, bytes: None });
            }
        }
        Ok(())
    }
}

/// The content of a sector after a power cut that keeps the changes before number `kept`; `half`: and this sector's
/// share of that one.
fn survivor(
    versions: Vec<Version>,
    kept: u64,
    half: bool,
    fate: Fate,
    random: &mut SplitMix64,
) -> Option<Sector> {
    let made = |change: u64| change < kept || (half && change == kept);
    let first = versions.iter().rposition(|v| v.change.is_some_and(made)).unwrap_or(0);
    let mut left: Vec<Version> =
        versions.into_iter().skip(first).filter(|v| v.change.is_none_or(made)).collect();
    let i = if random.below(100) < fate.newest {
        left.len() - 1
    } else if random.below(100) < fate.oldest {
        0
    } else {
        random.below(left.len() as u64) as usize
    };
    left.swap_remove(i).bytes
}

fn pack(bytes: &[u8]) -> Option<Sector> {
    if *bytes == [0; SECTOR] {
        return None;
    }
    let mut sector = Box::new([0; SECTOR]);
    sector.copy_from_slice(bytes);
    Some(sector)
}

/// The next range of a file, inside of `from..end`, that is no hole.
fn data_after(file: &File, from: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= end {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(from)) {
        Ok(start) if start < end => start,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let stop = seek(file, SeekFrom::Hole(start))?;
    Ok(Some((start, stop.min(end))))
}
