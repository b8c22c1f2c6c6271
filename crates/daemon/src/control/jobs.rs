//! The methods of the control socket about jobs.

use std::time::Duration;

use serde_json::Value;

use super::methods::{MAX_WAIT, found, reply, take};
use super::pauses::image;
use super::protocol::{
    CoalesceParams, Job, JobKind, JobLimitParams, JobList, JobParams, JobPhase, JobWaitParams,
    MirrorParams, Nothing, PhaseName, RpcError, code,
};
use crate::Shared;
use crate::jobs::state::{Coalesce, Mirror, Outcome, Task};
use crate::jobs::{Refusal, Seen};
use crate::params::{Format, Image};
use crate::state::DiskId;
use crate::table::Entry;

/// How long `job.cancel` waits for the end of the job's process.
const CANCELLED_WITHIN: Duration = Duration::from_secs(10);

/// Calls a method whose name begins with `job.`, or one that starts a job. `None`: there is no such
/// method.
pub(super) fn call(
    shared: &Shared,
    method: &str,
    params: Value,
) -> Option<Result<Value, RpcError>> {
    let jobs = &shared.jobs;
    Some(match method {
        "disk.coalesce" => take(params).and_then(|asked| reply(&coalesce(shared, &asked)?)),
        "disk.mirror" => take(params).and_then(|asked| reply(&mirror(shared, &asked)?)),
        "job.list" => take::<Nothing>(params).and_then(|_| reply(&list(shared))),
        "job.show" => take::<JobParams>(params).and_then(|asked| reply(&show(shared, asked.id)?)),
        "job.wait" => take(params).and_then(|asked| reply(&wait(shared, &asked)?)),
        "job.cancel" => changed(shared, params, |id| {
            jobs.cancel(id)?;
            jobs.wait(id, CANCELLED_WITHIN).map(drop)
        }),
        "job.complete" => changed(shared, params, |id| jobs.complete(id)),
        "job.pause" => changed(shared, params, |id| jobs.pause(id, true)),
        "job.resume" => changed(shared, params, |id| jobs.pause(id, false)),
        "job.limit" => take::<JobLimitParams>(params).and_then(|asked| {
            jobs.limit(asked.id, asked.speed.filter(|speed| *speed > 0)).map_err(refused)?;
            reply(&show(shared, asked.id)?)
        }),
        _ => return None,
    })
}

/// Changes a job, and returns it.
fn changed(
    shared: &Shared,
    params: Value,
    change: impl FnOnce(u64) -> Result<(), Refusal>,
) -> Result<Value, RpcError> {
    let JobParams { id } = take(params)?;
    change(id).map_err(refused)?;
    reply(&show(shared, id)?)
}

pub(crate) fn list(shared: &Shared) -> JobList {
    let seen = shared.jobs.list(shared.clock.now_ns());
    JobList { jobs: seen.into_iter().map(describe).collect() }
}

fn show(shared: &Shared, id: u64) -> Result<Job, RpcError> {
    shared.jobs.show(id, shared.clock.now_ns()).map(describe).map_err(refused)
}

/// Waits for the end of a job.
fn wait(shared: &Shared, asked: &JobWaitParams) -> Result<Job, RpcError> {
    let timeout = Duration::from_secs(asked.timeout_s.into()).min(MAX_WAIT);
    match shared.jobs.wait(asked.id, timeout).map_err(refused)? {
        true => show(shared, asked.id),
        false => {
            let message = format!("job {} has not ended in time", asked.id);
            let help = "it goes on; the method may be called again";
            Err(RpcError::new(code::TIMEOUT, message, help))
        }
    }
}

/// Starts the merge of images below a running disk's leaf.
fn coalesce(shared: &Shared, asked: &CoalesceParams) -> Result<Job, RpcError> {
    found(shared, asked.disk)?;
    let bad = |message: String, help: &str| RpcError::new(code::INVALID_PARAMS, message, help);
    for path in [&asked.from, &asked.to].into_iter().flatten() {
        if !path.starts_with('/') {
            let message = format!("{path:.200} is not an absolute path");
            return Err(bad(message, "name the images of the chain by their paths"));
        }
    }
    if asked.speed == Some(0) {
        return Err(bad("a speed of 0".to_owned(), "leave speed out for no limit"));
    }
    let at_rest = "ferrite image coalesce merges images at rest";
    let image = served_image(shared, asked.disk, at_rest)?;
    let task = Coalesce::new(&image, asked.from.clone(), asked.to.clone()).forced(asked.force);
    shared.jobs.start(asked.disk, Task::Coalesce(task), asked.speed).map(describe).map_err(refused)
}

