//! The few threads that compute for all queues of a process: hashing, compressing, scrubbing. A queue's
//! thread has requests to serve, and an engine that tells it of results.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::offload::Results;
use ferrite_host::processors;

/// Threads at most, and never more than there are processors.
const THREADS: usize = 4;

/// A computation; see [`Engine::compute`](crate::engine::Engine::compute).
pub struct Work(Box<dyn FnOnce() + Send>);

impl Work {
    /// `work`, which must not wait for anything. It leaves its results where its giver looks.
    pub fn new(work: impl FnOnce() + Send + 'static) -> Work {
        Work(Box::new(work))
    }

    /// Does it on this thread, and says what it completes with: 0, or `-EIO` if it has panicked.
    pub fn run(self) -> i32 {
        match catch_unwind(AssertUnwindSafe(self.0)) {
            Ok(()) => 0,
            Err(_) => -libc::EIO,
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Work")
    }
}

struct Job {
    id: u64,
    work: Work,
    giver: Arc<Results>,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// That have been started. They live as long as the process.
    threads: usize,
    /// Those of them that wait for a job.
    idle: usize,
}

static JOBS: Mutex<Jobs> = Mutex::new(Jobs { waiting: VecDeque::new(), threads: 0, idle: 0 });
static MORE: Condvar = Condvar::new();

fn jobs() -> MutexGuard<'static, Jobs> {
    JOBS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has it done; `giver` is told of its end, once.
///
/// # Errors
/// There is no thread, and none can be made. `giver` is not told.
pub(crate) fn give(id: u64, work: Work, giver: Arc<Results>) -> io::Result<()> {
    let mut jobs = jobs();
    if jobs.idle <= jobs.waiting.len() && jobs.threads < THREADS.min(processors::count()) {
        let thread = std::thread::Builder::new().name("ferrite-compute".to_owned()).spawn(work_on);
        match thread {
            Ok(_) => jobs.threads += 1,
            Err(e) if jobs.threads == 0 => return Err(e),
            // The others have to do.
            Err(_) => {}
        }
    }
    jobs.waiting.push_back(Job { id, work, giver });
    MORE.notify_one();
    Ok(())
}

fn work_on() {
    let mut jobs = jobs();
    loop {
        while let Some(Job { id, work, giver }) = jobs.waiting.pop_front() {
            drop(jobs);
            giver.push(id, work.run());
            drop(giver);
            jobs = self::jobs();
        }
        jobs.idle += 1;
        jobs = MORE.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        jobs.idle -= 1;
    }
}
