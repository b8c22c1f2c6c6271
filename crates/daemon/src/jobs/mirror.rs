//! The steps of a mirror (docs/internals/mirror.md 4).
//!
//! The order, and what the next daemon does if this one dies in a step: the same step again.
//!
//! 1. `check`: a process opens the target and looks whether it fits. The map is made, with all regions
//!    set.
//! 2. `attach`: the step is written to the state file: from here on, each worker that opens the source
//!    opens the mirror, too. The disk is paused, and goes on. If the next daemon does so again the map
//!    stays as it is: a worker may have cleared bits, and workers without the mirror came before. In the
//!    pause the source gets the dirty map that survives a power cut (`keeping`), before a worker can
//!    clear bits of it.
//! 3. `copy`, `mirror`: the worker copies. This thread looks at the map, and tells the worker how fast.
//! 4. `switch`: the disk is paused. If the map says that both are equal, it goes on with the target;
//!    otherwise with the source and its mirror, and with step 3. The disk's state file names the
//!    image that is the disk: one of the two, at each time.
//! 5. `detach`, if the mirror was cancelled or has failed: the step is written, so no later worker
//!    opens the mirror. The disk is paused, and goes on with the source alone. The dirty map ends, if the
//!    mirror was cancelled. After a failure it stays, so that another mirror can go on with the target.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferrite_disk::{MirrorFile, MirrorState, MirrorStatus, REGION_BYTES};
use serde::Deserialize;

use super::coalesce::result;
use super::run::{Halt, Leave, Run};
use super::state::{JobId, Mirror, MirrorStep, Task};
use super::{Jobs, MirrorSpec, Refusal};
use crate::params::Image;
use crate::state::DiskId;
use crate::table::Phase;
use crate::wait::Backoff;
use crate::{Failure, Paths, Xen};

mod keeping;

/// How often the map is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// How long a disk may be gone before its mirror ends: a guest that starts again keeps it.
const GONE: Duration = Duration::from_secs(30);
/// The pauses before a target that has failed is opened again.
const REOPEN: Duration = Duration::from_secs(1);
const REOPEN_MAX: Duration = Duration::from_secs(60);
/// A copy that comes no nearer to its end in this time does not converge.
const NO_NEARER: Duration = Duration::from_secs(60);

impl Jobs {
    /// Has a mirror end with the target as the disk's image, once that has all.
    pub(crate) fn complete(&self, id: JobId) -> Result<(), Refusal> {
        let refuse = |why: String, help: &str| Err(Failure { why, help: help.to_owned() });
        self.ask(id, |state, _| match &mut state.task {
            Task::Mirror(mirror) if mirror.target_image().is_none() => refuse(
                format!("a disk of this host cannot be served from {:.256}", mirror.target),
                "attach that disk where its server is, and cancel the mirror",
            ),
            Task::Mirror(mirror) => {
                mirror.switches = true;
                Ok(())
            }
            Task::Coalesce(_) => refuse(
                format!("job {id} is no mirror"),
                "ferrite job list shows what each job does",
            ),
        })
    }

    /// The mirror that workers open with this image.
    pub(crate) fn mirror_of(&self, image: &Image) -> Option<MirrorSpec> {
        let table = self.lock();
        let mut open = table.jobs.values().filter(|job| job.state.end.is_none());
        open.find_map(|job| match &job.state.task {
            Task::Mirror(mirror) if mirror.source == *image && mirror.step.is_mirrored() => {
                let map = self.mirror_map(job.state.id)?;
                Some(MirrorSpec { target: mirror.worker_target(), map })
            }
            _ => None,
        })
    }

    /// The file of the map of a mirror.
    fn mirror_map(&self, id: JobId) -> Option<PathBuf> {
        let run = self.files.folder().parent()?;
        Some(Paths { run: run.to_owned() }.mirrors().join(format!("{id}.map")))
    }
}

