//! One queue of a guest: keeps a number of requests in flight, and counts.

use std::time::Duration;

use ferrite_host::clock::{Clock, Random, SplitMix64, SystemClock};
use ferrite_loopback::LoopbackError;
use ferrite_loopback::front::{Buffer, FrontError, FrontQueue, RingWord};
use ferrite_xen::abi::SECTOR_BYTES;
use ferrite_xen::hypervisor::PAGE_SIZE;
use rustix::time::{ClockId, clock_gettime};

use super::cli::Mode;
use super::measure::PATIENCE;
use super::tally::{Counter, Tally};
use super::task::{Task, Times};

/// The stretch whose blocks come out of order, as in the thesis's third experiment (sources.md 4).
const INTERLEAVED_SECTORS: u64 = 112 << 10 >> 9;

/// The `i`-th of so many blocks: in each whole stretch the even ones, then the odd ones.
fn interleaved(i: u64, stretch: u64, blocks: u64) -> u64 {
    if stretch < 3 || i / stretch >= blocks / stretch {
        return i;
    }
    let (start, within, evens) = (i / stretch * stretch, i % stretch, stretch.div_ceil(2));
    start + if within < evens { 2 * within } else { 2 * (within - evens) + 1 }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Read,
    Write,
    Flush,
    Discard,
}

/// Chooses the next request, in one part of the disk.
struct Choice {
    mode: Mode,
    /// Places below this read, if only reads count.
    readers: u16,
    /// The last request was a write, and a flush follows.
    flush: bool,
    first: u64,
    block_sectors: u64,
    blocks: u64,
    next: u64,
    random: SplitMix64,
}

impl Choice {
    /// The same choices in each run, and different ones in each part.
    fn new(task: &Task, (first, sectors): (u64, u64)) -> Choice {
        let block_sectors = u64::from(task.block_bytes) / SECTOR_BYTES;
        let mut blocks = sectors / block_sectors;
        let stretch = INTERLEAVED_SECTORS / block_sectors;
        if task.mode == Mode::Interleaved && stretch > 0 && blocks > stretch {
            // Only whole stretches, so that a batch of a stretch is always one.
            blocks -= blocks % stretch;
        }
        Choice {
            mode: task.mode,
            readers: (task.depth as u16).div_ceil(2),
            flush: false,
            first,
            block_sectors,
            blocks,
            next: 0,
            random: SplitMix64::new(first),
        }
    }

    fn following(&mut self) -> u64 {
        let block = self.next;
        self.next = (block + 1) % self.blocks;
        block
    }

    /// A write, or the flush after it, in turn.
    fn write_or_flush(&mut self) -> What {
        self.flush = !self.flush;
        if self.flush { What::Write } else { What::Flush }
    }

    /// A sector, and the kind of request.
    fn next(&mut self, place: u16) -> (u64, What) {
        let half = self.blocks.div_ceil(2);
        let counts = self.counts(place);
        let block = match self.mode {
            Mode::Storm | Mode::Churn if counts => self.random.below(half),
            Mode::Storm | Mode::Churn => self.blocks - 1 - self.random.below(half),
            Mode::Randread | Mode::Randwrite | Mode::Randrw | Mode::Flush | Mode::Discard => {
                self.random.below(self.blocks)
            }
            Mode::Read | Mode::Write => self.following(),
            Mode::Interleaved => {
                let block = self.following();
                interleaved(block, INTERLEAVED_SECTORS / self.block_sectors, self.blocks)
            }
        };
        let what = match self.mode {
            Mode::Randrw if self.random.next_u64() & 1 == 1 => What::Write,
            Mode::Storm | Mode::Churn if counts => What::Read,
            Mode::Storm | Mode::Discard => What::Discard,
            Mode::Flush => self.write_or_flush(),
            Mode::Write | Mode::Randwrite | Mode::Churn => What::Write,
            Mode::Read | Mode::Randread | Mode::Randrw | Mode::Interleaved => What::Read,
        };
        (self.first + block * self.block_sectors, what)
    }

