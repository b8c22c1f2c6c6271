//! The thread that copies what the target lacks. It has an engine and memory of its own, so it does not delay queues.
//!
//! A region is copied while no write to it is under way; writes to other regions go on. A few regions are under way at a time.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_disk_base::{Port, SECTOR_BYTES};
use ferrite_io::arena::Span;
use ferrite_io::pool::{Pool, SLAB_BYTES};
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::Scratch;
use ferrite_store::background::ServiceEngine;
use ferrite_store::pace::{Pace, Stop};

use super::{Pair, REGION_BYTES};
use crate::Disk;

/// The most operations under way.
const ENTRIES: u32 = 64;
/// Regions under way at a time.
const LANES: usize = 4;
/// Regions between two flushes of the target.
const ROUND: usize = 64;
/// The pause before the thread looks for work again.
const IDLE: Duration = Duration::from_millis(100);
/// The pauses before a target that has failed is tried again.
const AGAIN: Duration = Duration::from_millis(250);
const AGAIN_MAX: Duration = Duration::from_secs(10);
/// How often bits that survive a power cut are cleared. A region that is written as often keeps its bit, and its writes
/// wait for no sync.
const SETTLE: Duration = Duration::from_secs(3);
/// Data are copied in multiples of this.
const UNIT: u64 = 4096;
/// Data are compared in pieces of this.
const COMPARED: u64 = 64 << 10;

const _: () = assert!(REGION_BYTES as usize == SLAB_BYTES);

/// The running thread.
pub(super) struct Background {
    stop: Arc<Stop>,
    thread: JoinHandle<()>,
}

impl Background {
    pub(super) fn start(pair: Arc<Pair>, engine: ServiceEngine) -> io::Result<Background> {
        let stop = Stop::new()?;
        let theirs = stop.clone();
        let span = tracing::Span::current();
        let body = move || {
            let _in_span = span.enter();
            if let Err(e) = work(&pair, &engine, theirs) {
                tracing::warn!("the mirror copies nothing: {e}");
                pair.regions.map.say_why(&format!("the copy does not run: {e}"));
                pair.regions.map.ask_reopen(true);
            }
        };
        let thread = std::thread::Builder::new().name("mirror".to_owned()).spawn(body)?;
        Ok(Background { stop, thread })
    }

    /// Ends the thread. None of its operations is under way when this returns.
    pub(super) fn end(self) {
        self.stop.ask();
        if self.thread.join().is_err() {
            tracing::error!("the mirror's thread has panicked: this is a bug in ferrite");
        }
    }
}

fn work(pair: &Arc<Pair>, engine: &ServiceEngine, stop: Arc<Stop>) -> io::Result<()> {
    let scratch_bytes = Disk::MAX_SCRATCH_BYTES;
    let pool = Pool::with_scratch((LANES + 1) * SLAB_BYTES, 1, scratch_bytes)?;
    let mut reactor = Reactor::new(engine(pool.arena().clone(), ENTRIES)?);
    let scratch = Scratch::new(pool.arena().clone(), pool.scratch(0));
    let backings = pair.backings().into_iter().map(|backing| reactor.add(backing, &scratch));
    let files = backings.collect::<io::Result<_>>()?;
    let port = Port { io: reactor.io(), files, scratch };
    let mut queue = pool.queue(0);
    let buffers: Option<Vec<_>> = (0..LANES).map(|_| queue.alloc(SLAB_BYTES)).collect();
    let buffers = buffers.ok_or(io::ErrorKind::OutOfMemory)?;
    let spans: Vec<Span> = buffers.iter().map(|buffer| buffer.span()).collect();
    let pace = Pace::bounded(None, Some(stop));
    let copier = Copier { pair, port: &port, zeros: pool.zero_page(), pace: &pace };
    reactor.block_on(copier.run(&spans))?;
    drop(reactor);
    buffers.into_iter().for_each(|buffer| queue.free(buffer));
    Ok(())
}

/// See [`Mirror::work_once`](super::Mirror::work_once).
pub(super) async fn once(pair: &Pair, port: &Port, zeros: Span, buffers: &[Span], settles: bool) {
    let pace = Pace::unbounded();
    let copier = Copier { pair, port, zeros, pace: &pace };
    if pair.target.is_some() && (pair.regions.left() > 0 || pair.regions.is_behind()) {
        copier.round(buffers).await;
    } else {
        pair.flush_target(port).await;
    }
    if settles {
        copier.settle().await;
    }
    pair.say();
}

/// Why a region was not copied.
enum Lost {
    Source(io::Error),
    Target(io::Error),
}