/// The result of `mirror-check`.
#[derive(Deserialize)]
struct Checked {
    /// Bytes of the disk.
    bytes: u64,
    /// The name of the dirty map for this target.
    map: String,
}

pub(super) fn task(run: &Run) -> Mirror {
    match run.state().task {
        Task::Mirror(mirror) => mirror,
        Task::Coalesce(_) => unreachable!("a job does not change its kind"),
    }
}

fn with_mirror(task: &mut Task, f: impl FnOnce(&mut Mirror)) {
    if let Task::Mirror(mirror) = task {
        f(mirror);
    }
}

/// Does all steps from this one on.
pub(super) fn run(run: &Run, begun: MirrorStep) -> Result<(), Halt> {
    let done = match begun {
        MirrorStep::Detach => Err(kept(run)),
        begun => steps(run, begun),
    };
    let done = match done {
        Err(halt @ (Halt::Cancelled | Halt::Failed(_))) => Err(leave(run, halt)),
        done => done,
    };
    if done.is_ok() {
        // The disk has the target now. The source is at rest.
        keeping::end(run);
    }
    if !matches!(done, Err(Halt::Stopped))
        && let Some(map) = run.jobs().mirror_map(run.id())
        && let Err(e) = std::fs::remove_file(&map)
        && e.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("cannot remove {}: {e}", map.display());
    }
    done
}

/// The reason for which a mirror ends that was ending before.
fn kept(run: &Run) -> Halt {
    match task(run).failed {
        Some((why, help)) => Halt::Failed(Failure { why, help }),
        None => Halt::Cancelled,
    }
}

fn steps(run: &Run, begun: MirrorStep) -> Result<(), Halt> {
    let mut step = begun;
    // The disk may have gone on with the target before the last daemon died.
    if step == MirrorStep::Switch && is_switched(run)? {
        return Ok(());
    }
    let (mut bytes, mut name) = (task(run).bytes, task(run).map);
    loop {
        run.enter(|task| {
            with_mirror(task, |mirror| {
                (mirror.step, mirror.bytes) = (step, bytes);
                mirror.map.clone_from(&name);
            });
        })?;
        step = match step {
            MirrorStep::Check => {
                let found = check(run)?;
                (bytes, name) = (Some(found.bytes), Some(found.map));
                make_map(run, found.bytes)?;
                MirrorStep::Attach
            }
            MirrorStep::Attach => {
                attach(run)?;
                MirrorStep::Copy
            }
            MirrorStep::Copy | MirrorStep::Mirror => follow(run, step)?,
            MirrorStep::Switch => match switch(run)? {
                true => return Ok(()),
                false => MirrorStep::Copy,
            },
            // It is begun by `leave` only.
            MirrorStep::Detach => return Err(kept(run)),
        };
    }
}

/// Looks whether the target can be opened, and fits.
fn check(run: &Run) -> Result<Checked, Halt> {
    let mirror = task(run);
    let mut command = run.image_command()?;
    command.arg("mirror-check").arg(mirror.source.name()).arg(&mirror.target).arg("--json");
    result("check", run.child(&mut command, Leave::Any)?)
}

fn map(run: &Run) -> Result<MirrorFile, Halt> {
    let path = run.jobs().mirror_map(run.id()).unwrap_or_default();
    MirrorFile::open(&path).map_err(|e| cannot_use_map(&path, &e))
}

fn cannot_use_map(path: &std::path::Path, e: &io::Error) -> Halt {
    let help = "make room on the file system of /run, then begin the mirror anew";
    let why = format!("cannot use the map {}: {e}", path.display());
    Halt::Failed(Failure { why, help: help.to_owned() })
}

fn status(map: &MirrorFile) -> Result<MirrorStatus, Halt> {
    map.status().map_err(|e| cannot_use_map("of the mirror".as_ref(), &e))
}

