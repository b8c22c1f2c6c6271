//! The steps of a merge of a running disk's images, below the leaf: those of `ferrite image
//! merge-step`, which names the same. A merge of the leaf itself has more of them: see `leaf`.
//!
//! The order, and what the next daemon does if this one dies in a step: the same step again, which
//! makes no difference to what it has done.
//!
//! 1. `plan`: the ends of the stretch are found, and written to the state file. After `relink` the
//!    chain does not tell them any more.
//! 2. `grow`: a lower end that is too small grows while the disk is paused.
//! 3. `copy`: the data of the stretch are copied into the lower end, while the disk is served. No
//!    reader sees a difference, as images above have these data.
//! 4. `relink`: the disk is paused, the image above the stretch gets the lower end as its parent,
//!    and the disk is resumed with its own name.
//! 5. `clean`: images that no chain has any more are removed.

use std::process::Command;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::leaf;
use super::run::{Halt, Leave, Run};
use super::state::{Coalesce, CoalesceStep, Task};
use crate::Failure;

/// The result of the step `plan`.
#[derive(Deserialize)]
pub(super) struct Plan {
    /// The images that are merged, the upper end first.
    pub(super) images: Vec<String>,
    /// The lower end.
    pub(super) to: String,
    pub(super) must_grow: bool,
    /// Bytes of data in the leaf, if that is the upper end.
    #[serde(default)]
    pub(super) leaf_bytes: Option<u64>,
}

/// Sets in the state file the results of a step.
pub(super) type Known = Box<dyn Fn(&mut Coalesce)>;

/// A step, and the results of the one before.
pub(super) struct Next(pub(super) CoalesceStep, pub(super) Option<Known>);

/// Does all steps from this one on.
pub(super) fn run(run: &Run, begun: CoalesceStep) -> Result<(), Halt> {
    if begun == CoalesceStep::Undo {
        return Err(leaf::undo(run));
    }
    match steps(run, Next(begun, None)) {
        Err(halt @ (Halt::Cancelled | Halt::Failed(_))) => Err(leaf::go_back(run, halt)),
        done => done,
    }
}

fn steps(run: &Run, begun: Next) -> Result<(), Halt> {
    let mut next = begun;
    loop {
        let Next(step, known) = next;
        run.enter(|task| known_step(task, step, known.as_ref()))?;
        let coalesce = leaf::task(run);
        let then = |step| Next(step, None);
        next = match step {
            CoalesceStep::Plan => plan(run)?,
            CoalesceStep::Split => {
                while_paused(run)?;
                let grows = coalesce.top.is_some_and(|top| top.must_grow && top.rounds == 1);
                then(if grows { CoalesceStep::Grow } else { CoalesceStep::Copy })
            }
            CoalesceStep::Grow => {
                while_paused(run)?;
                then(CoalesceStep::Copy)
            }
            CoalesceStep::Copy => {
                run.child(&mut command(run)?, Leave::Any)?;
                then(CoalesceStep::Relink)
            }
            CoalesceStep::Relink => {
                while_paused(run)?;
                then(CoalesceStep::Clean)
            }
            CoalesceStep::Clean => {
                run.child(&mut command(run)?, Leave::No)?;
                match coalesce.top {
                    Some(_) => then(CoalesceStep::Leaf),
                    None => return Ok(()),
                }
            }
            CoalesceStep::Leaf => match leaf::merge(run)? {
                Some(next) => next,
                None => return Ok(()),
            },
            // It is begun by `leaf` only.
            CoalesceStep::Undo => return Err(leaf::undo(run)),
        };
    }
}

/// Notes a step, with what the step before has found.
pub(super) fn known_step(task: &mut Task, step: CoalesceStep, known: Option<&Known>) {
    let Task::Coalesce(coalesce) = task else { return };
    coalesce.step = step;
    if let Some(known) = known {
        known(coalesce);
    }
}

fn plan(run: &Run) -> Result<Next, Halt> {
    let plan: Plan = result("plan", run.child(&mut command(run)?, Leave::Any)?)?;
    if plan.leaf_bytes.is_some() {
        return leaf::planned(run, plan);
    }
    let step = if plan.must_grow { CoalesceStep::Grow } else { CoalesceStep::Copy };
    let known = move |coalesce: &mut Coalesce| {
        coalesce.from = plan.images.first().cloned();
        coalesce.to = Some(plan.to.clone());
    };
    Ok(Next(step, Some(Box::new(known))))
}

/// The result of a step.
pub(super) fn result<T: DeserializeOwned>(step: &str, result: Value) -> Result<T, Halt> {
    serde_json::from_value(result).map_err(|e| {
        let help = "start the job again; the daemon's program may have been exchanged";
        let why = format!("the result of the step {step} cannot be read: {e}");
        Halt::Failed(Failure { why, help: help.to_owned() })
    })
}

/// Does a step while the disk is paused. The disk is resumed whether the step works or not: its chain
/// is the old one or the new one.
pub(super) fn while_paused(run: &Run) -> Result<Value, Halt> {
    let mut command = command(run)?;
    let by = format!("job {}", run.state().id);
    let paused = run.insist(|| match run.served()? {
        // No guest has the image open.
        None => Ok(None),
        Some(disk) => run.with_pausing(|p| p.pause(disk, &by)).map(|()| Some(disk)).map_err(|e| {
            Halt::Failed(Failure {
                why: format!("disk {disk} cannot be paused: {}", e.why),
                help: format!("{}; then start the job again", e.help),
            })
        }),
    })?;
    run.reached("paused");
    let done = run.child(&mut command, Leave::No);
    run.reached("changed");
    let resumed = paused.map_or(Ok(()), |disk| {
        run.insist(|| run.with_pausing(|p| p.resume(disk, &by)).map_err(Halt::Failed)).map_err(
            |halt| {
                halt.because(|e| Failure {
                    why: format!("disk {disk} is paused and cannot be resumed: {}", e.why),
                    help: format!("{}; then ferrite disk resume {disk}", e.help),
                })
            },
        )
    });
    run.reached("resumed");
    // A guest that waits is the greater trouble.
    resumed.and(done)
}

/// The process of the step that was begun.
fn command(run: &Run) -> Result<Command, Halt> {
    let state = run.state();
    let coalesce = &leaf::task(run);
    let mut command = run.image_command()?;
    command.arg("merge-step").arg(coalesce.step.word()).arg(coalesce.leaf().name());
    // In a merge of the leaf, the upper end is the last snapshot.
    let from = match (&coalesce.top, coalesce.step) {
        (_, CoalesceStep::Leaf) => &None,
        (Some(top), _) => &top.snapshot,
        (None, _) => &coalesce.from,
    };
    let to = coalesce.to.as_ref().filter(|_| coalesce.step != CoalesceStep::Split);
    for (option, value) in [("--from", from.as_ref()), ("--to", to)] {
        command.args(value.into_iter().flat_map(|value| [option, value]));
    }
    let is_forced = coalesce.force;
    let takes_force = !matches!(coalesce.step, CoalesceStep::Split | CoalesceStep::Undo);
    command.args((is_forced && takes_force).then_some("--force"));
    match coalesce.step {
        CoalesceStep::Copy => {
            command.args(["--speeds", "--speed", &state.speed.unwrap_or(0).to_string()]);
        }
        CoalesceStep::Leaf | CoalesceStep::Undo => {
            command.args(["--most", &leaf::most(run, coalesce).to_string()]);
        }
        _ => {}
    }
    command.arg("--json");
    Ok(command)
}
