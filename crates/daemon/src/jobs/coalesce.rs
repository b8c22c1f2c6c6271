//! The steps of a merge of a running disk's images, below the leaf: those of `ferrite image
//! merge-step`, which names the same.
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

use super::run::{Halt, Leave, Run};
use super::state::{CoalesceStep, Task};
use crate::Failure;

/// The result of the step `plan`.
#[derive(Deserialize)]
struct Plan {
    /// The images that are merged, the upper end first.
    images: Vec<String>,
    /// The lower end.
    to: String,
    must_grow: bool,
}

/// Does all steps from this one on.
pub(super) fn run(run: &Run, begun: CoalesceStep) -> Result<(), Halt> {
    let (mut step, mut known) = (begun, None);
    loop {
        enter(run, step, known.take())?;
        step = match step {
            CoalesceStep::Plan => {
                let plan = plan(run)?;
                let next = if plan.must_grow { CoalesceStep::Grow } else { CoalesceStep::Copy };
                known = Some(plan);
                next
            }
            CoalesceStep::Grow => {
                while_paused(run)?;
                CoalesceStep::Copy
            }
            CoalesceStep::Copy => {
                run.child(&mut command(run)?, Leave::Any)?;
                CoalesceStep::Relink
            }
            CoalesceStep::Relink => {
                while_paused(run)?;
                CoalesceStep::Clean
            }
            CoalesceStep::Clean => return run.child(&mut command(run)?, Leave::No).map(drop),
        };
    }
}

/// Writes a step to the state file, with what the step before has found.
fn enter(run: &Run, step: CoalesceStep, known: Option<Plan>) -> Result<(), Halt> {
    run.enter(|task| match task {
        Task::Coalesce(coalesce) => {
            coalesce.step = step;
            if let Some(plan) = &known {
                coalesce.from = plan.images.first().cloned();
                coalesce.to = Some(plan.to.clone());
            }
        }
    })
}

fn plan(run: &Run) -> Result<Plan, Halt> {
    let result = run.child(&mut command(run)?, Leave::Any)?;
    serde_json::from_value(result).map_err(|e| {
        let help = "start the job again; the daemon's program may have been exchanged";
        let why = format!("the plan of the merge cannot be read: {e}");
        Halt::Failed(Failure { why, help: help.to_owned() })
    })
}

/// Does a step while the disk is paused. The disk is resumed whether the step works or not: its chain
/// is the old one or the new one.
fn while_paused(run: &Run) -> Result<(), Halt> {
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
    resumed.and(done.map(drop))
}

/// The process of the step that was begun.
fn command(run: &Run) -> Result<Command, Halt> {
    let state = run.state();
    let Task::Coalesce(coalesce) = &state.task;
    let mut command = run.means().tools()?.image();
    command.arg("merge-step").arg(coalesce.step.word()).arg(coalesce.leaf().name());
    for (option, value) in [("--from", &coalesce.from), ("--to", &coalesce.to)] {
        command.args(value.iter().flat_map(|value| [option, value]));
    }
    command.args(coalesce.force.then_some("--force"));
    if coalesce.step == CoalesceStep::Copy {
        command.args(["--speeds", "--speed", &state.speed.unwrap_or(0).to_string()]);
    }
    command.arg("--json");
    Ok(command)
}
