//! `Data`: the mirror of a tap, by which XAPI moves the disk of a running guest, and its copy.
//!
//! A mirror is a job of the daemon, and its number is the operation's key. XAPI asks for its state until it is complete:
//! the target has all then, and gets each write. XAPI ends it with `cancel` and `destroy`.
//!
//! A copy is a mirror, too, since the guest may write meanwhile: all of the disk is copied, whatever blocks XAPI names. It
//! ends when it is complete. Of a disk that is mirrored to the same target, the mirror is the copy, and goes on.

use std::path::{Path, PathBuf};

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::Nothing;
use ferrite_daemon::control::protocol::{Job, JobKind, JobList, JobParams, JobPhase, MirrorParams};
use ferrite_daemon::state::DiskId;
use serde::Deserialize;
use serde_json::{Value, json};

use super::disks::Disks;
use super::uri::Image;
use super::volume_folder::Folder;
use super::{Call, Fault, Kind, files};
use crate::disk::{ANSWER, call as ask};

/// The kind of the operations, as XAPI names it.
const MIRROR: &str = "MirrorV1";
const COPY: &str = "CopyV1";
/// Follows the number of a copy that is an operation of XAPI's already.
const SHARED: &str = "m";
/// The step of a mirror whose target has all.
const IN_STEP: &str = "mirror";

#[derive(Deserialize)]
struct StartParams {
    uri: String,
    /// The target, as the URI of an export.
    remote: String,
}

#[derive(Deserialize)]
struct CopyParams {
    #[serde(flatten)]
    of: StartParams,
    #[serde(rename = "blocklist")]
    _blocks: Blocks,
}

/// The blocks that differ. More of them are copied.
#[derive(Deserialize)]
struct Blocks {
    /// Bytes of a block.
    #[serde(rename = "blocksize")]
    _bytes: u64,
    /// The first one and the number of each range.
    #[serde(rename = "ranges")]
    _ranges: Vec<(u64, u64)>,
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
        "data.copy" => call.params().and_then(|asked: CopyParams| copy(run, &asked)),
        "data.stat" => call.params().and_then(|of: OperationParams| stat(run, &of)),
        "data.cancel" => call.params().and_then(|of: OperationParams| cancel(run, &of)),
        "data.destroy" => call.params().and_then(|of: OperationParams| {
            let marker = marker(run, &of);
            if of.operation.1.ends_with(SHARED) || marker.exists() {
                return files::remove(&marker)
                    .map(|()| Value::Null)
                    .map_err(|e| Fault::of_io(format!("cannot remove {}", marker.display()), e));
            }
            // The record of a job is kept for a day. A job that goes on ends here.
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
    // A merge of its images is a job of the disk, too.
    let _still = Image::parse(&asked.uri).and_then(|image| Folder::hold(&image.path()))?;
    let disk = tap(run, &asked.uri)?;
    let (target, switch, resume, compare) = (asked.remote.clone(), false, false, false);
    let params = MirrorParams { disk, target, switch, resume, compare, speed: None };
    match ask::<Job>(run, "disk.mirror", &params, ANSWER) {
        Ok(job) => Ok(operation(&job)),
        // A repeated call: the operation is the same.
        Err(e) => match running(run, disk)?.filter(|job| job.to.as_ref() == Some(&asked.remote)) {
            Some(job) => Ok(operation(&job)),
            None => Err(failed(&format!("cannot mirror {}", asked.uri), &e)),
        },
    }
}

fn copy(run: &Path, asked: &CopyParams) -> Result<Value, Fault> {
    let disk = tap(run, &asked.of.uri)?;
    let is_it = |job: &Job| job.to.as_ref() == Some(&asked.of.remote);
    if let Some(job) = running(run, disk)?.filter(is_it) {
        return Ok(json!([COPY, format!("{}{SHARED}", job.id)]));
    }
    let operation = mirror(run, &asked.of)?;
    Ok(json!([COPY, operation[1]]))
}

/// The file that says that a copy was complete, when its job is ended.
fn marker(run: &Path, of: &OperationParams) -> PathBuf {
    let digits: String = of.operation.1.chars().filter(char::is_ascii_digit).take(20).collect();
    run.join(format!("smapi/copied-{digits}"))
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
    let number = match kind.as_str() {
        MIRROR => Some(key.as_str()),
        COPY => Some(key.strip_suffix(SHARED).unwrap_or(key)),
        _ => None,
    };
    let id = number.and_then(|number| number.parse().ok());
    let id = id.ok_or_else(|| {
        let text = format!("{kind} {key} is no mirror or copy of this host; Data.ls lists them");
        Fault::new(Kind::Invalid, text)
    })?;
    ask(run, "job.show", &JobParams { id }, ANSWER)
        .map_err(|e| failed(&format!("cannot find the mirror {id}"), &e))
}

fn stat(run: &Path, of: &OperationParams) -> Result<Value, Fault> {
    let is_copy = of.operation.0 == COPY;
    let marker = marker(run, of);
    if is_copy && marker.exists() {
        return Ok(json!({ "failed": false, "complete": true, "progress": 1.0 }));
    }
    let job = job(run, of)?;
    let lacks = job.why.is_some();
    let failed = matches!(job.phase, JobPhase::Failed | JobPhase::Cancelled) || lacks;
    let complete = job.step == IN_STEP && !job.phase.has_ended() && !lacks;
    if is_copy && complete && !of.operation.1.ends_with(SHARED) {
        // The copy has ended, also if this call dies between the two: the next one finds the file, or ends the job.
        files::replace(&marker, &job.id.to_string())
            .map_err(|e| Fault::of_io(format!("cannot write {}", marker.display()), e))?;
        cancel(run, of)?;
    }
    let progress = match job.all {
        0 => 0.0,
        all => job.done.min(all) as f64 / all as f64,
    };
    Ok(json!({ "failed": failed, "complete": complete, "progress": progress }))
}

fn cancel(run: &Path, of: &OperationParams) -> Result<Value, Fault> {
    if of.operation.1.ends_with(SHARED) {
        return Ok(Value::Null);
    }
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
