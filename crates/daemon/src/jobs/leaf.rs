//! The steps of a merge of the leaf itself, with those of `coalesce` between them. Its guest writes to
//! the leaf, so a snapshot of it is merged, and later writes are merged after that.
//!
//! The order, once `plan` has found the lower end:
//!
//! 1. `split`: a name for the snapshot is written to the state file. Then the disk is paused, the
//!    leaf's file gets that name, and a new leaf the disk's.
//! 2. `grow`, `copy`, `relink`, `clean`: the image of that name, and all between, are merged into the
//!    lower end. The new leaf stands on that then.
//! 3. `leaf`: the disk is paused. If the new leaf has few data, these are merged into the lower end,
//!    which takes the disk's name, and the job is done. Else it begins with 1 again, as long as each
//!    round leaves less, and for [`ROUNDS`] rounds.
//!
//! The disk's name shows the disk after each step, and a successor begins with the step that was
//! begun: a step that was done before changes nothing. A round that fails or is cancelled before
//! `relink` is undone while the disk is paused (`undo`), if the new leaf has few data. If it has more,
//! the chain stays one image longer.

use std::path::Path;

use serde::Deserialize;

use super::coalesce::{Known, Next, Plan, known_step, result, while_paused};
use super::run::{Halt, Run};
use super::state::{Coalesce, CoalesceStep, Task, Top};
use crate::Failure;
use crate::params::Image;

/// Most snapshots that are made for a merge.
const ROUNDS: u32 = 6;

/// The result of `leaf` and `undo`.
#[derive(Deserialize)]
struct Merged {
    merged: bool,
    leaf_bytes: u64,
}

/// The merge that the job does.
pub(super) fn task(run: &Run) -> Coalesce {
    match run.state().task {
        Task::Coalesce(coalesce) => coalesce,
        Task::Mirror(_) => unreachable!("a job does not change its kind"),
    }
}

/// The step after the plan.
pub(super) fn planned(run: &Run, plan: Plan) -> Result<Next, Halt> {
    let small = run.means().leaf.small;
    let is_small = plan.leaf_bytes.is_some_and(|bytes| bytes <= small) && plan.images.len() == 1;
    let top = Top { must_grow: plan.must_grow, ..Top::default() };
    let Next(step, known) = match is_small {
        true => Next(CoalesceStep::Leaf, set(top)),
        false => split(run, top)?,
    };
    let ends = move |coalesce: &mut Coalesce| {
        coalesce.from = plan.images.first().cloned();
        coalesce.to = Some(plan.to.clone());
        known.iter().for_each(|known| known(coalesce));
    };
    Ok(Next(step, Some(Box::new(ends))))
}

/// The next round.
fn split(run: &Run, top: Top) -> Result<Next, Halt> {
    let (coalesce, id) = (task(run), run.state().id);
    let leaf = coalesce.leaf();
    let name = free_name(&leaf, id, top.rounds + 1).ok_or_else(|| {
        let why = format!("the name of {} is not UTF-8", leaf.path.display());
        Halt::Failed(Failure { why, help: "rename it".to_owned() })
    })?;
    let top = Top { snapshot: Some(name), rounds: top.rounds + 1, ..top };
    Ok(Next(CoalesceStep::Split, set(top)))
}

fn set(top: Top) -> Option<Known> {
    Some(Box::new(move |coalesce: &mut Coalesce| coalesce.top = Some(top.clone())))
}

/// A name beside the leaf that no file has.
fn free_name(leaf: &Image, id: u64, round: u32) -> Option<String> {
    let stem = leaf.path.file_stem()?.to_str()?;
    let extension = match leaf.path.extension() {
        Some(extension) => format!(".{}", extension.to_str()?),
        None => String::new(),
    };
    let path = |n: u32| leaf.path.with_file_name(format!("{stem}.ferrite-job-{id}-{n}{extension}"));
    let path = (round..).map(path).find(|path| is_missing(path))?;
    Image { path, format: leaf.format }.name().into_string().ok()
}

fn is_missing(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}

