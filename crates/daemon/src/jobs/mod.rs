//! Jobs: what takes longer than a second, and goes on without the client that has asked for it.
//!
//! * [`state`]: the files that tell the next daemon which jobs there are, and their steps.
//! * `run`: the thread of a job. `coalesce` has the steps of one kind: straight-line code. `leaf` has
//!   those of a merge of the leaf itself.
//! * `mirror`: the steps of another kind, which has every write go to a second disk, too. `handover` has the
//!   switch-over to another host.
//! * `child`: the processes that do the work. This crate opens no images.
//! * `means`: programs, pauses of disks, and the time.
//! * `meter`: progress.
//! * `pausing`: pauses of disks that are steps of jobs.
//!
//! A further kind is a value of [`state::Task`] with its steps, and a module with a function `run`.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrite_serve::waker::Waker;

mod child;
mod coalesce;
mod handover;
mod leaf;
mod means;
mod meter;
mod mirror;
mod pausing;
mod run;
pub mod state;

pub use means::{LeafBytes, Means, MirrorSpec, Pausing, Tools};
use meter::Meter;
use state::{End, JobFiles, JobId, JobState, Outcome, Task};

use crate::params::Image;
use crate::state::DiskId;
use crate::{Failure, Shared};

/// How long an ended job is kept.
const KEPT: Duration = Duration::from_secs(24 * 3600);
/// Most ended jobs that are kept. The oldest goes first.
const MAX_KEPT: usize = 1000;
/// How long the daemon's end waits for jobs.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);

/// Why a job is not started, or not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such job.
    Unknown(JobId),
    /// This job changes the disk.
    Busy(JobId),
    /// Another reason, with the next step.
    Other(Failure),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Unknown(id) => write!(f, "there is no job {id}"),
            Refusal::Busy(id) => write!(f, "job {id} changes this disk already"),
            Refusal::Other(failure) => f.write_str(&failure.why),
        }
    }
}

impl Refusal {
    /// The next step for the administrator.
    pub fn help(&self) -> String {
        match self {
            Refusal::Unknown(_) => {
                "ferrite job list shows all jobs; a job is kept for a day after its end".to_owned()
            }
            Refusal::Busy(id) => {
                format!("ferrite job wait {id} waits for it, ferrite job cancel {id} ends it")
            }
            Refusal::Other(failure) => failure.help.clone(),
        }
    }
}

/// A job in the table.
struct Entry {
    state: JobState,
    meter: Meter,
    /// The reason why a job that goes on does not end.
    trouble: Option<String>,
    /// Wakes the job's thread. `None` after its end.
    wake: Option<Arc<Waker>>,
}

/// A job with its progress.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) state: JobState,
    pub(crate) done: u64,
    pub(crate) all: u64,
    pub(crate) rate: u64,
    pub(crate) left_s: Option<u64>,
    pub(crate) trouble: Option<String>,
}

/// All jobs of the daemon.
pub(crate) struct Jobs {
    files: JobFiles,
    means: Means,
    table: Mutex<Table>,
    changed: Condvar,
    /// The daemon, for the jobs' threads.
    shared: OnceLock<Weak<Shared>>,
}

#[derive(Default)]
struct Table {
    jobs: BTreeMap<JobId, Entry>,
    /// The last number that was used.
    last: JobId,
    stopping: bool,
    /// Jobs that have ended since the daemon was started, by kind and result.
    ended: BTreeMap<(&'static str, &'static str), u64>,
}

impl Table {
    /// The job that changes a disk, or its image, now.
    fn changing(&self, disk: DiskId, image: &Image) -> Option<JobId> {
        let mut open = self.jobs.values().filter(|job| job.state.end.is_none());
        let job = open.find(|job| job.state.disk == disk || job.state.task.image() == *image)?;
        Some(job.state.id)
    }
}

impl Table {
    /// The job that has the same target.
    fn mirroring_to(&self, task: &Task) -> Option<JobId> {
        let Task::Mirror(wanted) = task else { return None };
        let is_same = |task: &Task| matches!(task, Task::Mirror(m) if m.target == wanted.target);
        let mut open = self.jobs.values().filter(|job| job.state.end.is_none());
        open.find(|job| is_same(&job.state.task)).map(|job| job.state.id)
    }
}