    /// Whether requests of this place count.
    fn counts(&self, place: u16) -> bool {
        !self.mode.counts_reads_only() || place < self.readers
    }
}

/// Carries the requests of a load to their server. A request is identified by its place, which has data of its own.
pub(crate) trait Carrier {
    /// Writes a request for an idle place.
    fn send(&mut self, place: u16, sector: u64, what: What) -> Result<(), FrontError>;
    /// Publishes the requests written so far.
    fn push(&mut self) -> Result<(), FrontError>;
    fn in_flight(&self) -> usize;
    fn has_response(&self) -> bool;
    /// Requests an event with the next response; whether a response is there already.
    fn final_check(&self) -> bool;
    /// Waits for a response: requests an event, sleeps, checks again. `false` if none came in time.
    fn wait(&mut self, timeout: Duration) -> Result<bool, FrontError>;
    /// The next response: its place, and whether it is a success.
    fn take(&mut self) -> Result<Option<(u16, bool)>, FrontError>;
}

/// A queue of a blkfront.
pub(crate) struct Blkif {
    queue: FrontQueue,
    buffer: Buffer,
    block_bytes: usize,
    /// The distance of places in the buffer.
    stride: usize,
    /// The place of each request in flight, by its tag.
    place_of: Vec<u16>,
    stamp: Option<Stamp>,
}

/// Makes pages differ from all earlier ones.
struct Stamp {
    /// The start of this load, which no other load of this part has.
    began_ns: u64,
    pages: u64,
}

impl Stamp {
    fn next(&mut self) -> [u8; 16] {
        self.pages += 1;
        let both = u128::from(self.began_ns) << 64 | u128::from(self.pages);
        both.to_le_bytes()
    }
}

impl Blkif {
    /// The written data is not zeros, which a disk could treat specially.
    pub(crate) fn new(queue: FrontQueue, buffer: Buffer, task: &Task, first: u64) -> Blkif {
        let mut random = SplitMix64::new(first);
        for at in (0..buffer.len()).step_by(8) {
            buffer.write(at, &random.next_u64().to_le_bytes());
        }
        // Each part has different data.
        let stamp = Stamp { began_ns: SystemClock.now_ns(), pages: 0 };
        Blkif {
            stamp: task.distinct.then_some(stamp),
            place_of: vec![0; queue.entries() as usize],
            queue,
            buffer,
            block_bytes: task.block_bytes as usize,
            stride: task.block_pages() as usize * PAGE_SIZE,
        }
    }

    /// The queue, idle.
    pub(crate) fn into_queue(self) -> FrontQueue {
        self.queue
    }
}

impl Carrier for Blkif {
    fn send(&mut self, place: u16, sector: u64, what: What) -> Result<(), FrontError> {
        let (at, bytes) = (usize::from(place) * self.stride, self.block_bytes);
        if let (What::Write, Some(stamp)) = (what, &mut self.stamp) {
            for page in (at..at + bytes).step_by(PAGE_SIZE) {
                self.buffer.write(page, &stamp.next());
            }
        }
        let tag = match what {
            What::Write => self.queue.write(sector, &self.buffer, at, bytes)?,
            What::Read => self.queue.read(sector, &self.buffer, at, bytes)?,
            What::Flush => self.queue.flush()?,
            What::Discard => self.queue.discard(sector, bytes as u64 / SECTOR_BYTES, false)?,
        };
        self.place_of[usize::from(tag.0)] = place;
        Ok(())
    }

