//! `Data`: the mirror of a tap, by which XAPI moves the disk of a running guest.
//!
//! A mirror is a job of the daemon, and its number is the operation's key. XAPI asks for its state until it is complete:
//! the target has all then, and gets each write. XAPI ends it with `cancel` and `destroy`.

use std::path::Path;

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::Nothing;
use ferrite_daemon::control::protocol::{Job, JobKind, JobList, JobParams, JobPhase, MirrorParams};
use ferrite_daemon::state::DiskId;
use serde::Deserialize;
use serde_json::{Value, json};

use super::disks::Disks;
use super::{Call, Fault, Kind};
use crate::disk::{ANSWER, call as ask};

/// The kind of the operations, as XAPI names it.
const MIRROR: &str = "MirrorV1";
/// The step of a mirror whose target has all.
const IN_STEP: &str = "mirror";

#[derive(Deserialize)]
struct StartParams {
    uri: String,
    /// The target, as the URI of an export.
    remote: String,
}

#[derive(Deserialize)]
struct UriParams {
    uri: String,
}

#[derive(Deserialize)]
struct OperationParams {
    /// The kind, and the key.
    operation: (String, String),
}

/// Carries out a call, whose name is in small letters. `None`: there is no such call.
pub(super) fn answer(call: &Call, name: &str) -> Option<Result<Value, Fault>> {
    let run = &call.run_dir;
    Some(match name {
        "data.mirror" => call.params().and_then(|asked: StartParams| mirror(run, &asked)),
        "data.stat" => call.params().and_then(|of: OperationParams| stat(run, &of)),
        "data.cancel" => call.params().and_then(|of: OperationParams| cancel(run, &of)),
        "data.destroy" => call.params().and_then(|of: OperationParams| {
            // A job is kept for a day. What goes on ends here.
            match job(run, &of) {
                Ok(job) if !job.phase.has_ended() => cancel(run, &of),
                _ => Ok(Value::Null),
            }
        }),
        "data.ls" => call.params().and_then(|of: UriParams| list(run, &of.uri)),
        _ => return None,
    })
}

/// The tap of a URI.
fn tap(run: &Path, uri: &str) -> Result<DiskId, Fault> {
    let disk = Disks::of(run).lock(uri)?.read()?;
    let disk = disk.filter(|disk| !disk.active.is_empty()).ok_or_else(|| {
        let text = format!("cannot mirror {uri}: it is not active; activate it first");
        Fault::new(Kind::Failed, text)
    })?;
    Ok(DiskId::tap(disk.minor))
}

fn mirror(run: &Path, asked: &StartParams) -> Result<Value, Fault> {
    let disk = tap(run, &asked.uri)?;
    let (target, switch, resume) = (asked.remote.clone(), false, false);
    let params = MirrorParams { disk, target, switch, resume, speed: None };
    match ask::<Job>(run, "disk.mirror", &params, ANSWER) {
        Ok(job) => Ok(operation(&job)),
        // A repeated call: the operation is the same.
        Err(e) => match running(run, disk)?.filter(|job| job.to.as_ref() == Some(&asked.remote)) {
            Some(job) => Ok(operation(&job)),
            None => Err(failed(&format!("cannot mirror {}", asked.uri), &e)),
        },
    }
}

fn running(run: &Path, disk: DiskId) -> Result<Option<Job>, Fault> {
    let all: JobList = ask(run, "job.list", &Nothing {}, ANSWER)
        .map_err(|e| failed("cannot list the mirrors", &e))?;
    let is_it =
        |job: &Job| job.kind == JobKind::Mirror && job.disk == disk && !job.phase.has_ended();
    Ok(all.jobs.into_iter().find(is_it))
}

fn list(run: &Path, uri: &str) -> Result<Value, Fault> {
    let job = running(run, tap(run, uri)?)?;
    Ok(job.iter().map(operation).collect())
}

fn operation(job: &Job) -> Value {
    json!([MIRROR, job.id.to_string()])
}

fn job(run: &Path, of: &OperationParams) -> Result<Job, Fault> {
    let (kind, key) = &of.operation;
    let id = Some(key).filter(|_| kind == MIRROR).and_then(|key| key.parse().ok());
    let id = id.ok_or_else(|| {
        let text = format!("{kind} {key} is no mirror of this host; Data.ls lists them");
        Fault::new(Kind::Invalid, text)
    })?;
    ask(run, "job.show", &JobParams { id }, ANSWER)
        .map_err(|e| failed(&format!("cannot find the mirror {id}"), &e))
}

fn stat(run: &Path, of: &OperationParams) -> Result<Value, Fault> {
    let job = job(run, of)?;
    let lacks = job.why.is_some();
    let failed = matches!(job.phase, JobPhase::Failed | JobPhase::Cancelled) || lacks;
    let complete = job.step == IN_STEP && !job.phase.has_ended() && !lacks;
    let progress = match job.all {
        0 => 0.0,
        all => job.done.min(all) as f64 / all as f64,
    };
    Ok(json!({ "failed": failed, "complete": complete, "progress": progress }))
}

fn cancel(run: &Path, of: &OperationParams) -> Result<Value, Fault> {
    let job = job(run, of)?;
    if job.phase.has_ended() {
        return Ok(Value::Null);
    }
    let asked = JobParams { id: job.id };
    ask::<Job>(run, "job.cancel", &asked, ANSWER)
        .map_err(|e| failed(&format!("cannot cancel the mirror {}", job.id), &e))?;
    Ok(Value::Null)
}

fn failed(what: &str, e: &ClientError) -> Fault {
    Fault::new(Kind::Failed, format!("{what}: {e}; {}", e.help()))
}