/// The most data in a leaf that is merged in the step that was begun.
pub(super) fn most(run: &Run, coalesce: &Coalesce) -> u64 {
    let is_last = coalesce.top.as_ref().is_some_and(|top| top.rounds >= ROUNDS);
    match is_last && coalesce.step == CoalesceStep::Leaf {
        true => run.means().leaf.most,
        false => run.means().leaf.small,
    }
}

/// Merges the leaf, if it is small by now. `None`: all is done.
pub(super) fn merge(run: &Run) -> Result<Option<Next>, Halt> {
    let Merged { merged, leaf_bytes } = result("leaf", while_paused(run)?)?;
    if merged {
        return Ok(None);
    }
    let top = task(run).top.unwrap_or_default();
    if top.rounds >= ROUNDS {
        return Err(Halt::Failed(too_large(leaf_bytes, run.means().leaf.most)));
    }
    let is_less = top.left.is_none_or(|before| leaf_bytes < before);
    let top = Top { left: Some(leaf_bytes), ..top };
    Ok(Some(match is_less {
        true => split(run, top)?,
        // Another round would not leave less.
        false => Next(CoalesceStep::Leaf, set(Top { rounds: ROUNDS, ..top })),
    }))
}

fn too_large(leaf_bytes: u64, most: u64) -> Failure {
    let [has, most] = [leaf_bytes, most].map(|bytes| bytes.div_ceil(1 << 20));
    Failure {
        why: format!(
            "the guest writes as fast as the leaf is merged: it has {has} MiB again, and at most {most} \
             MiB are merged while a guest waits; what it had before is merged"
        ),
        help: "start the job again when the guest writes less, or without a limit (--speed)"
            .to_owned(),
    }
}

/// Undoes a round that was cancelled or has failed, if there is one. Returns how the job ends.
pub(super) fn go_back(run: &Run, halt: Halt) -> Halt {
    use CoalesceStep::{Copy, Grow, Relink, Split};
    let coalesce = task(run);
    let snapshot = coalesce.top.and_then(|top| top.snapshot);
    let Some(snapshot) = snapshot else { return halt };
    if !matches!(coalesce.step, Split | Grow | Copy | Relink) || is_missing(file(&snapshot)) {
        return halt;
    }
    let failed = match &halt {
        Halt::Failed(Failure { why, help }) => Some((why.clone(), help.clone())),
        _ => None,
    };
    let known: Known = Box::new(move |coalesce| {
        coalesce.top.iter_mut().for_each(|top| top.failed.clone_from(&failed));
    });
    match run.enter_undo(|task| known_step(task, CoalesceStep::Undo, Some(&known))) {
        Ok(()) => undo(run),
        Err(Halt::Failed(e)) => longer(run, halt, &e.why),
        Err(halt) => halt,
    }
}

/// Does the step `undo`. Returns how the job ends.
pub(super) fn undo(run: &Run) -> Halt {
    let halt = match task(run).top.and_then(|top| top.failed) {
        Some((why, help)) => Halt::Failed(Failure { why, help }),
        None => Halt::Cancelled,
    };
    match while_paused(run).and_then(|done| result::<Merged>("undo", done)) {
        Ok(done) if done.merged => halt,
        Ok(done) => {
            let why = format!("the guest has written {} MiB since", done.leaf_bytes >> 20);
            longer(run, halt, &why)
        }
        Err(Halt::Failed(e)) => longer(run, halt, &e.why),
        Err(stopped) => stopped,
    }
}

/// How a job ends whose last snapshot stays in the chain.
fn longer(run: &Run, halt: Halt, reason: &str) -> Halt {
    let snapshot = task(run).top.and_then(|top| top.snapshot).unwrap_or_default();
    let stays = format!(
        "its disk's chain has one more image, {}, which is not merged back: {reason}",
        file(&snapshot).display()
    );
    let merges = format!("ferrite disk coalesce {} merges it into its parent", run.state().disk);
    match halt {
        Halt::Failed(Failure { why, help }) => Halt::Failed(Failure {
            why: format!("{why}; {stays}"),
            help: format!("{help}; {merges}"),
        }),
        _ => Halt::Longer(Failure { why: stays, help: merges }),
    }
}

/// The file of an image that is named by its format, too.
fn file(name: &str) -> &Path {
    Path::new(name.split_once(':').map_or(name, |(_, path)| path))
}
