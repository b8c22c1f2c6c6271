//! What is done with the keeper of a disk when its image is closed: the disk is gone, it is paused,
//! or it gets another program.

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use ferrite_keeper::{Keeper, Line};
use ferrite_serve::blkif::lifecycle::{ServeError, pause, release_tables, retire};
use ferrite_serve::waker::Waker;

use super::{failure, has_no_listener, not_served};
use crate::wait::wait_for;
use crate::{Assignment, Failure, Step};

/// How long the worker of a disk that is gone may take to close the image. Then it is killed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Has the worker of a paused disk close its image. Returns its keeper's process number.
///
/// A worker that ends meanwhile leaves a table that names the image. Its guest would not be served
/// from another one.
pub(super) fn close(socket: &Path, run_dir: &Path, stop: &Waker) -> Result<Option<u32>, Failure> {
    let release =
        || release_tables(run_dir).map_err(|e| failure("release the disk's in-flight table", &e));
    let has_keeper = || !Keeper::connect(socket).is_err_and(|e| has_no_listener(&e));
    let line = match Keeper::connect(socket).and_then(|keeper| keeper.line(None)) {
        // The worker has ended with its keeper.
        Err(e) if has_no_listener(&e) => return release().map(|()| None),
        line => line.map_err(|e| failure("reach the keeper", &e))?,
    };
    match pause(line.fd.as_fd(), stop, None) {
        Ok(()) => Ok(Some(line.keeper as u32)),
        // The next worker of a paused disk opens nothing by itself.
        Err(ServeError::WorkerLost(_)) => release().map(|()| Some(line.keeper as u32)),
        // It could not do all without its keeper, and ends as well.
        Err(e) if !matches!(e, ServeError::Left) && !has_keeper() => release().map(|()| None),
        Err(e) => Err(not_served(e)),
    }
}

/// Replaces the program of a paused disk's keeper and worker.
pub(super) fn upgrade_closed(socket: &Path, binary: &Path) -> Result<(), Failure> {
    let upgraded = match Keeper::connect(socket) {
        // The next keeper is of the daemon's program.
        Err(e) if has_no_listener(&e) => return Ok(()),
        keeper => keeper.and_then(|keeper| keeper.upgrade(binary)),
    };
    upgraded.map_err(|e| Failure {
        why: format!("cannot run {}: {e}", binary.display()),
        help: "name a program of ferrite".to_owned(),
    })
}

/// Ends the keeper of a disk that is gone. Its end may have been missed, so the image may be open.
/// Only this worker knows what has to be written before others may use the image.
pub(super) fn end_closed(keeper: Keeper) -> io::Result<()> {
    // A keeper without an image has no worker that could close it.
    if keeper.spec()?.is_idle() {
        return keeper.end();
    }
    let line = keeper.line(None)?;
    let why = match retire(line.fd.as_fd(), &Waker::new()?, Some(CLOSE_TIMEOUT)) {
        // The other disks of the worker go on.
        Ok(()) => return keeper.leave(),
        // A worker that is lost has nothing open any more.
        Err(ServeError::WorkerLost(_)) => return keeper.end(),
        Err(ServeError::Left) => format!("it took more than {} s", CLOSE_TIMEOUT.as_secs()),
        Err(e) => e.to_string(),
    };
    tracing::warn!(
        "the image of a detached disk was not closed: {why}; its answered writes are kept on this \
         host, and are there when ferrite opens the image"
    );
    keeper.end()
}

/// Upgrades a disk, and all disks that its worker serves. The image is closed first, so that the
/// next program starts from the image alone.
pub(super) fn upgrade(
    disk: &Assignment<'_>,
    keeper: &Keeper,
    line: &Line,
    binary: &Path,
    stop: &Waker,
) -> Result<(), Failure> {
    let participant = disk.participant();
    let retired = match retire(line.fd.as_fd(), stop, None) {
        // A worker that has ended leaves what the next one recovers from.
        Ok(()) | Err(ServeError::WorkerLost(_)) => Ok(()),
        Err(e) => Err(not_served(e)),
    };
    if retired.is_ok() {
        disk.reached(Step::Retired);
    }
    let replace = || {
        keeper.upgrade(binary).map_err(|e| Failure {
            why: format!("cannot run {}: {e}", binary.display()),
            help: "the old program still serves the disk; name a program of ferrite".to_owned(),
        })?;
        disk.reached(Step::Upgraded);
        Ok(())
    };
    participant.finish(retired, replace, || wait_for([stop.fd()], Some(Duration::ZERO)) == [true])
}
