//! Goes through the regions of a disk, several at a time: each is read, its hash is taken or compared, and what has to be
//! copied of it is written.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_disk::Disk;
use ferrite_disk::pieces::{What, look};
use ferrite_disk_base::dirty::REGION_BYTES;
use ferrite_disk_base::{Port, SECTOR_BYTES};
use ferrite_io::arena::Span;
use ferrite_io::shared_lock::SharedLock;

use super::manifest::Hash;
use crate::io_context::{BUFFER_BYTES, IoContext, Stop, all};
use crate::speed::Speed;
use crate::{ImageTools, Progress};

/// Regions in flight at a time. They take 32 MiB of buffers.
const IN_FLIGHT: usize = 8;
const BUFFERS_OF_REGION: usize = REGION_BYTES as usize / BUFFER_BYTES;
/// The unit of zeros that are not written as data.
const UNIT: usize = 64 << 10;

/// The disk that gets the data.
#[derive(Clone, Copy)]
pub(super) struct To<'a> {
    pub(super) disk: &'a Disk,
    /// It may have other data where the source has zeros: these are written.
    pub(super) zeros: bool,
}

/// The work on the regions.
pub(super) struct Plan<'a> {
    pub(super) from: &'a Disk,
    pub(super) to: Option<To<'a>>,
    /// The parts of the disk that are read and copied: in order, apart. Regions are read whole.
    pub(super) ranges: Vec<Range<u64>>,
    /// The hashes of the regions that are complete in the destination already.
    pub(super) done: BTreeMap<u32, Hash>,
    /// The hashes that the disk has to have; a region without one has to be zeros. `None`: hashes are collected.
    pub(super) expected: Option<&'a BTreeMap<u32, Hash>>,
    /// The hashes of the disk below the destination, where a region without one is zeros: what has the same hash is left
    /// out. `None`: nothing is.
    pub(super) same: Option<BTreeMap<u32, Hash>>,
    /// A region of zeros gets a hash, too.
    pub(super) zeros_have_hashes: bool,
    /// Bytes of the disk, for the progress, and those of them that earlier steps have done.
    pub(super) total: (u64, u64),
}

/// A region, and the parts of it that may have data.
struct Region {
    number: u32,
    data: Vec<Range<u64>>,
}

/// See the module text.
pub(super) struct Regions<'a> {
    tools: &'a ImageTools<'a>,
    plan: Plan<'a>,
    from_port: Port,
    to_port: Option<Port>,
    bytes: u64,
    buffers: Vec<Span>,
    zeros: Span,
    /// The input of a hash.
    memory: RefCell<Vec<u8>>,
    /// The hash of a whole region of zeros.
    zero_hash: Hash,
    /// Held by the task that looks for the next region.
    looking: SharedLock,
    /// The next region, if it is in a range; and the first range that ends behind it.
    next: Cell<(u64, usize)>,
    /// Whether there are zeros, and their end: computed once for each part, as some file systems walk all of it for the
    /// answer.
    part: Cell<(bool, u64)>,
    /// The hashes that were collected.
    hashes: RefCell<BTreeMap<u32, Hash>>,
    /// The regions whose content has another hash.
    wrong: RefCell<Vec<u32>>,
    /// Bytes that were read.
    read: Cell<u64>,
    /// Bytes that may still be read before a stop.
    left: Cell<u64>,
    stop: Stop,
    speed: Speed,
    bytes_per_s: Arc<AtomicU64>,
}

impl<'a> Regions<'a> {
    /// An I/O context with room for all buffers.
    pub(super) fn context(tools: &ImageTools<'_>) -> io::Result<IoContext> {
        IoContext::new(tools, IN_FLIGHT * BUFFERS_OF_REGION + 1)
    }

