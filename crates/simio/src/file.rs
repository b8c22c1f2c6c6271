//! One file of a simulated world.
//!
//! The real file (sparse, on a tmpfs) holds what a process would read now: the page cache. What a
//! power cut may bring back is kept here, beside it: for each sector that a sync has not made
//! durable all that it held since, and the list of changes of the file's size and allocation.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ftruncate, seek};
use rustix::io::Errno;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::engine::Op;

/// The bytes that a medium writes as a whole or not at all.
pub(super) const SECTOR_BYTES: u64 = 512;

const SECTOR: usize = SECTOR_BYTES as usize;

/// The bytes that a device forgets as a whole or not at all.
const DISCARD_BYTES: u64 = 16 << 10;

type Sector = Box<[u8; SECTOR]>;

/// The contents of a sector from some moment on.
struct Version {
    /// The step at which it came.
    at: u64,
    /// The change of allocation that brought it; none: a write within the file. What makes a file
    /// longer is on the medium before its new length is (ext4 `data=ordered`, XFS, btrfs).
    change: Option<u64>,
    /// A sync failed to write it, and the kernel has forgotten that it is dirty.
    lost: bool,
    /// None: zeros.
    bytes: Option<Sector>,
}

/// A change of size or allocation that is not durable. They become so in order, as in the journal
/// of a file system.
struct Change {
    at: u64,
    size_before: u64,
    /// A power cut may leave a range half freed, but a size is the old or the new one.
    divisible: bool,
}

/// How a power cut treats what was not synced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fate {
    /// Of 100 sectors, how many take the last value that they had.
    newest: u64,
    /// Of 100 of the others, how many take the oldest.
    oldest: u64,
}

impl Fate {
    /// Evenly mixed fates hide what shows only when nearly all, or nearly nothing, was written.
    pub(super) fn choose(random: &mut SplitMix64) -> Fate {
        let newest = [0, 3, 50, 97, 100][random.below(5) as usize];
        let oldest = [100, 50, 0][random.below(3) as usize];
        Fate { newest, oldest }
    }
}

/// The abilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Discard: any of the range is zeros then.
    pub discards: bool,
    /// Making a range zeros without being sent them.
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

    /// It is a device from now on.
    pub(super) fn become_device(&mut self, device: Device) -> io::Result<()> {
        self.size = self.file.metadata()?.len();
        self.device = Some(device);
        Ok(())
    }

    /// The errno with which it refuses what it cannot do.
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

    /// How much of a write it takes: a device no more than it has.
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

    /// Writes, and remembers what was there.
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

    /// Makes a range zero: a hole, or freshly allocated space. A device does what a write does.
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
        // Sectors that are zero already may come back from an earlier moment.
        let range = offset.div_ceil(SECTOR_BYTES)..end / SECTOR_BYTES;
        for (_, versions) in self.sectors.range_mut(range) {
            if versions.last().is_some_and(|v| v.at != at) {
                versions.push(Version { at, change: None, lost: false, bytes: None });
            }
        }
        Ok(())
    }

    /// A device forgets what it likes of a range.
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

    /// The file reaches to `end` at least.
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

    /// Everything up to step `since` is durable.
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

    /// A sync that failed: of what was dirty, some was written, and the rest the kernel forgets.
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

    /// Somebody else has changed it, durably.
    pub(super) fn changed_outside(&mut self) -> io::Result<()> {
        self.size = self.file.metadata()?.len();
        self.sectors.clear();
        self.changes.clear();
        Ok(())
    }

    /// Whether there is anything that a power cut could take.
    pub(super) fn is_durable(&self) -> bool {
        self.sectors.is_empty() && self.changes.is_empty()
    }

    /// Whether something can be read that a failed sync has not written, and none to come will.
    pub(super) fn has_forgotten(&self) -> bool {
        self.sectors.values().flatten().any(|version| version.lost)
    }

    /// The file as one possible power cut leaves it.
    pub(super) fn cut(&mut self, fate: Fate, random: &mut SplitMix64) -> io::Result<()> {
        let kept = match fate.newest {
            0 => 0,
            100 => self.changes.len(),
            _ => random.below(self.changes.len() as u64 + 1) as usize,
        };
        let size = self.changes.get(kept).map_or(self.size, |c| c.size_before);
        let half = self.changes.get(kept).is_some_and(|c| c.divisible);
        let (kept, half) = (self.first_change + kept as u64, half);
        // Changing nothing would change the file's times.
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

    /// Remembers a change of size or allocation.
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

    /// Remembers what stood in a range that becomes zero. Its ends may lie within sectors.
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
        // Sectors that are zero now, in a hole perhaps, and may come back from an earlier moment.
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

/// The contents of a sector after a power cut that keeps the changes before number `kept`; `half`: of
/// that one, too, its share of this sector.
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
    if bytes.iter().all(|b| *b == 0) {
        return None;
    }
    let mut sector = Box::new([0; SECTOR]);
    sector.copy_from_slice(bytes);
    Some(sector)
}

/// The next stretch of a file, inside of `from..end`, that is no hole.
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