/// Pauses the disk, calls `f`, and lets it go on with the image that `f` returns, or with its own.
fn while_paused<T>(
    run: &Run,
    f: impl FnOnce() -> Result<(T, Option<Image>), Halt>,
) -> Result<T, Halt> {
    let by = format!("job {}", run.id());
    let disk = pause(run, &by)?;
    let done = f();
    run.reached("changed");
    let image = done.as_ref().ok().and_then(|(_, image)| image.clone());
    if let Some(image) = &image
        && let Err(e) = run.with_pausing(|p| p.resume_as(disk, &by, Some(image)))
    {
        resume(run, disk, &by)?;
        let why = format!("the disk cannot go on with {}: {}", image.path.display(), e.why);
        return Err(Halt::Failed(Failure { why, ..e }));
    }
    if image.is_none() {
        resume(run, disk, &by)?;
    }
    run.reached("resumed");
    done.map(|(done, _)| done)
}

/// Pauses the disk: both disks are closed.
pub(super) fn pause(run: &Run, by: &str) -> Result<DiskId, Halt> {
    let disk = run.insist(|| match run.served()? {
        None => Err(Halt::Failed(gone(run))),
        Some(disk) => run.with_pausing(|p| p.pause(disk, by)).map(|()| disk).map_err(|e| {
            Halt::Failed(Failure { why: format!("disk {disk} cannot be paused: {}", e.why), ..e })
        }),
    })?;
    run.reached("paused");
    Ok(disk)
}

/// Lets the disk go on with its own image.
pub(super) fn resume(run: &Run, disk: DiskId, by: &str) -> Result<(), Halt> {
    run.insist(|| run.with_pausing(|p| p.resume(disk, by)).map_err(Halt::Failed)).map_err(|halt| {
        halt.because(|e| Failure {
            why: format!("disk {disk} is paused and cannot be resumed: {}", e.why),
            help: format!("{}; then ferrite disk resume {disk}", e.help),
        })
    })
}

fn gone(run: &Run) -> Failure {
    Failure {
        why: format!("no disk is served from {} any more", task(run).source.path.display()),
        help:
            "the target is not complete: when the disk is attached, begin the mirror again, with \
               --resume if no other program writes to the target"
                .to_owned(),
    }
}

/// Makes the map. No worker has opened it.
fn make_map(run: &Run, bytes: u64) -> Result<(), Halt> {
    let state = run.state();
    let path = run.jobs().mirror_map(run.id()).unwrap_or_default();
    let made = MirrorFile::create(&path, bytes);
    let made = made.and_then(|map| {
        map.set_compares(task(run).compares)?;
        // The other host has made the target of a migration, under a name of its own.
        map.set_fresh(task(run).migration.is_some())?;
        map.set_pace(state.speed, state.paused)
    });
    made.map_err(|e| cannot_use_map(&path, &e))
}

/// Has the disk go on with the mirror.
fn attach(run: &Run) -> Result<(), Halt> {
    while_paused(run, || keeping::begin(run).map(|()| ((), None)))?;
    let status = status(&map(run)?)?;
    match (status.opened, status.state) {
        (0, _) => Err(Halt::Failed(Failure {
            why: "the disk's worker has not opened the mirror".to_owned(),
            help: "a read-only disk has none; a disk that an older program serves needs ferrite upgrade"
                .to_owned(),
        })),
        (_, MirrorState::NoTarget) => Err(Halt::Failed(Failure {
            why: format!("the target cannot be opened: {}", status.why),
            help: "then start the mirror again".to_owned(),
        })),
        _ => Ok(()),
    }
}

/// The progress of a copy over time.
struct Watch {
    /// The fewest regions that were left, and since when.
    least: (u64, Instant),
    /// When the target may be opened again.
    reopen_at: Option<Instant>,
    backoff: Backoff,
    gone_since: Option<Instant>,
}

