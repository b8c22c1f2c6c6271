//! Work that an engine has done beside its thread: system calls that block and that its kernel interface
//! does not have, by a helper thread of its own, and computing. Results come back through an eventfd that
//! the engine watches.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate, fdatasync, ftruncate};
use rustix::io::Errno;

use crate::computing::{self, Work};
use crate::engine::Op;

/// `_IO(0x12, 119)` of linux/fs.h; takes two u64: first byte, bytes.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// One call to make. It holds the file open.
pub(crate) struct Job {
    /// The caller's mark, which comes back with the result.
    pub(crate) id: u64,
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) call: Call,
}

/// The system call to make. Offsets and lengths are bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    /// `BLKDISCARD`.
    Discard { offset: u64, len: u64 },
    /// `fdatasync`.
    Sync,
    /// `ftruncate`.
    SetLen { len: u64 },
    /// `fallocate`.
    Fallocate { flags: FallocateFlags, offset: u64, len: u64 },
    /// Nothing, but it takes its time.
    #[cfg(test)]
    Nap(std::time::Duration),
}

impl Call {
    /// The call that does what the operation asks for, if there is one.
    pub(crate) fn of(op: Op) -> Option<Call> {
        let fallocate = |flags, offset, len| Some(Call::Fallocate { flags, offset, len });
        match op {
            Op::Sync { .. } => Some(Call::Sync),
            Op::PunchHole { offset, len, .. } => {
                fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
            }
            Op::ZeroRange { offset, len, .. } => {
                fallocate(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, offset, len)
            }
            Op::Allocate { offset, len, extends, .. } => {
                let keeps =
                    if extends { FallocateFlags::empty() } else { FallocateFlags::KEEP_SIZE };
                fallocate(keeps, offset, len)
            }
            Op::SetLen { len, .. } => Some(Call::SetLen { len }),
            Op::Discard { offset, len, .. } => Some(Call::Discard { offset, len }),
            Op::Read { .. }
            | Op::Write { .. }
            | Op::Readable { .. }
            | Op::Writable { .. }
            | Op::Timer { .. } => None,
        }
    }
}

impl Job {
    /// 0 or `-errno`.
    fn run(&self) -> i32 {
        loop {
            match self.call_once() {
                Ok(()) => return 0,
                Err(Errno::INTR) => {}
                Err(e) => return -e.raw_os_error(),
            }
        }
    }

    fn call_once(&self) -> Result<(), Errno> {
        match self.call {
            Call::Sync => fdatasync(&self.file),
            Call::SetLen { len } => ftruncate(&self.file, len),
            Call::Fallocate { flags, offset, len } => fallocate(&self.file, flags, offset, len),
            Call::Discard { offset, len } => {
                let range = [offset, len];
                let fd = self.file.as_raw_fd();
                // SAFETY: the kernel reads two u64 at the pointer, which outlive the call.
                match unsafe { libc::ioctl(fd, BLKDISCARD, range.as_ptr()) } {
                    0 => Ok(()),
                    _ => {
                        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
                    }
                }
            }
            #[cfg(test)]
            Call::Nap(time) => {
                std::thread::sleep(time);
                Ok(())
            }
        }
    }
}

/// Results that were not taken yet.
pub(crate) struct Results {
    done: Mutex<Vec<(u64, i32)>>,
    /// Whether something is in there: a look that costs nothing.
    any: AtomicBool,
    wake: OwnedFd,
}

/// The helper thread, and the ways to what is done beside.
pub(crate) struct Offload {
    /// Started by the first call. `None` also while it is being dropped.
    jobs: Option<Sender<Job>>,
    results: Arc<Results>,
    thread: Option<JoinHandle<()>>,
    /// Jobs given and not yet taken back.
    pub(crate) outstanding: usize,
}

impl Offload {
    /// With nothing done yet.
    pub(crate) fn new() -> io::Result<Offload> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let results =
            Arc::new(Results { done: Mutex::default(), any: AtomicBool::new(false), wake });
        Ok(Offload { jobs: None, results, thread: None, outstanding: 0 })
    }

    fn start(&mut self) -> io::Result<()> {
        let theirs = self.results.clone();
        let (jobs, queue) = channel();
        let name = "ferrite-helper".to_owned();
        let thread = std::thread::Builder::new().name(name).spawn(move || work(&queue, &theirs))?;
        (self.jobs, self.thread) = (Some(jobs), Some(thread));
        Ok(())
    }

    /// Hands over a call. The thread makes them in order, one at a time.
    pub(crate) fn give(&mut self, job: Job) {
        self.outstanding += 1;
        let id = job.id;
        let started = if self.thread.is_none() { self.start() } else { Ok(()) };
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !sent {
            let errno = started.err().and_then(|e| e.raw_os_error());
            self.results.push(id, -errno.unwrap_or(libc::EIO));
        }
    }

    /// Hands over what is to be computed. Several are done at once, in any order.
    pub(crate) fn compute(&mut self, id: u64, work: Work) {
        self.outstanding += 1;
        if let Err(e) = computing::give(id, work, self.results.clone()) {
            self.results.push(id, -e.raw_os_error().unwrap_or(libc::EIO));
        }
    }

    /// The descriptor to watch for results.
    pub(crate) fn wake_fd(&self) -> RawFd {
        self.results.wake.as_raw_fd()
    }

    /// Whether there are results to take.
    pub(crate) fn has_results(&self) -> bool {
        self.results.any.load(Ordering::Acquire)
    }

    /// The results that are there, with their jobs' ids.
    pub(crate) fn take(&mut self) -> Vec<(u64, i32)> {
        let mut done = self.results.done.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = rustix::io::read(&self.results.wake, &mut [0u8; 8]);
        self.results.any.store(false, Ordering::Relaxed);
        let done = std::mem::take(&mut *done);
        self.outstanding -= done.len();
        done
    }
}

impl Results {
    pub(crate) fn push(&self, id: u64, raw: i32) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.push((id, raw));
        self.any.store(true, Ordering::Release);
        // Under the lock, as the read in `take`: written later, it would wake for what was taken
        // already, again and again, since the engine does not read it before there are results. It
        // can fail only if the counter is full, and then it wakes already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

fn work(queue: &Receiver<Job>, results: &Results) {
    while let Ok(job) = queue.recv() {
        let raw = job.run();
        let id = job.id;
        // The receiver of the result may close the file.
        drop(job);
        results.push(id, raw);
    }
}

impl Drop for Offload {
    /// Waits for the calls that were given.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the helper thread panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::engine::is_readable;

    /// The descriptor must not wake for a result that was taken, nor be silent about one that was
    /// not.
    #[test]
    fn the_descriptor_is_readable_while_there_are_results_and_no_longer() {
        const EACH: u64 = 50_000;
        let mut offload = Offload::new().unwrap();
        offload.outstanding = 3 * EACH as usize;
        let results = offload.results.clone();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..EACH).for_each(|id| results.push(id, 0)));
            }
            while offload.outstanding > 0 {
                assert!(start.elapsed() < Duration::from_secs(60));
                let done = results.done.lock().unwrap();
                let readable = is_readable(results.wake.as_fd()).unwrap();
                assert_eq!(readable, !done.is_empty(), "{} to come", offload.outstanding);
                drop(done);
                offload.take();
            }
        });
    }
}
