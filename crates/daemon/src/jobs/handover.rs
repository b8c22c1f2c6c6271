//! The switch-over of a mirror to another host: the disk is closed here, and the token moves
//! (docs/internals/migration.md). `crate::migration::send` has the order of the durable writes.

use std::time::Duration;

use super::mirror::{is_complete, pause, resume};
use super::run::{Halt, Run};
use super::state::Mirror;
use crate::migration::send::{self, Settled};
use crate::migration::token::Sender;
use crate::state::DiskId;
use crate::wait::Backoff;
use crate::{Failure, Step};

/// The pauses between two questions to the other host.
const ASK: Duration = Duration::from_millis(100);
const ASK_MAX: Duration = Duration::from_secs(5);

/// Moves the disk to the other host. `false`: the copy is not complete any more.
///
/// An earlier daemon may have begun: then the image has its mark, and the guest waits.
pub(super) fn switch(run: &Run, mirror: &Mirror, id: &str) -> Result<bool, Halt> {
    let by = format!("job {}", run.id());
    let record = send::read(run.shared(), id).map_err(Halt::Failed)?;
    let disk = match record.state {
        Sender::Owner => {
            let disk = pause(run, &by)?;
            match is_complete(run) {
                Ok(true) => {}
                not => {
                    resume(run, disk, &by)?;
                    return not;
                }
            }
            if let Err(e) = send::leave(run.shared(), id) {
                // The mark may be there all the same.
                return match settle(run, id)? {
                    Settled::Back => resume(run, disk, &by).and(Err(Halt::Failed(e))),
                    Settled::Moved => moved(run, mirror, Some(disk), &by),
                };
            }
            (run.shared().on_step)(Step::Job("left"));
            Some(disk)
        }
        Sender::Leaving | Sender::Moved => run.served()?,
    };
    match settle(run, id)? {
        Settled::Moved => moved(run, mirror, disk, &by),
        Settled::Back => {
            if let Some(disk) = disk {
                resume(run, disk, &by)?;
            }
            let over = send::read(run.shared(), id).map_err(Halt::Failed)?.done;
            // It was not offered to the other host: the disk has gone on, and so does its copy.
            if over { Err(Halt::Cancelled) } else { Ok(false) }
        }
    }
}

/// Asks the other host until it has decided. Its guest waits.
fn settle(run: &Run, id: &str) -> Result<Settled, Halt> {
    let mut backoff = Backoff::new(ASK, ASK_MAX);
    loop {
        match send::settle(run.shared(), id) {
            Ok(settled) => {
                run.jobs().set_trouble(run.id(), None);
                return Ok(settled);
            }
            Err(Failure { why, help }) => {
                let trouble = format!(
                    "it is not known which host has the disk, and its guest waits: {why}; {help}"
                );
                run.jobs().set_trouble(run.id(), Some(trouble));
                run.rest(backoff.after(false))?;
            }
        }
    }
}

/// The disk is at the other host. Its guest goes on with it there, or waits until it is detached.
fn moved(run: &Run, mirror: &Mirror, disk: Option<DiskId>, by: &str) -> Result<bool, Halt> {
    let id = mirror.migration.as_ref().map(|migration| migration.id.as_str()).unwrap_or_default();
    let record = send::read(run.shared(), id).map_err(Halt::Failed)?;
    let Some(disk) = disk else { return Ok(true) };
    if !record.keep {
        // The mark refuses the image. So the disk stays paused over the end of any process, and its row says why.
        if let Err(e) = run.with_pausing(|p| p.resume(disk, by)) {
            tracing::info!("disk {disk} waits until it is detached: {e}");
        }
        return Ok(true);
    }
    let target = mirror.target_image().ok_or_else(|| {
        let help = "correct hosts below [migration] in ferrite.toml".to_owned();
        Halt::Failed(Failure { why: format!("{:.256} is no disk's name", mirror.target), help })
    })?;
    run.insist(|| run.with_pausing(|p| p.resume_as(disk, by, Some(&target))).map_err(Halt::Failed))
        .map_err(|halt| {
            halt.because(|e| Failure {
                why: format!("the disk is at {}, and cannot go on with it: {}", record.host, e.why),
                help: format!(
                    "{}; then ferrite disk resume {disk} --image {}",
                    e.help,
                    target.path.display()
                ),
            })
        })?;
    run.reached("resumed");
    Ok(true)
}
