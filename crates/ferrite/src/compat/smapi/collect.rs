//! Merges hidden images on which a single image is left, so that chains become shorter again.
//!
//! A process of its own does that, which calls start and do not wait for. It has the repository's lock during a merge. A
//! call that wants the lock says so by a second one ([`Folder::lock`]): the merge is cancelled then, and begun anew some
//! time later. Each merge can be cancelled or killed at any moment: all volumes read as before.
//!
//! * An image at rest is merged into its parent here, and the parent takes its name.
//! * Images of a disk that a tap has open are merged by a job of the daemon, while the guest works.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{
    CoalesceParams, Job, JobKind, JobList, JobParams, JobPhase, Nothing,
};
use ferrite_daemon::state::DiskId;
use ferrite_image_tools::{ImageTools, Rebase};
use serde_json::Value;

use super::taps::TapCtl;
use super::volume_folder::{Folder, Record, is_of_job};
use super::volume_images::{Images, Look};
use super::{Fault, Kind};
use crate::disk::{ANSWER, call as ask};

/// The name of the call. XAPI does not know it.
pub(super) const CALL: &str = "SR.coalesce";
/// How often a job is looked at, and whether another call waits.
const LOOK: Duration = Duration::from_millis(100);
/// The pause after a merge that another call has cancelled: others may follow.
const PAUSE: Duration = Duration::from_secs(3);
/// How long a daemon may be away whose job merges.
const AWAY: Duration = Duration::from_secs(60);

/// Starts the process for a repository, if there may be something to merge. The caller goes on.
pub(super) fn begin(folder: &Folder, run_dir: &Path) {
    let is_hidden = |key: &String| folder.record(key).is_ok_and(|r| r.is_some_and(|r| r.hidden));
    if !folder.repository.coalesces() || !folder.recorded().iter().any(is_hidden) {
        return;
    }
    let mut command = Command::new("/proc/self/exe");
    command.args(["compat", "smapi-volume", CALL, "--run-dir"]).arg(run_dir).arg(&folder.path);
    // The caller's reader waits for the end of the caller's output.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // If it cannot be started, a later call tries again.
    let _ = command.process_group(0).spawn();
}

/// A merge: of this image into its parent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Merge {
    child: String,
    parent: String,
    /// The open tap's minor and its leaf. `None`: no tap has the images open.
    by: Option<(u32, String)>,
    /// Images on the child that are not in the tap's chain.
    beside: Vec<String>,
}

/// How a merge has ended.
enum Ended {
    Done,
    /// Another call wants the lock.
    Cancelled,
}

/// Merges what can be merged in this repository, then ends. One process does that at a time.
pub(super) fn run(path: &Path, run_dir: &Path) -> Result<Value, Fault> {
    let folder = Folder::at(path)?;
    let Some(alone) = folder.collector()? else { return Ok(Value::Null) };
    let taps = TapCtl { run_dir };
    let images = Images { folder: &folder, taps: &taps, run_dir };
    let mut failed = BTreeSet::new();
    loop {
        let lock = folder.lock()?;
        images.sweep()?;
        let Some(merge) = candidate(&images, &failed)? else {
            // A call that makes another candidate has the lock after this, and starts the next process.
            drop(alone);
            drop(lock);
            return Ok(Value::Null);
        };
        let ended = match &merge.by {
            _ if folder.is_awaited() => Ok(Ended::Cancelled),
            None => at_rest(&images, &merge),
            Some((minor, leaf)) => by_job(&images, &merge, *minor, leaf),
        };
        match ended {
            Ok(Ended::Done) => images.sweep()?,
            Ok(Ended::Cancelled) => {
                drop(lock);
                std::thread::sleep(PAUSE);
            }
            Err(fault) => {
                folder.note(&format!("{} into {}: {}", merge.child, merge.parent, fault.text));
                failed.insert((merge.child, merge.parent));
            }
        }
    }
}

/// The next merge: of hidden images first, since volumes are written meanwhile.
fn candidate(
    images: &Images<'_>,
    failed: &BTreeSet<(String, String)>,
) -> Result<Option<Merge>, Fault> {
    let keys = images.folder.keys()?;
    let mut hidden = BTreeSet::new();
    for key in &keys {
        let record = images.folder.record(key)?;
        if is_of_job(key) || record.is_some_and(|record| record.hidden) {
            hidden.insert(key.clone());
        }
    }
    let Some(parents) = images.parents(&keys, &hidden)? else { return Ok(None) };
    // An image that a cancelled job has left in a chain is one of ours from now on.
    for key in parents.values().filter(|key| is_of_job(key)) {
        if images.folder.record(key)?.is_none() {
            images.folder.set_record(key, &Record::hidden())?;
        }
    }
    let open = images.open_leaves()?;
    let mut merges = Vec::new();
    for (child, parent) in &parents {
        let children = parents.values().filter(|of| *of == parent).count();
        let is_single = children == 1 && !images.has_children_elsewhere(parent);
        if !is_single
            || !hidden.contains(parent)
            || failed.contains(&(child.clone(), parent.clone()))
        {
            continue;
        }
        let users: Vec<_> =
            open.iter().filter(|(_, leaf)| stands_on(leaf, child, &parents)).collect();
        let by = match users.as_slice() {
            [] => None,
            [user] => Some((*user).clone()),
            // A job changes the chain of one disk.
            _ => continue,
        };
        let is_beside = |(image, of): &(&String, &String)| {
            *of == child && !by.as_ref().is_some_and(|(_, leaf)| stands_on(leaf, image, &parents))
        };
        let beside = parents.iter().filter(is_beside).map(|(image, _)| image.clone()).collect();
        let merge = Merge { child: child.clone(), parent: parent.clone(), by, beside };
        merges.push((!hidden.contains(child), merge));
    }
    merges.sort();
    Ok(merges.into_iter().next().map(|(_, merge)| merge))
}