    pub(super) fn new(
        tools: &'a ImageTools<'a>,
        context: &mut IoContext,
        mut plan: Plan<'a>,
    ) -> io::Result<Regions<'a>> {
        let zeros = context.buffer()?;
        let buffers = (0..IN_FLIGHT).map(|_| context.region()).collect::<io::Result<_>>()?;
        let from_port = context.port(plan.from)?;
        let to_port = plan.to.map(|to| context.port(to.disk)).transpose()?;
        from_port.memory().fill(zeros, 0);
        let bytes_per_s = Arc::<AtomicU64>::default();
        Ok(Regions {
            speed: Speed::new(bytes_per_s.clone()),
            bytes_per_s,
            tools,
            bytes: plan.from.sectors() * SECTOR_BYTES,
            hashes: RefCell::new(std::mem::take(&mut plan.done)),
            plan,
            from_port,
            to_port,
            buffers,
            zeros,
            memory: RefCell::new(vec![0; REGION_BYTES as usize]),
            zero_hash: hash(&vec![0; REGION_BYTES as usize]),
            looking: SharedLock::new(),
            next: Cell::new((0, 0)),
            part: Cell::new((false, 0)),
            wrong: RefCell::default(),
            read: Cell::new(0),
            left: Cell::new(0),
            stop: Stop::default(),
        })
    }

    /// Reads at most so many bytes a second from now on; 0: no limit.
    pub(super) fn limit(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
    }

    /// The hashes so far: of regions that are written, and not durable before a flush.
    pub(super) fn hashes(&self) -> BTreeMap<u32, Hash> {
        self.hashes.borrow().clone()
    }

    /// The offsets of regions that have another hash than was expected.
    pub(super) fn wrong(&self) -> Vec<u64> {
        let mut wrong = self.wrong.borrow().clone();
        wrong.sort_unstable();
        wrong.into_iter().map(|number| u64::from(number) * REGION_BYTES).collect()
    }

    /// The bytes of the source that were read.
    pub(super) fn read_bytes(&self) -> u64 {
        self.read.get()
    }

    /// Goes on until about so many bytes are read. Returns whether that was all.
    ///
    /// # Errors
    /// `Interrupted` if the progress callback stopped it. Errors of the two disks.
    pub(super) async fn run(&self, bytes: u64) -> io::Result<bool> {
        self.left.set(bytes);
        let worker = |buf: &Span| -> Task<'_> {
            let buf = *buf;
            Box::pin(async move {
                let done = self.work(buf).await;
                if done.is_err() {
                    self.stop.raise();
                }
                done
            })
        };
        all(self.buffers.iter().map(worker).collect()).await?;
        Ok(self.left.get() > 0)
    }

    /// Makes what was written durable.
    pub(super) async fn flush(&self) -> io::Result<()> {
        match (self.plan.to, &self.to_port) {
            (Some(to), Some(port)) => to.disk.flush(port).await,
            _ => Ok(()),
        }
    }

    /// Completes the destination, durably.
    pub(super) async fn close(&self) -> io::Result<()> {
        match (self.plan.to, &self.to_port) {
            (Some(to), Some(port)) => to.disk.close(port).await,
            _ => Ok(()),
        }
    }

    async fn work(&self, buf: Span) -> io::Result<()> {
        while let Some(region) = self.next().await? {
            self.one(&region, buf).await?;
        }
        Ok(())
    }

    fn span_of(&self, number: u32) -> Range<u64> {
        let start = u64::from(number) * REGION_BYTES;
        start..(start + REGION_BYTES).min(self.bytes)
    }

    /// The next region that has something to do.
    async fn next(&self) -> io::Result<Option<Region>> {
        let _held = self.looking.lock(&self.from_port.io).await?;
        while !self.stop.is_raised() && self.left.get() > 0 {
            let (mut number, mut range) = self.next.get();
            let ranges = &self.plan.ranges;
            while ranges.get(range).is_some_and(|found| found.end <= number * REGION_BYTES) {
                range += 1;
            }
            let Some(found) = ranges.get(range) else { return Ok(None) };
            number = number.max(found.start / REGION_BYTES);
            let (done, total_bytes) = self.plan.total;
            let done_bytes = (done + number * REGION_BYTES).min(total_bytes);
            let progress = Progress { done_bytes, total_bytes };
            let goes_on = || (self.tools.progress)(progress);
            if !goes_on() || !self.speed.wait(goes_on) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            self.next.set((number + 1, range));
            let number = u32::try_from(number).map_err(io::Error::other)?;
            if self.hashes.borrow().contains_key(&number) {
                continue;
            }
            let data = self.look(self.span_of(number)).await?;
            if data.is_empty() && !self.asks_for_zeros(number) {
                continue;
            }
            let bytes: u64 = data.iter().map(|part| part.end - part.start).sum();
            self.read.set(self.read.get() + bytes);
            self.speed.spend(bytes);
            self.left.set(self.left.get().saturating_sub(bytes.max(UNIT as u64)));
            return Ok(Some(Region { number, data }));
        }
        Ok(None)
    }

    /// Whether there is something to do for a region of zeros.
    fn asks_for_zeros(&self, number: u32) -> bool {
        if let Some(same) = &self.plan.same {
            return same.contains_key(&number);
        }
        let is_expected = self.plan.expected.is_some_and(|all| all.contains_key(&number));
        is_expected || self.plan.zeros_have_hashes || self.plan.to.is_some_and(|to| to.zeros)
    }

    /// The parts of a region that may have data.
    async fn look(&self, region: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let (mut at, mut data) = (region.start, Vec::new());
        while at < region.end {
            if self.part.get().1 <= at {
                let piece = look(self.plan.from, &self.from_port, at, self.bytes - at).await?;
                self.part.set((piece.what == What::Zeros, at + piece.len.max(1)));
            }
            let (zeros, end) = self.part.get();
            let end = end.min(region.end);
            if !zeros {
                data.push(at..end);
            }
            at = end;
        }
        Ok(data)
    }

    async fn one(&self, region: &Region, buf: Span) -> io::Result<()> {
        let Region { number, data } = region;
        let span = self.span_of(*number);
        let len = (span.end - span.start) as usize;
        let buf = buf.slice(0, len);
        let found = match data.is_empty() {
            true => self.hash_of_zeros(len),
            false => {
                self.read(span.start, data, buf).await?;
                let memory = &mut self.memory.borrow_mut()[..len];
                self.from_port.memory().copy_out(buf, memory);
                hash(memory)
            }
        };
        let is_zeros = found == self.hash_of_zeros(len);
        if let Some(expected) = self.plan.expected
            && expected.get(number).copied().unwrap_or(self.hash_of_zeros(len)) != found
        {
            self.wrong.borrow_mut().push(*number);
            return Ok(());
        }
        if let Some(same) = &self.plan.same
            && same.get(number).copied().unwrap_or(self.hash_of_zeros(len)) == found
        {
            return Ok(());
        }
        if let (Some(to), Some(port)) = (self.plan.to, &self.to_port) {
            for part in self.parts(&span) {
                match is_zeros {
                    true => self.write_zeros(to, port, part).await?,
                    false => self.write(to, port, (&span, buf), part).await?,
                }
            }
        }
        if self.plan.expected.is_none() && (!is_zeros || self.plan.zeros_have_hashes) {
            self.hashes.borrow_mut().insert(*number, found);
        }
        Ok(())
    }

    fn hash_of_zeros(&self, len: usize) -> Hash {
        match len as u64 == REGION_BYTES {
            true => self.zero_hash,
            // The last region of a disk.
            false => hash(&vec![0; len]),
        }
    }

    /// The parts of a region that are copied.
    fn parts(&self, region: &Range<u64>) -> Vec<Range<u64>> {
        let ranges = &self.plan.ranges;
        let first = ranges.partition_point(|range| range.end <= region.start);
        let inside = ranges[first..].iter().take_while(|range| range.start < region.end);
        inside.map(|range| range.start.max(region.start)..range.end.min(region.end)).collect()
    }

    /// Reads the data of a region, the rest of which is zeros.
    async fn read(&self, start: u64, data: &[Range<u64>], buf: Span) -> io::Result<()> {
        let memory = self.from_port.memory();
        let mut reads: Vec<Task<'_>> = Vec::new();
        let mut at = start;
        let place = |from: u64, to: u64| buf.slice((from - start) as usize, (to - from) as usize);
        for part in data {
            memory.fill(place(at, part.start), 0);
            at = part.end;
            for from in (part.start..part.end).step_by(BUFFER_BYTES) {
                let to = (from + BUFFER_BYTES as u64).min(part.end);
                let buf = place(from, to);
                let read = self.plan.from.read(&self.from_port, from, buf);
                reads.push(Box::pin(read));
            }
        }
        memory.fill(place(at, start + buf.len() as u64), 0);
        all(reads).await
    }

    /// Writes a part of a region: its units of zeros as such.
    async fn write(
        &self,
        to: To<'_>,
        port: &Port,
        (region, buf): (&Range<u64>, Span),
        part: Range<u64>,
    ) -> io::Result<()> {
        let memory = self.from_port.memory();
        let place =
            |from: u64, to: u64| buf.slice((from - region.start) as usize, (to - from) as usize);
        let end_of_unit = |at: u64| (at / UNIT as u64 + 1) * UNIT as u64;
        let mut writes: Vec<Task<'_>> = Vec::new();
        let mut at = part.start;
        while at < part.end {
            let zeros = memory.is_zero(place(at, end_of_unit(at).min(part.end)));
            let mut end = end_of_unit(at).min(part.end);
            let most = at + BUFFER_BYTES as u64;
            while end < part.end && end < most {
                let next = end_of_unit(end).min(part.end);
                if memory.is_zero(place(end, next)) != zeros {
                    break;
                }
                end = next;
            }
            match zeros {
                false => writes.push(Box::pin(to.disk.write(port, at, place(at, end)))),
                true => writes.push(Box::pin(self.write_zeros(to, port, at..end))),
            }
            at = end;
        }
        all(writes).await
    }

    async fn write_zeros(&self, to: To<'_>, port: &Port, part: Range<u64>) -> io::Result<()> {
        if !to.zeros {
            return Ok(());
        }
        to.disk.write_zeroes(port, part.start, part.end - part.start, self.zeros).await
    }
}

fn hash(bytes: &[u8]) -> Hash {
    Hash(*blake3::hash(bytes).as_bytes())
}

type Task<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>;
