//! io_uring with polled storage: a second ring beside the main one.
//!
//! A ring that polls (`IORING_SETUP_IOPOLL`) asks the device for completions instead of waiting
//! for its interrupt: less time a request, for a processor that never rests meanwhile. It carries
//! reads and writes of devices with poll queues and nothing else, so everything else goes through
//! an ordinary ring. While anything is in flight on the polled ring, waiting means to look at both;
//! otherwise the ordinary ring sleeps as it always does.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, major, minor};

use super::Uring;
use crate::arena::{Arena, Span};
use crate::clock::{Clock, SystemClock};
use crate::engine::{Completion, Engine, FileId, Op, Token, Transfer};

/// The engine on two rings; see the module text.
#[derive(Debug)]
pub struct PolledUring {
    main: Uring,
    polled: Uring,
    /// For each file of the main ring its place in the polled one, if it is polled.
    files: Vec<Option<FileId>>,
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

    fn polled(&self, file: FileId) -> Option<FileId> {
        self.files.get(file.0 as usize).copied().flatten()
    }
}

/// Why a file's I/O cannot be polled, or nothing if it can be.
fn not_polled_because(file: BorrowedFd<'_>) -> Option<&'static str> {
    let Ok(stat) = fstat(file) else { return Some("it cannot be looked at") };
    if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
        return Some("it is no block device");
    }
    if !fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT)) {
        return Some("it is not open for direct I/O");
    }
    // A partition's queue is its device's.
    let device = format!("/sys/dev/block/{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    let polled = ["queue", "../queue"].iter().any(|queue| {
        std::fs::read_to_string(format!("{device}/{queue}/io_poll"))
            .is_ok_and(|text| text.trim() == "1")
    });
    (!polled).then_some("its driver has no poll queues (for NVMe: nvme.poll_queues=N)")
}

impl Engine for PolledUring {
    fn name(&self) -> &'static str {
        "io_uring polled"
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        let id = self.main.add_file(file.clone())?;
        let polled = match not_polled_because(file.as_fd()) {
            None => Some(self.polled.add_file(file)?),
            Some(why) => {
                tracing::warn!("file {} of the disk is not polled: {why}", id.0);
                None
            }
        };
        self.files.push(polled);
        Ok(id)
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
            Op::Read { file, .. } | Op::Write { file, .. } => self.polled(file),
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
        match self.polled(file) {
            Some(file) => self.polled.push_vectored(token, transfer, file, offset, bufs),
            None => self.main.push_vectored(token, transfer, file, offset, bufs),
        }
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
        assert_eq!(not_polled_because(file.as_fd()), Some("it is no block device"));
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
        e.files.push(Some(e.polled.add_file(file).unwrap()));
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
}