    fn push(&mut self) -> Result<(), FrontError> {
        self.queue.push().map(drop)
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn has_response(&self) -> bool {
        self.queue.has_response()
    }

    fn final_check(&self) -> bool {
        self.queue.final_check()
    }

    fn wait(&mut self, timeout: Duration) -> Result<bool, FrontError> {
        self.queue.wait(timeout)
    }

    fn take(&mut self) -> Result<Option<(u16, bool)>, FrontError> {
        let reply = self.queue.take()?;
        Ok(reply.map(|reply| (self.place_of[usize::from(reply.tag.0)], reply.is_ok())))
    }
}

/// A load with its carrier, for one thread.
pub(crate) struct Load<C> {
    carrier: C,
    poll_ns: u64,
    batch: bool,
    choice: Choice,
    /// The time at which the request of each place was sent.
    sent_ns: Vec<u64>,
    /// Numbers of places without a request.
    idle: Vec<u16>,
    /// Places whose requests have just ended, and whether successfully.
    ended: Vec<(u16, bool)>,
    counter: Counter,
}

impl<C: Carrier> Load<C> {
    pub(crate) fn new(carrier: C, task: &Task, part: (u64, u64)) -> Load<C> {
        let depth = task.depth as u16;
        Load {
            carrier,
            poll_ns: u64::from(task.poll_us) * 1000,
            batch: task.batch,
            choice: Choice::new(task, part),
            sent_ns: vec![0; usize::from(depth)],
            idle: (0..depth).rev().collect(),
            ended: Vec::with_capacity(task.depth as usize),
            counter: Counter::new(),
        }
    }

    /// Runs from start to end. A request's time is from before it is put on the ring to after all responses of its
    /// batch were taken off. Returns the carrier, idle.
    pub(crate) fn run(mut self, times: Times) -> Result<(C, Tally), FrontError> {
        let clock = SystemClock;
        let wait_ns = times.start_ns.saturating_sub(clock.now_ns());
        clock.sleep(Duration::from_nanos(wait_ns));
        let mut now_ns = clock.now_ns();
        let mut cpu_from_ns = cpu_ns();
        let mut counting = false;
        while now_ns < times.until_ns {
            if !self.batch || self.carrier.in_flight() == 0 {
                while let Some(place) = self.idle.pop() {
                    let (sector, what) = self.choice.next(place);
                    self.carrier.send(place, sector, what)?;
                    self.sent_ns[usize::from(place)] = now_ns;
                }
                self.carrier.push()?;
            }
            self.take_some()?;
            now_ns = clock.now_ns();
            if now_ns >= times.from_ns && !counting {
                counting = true;
                cpu_from_ns = cpu_ns();
            }
            self.count(now_ns, counting && now_ns < times.until_ns);
        }
        let cpu_ns = cpu_ns() - cpu_from_ns;
        while self.carrier.in_flight() > 0 {
            self.take_some()?;
            self.count(0, false);
        }
        Ok((self.carrier, self.counter.tally(cpu_ns)))
    }

    /// Waits for responses, as a guest does: polls for a while, then sleeps until an event comes.
    fn take_some(&mut self) -> Result<(), FrontError> {
        if self.poll_ns > 0 && !self.carrier.final_check() {
            let end_ns = SystemClock.now_ns() + self.poll_ns;
            while !self.carrier.has_response() && SystemClock.now_ns() < end_ns {
                std::hint::spin_loop();
            }
        }
        if !self.carrier.wait(PATIENCE)? {
            return Err(self.unanswered());
        }
        self.take_all()
    }

    fn unanswered(&self) -> FrontError {
        late(format!("no response to {} requests came", self.carrier.in_flight()))
    }

    fn take_all(&mut self) -> Result<(), FrontError> {
        while let Some(ended) = self.carrier.take()? {
            self.ended.push(ended);
        }
        Ok(())
    }

