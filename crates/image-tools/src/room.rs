//! The room on file systems: what cannot fit is refused before it begins, and a copy stops before it has taken the room
//! that others need.

use std::io;
use std::path::Path;

use ferrite_disk::Disk;
use ferrite_disk::pieces::{Piece, What, look_at_first, look_at_layer};
use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ErrorKind, Port, Raw};
use ferrite_images::Layer;
use rustix::fs::{StatVfs, fstatvfs, statvfs};

use super::formats;

/// The unit in which file systems give out space.
const BLOCK_BYTES: u64 = 4096;
/// The least and the most that is left to others of a file system.
const RESERVE_BYTES: (u64, u64) = (1 << 20, 16 << 20);

/// The room on a file system, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// All that is free for users.
    free: u64,
    /// The part of that which is left to others.
    reserve: u64,
}

impl Room {
    fn of(found: &StatVfs) -> Room {
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        let (least, most) = RESERVE_BYTES;
        let reserve = (bytes(found.f_blocks) / 1000).clamp(least, most);
        Room { free: bytes(found.f_bavail), reserve }
    }

    /// The room beside the file at `path`.
    pub(super) fn at(path: &Path) -> io::Result<Room> {
        Ok(Room::of(&statvfs(path)?))
    }

    /// Refuses an operation that takes at least so many bytes, if they are not there. Nothing was changed yet.
    pub(super) fn check(self, what: String, needed: u64, path: &Path) -> Result<(), DiskError> {
        if needed == 0 || needed.saturating_add(self.reserve) <= self.free {
            return Ok(());
        }
        let (path, missing) = (path.display(), needed.saturating_add(self.reserve) - self.free);
        let why = format!(
            "it takes {} or more on the file system of {path}, which has {} free; {} of these are left \
             to others",
            Human(needed),
            Human(self.free),
            Human(self.reserve.min(self.free)),
        );
        let help = format!(
            "nothing was changed: make room for {} or more, and run the same command again",
            Human(missing)
        );
        let full = io::Error::from(io::ErrorKind::StorageFull);
        Err(DiskError::new(ErrorKind::Io, what, why, help).with_source(full))
    }
}

/// Stops a copy whose destination grows while its file system has no more room than what is left to others.
pub(super) struct Guard {
    /// The space that the destination took at the beginning; `None`: it is no file that grows.
    taken: Option<u64>,
}

impl Guard {
    pub(super) fn of(to: &Disk) -> Guard {
        Guard { taken: growing(to).and_then(|raw| raw.disk_bytes().ok()) }
    }

    /// Whether there may be no room for so many bytes that are written at a time. Then the copy writes one piece after
    /// the other, each after a [`check`](Self::check): what is under way is not counted yet.
    pub(super) fn is_low(&self, to: &Disk, bytes: u64) -> bool {
        let room = self.taken.and(growing(to)).and_then(|raw| fstatvfs(raw.fd()).ok());
        room.is_some_and(|found| {
            let room = Room::of(&found);
            room.free < room.reserve.saturating_add(bytes)
        })
    }

    /// Called before so many bytes of data are written.
    ///
    /// # Errors
    /// `StorageFull`: the remaining space is for others. The data that it wrote so far are whole.
    pub(super) fn check(&self, to: &Disk, bytes: u64) -> io::Result<()> {
        let Some((taken, raw)) = self.taken.zip(growing(to)) else { return Ok(()) };
        // Where the kernel does not tell, its own error ends the copy.
        let Ok(room) = fstatvfs(raw.fd()).map(|found| Room::of(&found)) else { return Ok(()) };
        // Data that get the places of others take nothing. But the tables that lead to them may have had holes.
        let for_tables = room.reserve / 4;
        if room.free >= room.reserve.saturating_add(bytes)
            || raw.disk_bytes()? <= taken.saturating_add(for_tables)
        {
            return Ok(());
        }
        let why = format!(
            "no space left on the file system of {} (it has {}, and a reserve is left to others)",
            raw.path().display(),
            Human(room.free)
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, why))
    }
}

