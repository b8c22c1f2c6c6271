//! Copies of damaged disks: what cannot be read is zeros in the copy, and listed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;

use ferrite_disk::Disk;
use ferrite_disk::pieces::{Found, What, look_in_spite};
use ferrite_disk_base::{Port, is_damage};
use ferrite_io::arena::Span;

use super::DamagedRange;
use super::formats::shown;

/// Ranges that are listed; the rest is counted.
const MAX_LISTED: usize = 1000;
/// Ranges that are kept until the end: neighbours are joined as they come.
const MAX_KEPT: usize = 1 << 16;
/// After an error data are read in pieces of so many bytes, and these in units of so many: a page of the medium.
const STEPS: [usize; 2] = [64 << 10, 4096];

/// A part of a disk that could not be read.
struct Range {
    len: u64,
    /// The image of the chain that has it.
    layer: usize,
    why: String,
}

/// What could not be read so far.
#[derive(Default)]
pub(super) struct Lost {
    ranges: RefCell<Ranges>,
}

#[derive(Default)]
struct Ranges {
    /// By first byte; no two of them touch, unless they are of different layers.
    kept: BTreeMap<u64, Range>,
    /// The number of ranges beyond those kept.
    more: u64,
    /// The bytes of these ranges.
    more_bytes: u64,
}

impl Ranges {
    /// Adds a range, and joins it to its neighbours. The reason of the first one counts.
    fn add(&mut self, start: u64, range: Range) {
        let (mut start, mut range) = (start, range);
        if let Some((at, before)) = self.kept.range(..=start).next_back()
            && at + before.len >= start
            && before.layer == range.layer
        {
            let (at, end) = (*at, (start + range.len).max(at + before.len));
            let why = before.why.clone();
            (start, range) = (at, Range { len: end - at, why, ..range });
        }
        while let Some((at, behind)) = self.kept.range(start..).next()
            && *at <= start + range.len
            && behind.layer == range.layer
        {
            let at = *at;
            let Some(joined) = self.kept.remove(&at) else { break };
            range.len = range.len.max(at + joined.len - start);
            if at == start {
                range.why = joined.why;
            }
        }
        if self.kept.len() < MAX_KEPT {
            self.kept.insert(start, range);
        } else {
            self.more += 1;
            self.more_bytes += range.len;
        }
    }
}

impl Lost {
    fn add(&self, start: u64, len: u64, layer: usize, why: &io::Error) {
        let range = Range { len, layer, why: why.to_string() };
        self.ranges.borrow_mut().add(start, range);
    }

    /// The bytes that are lost, the first ranges, and how many more there are.
    pub(super) fn told(self, disk: &Disk) -> (u64, Vec<DamagedRange>, u64) {
        let Ranges { kept, more, more_bytes } = self.ranges.into_inner();
        let bytes = kept.values().map(|range| range.len).sum::<u64>() + more_bytes;
        let more_ranges = (kept.len().saturating_sub(MAX_LISTED)) as u64 + more;
        let media = disk.media();
        let path = |layer: usize| media.get(layer).map_or(String::new(), |raw| shown(raw.path()));
        let told = |(start, range): (u64, Range)| DamagedRange {
            start_bytes: start,
            length_bytes: range.len,
            path: path(range.layer),
            why: range.why,
        };
        (bytes, kept.into_iter().take(MAX_LISTED).map(told).collect(), more_ranges)
    }

    /// The kind of the beginning of a range, as `pieces::look` says it: what is damaged is zeros.
    pub(super) async fn look(
        &self,
        (disk, port): (&Disk, &Port),
        at: u64,
        len: u64,
    ) -> io::Result<(What, u64)> {
        match look_in_spite(disk, port, at, len).await? {
            Found::Piece(piece) => Ok((piece.what, piece.len)),
            Found::Damaged { len, layer, why } => {
                self.add(at, len, layer, &why);
                Ok((What::Zeros, len))
            }
        }
    }