/// Looks at the mirror until another step is due.
fn follow(run: &Run, step: MirrorStep) -> Result<MirrorStep, Halt> {
    let map = map(run)?;
    let backoff = Backoff::new(REOPEN, REOPEN_MAX);
    let mut watch =
        Watch { least: (u64::MAX, Instant::now()), reopen_at: None, backoff, gone_since: None };
    loop {
        let state = run.state();
        if state.cancelled {
            return Err(Halt::Cancelled);
        }
        let speed = map.set_pace(state.speed, state.paused);
        speed.map_err(|e| cannot_use_map("of the mirror".as_ref(), &e))?;
        let status = status(&map)?;
        let done = (status.regions - status.left) * REGION_BYTES;
        let all = status.regions * REGION_BYTES;
        run.jobs().note(run.id(), run.shared().clock.now_ns(), done, all);
        run.jobs().set_trouble(run.id(), watch.trouble(&status, state.paused));
        watch.must_be_served(run)?;
        let in_step = status.state == MirrorState::InStep;
        match step {
            _ if in_step && task(run).switches && !state.paused => return Ok(MirrorStep::Switch),
            MirrorStep::Copy if in_step && !state.paused => return Ok(MirrorStep::Mirror),
            MirrorStep::Mirror if !in_step && !state.paused => return Ok(MirrorStep::Copy),
            _ => {}
        }
        if status.reopen && !state.paused && watch.may_reopen() {
            reopen(run, &status)?;
        } else if !status.reopen {
            watch.reopen_at = None;
        }
        run.rest(LOOK)?;
    }
}

impl Watch {
    /// The reason why the mirror is not complete, in words.
    fn trouble(&mut self, status: &MirrorStatus, paused: bool) -> Option<String> {
        let left = (status.left * REGION_BYTES) >> 20;
        if status.left < self.least.0 || paused || status.left == 0 {
            self.least = (status.left, Instant::now());
        }
        let why = &status.why;
        match status.state {
            MirrorState::NoTarget | MirrorState::Behind => {
                Some(format!("the target lacks {left} MiB, and fails: {why}; it is tried again"))
            }
            _ if !why.is_empty() => Some(why.clone()),
            MirrorState::Copying if self.least.1.elapsed() >= NO_NEARER => Some(format!(
                "it does not converge: {left} MiB are left, and not fewer for {} s; the target or the limit \
                 (--speed) is slower than the guest",
                self.least.1.elapsed().as_secs()
            )),
            _ => None,
        }
    }

    /// Whether the target may be opened again now: the guest waits for that.
    fn may_reopen(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.reopen_at.is_some_and(|at| at <= now);
        if is_due || self.reopen_at.is_none() {
            self.reopen_at = Some(now + self.backoff.after(false));
        }
        is_due
    }

    /// Checks that the disk is there, or was a moment ago.
    fn must_be_served(&mut self, run: &Run) -> Result<(), Halt> {
        let source = task(run).source;
        let has = |phase: &Phase| !matches!(phase, Phase::Empty);
        let is_there = run.shared().table.read(|disks| {
            disks.values().any(|e| e.image.as_ref() == Some(&source) && has(&e.phase))
        });
        let since_start = run.shared().started.elapsed().unwrap_or(GONE);
        if is_there || run.shared().xen() != Xen::Connected || since_start < GONE {
            self.gone_since = None;
            return Ok(());
        }
        let since = *self.gone_since.get_or_insert_with(Instant::now);
        match since.elapsed() >= GONE {
            true => Err(Halt::Failed(gone(run))),
            false => Ok(()),
        }
    }
}