impl Jobs {
    /// Reads the jobs of earlier daemons.
    pub(crate) fn open(folder: &Path, means: Means) -> io::Result<Jobs> {
        let files = JobFiles::open(folder)?;
        let found = files.all();
        let mut table = Table { last: files.highest(), ..Table::default() };
        for state in found {
            let meter = Meter::new(state.done, state.all);
            table.jobs.insert(state.id, Entry { state, meter, trouble: None, wake: None });
        }
        let table = Mutex::new(table);
        Ok(Jobs { files, means, table, changed: Condvar::new(), shared: OnceLock::new() })
    }

    /// Sets the programs, pauses and clock that jobs use.
    pub(crate) fn set_means(&mut self, means: Means) {
        self.means = means;
    }

    /// Goes on with the jobs of earlier daemons.
    pub(crate) fn begin(&self, shared: &Arc<Shared>) {
        let _ = self.shared.set(Arc::downgrade(shared));
        self.expire();
        let mut table = self.lock();
        let unfinished = table.jobs.values().filter(|job| job.state.end.is_none());
        let unfinished: Vec<JobState> = unfinished.map(|job| job.state.clone()).collect();
        for state in unfinished {
            let (id, disk, step) = (state.id, state.disk, state.task.step());
            tracing::info!("job {id} of disk {disk} goes on with its step {step}");
            match self.thread(id) {
                Ok(wake) => table.jobs.entry(id).and_modify(|job| job.wake = Some(wake)),
                Err(e) => {
                    tracing::error!("job {id} does not go on: cannot start a thread: {e}");
                    continue;
                }
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a job's thread, which waits for the table's lock.
    fn thread(&self, id: JobId) -> io::Result<Arc<Waker>> {
        let shared = self.shared.get().and_then(Weak::upgrade);
        let shared = shared.ok_or_else(|| io::Error::other("the daemon does not run"))?;
        let wake = Arc::new(Waker::new()?);
        let of_thread = wake.clone();
        let builder = std::thread::Builder::new().name(format!("job-{id}"));
        builder.spawn(move || run::run(shared, id, of_thread))?;
        Ok(wake)
    }

    /// The programs that change images.
    pub(crate) fn tools(&self) -> Option<&dyn Tools> {
        self.means.tools.as_deref()
    }

    /// The job that changes a disk.
    pub(crate) fn of_disk(&self, disk: DiskId) -> Option<JobId> {
        let table = self.lock();
        let mut open = table.jobs.values().filter(|job| job.state.end.is_none());
        open.find(|job| job.state.disk == disk).map(|job| job.state.id)
    }

    /// Starts a job. One job at a time changes a disk, and an image.
    pub(crate) fn start(
        &self,
        disk: DiskId,
        task: Task,
        speed: Option<u64>,
    ) -> Result<Seen, Refusal> {
        let image = task.image();
        self.expire();
        let mut table = self.lock();
        if table.stopping {
            let help = "the next daemon takes it: ask again".to_owned();
            return Err(Refusal::Other(Failure { why: "the daemon ends".to_owned(), help }));
        }
        if let Some(other) = table.changing(disk, &image).or_else(|| table.mirroring_to(&task)) {
            return Err(Refusal::Busy(other));
        }
        let id = table.last + 1;
        let state = JobState::new(id, disk, task, speed, self.means.now_s());
        // The file comes first: a job that works is known to the next daemon.
        let failed = |e: &io::Error| Refusal::Other(run::cannot_write(self, e));
        self.files.write(&state).map_err(|e| failed(&e))?;
        table.last = id;
        let wake = self.thread(id).map_err(|e| {
            self.files.remove(id);
            failed(&e)
        })?;
        tracing::info!("job {id} of disk {disk} is started: {}", kind(&state.task));
        let entry = Entry { state, meter: Meter::default(), trouble: None, wake: Some(wake) };
        let seen = entry.seen(0);
        table.jobs.insert(id, entry);
        self.changed.notify_all();
        Ok(seen)
    }

    /// Changes a job and writes its file. A change whose file cannot be written is not made.
    fn change<T>(
        &self,
        id: JobId,
        f: impl FnOnce(&mut JobState, &mut Meter) -> T,
    ) -> io::Result<T> {
        let mut table = self.lock();
        let Some(job) = table.jobs.get_mut(&id) else {
            return Err(io::Error::other(format!("there is no job {id}")));
        };
        let mut state = job.state.clone();
        let result = f(&mut state, &mut job.meter);
        if state != job.state {
            self.files.write(&state)?;
            job.state = state;
            self.changed.notify_all();
        }
        Ok(result)
    }

    /// A request of a client that changes a job: its thread is woken afterwards.
    fn ask(
        &self,
        id: JobId,
        f: impl FnOnce(&mut JobState, &mut Meter) -> Result<(), Failure>,
    ) -> Result<(), Refusal> {
        self.expire();
        if !self.lock().jobs.contains_key(&id) {
            return Err(Refusal::Unknown(id));
        }
        let asked = self.change(id, |state, meter| match &state.end {
            None => f(state, meter),
            Some(end) => {
                let help = format!("ferrite job show {id} has its result");
                let why = format!("job {id} has ended: it {}", said(&end.outcome));
                Err(Failure { why, help })
            }
        });
        let failed = |e| Refusal::Other(run::cannot_write(self, &e));
        asked.map_err(failed)?.map_err(Refusal::Other)?;
        if let Some(wake) = self.lock().jobs.get(&id).and_then(|job| job.wake.as_ref()) {
            wake.wake();
        }
        Ok(())
    }

    /// Cancels a job, if what it has done does not show yet.
    pub(crate) fn cancel(&self, id: JobId) -> Result<(), Refusal> {
        self.ask(id, |state, _| match state.task.may_cancel() {
            true => {
                state.cancelled = true;
                Ok(())
            }
            false => Err(Failure {
                why: format!(
                    "job {id} cannot be cancelled any more: its step {} has begun",
                    state.task.step()
                ),
                help: format!("it ends soon (ferrite job wait {id}), or can be cancelled later"),
            }),
        })
    }

    /// Has a job rest, or go on.
    pub(crate) fn pause(&self, id: JobId, paused: bool) -> Result<(), Refusal> {
        self.ask(id, |state, meter| {
            state.paused = paused;
            meter.forget_rate();
            Ok(())
        })
    }

    /// Gives a job another limit in bytes a second.
    pub(crate) fn limit(&self, id: JobId, speed: Option<u64>) -> Result<(), Refusal> {
        self.ask(id, |state, meter| {
            state.speed = speed;
            meter.forget_rate();
            Ok(())
        })
    }

    /// The job that copies the disk of a migration.
    pub(crate) fn migrating(&self, migration: &str) -> Option<JobId> {
        let is_it = |task: &Task| match task {
            Task::Mirror(mirror) => mirror.migration.as_ref().is_some_and(|m| m.id == migration),
            Task::Coalesce(_) => false,
        };
        let table = self.lock();
        let mut open = table.jobs.values().filter(|job| job.state.end.is_none());
        open.find(|job| is_it(&job.state.task)).map(|job| job.state.id)
    }

    fn read(&self, id: JobId) -> Option<JobState> {
        self.lock().jobs.get(&id).map(|job| job.state.clone())
    }

    /// A job with its progress at this time.
    pub(crate) fn show(&self, id: JobId, now_ns: u64) -> Result<Seen, Refusal> {
        self.expire();
        let table = self.lock();
        let found = table.jobs.get(&id).map(|job| job.seen(now_ns));
        found.ok_or(Refusal::Unknown(id))
    }

    /// All jobs, in the order of their start.
    pub(crate) fn list(&self, now_ns: u64) -> Vec<Seen> {
        self.expire();
        self.lock().jobs.values().map(|job| job.seen(now_ns)).collect()
    }

    /// The number of jobs that have ended since the daemon was started, by kind and result.
    pub(crate) fn ended(&self) -> Vec<(&'static str, &'static str, u64)> {
        let table = self.lock();
        table.ended.iter().map(|((kind, result), n)| (*kind, *result, *n)).collect()
    }

    /// Waits until a job has ended, or for the time `timeout`. Returns whether it has.
    pub(crate) fn wait(&self, id: JobId, timeout: Duration) -> Result<bool, Refusal> {
        let end = Instant::now() + timeout;
        let mut table = self.lock();
        loop {
            match table.jobs.get(&id) {
                None => return Err(Refusal::Unknown(id)),
                Some(job) if job.state.end.is_some() => return Ok(true),
                Some(_) => {}
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || table.stopping {
                return Ok(false);
            }
            let waited = self.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn note(&self, id: JobId, now_ns: u64, done: u64, all: u64) {
        if let Some(job) = self.lock().jobs.get_mut(&id) {
            job.meter.note(now_ns, done, all);
        }
    }

    /// Notes what keeps a job from its end.
    fn set_trouble(&self, id: JobId, trouble: Option<String>) {
        if let Some(job) = self.lock().jobs.get_mut(&id) {
            job.trouble = trouble;
        }
    }

    /// Records how a job has ended. The result counts also if its file cannot be written: the next
    /// daemon does the last step again then.
    fn end(&self, shared: &Shared, id: JobId, outcome: Outcome) {
        let disk = self.read(id).map(|state| state.disk);
        if let (Some(disk), true) = (disk, shared.log.allow(shared.clock.now_ns()).is_some()) {
            match &outcome {
                Outcome::Failed { why, help } => {
                    tracing::error!("job {id} of disk {disk} has failed: {why}; {help}");
                }
                outcome => tracing::info!("job {id} of disk {disk} {}", said(outcome)),
            }
        }
        let at = self.means.now_s();
        let mut table = self.lock();
        let Table { jobs, ended, .. } = &mut *table;
        let Some(job) = jobs.get_mut(&id) else { return };
        *ended.entry((kind(&job.state.task), result(&outcome))).or_default() += 1;
        (job.state.done, job.state.all) = (job.meter.done, job.meter.all);
        job.state.end = Some(End { at, outcome });
        if let Err(e) = self.files.write(&job.state) {
            tracing::warn!("{}", run::cannot_write(self, &e));
        }
        self.changed.notify_all();
    }

    fn thread_ended(&self, id: JobId) {
        if let Some(job) = self.lock().jobs.get_mut(&id) {
            job.wake = None;
        }
        self.changed.notify_all();
    }

    /// Removes jobs that ended a day ago.
    pub(crate) fn expire(&self) {
        let now = self.means.now_s();
        let mut table = self.lock();
        let ended = |job: &Entry| job.state.end.as_ref().map(|end| (end.at, job.state.id));
        let mut kept: Vec<(u64, JobId)> = table.jobs.values().filter_map(ended).collect();
        kept.sort_unstable();
        let excess = kept.len().saturating_sub(MAX_KEPT);
        for (at, (ended, id)) in kept.into_iter().enumerate() {
            let thread = table.jobs.get(&id).is_some_and(|job| job.wake.is_some());
            if !thread && (at < excess || now.saturating_sub(ended) >= KEPT.as_secs()) {
                table.jobs.remove(&id);
                self.files.remove(id);
            }
        }
    }

    fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Has all threads end: each leaves its state file to the next daemon. A disk that a job has
    /// paused is resumed before.
    pub(crate) fn stop(&self) {
        let end = Instant::now() + STOP_TIMEOUT;
        let mut table = self.lock();
        table.stopping = true;
        self.changed.notify_all();
        loop {
            let running = table.jobs.values().filter_map(|job| job.wake.as_ref());
            let running: Vec<_> = running.cloned().collect();
            running.iter().for_each(|wake| wake.wake());
            let left = end.saturating_duration_since(Instant::now());
            if running.is_empty() || left.is_zero() {
                if !running.is_empty() {
                    tracing::warn!("{} jobs have not come to rest", running.len());
                }
                return;
            }
            let waited = self.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Entry {
    fn seen(&self, now_ns: u64) -> Seen {
        let runs = self.state.end.is_none() && !self.state.paused;
        Seen {
            state: self.state.clone(),
            done: self.meter.done,
            all: self.meter.all,
            rate: if runs { self.meter.rate(now_ns) } else { 0 },
            left_s: self.meter.left_s(now_ns).filter(|_| runs),
            trouble: self.trouble.clone().filter(|_| self.state.end.is_none()),
        }
    }
}

/// The name of a job's kind.
pub(crate) fn kind(task: &Task) -> &'static str {
    match task {
        Task::Coalesce(_) => "coalesce",
        Task::Mirror(_) => "mirror",
    }
}

/// The name of a result.
pub(crate) fn result(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "done",
        Outcome::Cancelled | Outcome::Longer { .. } => "cancelled",
        Outcome::Failed { .. } => "failed",
    }
}

fn said(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "is done",
        Outcome::Cancelled | Outcome::Longer { .. } => "was cancelled",
        Outcome::Failed { .. } => "has failed",
    }
}
