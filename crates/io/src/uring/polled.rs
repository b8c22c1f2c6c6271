//! io_uring with polled storage: a second ring beside the main one.
//!
//! A ring that polls (`IORING_SETUP_IOPOLL`) asks the device for completions instead of waiting
//! for its interrupt: less time a request, for a processor that never rests meanwhile. It carries
//! reads and writes of devices with poll queues and nothing else, so everything else goes through
//! an ordinary ring. While anything is in flight on the polled ring, waiting means to look at both;
//! otherwise the ordinary ring sleeps as it always does.
//!
//! A transfer that the device's driver would split goes through the ordinary ring, too: the kernel does
//! not poll for the parts. With one processor, Linux 6.1 never ends it while a thread asks for them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, major, minor};

use super::Uring;
use crate::arena::{Arena, Span};
use crate::computing::Work;
use crate::engine::{Completion, Engine, FileId, Op, Token, Transfer};
use ferrite_host::clock::{Clock, SystemClock};
use ferrite_host::names;

const PAGE_BYTES: usize = 4096;

/// The engine on two rings; see the module text.
#[derive(Debug)]
pub struct PolledUring {
    main: Uring,
    polled: Uring,
    /// For each file of the main ring its place in the polled one, if it is polled.
    files: Vec<Option<Polled>>,
}

/// A file whose reads and writes are polled.
#[derive(Clone, Copy, Debug)]
struct Polled {
    /// In the polled ring.
    id: FileId,
    whole: Whole,
}

/// The limits of a transfer that a driver takes as one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Whole {
    bytes: usize,
    /// Pieces of memory of up to a page; all but the first begin with a page.
    segments: usize,
}

impl Whole {
    /// By the attributes of a queue in sysfs (Documentation/ABI/stable/sysfs-block of the kernel):
    /// none if its driver has no poll queues.
    fn of(queue: &Path) -> Option<Whole> {
        let number =
            |name| names::read_to_string(queue.join(name)).ok()?.trim().parse::<usize>().ok();
        (number("io_poll")? == 1).then_some(())?;
        Some(Whole { bytes: number("max_sectors_kb")? << 10, segments: number("max_segments")? })
    }

    fn takes(self, bufs: &[Span]) -> bool {
        let ends_a_page = |buf: &Span| (buf.offset() + buf.len()).is_multiple_of(PAGE_BYTES);
        let begins_one = |buf: &Span| buf.offset().is_multiple_of(PAGE_BYTES);
        let no_gap = |pair: &[Span]| ends_a_page(&pair[0]) && begins_one(&pair[1]);
        let segments = |buf: &Span| (buf.offset() % PAGE_BYTES + buf.len()).div_ceil(PAGE_BYTES);
        bufs.iter().map(Span::len).sum::<usize>() <= self.bytes
            && bufs.iter().map(segments).sum::<usize>() <= self.segments
            && bufs.windows(2).all(no_gap)
    }
}

impl PolledUring {
    /// As [`Uring::new`]; files are polled whose devices have poll queues.
    ///
    /// # Errors
    /// A [`SetupError`](super::SetupError) inside.
    pub fn new(arena: Arc<Arena>, entries: u32) -> io::Result<PolledUring> {
        Ok(PolledUring {
            main: Uring::new(arena.clone(), entries)?,
            polled: Uring::with_tables(arena, entries, true)?,
            files: Vec::new(),
        })
    }

    /// The file in the polled ring, for a transfer that is polled.
    fn polled(&self, file: FileId, bufs: &[Span]) -> Option<FileId> {
        let polled = self.files.get(file.0 as usize)?.as_ref()?;
        polled.whole.takes(bufs).then_some(polled.id)
    }
}

/// Which transfers can be polled, or why none can be.
fn can_be_polled(file: BorrowedFd<'_>) -> Result<Whole, &'static str> {
    let Ok(stat) = fstat(file) else { return Err("it cannot be looked at") };
    if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
        return Err("it is no block device");
    }
    if !fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT)) {
        return Err("it is not open for direct I/O");
    }
    // A partition's queue is its device's.
    let device = format!("/sys/dev/block/{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    ["queue", "../queue"]
        .iter()
        .find_map(|queue| Whole::of(Path::new(&format!("{device}/{queue}"))))
        .ok_or("its driver has no poll queues (for NVMe: nvme.poll_queues=N)")
}