struct Copier<'a> {
    pair: &'a Pair,
    port: &'a Port,
    zeros: Span,
    pace: &'a Pace,
}

impl Copier<'_> {
    /// Copies until it is to end.
    async fn run(&self, buffers: &[Span]) {
        let mut pause = AGAIN;
        let (mut settled, mut was_in_step) = (Instant::now(), false);
        while self.pace.check().is_ok() {
            let regions = &self.pair.regions;
            let rests = regions.map.rests();
            let rest = if self.pair.target.is_none() {
                regions.map.ask_reopen(true);
                AGAIN_MAX
            } else if rests || (regions.left() == 0 && !regions.is_behind()) {
                if regions.has_unflushed() {
                    self.pair.flush_target(self.port).await;
                }
                IDLE
            } else if self.round(buffers).await {
                pause = AGAIN;
                Duration::ZERO
            } else {
                let rest = pause;
                pause = (pause * 2).min(AGAIN_MAX);
                rest
            };
            self.pair.say();
            let in_step = regions.left() == 0 && !regions.is_behind();
            if settled.elapsed() >= SETTLE || in_step && !was_in_step {
                self.settle().await;
                settled = Instant::now();
            }
            was_in_step = in_step;
            if !rest.is_zero() && self.pace.rest(&self.port.io, rest).await.is_err() {
                return;
            }
        }
    }

    /// Clears bits that survive a power cut.
    async fn settle(&self) {
        if let Err(e) = self.pair.settle_groups(self.port, false).await {
            // The guest's own flushes fail, too.
            tracing::debug!(
                "the mirror's dirty map names too much: the source cannot be flushed: {e}"
            );
        }
    }

    /// Copies some regions, and flushes the target. A target that has failed is tried with one region. Returns whether
    /// it works.
    async fn round(&self, buffers: &[Span]) -> bool {
        let regions = &self.pair.regions;
        let was_behind = regions.is_behind();
        let lanes = if was_behind { 1 } else { buffers.len() };
        let lane = |buffer: &Span| {
            let most = if was_behind { 1 } else { ROUND / LANES };
            Box::pin(self.lane(*buffer, most, lanes as u64)) as Pin<Box<dyn Future<Output = _>>>
        };
        let done = all(buffers[..lanes].iter().map(lane).collect()).await;
        let mut is_lost = false;
        for e in done.into_iter().filter_map(Result::err) {
            is_lost = true;
            match e {
                Lost::Source(e) => {
                    // Only a write of the guest can mend that region.
                    let why = format!("cannot read what the target lacks: {e}");
                    regions.map.say_why(&why);
                }
                Lost::Target(e) if self.pace.check().is_ok() => self.failed(&e),
                Lost::Target(_) => {}
            }
        }
        if is_lost {
            return false;
        }
        if was_behind {
            // Its flush tells whether it works again.
            let Some((target, to)) = self.pair.target_port(self.port) else { return false };
            let number = regions.begin_flush();
            if let Err(e) = target.flush(&to).await {
                self.failed(&e);
                return false;
            }
            regions.flushed(number);
            regions.catch_up();
            regions.map.say_why("");
            regions.map.ask_reopen(false);
            tracing::info!("the mirror's target works again");
            return true;
        }
        self.pair.flush_target(self.port).await;
        !regions.is_behind()
    }

    fn failed(&self, e: &io::Error) {
        let was_behind = self.pair.regions.is_behind();
        self.pair.target_failed("copy to", e);
        // A full one gets room; another error may last as long as it is open.
        if was_behind && e.kind() != io::ErrorKind::StorageFull {
            self.pair.regions.map.ask_reopen(true);
        }
    }

    /// Copies up to `most` regions, one after the other.
    async fn lane(&self, buffer: Span, most: usize, lanes: u64) -> Result<(), Lost> {
        let (regions, mut from, mut unread) = (&self.pair.regions, 0, None);
        for _ in 0..most {
            if self.pace.check().is_err() || regions.map.rests() {
                return Ok(());
            }
            let next = regions.copy(&self.port.io, from).await.map_err(Lost::Source)?;
            let Some(copy) = next else { return unread.map_or(Ok(()), |e| Err(Lost::Source(e))) };
            from = copy.region + 1;
            let begun = Instant::now();
            let bytes = match self.copy(copy.region, buffer).await {
                Ok(bytes) => bytes,
                // The other regions are copied nevertheless.
                Err(Lost::Source(e)) => {
                    unread = Some(e);
                    continue;
                }
                Err(e) => return Err(e),
            };
            copy.done();
            regions.map.add_copied(bytes);
            self.pair.say();
            let speed = regions.map.speed();
            if speed > 0 {
                let wanted = Duration::from_secs_f64((bytes * lanes) as f64 / speed as f64);
                let rest = wanted.saturating_sub(begun.elapsed());
                // It is asked above whether the thread is to end.
                let _ = self.pace.rest(&self.port.io, rest).await;
            }
        }
        unread.map_or(Ok(()), |e| Err(Lost::Source(e)))
    }

    /// Copies a region; returns the bytes that the target has of it now.
    async fn copy(&self, region: u64, buffer: Span) -> Result<u64, Lost> {
        let (source, from) = (&self.pair.source, self.pair.source_port(self.port));
        let Some((target, to)) = self.pair.target_port(self.port) else {
            return Err(Lost::Target(io::ErrorKind::NotConnected.into()));
        };
        let start = region * REGION_BYTES;
        let end = (start + REGION_BYTES).min(source.sectors() * SECTOR_BYTES);
        let compares = self.pair.regions.map.compares;
        // The other half gets what the target has.
        let most = if compares { buffer.len() / 2 } else { buffer.len() } as u64;
        let mut at = start;
        while at < end {
            let found = source.allocation(&from, at, end - at).await;
            let found = found.map_err(Lost::Source)?;
            let whole = found.len / UNIT * UNIT;
            // A part of a unit is copied as data.
            let len = match found.zeros && (whole > 0 || found.len == end - at) {
                true if found.len == end - at => found.len,
                true => whole,
                false => found.len.next_multiple_of(UNIT).min(end - at).min(most),
            };
            if found.zeros && len <= found.len {
                self.zero(target, &to, at, len).await.map_err(Lost::Target)?;
            } else {
                let span = buffer.slice(0, len as usize);
                source.read(&from, at, span).await.map_err(Lost::Source)?;
                let written = match compares {
                    true => {
                        let other = buffer.slice(most as usize, len as usize);
                        self.write_changed(target, &to, at, (span, other)).await
                    }
                    false => target.write(&to, at, span).await,
                };
                written.map_err(Lost::Target)?;
            }
            at += len;
        }
        Ok(end - start)
    }

    /// Writes the pieces of a range that the target does not have. `other` is memory for what it has.
    async fn write_changed(
        &self,
        target: &Disk,
        to: &Port,
        offset: u64,
        (span, other): (Span, Span),
    ) -> io::Result<()> {
        let len = span.len() as u64;
        let found = target.allocation(to, offset, len).await?;
        if found.zeros && found.len >= len {
            return target.write(to, offset, span).await;
        }
        target.read(to, offset, other).await?;
        let memory = self.port.memory();
        let (mut own, mut theirs) = (vec![0; COMPARED as usize], vec![0; COMPARED as usize]);
        let mut differs = |at: u64| {
            let bytes = COMPARED.min(len - at) as usize;
            let place = |span: Span| span.slice(at as usize, bytes);
            memory.copy_out(place(span), &mut own[..bytes]);
            memory.copy_out(place(other), &mut theirs[..bytes]);
            own[..bytes] != theirs[..bytes]
        };
        let mut at = 0;
        while at < len {
            let begin = at;
            while at < len && differs(at) {
                at += COMPARED;
            }
            let end = at.min(len);
            if end > begin {
                let changed = span.slice(begin as usize, (end - begin) as usize);
                target.write(to, offset + begin, changed).await?;
            }
            // The piece that ended the run is the same.
            at += COMPARED;
        }
        Ok(())
    }

    /// Zeroes a range of the target where it is not zero.
    async fn zero(&self, target: &Disk, to: &Port, offset: u64, len: u64) -> io::Result<()> {
        let mut at = offset;
        while at < offset + len {
            let found = target.allocation(to, at, offset + len - at).await?;
            if !found.zeros {
                let rest = offset + len - at;
                return target.write_zeroes(to, at, rest, self.zeros).await;
            }
            at += found.len;
        }
        Ok(())
    }
}

/// Runs futures side by side, to the end of all.
async fn all<T>(mut futures: Vec<Pin<Box<dyn Future<Output = T> + '_>>>) -> Vec<T> {
    let mut done: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, slot) in futures.iter_mut().zip(&mut done) {
            if slot.is_none()
                && let Poll::Ready(value) = future.as_mut().poll(cx)
            {
                *slot = Some(value);
            }
        }
        if done.iter().any(Option::is_none) { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    done.into_iter().flatten().collect()
}
