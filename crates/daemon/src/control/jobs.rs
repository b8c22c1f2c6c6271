//! The methods of the control socket about jobs.

use std::time::Duration;

use serde_json::Value;

use super::methods::{MAX_WAIT, found, reply, take};
use super::protocol::{
    CoalesceParams, Job, JobKind, JobLimitParams, JobList, JobParams, JobPhase, JobWaitParams,
    Nothing, PhaseName, RpcError, code,
};
use crate::Shared;
use crate::jobs::state::{Coalesce, Outcome, Task};
use crate::jobs::{Refusal, Seen};
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
        "job.list" => take::<Nothing>(params).and_then(|_| reply(&list(shared))),
        "job.show" => take::<JobParams>(params).and_then(|asked| reply(&show(shared, asked.id)?)),
        "job.wait" => take(params).and_then(|asked| reply(&wait(shared, &asked)?)),
        "job.cancel" => changed(shared, params, |id| {
            jobs.cancel(id)?;
            jobs.wait(id, CANCELLED_WITHIN).map(drop)
        }),
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
    let disk = found(shared, asked.disk)?;
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
    let of_entry = |entry: &Entry| (entry.image.clone(), entry.beside);
    let (image, beside) =
        shared.table.read(|disks| disks.get(&asked.disk).map(of_entry)).unwrap_or_default();
    if let Some(first) = beside {
        let message = format!("disk {} is a stub domain's", asked.disk);
        let help = format!("it is served with disk {first}: merge the images of that one");
        return Err(RpcError::new(code::FAILED, message, &help));
    }
    let Some(image) = image.filter(|_| disk.phase == PhaseName::Served) else {
        let message = format!("disk {} is not served", asked.disk);
        let help = format!(
            "ferrite disk show {} says why; ferrite image coalesce merges images at rest",
            asked.disk
        );
        return Err(RpcError::new(code::FAILED, message, &help));
    };
    let task = Coalesce::new(&image, asked.from.clone(), asked.to.clone()).forced(asked.force);
    shared.jobs.start(asked.disk, Task::Coalesce(task), asked.speed).map(describe).map_err(refused)
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
    let Seen { state, done, all, rate, left_s } = seen;
    let (phase, why, help) = match state.end.as_ref().map(|end| end.outcome.clone()) {
        None if state.cancelled => (JobPhase::Cancelling, None, None),
        None if state.paused => (JobPhase::Paused, None, None),
        None => (JobPhase::Running, None, None),
        Some(Outcome::Done) => (JobPhase::Done, None, None),
        Some(Outcome::Cancelled) => (JobPhase::Cancelled, None, None),
        Some(Outcome::Longer { why, help }) => (JobPhase::Cancelled, Some(why), Some(help)),
        Some(Outcome::Failed { why, help }) => (JobPhase::Failed, Some(why), Some(help)),
    };
    let Task::Coalesce(coalesce) = &state.task;
    Job {
        id: state.id,
        kind: JobKind::Coalesce,
        disk: state.disk,
        image: state.task.image().path.to_string_lossy().into_owned(),
        from: coalesce.from.clone(),
        to: coalesce.to.clone(),
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
