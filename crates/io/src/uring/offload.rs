//! A helper thread for system calls that block and that the ring cannot make: block device
//! ioctls. Its results come back through an eventfd that the ring watches.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

/// `_IO(0x12, 119)` of linux/fs.h; takes two u64: first byte, bytes.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// One call to make. It holds the file open.
pub(super) struct Job {
    /// What comes back with the result.
    pub(super) index: u32,
    pub(super) file: Arc<OwnedFd>,
    pub(super) call: Call,
}

/// What to call.
pub(super) enum Call {
    /// `BLKDISCARD` of a range in bytes.
    Discard { offset: u64, len: u64 },
    /// Nothing, but it takes its time.
    #[cfg(test)]
    Nap(std::time::Duration),
}

impl Job {
    /// 0 or `-errno`.
    fn run(&self) -> i32 {
        let fd = self.file.as_raw_fd();
        match self.call {
            #[cfg(test)]
            Call::Nap(time) => {
                std::thread::sleep(time);
                0
            }
            Call::Discard { offset, len } => {
                let range = [offset, len];
                loop {
                    // SAFETY: the kernel reads two u64 at the pointer, which outlive the call.
                    if unsafe { libc::ioctl(fd, BLKDISCARD, range.as_ptr()) } == 0 {
                        return 0;
                    }
                    match io::Error::last_os_error().raw_os_error() {
                        Some(libc::EINTR) => {}
                        errno => return -errno.unwrap_or(libc::EIO),
                    }
                }
            }
        }
    }
}

struct Results {
    done: Mutex<Vec<(u32, i32)>>,
    wake: OwnedFd,
}

/// The thread and the ways to and from it.
pub(super) struct Offload {
    /// `None` while it is being dropped.
    jobs: Option<Sender<Job>>,
    results: Arc<Results>,
    thread: Option<JoinHandle<()>>,
    /// Jobs given and not yet taken back.
    pub(super) outstanding: usize,
    /// Whether the ring watches the eventfd.
    pub(super) watched: bool,
}

impl Offload {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<Offload> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let results = Arc::new(Results { done: Mutex::default(), wake });
        let (jobs, queue) = channel();
        let theirs = results.clone();
        let name = "ferrite-ioctl".to_owned();
        let thread = std::thread::Builder::new().name(name).spawn(move || work(&queue, &theirs))?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Offload { jobs, results, thread, outstanding: 0, watched: false })
    }

    /// Hands over a job. The thread runs them in order, one at a time.
    pub(super) fn give(&mut self, job: Job) {
        self.outstanding += 1;
        let index = job.index;
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !sent {
            self.results.push(index, -libc::EIO);
        }
    }

    /// What to watch for results.
    pub(super) fn wake_fd(&self) -> RawFd {
        self.results.wake.as_raw_fd()
    }

    /// The results that are there, with their jobs' indices.
    pub(super) fn take(&mut self) -> Vec<(u32, i32)> {
        // The eventfd first: a result that comes after it wakes once more.
        let _ = rustix::io::read(&self.results.wake, &mut [0u8; 8]);
        let done =
            std::mem::take(&mut *self.results.done.lock().unwrap_or_else(PoisonError::into_inner));
        self.outstanding -= done.len();
        done
    }
}

impl Results {
    fn push(&self, index: u32, raw: i32) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).push((index, raw));
        // It can fail only if the counter is full, and then it wakes already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

fn work(queue: &Receiver<Job>, results: &Results) {
    while let Ok(job) = queue.recv() {
        let raw = job.run();
        let index = job.index;
        // The file may be closed by whoever gets the result.
        drop(job);
        results.push(index, raw);
    }
}

impl Drop for Offload {
    /// Waits for the jobs that were given.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the ioctl thread panicked");
        }
    }
}