impl Engine for PolledUring {
    fn name(&self) -> &'static str {
        "io_uring polled"
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        let id = self.main.add_file(file.clone())?;
        let polled = match can_be_polled(file.as_fd()) {
            Ok(whole) => Some(Polled { id: self.polled.add_file(file)?, whole }),
            Err(why) => {
                tracing::warn!("file {} of the disk is not polled: {why}", id.0);
                None
            }
        };
        self.files.push(polled);
        Ok(id)
    }

    fn hold(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.main.hold(file)?;
        self.polled.hold(file)
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.polled.clear_files()?;
        self.files.clear();
        self.main.clear_files()
    }

    /// In the ring that most data goes through.
    fn pin(&mut self, region: Span) {
        match self.files.iter().any(Option::is_some) {
            true => self.polled.pin(region),
            false => self.main.pin(region),
        }
    }

    fn unpin(&mut self) -> bool {
        self.polled.unpin() & self.main.unpin()
    }

    fn push(&mut self, token: Token, op: Op) {
        let polled = match op {
            Op::Read { file, buf, .. } | Op::Write { file, buf, .. } => self.polled(file, &[buf]),
            _ => None,
        };
        match (op, polled) {
            (Op::Read { offset, buf, .. }, Some(file)) => {
                self.polled.push(token, Op::Read { file, offset, buf });
            }
            (Op::Write { offset, buf, .. }, Some(file)) => {
                self.polled.push(token, Op::Write { file, offset, buf });
            }
            (op, _) => self.main.push(token, op),
        }
    }

    fn push_vectored(
        &mut self,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        match self.polled(file, bufs) {
            Some(file) => self.polled.push_vectored(token, transfer, file, offset, bufs),
            None => self.main.push_vectored(token, transfer, file, offset, bufs),
        }
    }

    fn push_stream(
        &mut self,
        token: Token,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    ) {
        self.main.push_stream(token, transfer, socket, bufs);
    }

    fn compute(&mut self, token: Token, work: Work) {
        self.main.compute(token, work);
    }

    fn cancel(&mut self, token: Token) {
        self.main.cancel(token);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.polled.submit()?;
        self.main.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.polled.in_flight() == 0 {
            return self.main.wait(timeout);
        }
        let deadline_ns = timeout.map(|t| {
            let ns = u64::try_from(t.as_nanos()).unwrap_or(u64::MAX);
            SystemClock.now_ns().saturating_add(ns)
        });
        loop {
            self.submit()?;
            let found =
                self.polled.has_backlog_or_completions() || self.main.has_backlog_or_completions();
            if found || deadline_ns.is_some_and(|d| SystemClock.now_ns() >= d) {
                return Ok(());
            }
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        self.polled.reap(out);
        self.main.reap(out);
    }

    fn may_reap(&mut self) -> bool {
        self.polled.may_reap() || self.main.may_reap()
    }

    fn in_flight(&self) -> usize {
        self.polled.in_flight() + self.main.in_flight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_poll_queues_are_served_by_the_main_ring() {
        let arena = Arena::new(1).unwrap();
        let mut e = PolledUring::new(arena.clone(), 8).unwrap();
        let file: Arc<OwnedFd> = Arc::new(tempfile::tempfile().unwrap().into());
        assert_eq!(can_be_polled(file.as_fd()), Err("it is no block device"));
        let f = e.add_file(file).unwrap();
        e.pin(arena.span(0, 4096));
        e.push(1, Op::Write { file: f, offset: 0, buf: arena.span(0, 4096) });
        e.push_vectored(2, Transfer::Write, f, 4096, &[arena.span(0, 512), arena.span(512, 512)]);
        e.push(3, Op::Sync { file: f });
        let mut out = Vec::new();
        while out.len() < 3 {
            e.wait(None).unwrap();
            e.reap(&mut out);
        }
        out.sort_by_key(|c| c.token);
        assert_eq!(out.iter().map(|c| c.raw).collect::<Vec<_>>(), [4096, 1024, 0]);
        assert!(e.unpin() && e.in_flight() == 0 && !e.may_reap());
    }

    #[test]
    fn what_goes_through_the_polled_ring_ends_like_everything_else() {
        let arena = Arena::new(1).unwrap();
        let mut e = PolledUring::new(arena.clone(), 4).unwrap();
        let file: Arc<OwnedFd> = Arc::new(tempfile::tempfile().unwrap().into());
        let f = e.main.add_file(file.clone()).unwrap();
        let whole = Whole { bytes: 4096, segments: 1 };
        e.files.push(Some(Polled { id: e.polled.add_file(file).unwrap(), whole }));
        // Not open for direct I/O: the kernel refuses each, and so each completes.
        for token in 0..20 {
            e.push(token, Op::Read { file: f, offset: 0, buf: arena.span(0, 512) });
        }
        e.push(100, Op::Timer { after: Duration::from_millis(1) });
        let mut out = Vec::new();
        while out.len() < 21 {
            e.wait(None).unwrap();
            e.reap(&mut out);
        }
        out.sort_by_key(|c| c.token);
        assert!(out[..20].iter().all(|c| c.raw == -libc::EOPNOTSUPP), "{out:?}");
        assert_eq!(out[20], Completion { token: 100, raw: 0 });
    }

    #[test]
    fn what_the_driver_would_split_goes_through_the_main_ring() {
        let arena = Arena::new(1).unwrap();
        let mut e = PolledUring::new(arena.clone(), 4).unwrap();
        let file: Arc<OwnedFd> = Arc::new(tempfile::tempfile().unwrap().into());
        let f = e.main.add_file(file.clone()).unwrap();
        let whole = Whole { bytes: 8192, segments: 2 };
        e.files.push(Some(Polled { id: e.polled.add_file(file).unwrap(), whole }));
        let write = |at, len| Op::Write { file: f, offset: 0, buf: arena.span(at, len) };
        e.push(0, write(0, 8192));
        e.push(1, write(0, 8704));
        e.push(2, write(2048, 8192));
        let vectored = [
            (3, vec![arena.span(0, 4096), arena.span(8192, 4096)]),
            (4, vec![arena.span(0, 2048), arena.span(8192, 2048)]),
            (5, vec![arena.span(0, 4096), arena.span(6144, 2048)]),
            (6, vec![arena.span(0, 4096), arena.span(8192, 4096), arena.span(16384, 512)]),
        ];
        for (token, bufs) in &vectored {
            e.push_vectored(*token, Transfer::Write, f, 0, bufs);
        }
        let mut out = Vec::new();
        while out.len() < 7 {
            e.wait(None).unwrap();
            e.reap(&mut out);
        }
        out.sort_by_key(|c| c.token);
        // The polled ring refuses what is not direct, the other one takes everything.
        let polled = -libc::EOPNOTSUPP;
        let raw: Vec<i32> = out.iter().map(|c| c.raw).collect();
        assert_eq!(raw, [polled, 8704, 8192, polled, 4096, 6144, 8704]);
    }

    #[test]
    fn a_queue_without_polling_or_without_limits_is_not_polled() {
        let queue = tempfile::tempdir().unwrap();
        let put = |name: &str, text| std::fs::write(queue.path().join(name), text).unwrap();
        assert_eq!(Whole::of(queue.path()), None);
        put("io_poll", "1\n");
        put("max_segments", "127\n");
        assert_eq!(Whole::of(queue.path()), None);
        put("max_sectors_kb", "252\n");
        assert_eq!(Whole::of(queue.path()), Some(Whole { bytes: 252 << 10, segments: 127 }));
        put("io_poll", "0\n");
        assert_eq!(Whole::of(queue.path()), None);
    }
}