    /// Errors count whenever they happen.
    fn count(&mut self, now_ns: u64, counting: bool) {
        for (place, ok) in self.ended.drain(..) {
            if !ok {
                self.counter.add_error();
            } else if counting && self.choice.counts(place) {
                self.counter.add(now_ns - self.sent_ns[usize::from(place)]);
            }
            self.idle.push(place);
        }
    }
}

impl Load<Blkif> {
    /// Sends a batch when the backend sleeps, and requests one event with its last answer. So the backend runs the same
    /// steps each time, whatever the timing.
    pub(crate) fn run_in_steps(mut self, steps: u32) -> Result<(Blkif, Tally), FrontError> {
        let ring = self.carrier.queue.ring();
        for _ in 0..steps {
            let end_ns = SystemClock.now_ns() + PATIENCE.as_nanos() as u64;
            let next = self.carrier.queue.req_prod().wrapping_add(1);
            while ring.load(RingWord::ReqEvent) != next {
                if SystemClock.now_ns() > end_ns {
                    return Err(late("the backend did not go to sleep".to_owned()));
                }
                SystemClock.sleep(Duration::from_micros(20));
            }
            while let Some(place) = self.idle.pop() {
                let (sector, what) = self.choice.next(place);
                self.carrier.send(place, sector, what)?;
            }
            let last = self.carrier.queue.req_prod();
            ring.store(RingWord::RspEvent, last);
            self.carrier.push()?;
            while ring.load(RingWord::RspProd) != last {
                if !self.carrier.queue.wait_event(PATIENCE)? {
                    return Err(self.unanswered());
                }
            }
            self.take_all()?;
            self.count(0, true);
        }
        Ok((self.carrier, self.counter.tally(0)))
    }
}

fn late(what: String) -> FrontError {
    LoopbackError::Timeout { what, ms: PATIENCE.as_millis() as u64 }.into()
}

/// The processor time of this thread.
fn cpu_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    #[test]
    fn interleaved_blocks_come_once_each_and_even_before_odd() {
        let order: Vec<_> = (0..17).map(|i| super::interleaved(i, 7, 17)).collect();
        assert_eq!(order, [0, 2, 4, 6, 1, 3, 5, 7, 9, 11, 13, 8, 10, 12, 14, 15, 16]);
    }

    use super::*;

    fn choices(mode: Mode, n: usize) -> Vec<(u64, What)> {
        let task = Task {
            devid: 0,
            mode,
            block_bytes: 4096,
            depth: 8,
            batch: false,
            distinct: false,
            steps: None,
            ring_order: 0,
            max_indirect: 0,
            poll_us: 0,
            queues: 1,
            persistent: false,
            parts: Vec::new(),
        };
        let mut choice = Choice::new(&task, (800, 80));
        (0..n).map(|i| choice.next(i as u16 % 8)).collect()
    }

    #[test]
    fn blocks_in_order_begin_again_at_the_end() {
        let sectors: Vec<u64> = choices(Mode::Read, 12).into_iter().map(|(s, _)| s).collect();
        let expected: Vec<u64> = (0..12).map(|i| 800 + i % 10 * 8).collect();
        assert_eq!(sectors, expected);
        assert!(choices(Mode::Write, 5).iter().all(|(_, what)| *what == What::Write));
    }

    #[test]
    fn blocks_at_random_are_all_of_the_part_and_no_other() {
        let mut seen = [false; 10];
        for (sector, what) in choices(Mode::Randread, 1000) {
            assert!((800..880).contains(&sector) && sector % 8 == 0 && what == What::Read);
            seen[(sector as usize - 800) / 8] = true;
        }
        assert!(seen.iter().all(|s| *s));
    }

    #[test]
    fn half_of_a_mixed_load_writes() {
        let all = choices(Mode::Randrw, 1000);
        let writes = all.iter().filter(|(_, what)| *what == What::Write).count();
        assert!((400..600).contains(&writes), "{writes}");
    }

    #[test]
    fn each_write_of_a_flushing_load_has_a_flush_behind_it() {
        let all: Vec<What> = choices(Mode::Flush, 6).into_iter().map(|(_, what)| what).collect();
        assert_eq!(all, [What::Write, What::Flush].repeat(3));
    }

    #[test]
    fn what_is_beside_counted_reads_is_in_the_second_half_and_they_are_in_the_first() {
        for (mode, other) in [(Mode::Storm, What::Discard), (Mode::Churn, What::Write)] {
            for (i, (sector, what)) in choices(mode, 1000).into_iter().enumerate() {
                let expected = if i % 8 < 4 { (What::Read, 800..840) } else { (other, 840..880) };
                assert!(
                    what == expected.0 && expected.1.contains(&sector),
                    "{mode:?}, {i}: {what:?} {sector}"
                );
            }
        }
    }
}