    /// Reads a range. Damaged parts are zeros in `buf`.
    pub(super) async fn read(
        &self,
        (disk, port): (&Disk, &Port),
        at: u64,
        buf: Span,
    ) -> io::Result<()> {
        match disk.read(port, at, buf).await {
            Err(e) if is_damage(&e) => {}
            done => return done,
        }
        let mut done = 0;
        while done < buf.len() {
            let (from, left) = (at + done as u64, (buf.len() - done) as u64);
            let (part, layer, whole) = match look_in_spite(disk, port, from, left).await? {
                Found::Damaged { len, layer, why } => {
                    let part = buf.slice(done, len.min(left) as usize);
                    port.memory().fill(part, 0);
                    self.add(from, part.len() as u64, layer, &why);
                    done += part.len();
                    continue;
                }
                Found::Piece(piece) => {
                    let part = buf.slice(done, piece.len.min(left) as usize);
                    (part, piece.layer.unwrap_or(0), piece.what == What::Packed)
                }
            };
            match whole {
                true => self.try_to_read((disk, port), from, part, layer).await?,
                false => self.read_by_steps((disk, port), from, part, layer).await?,
            }
            done += part.len();
        }
        Ok(())
    }

    /// Reads a range of one layer in smaller and smaller units, since one bad block of the medium fails all of a read.
    async fn read_by_steps(
        &self,
        from: (&Disk, &Port),
        at: u64,
        buf: Span,
        layer: usize,
    ) -> io::Result<()> {
        for step in units(at, buf, STEPS[0]) {
            let (start, part) = step;
            match from.0.read(from.1, start, part).await {
                Err(e) if is_damage(&e) => {}
                done => {
                    done?;
                    continue;
                }
            }
            for (start, part) in units(start, part, STEPS[1]) {
                self.try_to_read(from, start, part, layer).await?;
            }
        }
        Ok(())
    }

    /// Reads a range that is lost as a whole, or not.
    async fn try_to_read(
        &self,
        (disk, port): (&Disk, &Port),
        at: u64,
        buf: Span,
        layer: usize,
    ) -> io::Result<()> {
        match disk.read(port, at, buf).await {
            Err(e) if is_damage(&e) => {
                port.memory().fill(buf, 0);
                self.add(at, buf.len() as u64, layer, &e);
                Ok(())
            }
            done => done,
        }
    }
}

/// The parts of a range in units that begin at multiples of so many bytes of the disk.
fn units(at: u64, buf: Span, unit: usize) -> impl Iterator<Item = (u64, Span)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let start = at + done as u64;
        let len = (unit - (start % unit as u64) as usize).min(buf.len() - done);
        let part = (len > 0).then(|| (start, buf.slice(done, len)))?;
        done += len;
        Some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(added: &[(u64, u64, usize)]) -> Vec<(u64, u64, String)> {
        let mut ranges = Ranges::default();
        for (n, (start, len, layer)) in added.iter().enumerate() {
            ranges.add(*start, Range { len: *len, layer: *layer, why: n.to_string() });
        }
        ranges.kept.into_iter().map(|(start, range)| (start, range.len, range.why)).collect()
    }

    #[test]
    fn neighbours_are_one_range_in_whatever_order_they_come() {
        let one = |why: &str| vec![(0, 12, why.to_owned())];
        assert_eq!(listed(&[(0, 4, 0), (4, 4, 0), (8, 4, 0)]), one("0"));
        assert_eq!(listed(&[(8, 4, 0), (0, 4, 0), (4, 4, 0)]), one("1"));
        assert_eq!(listed(&[(0, 8, 0), (2, 2, 0), (4, 8, 0)]), one("0"));
        let two = |a: u64, b: u64| vec![(0, a, "0".to_owned()), (b, 4, "1".to_owned())];
        assert_eq!(listed(&[(0, 4, 0), (8, 4, 0)]), two(4, 8));
        assert_eq!(listed(&[(0, 4, 0), (4, 4, 1)]), two(4, 4));
    }

    #[test]
    fn ranges_are_counted_when_there_is_no_room_for_them() {
        let mut ranges = Ranges::default();
        for n in 0..MAX_KEPT as u64 + 3 {
            ranges.add(n * 8, Range { len: 4, layer: 0, why: String::new() });
        }
        assert_eq!((ranges.kept.len(), ranges.more, ranges.more_bytes), (MAX_KEPT, 3, 12));
    }
}
