//! Pauses of disks that are steps of jobs.

use std::time::Duration;

use super::Pausing;
use crate::params::Image;
use crate::pause::{self, NotDone, Pause};
use crate::state::DiskId;
use crate::table::{Entry, Phase, detached};
use crate::{Failure, Shared};

/// How long a pause and its end may take each.
const WITHIN: Duration = Duration::from_secs(60);

/// Pauses by the daemon itself.
pub(super) struct Own<'a>(pub(super) &'a Shared);

impl Own<'_> {
    fn read<T>(&self, disk: DiskId, f: impl FnOnce(&Entry) -> T) -> Option<T> {
        self.0.table.read(|disks| disks.get(&disk).map(f))
    }
}

impl Pausing for Own<'_> {
    fn pause(&self, disk: DiskId, by: &str) -> Result<(), Failure> {
        // The job was interrupted in this pause, and the disk could not go on.
        let is_left = |entry: &Entry| {
            let is_own = |pause: &Pause| pause.by == by && !pause.is_step;
            entry.phase == Phase::Paused && entry.pause.as_ref().is_some_and(is_own)
        };
        if self.read(disk, is_left) == Some(true) {
            return Ok(());
        }
        pause::pause(self.0, disk, &Pause::step_of(by), WITHIN).map_err(failure)
    }

    fn resume(&self, disk: DiskId, by: &str) -> Result<(), Failure> {
        self.resume_as(disk, by, None)
    }

    fn resume_as(&self, disk: DiskId, _: &str, image: Option<&Image>) -> Result<(), Failure> {
        // It was detached meanwhile, or an administrator has resumed it.
        let Some(Some(is_step)) = self.read(disk, |entry| entry.pause.as_ref().map(|p| p.is_step))
        else {
            return Ok(());
        };
        match pause::resume_by(self.0, disk, image.cloned(), is_step, true, WITHIN) {
            Err(NotDone::NoDisk) => Ok(()),
            done => done.map_err(failure),
        }
    }
}

fn failure(e: NotDone) -> Failure {
    match e {
        NotDone::NoDisk => detached(),
        NotDone::NotInTime(failure) | NotDone::Failed(failure) => failure,
    }
}
