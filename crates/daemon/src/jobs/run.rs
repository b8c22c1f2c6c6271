//! The thread of a job: what all kinds have in common.

use std::collections::BTreeMap;
use std::io;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::lock_file::lock;
use ferrite_serve::waker::Waker;
use serde_json::Value;

use super::child::{self, Ended, Errors, Line, Order};
use super::pausing::Own;
use super::state::{JobId, JobState, Outcome, Task};
use super::{Jobs, Means, Pausing, coalesce, mirror};
use crate::state::DiskId;
use crate::table::{Entry, Phase};
use crate::wait::{Backoff, wait_for};
use crate::{Failure, Shared, Step, Xen};

/// How often it is tried whether the processes of an earlier daemon have ended.
const TRY: Duration = Duration::from_millis(50);
/// The pauses between tries of something that may work later.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// How often that is tried: for about a minute.
const TRIES: u32 = 16;
/// How long a disk may take to appear after the start of a daemon.
const ATTACHED_WITHIN: Duration = Duration::from_secs(30);

/// Why a job does not go on.
#[derive(Debug)]
pub(super) enum Halt {
    /// It was cancelled.
    Cancelled,
    /// It was cancelled, and its snapshot is left in the chain.
    Longer(Failure),
    /// The daemon ends. The next one goes on.
    Stopped,
    /// A step has failed.
    Failed(Failure),
}

impl Halt {
    /// Replaces the text of a failure. Any other reason stays as it is.
    pub(super) fn because(self, text: impl FnOnce(Failure) -> Failure) -> Halt {
        match self {
            Halt::Failed(failure) => Halt::Failed(text(failure)),
            halt => halt,
        }
    }
}

/// Whether a step may be left before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// The step is left when the job is cancelled or the daemon ends. It obeys the job's limit.
    Any,
    /// The step is done to its end: a guest waits for it.
    No,
}

/// The data of a job's thread.
pub(super) struct Run {
    shared: Arc<Shared>,
    id: JobId,
    wake: Arc<Waker>,
    errors: Errors,
}

/// Does a job, to its end or until the daemon ends.
pub(super) fn run(shared: Arc<Shared>, id: JobId, wake: Arc<Waker>) {
    let _end = Ending { shared: shared.clone(), id };
    let done = Run::begin(shared.clone(), id, wake).and_then(|run| match run.state().task {
        Task::Coalesce(begun) => coalesce::run(&run, begun.step),
        Task::Mirror(begun) => mirror::run(&run, begun.step),
    });
    let outcome = match done {
        Ok(()) => Outcome::Done,
        Err(Halt::Cancelled) => Outcome::Cancelled,
        Err(Halt::Longer(Failure { why, help })) => Outcome::Longer { why, help },
        Err(Halt::Failed(failure)) => failure.into(),
        Err(Halt::Stopped) => return,
    };
    shared.jobs.end(&shared, id, outcome);
    (shared.on_step)(Step::Job("ended"));
}

/// Notes the end of a job's thread, also after a panic.
struct Ending {
    shared: Arc<Shared>,
    id: JobId,
}

impl Drop for Ending {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "the job's thread has panicked: this is a bug in ferrite".to_owned();
            let help = "look whether the disk is paused (ferrite disk list), and report it";
            let failure = Failure { why, help: help.to_owned() };
            self.shared.jobs.end(&self.shared, self.id, failure.into());
        }
        self.shared.jobs.thread_ended(self.id);
    }
}

