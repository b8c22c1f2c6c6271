//! The dirty map of a mirror's source: after a power cut it says what the target lacks (docs/internals/mirror.md 5).
//!
//! It is made and ended by a process of the daemon, while no worker has the source open: a worker may do neither.

use serde::Deserialize;

use super::{cannot_use_map, map, result, task};
use crate::jobs::run::{Halt, Leave, Run};
use crate::params::Image;
use crate::{Failure, verbs};

/// The result of `mirror-map`.
#[derive(Deserialize)]
struct Kept {
    /// Whether there is a map that fits.
    kept: bool,
    /// Why there is none.
    why: String,
    /// Whether there are other maps.
    others: bool,
}

fn change(run: &Run, verb: &str, name: &str) -> Result<Kept, Halt> {
    let mut command = run.image_command()?;
    command.arg("mirror-map").arg(verb).arg(task(run).source.name()).arg(name).arg("--json");
    result("attach", run.child(&mut command, Leave::No)?)
}

/// Begins the map, or goes on with an earlier mirror's. The disk is paused. The next worker is told its name after that.
///
/// A mirror whose source cannot have a map works without one. If an earlier mirror's is missing the job fails: the
/// administrator expects a short copy.
pub(super) fn begin(run: &Run) -> Result<(), Halt> {
    let mirror = task(run);
    // A job that an older daemon has begun has none.
    let Some(name) = mirror.map else { return Ok(()) };
    let kept = match mirror.resumes {
        true => match change(run, "keep", &name)? {
            Kept { kept: true, .. } => true,
            Kept { why, .. } => {
                return Err(Halt::Failed(Failure {
                    why: format!("it is not known what the target lacks: {why}"),
                    help: "begin the mirror without --resume: it copies everything".to_owned(),
                }));
            }
        },
        false => match change(run, "begin", &name) {
            Ok(Kept { kept, why, .. }) => {
                if !kept {
                    tracing::info!("job {}: it begins anew after a power cut: {why}", run.id());
                }
                kept
            }
            Err(Halt::Failed(e)) => {
                tracing::warn!("job {}: it begins anew after a power cut: {e}", run.id());
                false
            }
            Err(halt) => return Err(halt),
        },
    };
    let named = map(run)?.set_name(kept.then_some(&name));
    named.map_err(|e| cannot_use_map("of the mirror".as_ref(), &e))
}

/// Whether the source has other maps, which move with the disk. It may be in use.
pub(super) fn has_others(run: &Run) -> bool {
    let looked = task(run).map.map(|name| change(run, "look", &name));
    matches!(looked, Some(Ok(Kept { others: true, .. })))
}

/// Ends the map, and gives the others to the target, which reads the same. Both are closed. If the daemon dies then, both
/// have maps that fit.
pub(super) fn hand_over(run: &Run, target: &Image) {
    end(run);
    if let Err(e) = verbs::copy_maps(run.shared(), &task(run).source, target, None) {
        tracing::warn!(
            "job {}: the dirty maps stay with the old image, and the next backup is a full one: {e}",
            run.id()
        );
    }
}

/// Ends the map. No worker has the source open.
pub(super) fn end(run: &Run) {
    let Some(name) = task(run).map else { return };
    if let Err(Halt::Failed(e)) = change(run, "end", &name) {
        tracing::warn!(
            "job {}: the dirty map {name} stays: {e}; to remove it: ferrite image dirty remove",
            run.id()
        );
    }
}