/// The file that a disk writes to. A store has its space.
fn growing(disk: &Disk) -> Option<&Raw> {
    match disk {
        Disk::Raw(_) | Disk::Image(_) => disk.media().first().copied().filter(|raw| raw.is_file()),
        Disk::Mirror(mirror) => growing(mirror.source()),
        Disk::Store(_) | Disk::Elsewhere(_) | Disk::Remote(_) | Disk::Null(_) => None,
    }
}

/// The least space that the layer below the first `count` of a chain takes when it gets their data: that of the data in
/// units where it has none. The disk has so many bytes. The space of those layers comes free only after that.
///
/// # Errors
/// `InvalidData`: metadata is damaged. Errors of the kernel.
pub(super) async fn merged(
    layers: &[Layer],
    count: usize,
    port: &Port,
    bytes: u64,
) -> io::Result<u64> {
    let Some((uppers, [parent, ..])) = layers.split_at_checked(count) else { return Ok(0) };
    let unit = formats::unit_bytes(parent).map_or(BLOCK_BYTES, u64::from);
    let mut lower = Lower { parent, at: count, port, unit, known: None };
    let (mut at, mut needed) = (0, 0);
    while at < bytes {
        let (piece, below) = look_at_first(uppers, port, at, bytes - at).await?;
        let len = piece.map_or(below, |piece| piece.len);
        if is_data(piece) {
            needed += lower.lacks(at, at + len).await?;
        }
        at += len;
    }
    Ok(needed)
}

fn is_data(piece: Option<Piece>) -> bool {
    piece.is_some_and(|piece| piece.what != What::Zeros)
}

/// The layer that gets the data.
struct Lower<'a> {
    parent: &'a Layer,
    /// Its index in the chain.
    at: usize,
    port: &'a Port,
    unit: u64,
    /// Whether it has data in the unit that was looked at last.
    known: Option<(u64, bool)>,
}

impl Lower<'_> {
    /// The bytes of a range in units where it has no data.
    async fn lacks(&mut self, from: u64, to: u64) -> io::Result<u64> {
        let (mut at, mut sum) = (from, 0);
        let end = to.min(self.parent.bytes());
        while at < end {
            let (piece, below) =
                look_at_layer(self.parent, self.at, self.port, at, end - at).await?;
            let len = piece.map_or(below, |piece| piece.len);
            if !is_data(piece) {
                sum += self.in_empty_units(at, at + len).await?;
            }
            at += len;
        }
        Ok(sum + (to - at))
    }

    /// The bytes of a range without data, but for those in units that have data elsewhere: these may have their space.
    async fn in_empty_units(&mut self, from: u64, to: u64) -> io::Result<u64> {
        let (mut at, mut sum) = (from, 0);
        while at < to {
            let end = (at / self.unit + 1) * self.unit;
            let next = match at.is_multiple_of(self.unit) && end <= to {
                // All whole units at once.
                true => to / self.unit * self.unit,
                false => end.min(to),
            };
            if next - at >= self.unit || !self.has_data(at / self.unit).await? {
                sum += next - at;
            }
            at = next;
        }
        Ok(sum)
    }

    async fn has_data(&mut self, number: u64) -> io::Result<bool> {
        if let Some((_, has)) = self.known.filter(|known| known.0 == number) {
            return Ok(has);
        }
        let mut at = number * self.unit;
        let end = (at + self.unit).min(self.parent.bytes());
        let mut has = false;
        while at < end && !has {
            let (piece, below) =
                look_at_layer(self.parent, self.at, self.port, at, end - at).await?;
            has = is_data(piece);
            at += piece.map_or(below, |piece| piece.len);
        }
        self.known = Some((number, has));
        Ok(has)
    }
}