/// The image of a disk that is served.
pub(super) fn served_image(shared: &Shared, id: DiskId, at_rest: &str) -> Result<Image, RpcError> {
    let disk = found(shared, id)?;
    let of_entry = |entry: &Entry| (entry.image.clone(), entry.beside);
    let (image, beside) =
        shared.table.read(|disks| disks.get(&id).map(of_entry)).unwrap_or_default();
    if let Some(first) = beside {
        let message = format!("disk {id} is a stub domain's");
        let help = format!("it is served with disk {first}: name that one");
        return Err(RpcError::new(code::FAILED, message, &help));
    }
    image.filter(|_| disk.phase == PhaseName::Served).ok_or_else(|| {
        let help = format!("ferrite disk show {id} says why; {at_rest}");
        RpcError::new(code::FAILED, format!("disk {id} is not served"), &help)
    })
}

/// Starts the mirror of a running disk.
fn mirror(shared: &Shared, asked: &MirrorParams) -> Result<Job, RpcError> {
    let at_rest = "ferrite image convert copies images at rest";
    let source = served_image(shared, asked.disk, at_rest)?;
    let bad = |message: String, help: &str| RpcError::new(code::INVALID_PARAMS, message, help);
    if asked.speed == Some(0) {
        return Err(bad("a speed of 0".to_owned(), "leave speed out for no limit"));
    }
    if source.format == Format::Store {
        let help = "copy a snapshot of it: ferrite store send, ferrite image convert";
        return Err(bad("volumes of stores cannot be mirrored".to_owned(), help));
    }
    let target = target(shared, &asked.target, asked.switch)?;
    let task = Mirror::new(&source, target, asked.switch).resumed(asked.resume);
    let task = task.comparing(asked.compare);
    shared.jobs.start(asked.disk, Task::Mirror(task), asked.speed).map(describe).map_err(refused)
}

/// The target of a mirror, as its worker gets it.
fn target(shared: &Shared, name: &str, switches: bool) -> Result<String, RpcError> {
    let bad = |message: String, help: &str| RpcError::new(code::INVALID_PARAMS, message, help);
    if name.starts_with("nbd:") || name.starts_with("nbd+") || name.starts_with("nbds") {
        if switches && image(name).is_err() {
            let help = "mirror it without --switch, and attach the disk where its server is";
            let message = "a disk of this host cannot be served from an export".to_owned();
            return Err(bad(message, help));
        }
        return Ok(name.to_owned());
    }
    let target = image(name)?;
    if target.format == Format::Store {
        let help = "give it by NBD (ferrite export nbd --socket SOCKET VOLUME), and mirror to \
                    nbd+unix:///?socket=SOCKET";
        return Err(bad("volumes of stores cannot be targets".to_owned(), help));
    }
    let real = target.path.canonicalize().map_err(|e| {
        let help = "make it first, as large as the disk: ferrite image create";
        bad(format!("cannot find {}: {e}", target.path.display()), help)
    })?;
    if !shared.config.allows(&real) {
        let help = "add its folder to image_folders in ferrite.toml, or name another place";
        return Err(bad(format!("{} is in no image folder", real.display()), help));
    }
    target
        .name()
        .into_string()
        .map_err(|_| bad("the target's name is not UTF-8".to_owned(), "rename it"))
}

fn refused(refusal: Refusal) -> RpcError {
    let code = match refusal {
        Refusal::Unknown(_) => code::NO_JOB,
        Refusal::Busy(_) => code::IN_USE,
        Refusal::Other(_) => code::FAILED,
    };
    RpcError::new(code, refusal.to_string(), &refusal.help())
}

fn describe(seen: Seen) -> Job {
    let Seen { state, done, all, rate, left_s, trouble } = seen;
    let (phase, why, help) = match state.end.as_ref().map(|end| end.outcome.clone()) {
        None if state.cancelled => (JobPhase::Cancelling, None, None),
        None if state.paused => (JobPhase::Paused, None, None),
        None => (JobPhase::Running, trouble, None),
        Some(Outcome::Done) => (JobPhase::Done, None, None),
        Some(Outcome::Cancelled) => (JobPhase::Cancelled, None, None),
        Some(Outcome::Longer { why, help }) => (JobPhase::Cancelled, Some(why), Some(help)),
        Some(Outcome::Failed { why, help }) => (JobPhase::Failed, Some(why), Some(help)),
    };
    let (kind, from, to) = match &state.task {
        Task::Coalesce(it) => (JobKind::Coalesce, it.from.clone(), it.to.clone()),
        Task::Mirror(it) => (JobKind::Mirror, None, Some(it.target.clone())),
    };
    Job {
        id: state.id,
        kind,
        disk: state.disk,
        image: state.task.image().path.to_string_lossy().into_owned(),
        from,
        to,
        phase,
        step: state.task.step().to_owned(),
        created: state.created,
        ended: state.end.as_ref().map(|end| end.at),
        done,
        all,
        rate,
        left_s,
        speed: state.speed,
        why,
        help,
    }
}