impl Run {
    /// Waits until no process of an earlier daemon works on the job.
    fn begin(shared: Arc<Shared>, id: JobId, wake: Arc<Waker>) -> Result<Run, Halt> {
        let path = shared.jobs.files.errors(id);
        let lock = loop {
            match lock(&path) {
                Ok(lock) => break lock,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    wait_for([wake.fd()], Some(TRY));
                    wake.clear();
                    if shared.jobs.is_stopping() {
                        return Err(Halt::Stopped);
                    }
                }
                Err(e) => return Err(Halt::Failed(cannot_write(&shared.jobs, &e))),
            }
        };
        Ok(Run { shared, id, wake, errors: Errors { lock, path } })
    }

    /// The job as it is now.
    pub(super) fn state(&self) -> JobState {
        self.jobs().read(self.id).expect("a job with a thread is in the table")
    }

    /// The daemon.
    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The number of the job.
    pub(super) fn id(&self) -> JobId {
        self.id
    }

    pub(super) fn jobs(&self) -> &Jobs {
        &self.shared.jobs
    }

    /// The means that this daemon has for jobs.
    pub(super) fn means(&self) -> &Means {
        &self.jobs().means
    }

    /// The command `ferrite image`, which may open the parents that disks may have.
    pub(super) fn image_command(&self) -> Result<Command, Halt> {
        let mut command = self.means().tools()?.image();
        for folder in &self.shared.config.parent_folders {
            command.arg("--parents").arg(folder);
        }
        Ok(command)
    }

    /// Calls `f` with what pauses disks.
    pub(super) fn with_pausing<T>(&self, f: impl FnOnce(&dyn Pausing) -> T) -> T {
        match &self.means().pausing {
            Some(pausing) => f(&**pausing),
            None => f(&Own(&self.shared)),
        }
    }

    /// Reports a point to the test's callback.
    pub(super) fn reached(&self, point: &'static str) {
        (self.shared.on_step)(Step::Job(point));
    }

    /// Begins a step, once the job is not paused: writes it to the state file before anything of it
    /// is done. The next daemon begins with it.
    pub(super) fn enter(&self, set: impl Fn(&mut Task)) -> Result<(), Halt> {
        self.enter_unless(true, set)
    }

    /// As [`enter`](Self::enter), also if the job is cancelled or paused.
    pub(super) fn enter_undo(&self, set: impl Fn(&mut Task)) -> Result<(), Halt> {
        self.enter_unless(false, set)
    }

    fn enter_unless(&self, obeys: bool, set: impl Fn(&mut Task)) -> Result<(), Halt> {
        loop {
            if self.jobs().is_stopping() {
                return Err(Halt::Stopped);
            }
            // One change under the table's lock: a job that was cancelled does not begin a step.
            let entered =
                self.jobs().change(self.id, |state, meter| match (state.cancelled, state.paused) {
                    (true, _) if obeys => Some(false),
                    (false, true) if obeys => None,
                    _ => {
                        set(&mut state.task);
                        (state.done, state.all) = (meter.done, meter.all);
                        Some(true)
                    }
                });
            match entered.map_err(|e| Halt::Failed(cannot_write(self.jobs(), &e)))? {
                Some(true) => break,
                Some(false) => return Err(Halt::Cancelled),
                None => {
                    wait_for([self.wake.fd()], None);
                    self.wake.clear();
                }
            }
        }
        (self.shared.on_step)(Step::Job(self.state().task.step()));
        Ok(())
    }

    /// Runs a process that does a step. Returns its result.
    pub(super) fn child(&self, command: &mut Command, leave: Leave) -> Result<Value, Halt> {
        let state = self.state();
        let order = || match leave {
            Leave::No => Order::GoOn(0),
            Leave::Any => self.order(),
        };
        let mut result = Value::Null;
        let note = |line: Line| match line {
            // Other steps are short.
            Line::Progress { done_bytes, total_bytes } if leave == Leave::Any => {
                let now_ns = self.shared.clock.now_ns();
                self.jobs().note(self.id, now_ns, done_bytes, total_bytes);
            }
            Line::Progress { .. } => {}
            Line::Result(value) => result = value,
        };
        let speed = if leave == Leave::Any { state.speed.unwrap_or(0) } else { 0 };
        let step = state.task.step();
        match child::run(command, step, &self.errors, &self.wake, speed, order, note) {
            Ended::Done => Ok(result),
            Ended::Failed(failure) => Err(Halt::Failed(failure)),
            Ended::Told if self.state().cancelled => Err(Halt::Cancelled),
            Ended::Told => Err(Halt::Stopped),
        }
    }

    fn order(&self) -> Order {
        let state = self.state();
        match state.cancelled || self.jobs().is_stopping() {
            true => Order::End,
            false => Order::of(state.speed, state.paused),
        }
    }

    /// The disk that is served from this image: the job's own, or that of a guest that was started
    /// again meanwhile. `None` if the image is at rest. After the start of a daemon, disks take a
    /// while to appear.
    pub(super) fn served(&self) -> Result<Option<DiskId>, Halt> {
        let (own, image) = (self.state().disk, self.state().task.image());
        let found = |table: &BTreeMap<DiskId, Entry>| {
            // A stub domain's disk has the worker of its guest's.
            let is_it =
                |entry: &Entry| entry.image.as_ref() == Some(&image) && entry.beside.is_none();
            let has = |id: &DiskId| table.get(id).is_some_and(is_it);
            let all = std::iter::once(own).chain(table.keys().copied());
            let mut all: Vec<DiskId> = all.filter(has).collect();
            // A disk that leaves its image to another attachment has it closed.
            all.sort_by_key(|id| matches!(table[id].phase, Phase::Resting(_)));
            all.first().copied()
        };
        loop {
            if let Some(id) = self.shared.table.read(found) {
                return Ok(Some(id));
            }
            let since_start = self.shared.started.elapsed().unwrap_or(ATTACHED_WITHIN);
            if self.shared.xen() == Xen::Connected && since_start >= ATTACHED_WITHIN {
                return Ok(None);
            }
            self.rest(TRY)?;
        }
    }

    /// Waits for this time, unless the daemon ends.
    pub(super) fn rest(&self, how_long: Duration) -> Result<(), Halt> {
        wait_for([self.wake.fd()], Some(how_long));
        self.wake.clear();
        match self.jobs().is_stopping() {
            true => Err(Halt::Stopped),
            false => Ok(()),
        }
    }

    /// Tries something that may fail now and work later, for about a minute.
    pub(super) fn insist<T>(&self, mut f: impl FnMut() -> Result<T, Halt>) -> Result<T, Halt> {
        let mut backoff = Backoff::new(RETRY, RETRY_MAX);
        for _ in 1..TRIES {
            match f() {
                Err(Halt::Failed(failure)) => tracing::debug!("job {}: {failure}", self.id),
                result => return result,
            }
            self.rest(backoff.after(false))?;
        }
        f()
    }
}

/// The failure of a write of the job's state.
pub(super) fn cannot_write(jobs: &Jobs, e: &io::Error) -> Failure {
    Failure {
        why: format!("cannot write the job's state to {}: {e}", jobs.files.folder().display()),
        help: "make room on the file system of /run, then start the job again".to_owned(),
    }
}