/// Whether an image is in the chain of a leaf.
fn stands_on(leaf: &str, image: &str, parents: &BTreeMap<String, String>) -> bool {
    let mut at = Some(leaf);
    let mut steps = 0..=parents.len();
    while let Some(key) = at.filter(|_| steps.next().is_some()) {
        if key == image {
            return true;
        }
        at = parents.get(key).map(String::as_str);
    }
    false
}

/// Merges images at rest. Their locks keep other programs out.
fn at_rest(images: &Images<'_>, merge: &Merge) -> Result<Ended, Fault> {
    // The parent takes the child's name, and the mode of a parent.
    let is_protected = images.is_protected(&merge.child);
    let folder = images.folder;
    let progress = |_| !folder.is_awaited();
    let tools = ImageTools { progress: &progress, ..images.tools(Look::Locked)? };
    let (_, child) = images.name(&merge.child)?;
    let (_, parent) = images.name(&merge.parent)?;
    match tools.coalesce_into(&child, &parent, false) {
        Ok(_) => {
            if is_protected != images.is_protected(&merge.child) {
                images.set_protected(&merge.child, is_protected)?;
            }
            Ok(Ended::Done)
        }
        Err(_) if folder.is_awaited() => Ok(Ended::Cancelled),
        Err(e) => Err(e.into()),
    }
}

/// Has the daemon merge images of a disk that is in use.
fn by_job(images: &Images<'_>, merge: &Merge, minor: u32, leaf: &str) -> Result<Ended, Fault> {
    let disk = DiskId::tap(minor);
    let path = |key: &str| Some(images.folder.path.join(key).display().to_string());
    let (from, to) = (path(&merge.child), path(&merge.parent));
    // The images beside stay as they are, on the child, until they stand on the parent, too.
    let force = !merge.beside.is_empty();
    let asked = CoalesceParams { disk, from, to, force, speed: None };
    let job: Job = ask(images.run_dir, "disk.coalesce", &asked, ANSWER)
        .map_err(|e| failed(&format!("cannot merge images of {leaf}"), &e))?;
    let mut cancelled = false;
    let job = loop {
        let seen = shown(images.run_dir, job.id)?;
        if seen.phase.has_ended() {
            break seen;
        }
        if !cancelled && images.folder.is_awaited() {
            cancelled = true;
            // If it has ended meanwhile, the next look shows that.
            let _ = ask::<Job>(images.run_dir, "job.cancel", &JobParams { id: job.id }, ANSWER);
        }
        std::thread::sleep(LOOK);
    };
    match job.phase {
        JobPhase::Done => {
            move_beside(images, merge)?;
            Ok(Ended::Done)
        }
        _ if cancelled => Ok(Ended::Cancelled),
        _ => {
            let why = job.why.unwrap_or_default();
            Err(Fault::new(Kind::Failed, format!("job {} has ended: {why}", job.id)))
        }
    }
}

/// Has images stand on the parent that stood on the child: it has all of the child's data, so they read the same. Then
/// nothing stands on the child.
fn move_beside(images: &Images<'_>, merge: &Merge) -> Result<(), Fault> {
    let tools = images.tools(Look::Locked)?;
    let (_, parent) = images.name(&merge.parent)?;
    for image in &merge.beside {
        tools.rebase(&images.name(image)?.1, &parent, Rebase::Unsafe, false)?;
    }
    Ok(())
}

/// A job, also after the daemon was restarted: the job goes on then.
fn shown(run_dir: &Path, id: u64) -> Result<Job, Fault> {
    let end = Instant::now() + AWAY;
    loop {
        match ask::<Job>(run_dir, "job.show", &JobParams { id }, ANSWER) {
            Ok(job) => return Ok(job),
            Err(ClientError::Unreachable(_)) if Instant::now() < end => std::thread::sleep(LOOK),
            Err(e) => return Err(failed(&format!("cannot look at job {id}"), &e)),
        }
    }
}

/// Ends merges of a tap's images that a killed process has begun. Without a daemon there is none.
pub(super) fn end_jobs(run_dir: &Path, minor: u32) -> Result<(), Fault> {
    let disk = DiskId::tap(minor);
    let all: JobList = match ask(run_dir, "job.list", &Nothing {}, ANSWER) {
        Ok(all) => all,
        Err(ClientError::Unreachable(_)) => return Ok(()),
        Err(e) => return Err(failed("cannot list the jobs", &e)),
    };
    let is_it =
        |job: &&Job| job.kind == JobKind::Coalesce && job.disk == disk && !job.phase.has_ended();
    for job in all.jobs.iter().filter(is_it) {
        let _ = ask::<Job>(run_dir, "job.cancel", &JobParams { id: job.id }, ANSWER);
        while !shown(run_dir, job.id)?.phase.has_ended() {
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}

fn failed(what: &str, e: &ClientError) -> Fault {
    Fault::new(Kind::Failed, format!("{what}: {e}; {}", e.help()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_used_by_the_leaves_above_it() {
        let pairs = [("v", "b2"), ("b2", "b1"), ("s", "b1")];
        let parents = pairs.map(|(child, parent)| (child.to_owned(), parent.to_owned())).into();
        assert!(stands_on("v", "v", &parents) && stands_on("v", "b1", &parents));
        assert!(!stands_on("s", "b2", &parents) && !stands_on("b1", "v", &parents));
        let circle = [("a", "b"), ("b", "a")];
        let circle = circle.map(|(child, parent)| (child.to_owned(), parent.to_owned())).into();
        assert!(!stands_on("a", "c", &circle));
    }
}