/// Has the worker open the target again, if that is likely to work.
fn reopen(run: &Run, status: &MirrorStatus) -> Result<(), Halt> {
    let mirror = task(run);
    // A file that the worker has open is locked by it.
    if status.state == MirrorState::NoTarget || mirror.target_image().is_none() {
        match check(run) {
            Err(Halt::Failed(e)) => {
                tracing::debug!("job {}: the target cannot be opened yet: {e}", run.id());
                return Ok(());
            }
            // The worker takes regions for equal that another file lacks.
            Ok(checked) if mirror.map.as_ref().is_some_and(|map| checked.map != *map) => {
                return Err(Halt::Failed(Failure {
                    why: format!(
                        "{:.256} is another file than when the mirror was begun",
                        mirror.target
                    ),
                    help: "begin the mirror anew with this file".to_owned(),
                }));
            }
            checked => checked.map(drop)?,
        }
    }
    match while_paused(run, || Ok(((), None))) {
        // It is tried again later: the guest is served.
        Err(Halt::Failed(e)) if run.served()?.is_some() => {
            tracing::warn!("job {}: the target is not opened again: {e}", run.id());
            Ok(())
        }
        done => done,
    }
}

/// Lets the disk go on with the target, if both are equal. `false`: they are not.
fn switch(run: &Run) -> Result<bool, Halt> {
    let mirror = task(run);
    if let Some(migration) = &mirror.migration {
        return super::handover::switch(run, &mirror, &migration.id);
    }
    let target = mirror.target_image().ok_or_else(|| {
        Halt::Failed(Failure {
            why: format!("a disk of this host cannot be served from {:.256}", mirror.target),
            help: "attach that disk where its server is, and cancel the mirror".to_owned(),
        })
    })?;
    let has_maps = keeping::has_others(run);
    while_paused(run, || match is_complete(run)? {
        true => {
            if has_maps {
                keeping::hand_over(run, &target);
            }
            Ok((true, Some(target)))
        }
        false => Ok((false, None)),
    })
}

/// Whether both disks are closed, equal and durable. The disk is paused.
pub(super) fn is_complete(run: &Run) -> Result<bool, Halt> {
    map(run)?.is_complete().map_err(|e| cannot_use_map("of the mirror".as_ref(), &e))
}

/// Whether a disk has the target as its image. Waits until a disk has one of the two.
fn is_switched(run: &Run) -> Result<bool, Halt> {
    let mirror = task(run);
    let target = mirror.target_image();
    let has = |image: Option<&Image>| {
        image.is_some()
            && run.shared().table.read(|disks| disks.values().any(|e| e.image.as_ref() == image))
    };
    loop {
        if has(target.as_ref()) {
            return Ok(true);
        }
        let since_start = run.shared().started.elapsed().unwrap_or(GONE);
        if has(Some(&mirror.source)) || since_start >= GONE {
            return Ok(false);
        }
        run.rest(LOOK)?;
    }
}

/// Ends a mirror that was cancelled or has failed: the disk goes on with the source alone. Returns how
/// the job ends.
fn leave(run: &Run, halt: Halt) -> Halt {
    if task(run).step == MirrorStep::Check {
        return halt;
    }
    let failed = match &halt {
        Halt::Failed(Failure { why, help }) => Some((why.clone(), help.clone())),
        _ => None,
    };
    let entered = run.enter_undo(|task| {
        with_mirror(task, |mirror| {
            mirror.step = MirrorStep::Detach;
            mirror.failed.clone_from(&failed);
        });
    });
    if let Err(e) = entered {
        return e;
    }
    run.jobs().set_trouble(run.id(), None);
    match run.served() {
        // It is attached without the mirror next time.
        Ok(None) => {
            if matches!(halt, Halt::Cancelled) {
                keeping::end(run);
            }
            return halt;
        }
        Err(e) => return e,
        Ok(Some(_)) => {}
    }
    let done = while_paused(run, || {
        if matches!(halt, Halt::Cancelled) {
            keeping::end(run);
        }
        Ok(((), None))
    });
    match done {
        Ok(()) => halt,
        Err(Halt::Failed(e)) => Halt::Failed(Failure {
            why: format!("the mirror cannot be ended: {}", e.why),
            help: e.help,
        }),
        Err(stopped) => stopped,
    }
}
