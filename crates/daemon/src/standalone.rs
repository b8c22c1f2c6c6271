//! A daemon of one disk that the command line names: `ferrite serve --control` and `ferrite export nbd --control`.
//!
//! The disk is a tap of the daemon's own, so all verbs, jobs and processes are those of every disk. No toolstack names
//! disks here, and xenstore is asked only for the guest that the disk is served to. Clients of NBD come by an export, or
//! by the keeper's socket, to which a link leads.
//!
//! The daemon has a run directory of its own. A file in it, the marker, names the image that was given. If the daemon is
//! killed, the disk stays served, and the next one finds it there: under the same image's name, whichever image the disk
//! has by now. When the daemon ends in good order, the image is closed before, and nothing is left of the disk: the caller
//! removes the directory. If a guest has the disk, its state stays there for the next daemon.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_keeper::nbd_socket;
use ferrite_serve::waker::Waker;

use crate::control::protocol::ExportParams;
use crate::devices;
use crate::params::Image;
use crate::pause::{self, NotDone, Pause};
use crate::state::DiskId;
use crate::table::{Entry, Phase, detached};
use crate::taps::{self, Joined};
use crate::wait::wait_for;
use crate::{Daemon, Failure, Xen, control, exports, vhost};

/// The name of the marker. It contains the name of the image that was given.
const MARKER: &str = "standalone";
/// How often ended threads and old jobs are looked for.
const LOOK: Duration = Duration::from_secs(1);
/// How long a cancelled job may take to come to its end.
const CANCELLED_WITHIN: Duration = Duration::from_secs(60);
/// How long closing the image may take: requests under way, and the tables.
const CLOSED_WITHIN: Duration = Duration::from_secs(300);

/// The disk of a standalone daemon.
#[derive(Clone, Debug)]
pub struct Standalone {
    /// The image.
    pub image: Image,
    /// Whether the image is opened read-only.
    pub read_only: bool,
    /// The guest's disk that it is, if a guest has it.
    pub guest: Option<DiskId>,
    /// How clients of other hosts, or a front end of vhost-user, reach it. The disk in it is filled in.
    pub export: Option<ExportParams>,
    /// The link that leads to the disk's NBD socket.
    pub socket: Option<PathBuf>,
}

/// Whether this run directory is a standalone daemon's.
pub fn is_standalone(run: &Path) -> bool {
    run.join(MARKER).exists()
}

impl Standalone {
    /// Makes the run directory of this disk, or finds that of a killed predecessor. Call it before [`Daemon::new`].
    ///
    /// # Errors
    /// The directory has other things in it, is another image's, or cannot be made.
    pub fn prepare(&self, run: &Path) -> Result<(), Failure> {
        let failed = |e: &io::Error| Failure {
            why: format!("cannot make {}: {e}", run.display()),
            help: "name a folder of this user's on tmpfs that does not exist yet".to_owned(),
        };
        let name = self.image.name().into_encoded_bytes();
        match fs::read(run.join(MARKER)) {
            Ok(known) if known == name => return Ok(()),
            Ok(known) => {
                let known = String::from_utf8_lossy(&known).into_owned();
                return Err(Failure {
                    why: format!("{} is the control folder of {known}", run.display()),
                    help: "name another folder, or serve that image; each disk has one of its own"
                        .to_owned(),
                });
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed(&e)),
        }
        DirBuilder::new().recursive(true).mode(0o700).create(run).map_err(|e| failed(&e))?;
        if fs::read_dir(run).map_err(|e| failed(&e))?.next().is_some() {
            return Err(Failure {
                why: format!("{} has other things in it", run.display()),
                help: "name a folder that does not exist yet: it is made, and removed at the end"
                    .to_owned(),
            });
        }
        let marker = run.join(MARKER);
        fs::write(marker.with_extension("new"), name).map_err(|e| failed(&e))?;
        fs::rename(marker.with_extension("new"), marker).map_err(|e| failed(&e))
    }
}

impl Daemon {
    /// Serves one disk until `stop` is woken or its guest has left it, and closes its image. `ready` is called with the
    /// disk, and where its exports listen, when it is served and the control socket exists.
    ///
    /// # Errors
    /// The disk cannot be opened, exported or closed. One that cannot be closed stays served.
    pub fn run_standalone(
        &self,
        disk: &Standalone,
        stop: &Waker,
        ready: &dyn Fn(DiskId, &[String]),
    ) -> Result<(), Failure> {
        // `disk list` reports a lost xenstore. This daemon takes no disks from xenstore, so it reports none.
        self.shared.set_xen(Xen::Connected);
        let control = self.begin().map_err(|e| Failure {
            why: format!("cannot make the control socket: {e}"),
            help: "name a shorter path, on a file system that has sockets".to_owned(),
        })?;
        let served = self.serve_standalone(disk, stop, ready);
        self.shared.stop.wake();
        self.end(control);
        served
    }

    fn serve_standalone(
        &self,
        disk: &Standalone,
        stop: &Waker,
        ready: &dyn Fn(DiskId, &[String]),
    ) -> Result<(), Failure> {
        let left = self.shared.table.read(|disks| disks.keys().copied().find(|id| id.is_tap()));
        let id = match left {
            Some(left) => left,
            None => taps::open_own(&self.shared, &disk.image, disk.read_only)
                .map(DiskId::tap)
                .map_err(|e| e.failure)?,
        };
        let reached = self.reach(disk, id);
        if let Ok(places) = &reached {
            ready(id, places);
            self.wait_for_end(disk, id, stop);
        }
        let closed = self.close_standalone(disk, id);
        reached.map(drop).and(closed)
    }

    /// Has the guest or clients reach the disk. Returns where exports listen.
    fn reach(&self, disk: &Standalone, id: DiskId) -> Result<Vec<String>, Failure> {
        let shared = &self.shared;
        if let Some(guest) = disk.guest
            && let Joined::No(why) = taps::join(shared, id, guest)
        {
            return Err(Failure { why, help: "run the same command again".to_owned() });
        }
        let has_export = exports::has(shared, id) || vhost::has(shared, id);
        if let (Some(export), false) = (&disk.export, has_export) {
            let asked = ExportParams { disk: id, ..export.clone() };
            control::export(shared, &asked).map_err(|e| Failure {
                why: e.message,
                help: e.data.map_or_else(String::new, |data| data.help),
            })?;
        }
        if let Some(link) = &disk.socket {
            let socket = nbd_socket(&shared.paths.run.join(id.file_name()));
            make_link(&socket, link).map_err(|e| Failure {
                why: format!("cannot make {}: {e}", link.display()),
                help: "name a path in a folder that exists, where nothing is".to_owned(),
            })?;
        }
        let rows = control::exports(shared).exports.into_iter();
        Ok(rows.flat_map(|row| row.listen.into_iter().chain(row.vhost_user)).collect())
    }

    /// Returns when the daemon is to stop, the guest has left, or the disk was closed by its control socket.
    fn wait_for_end(&self, disk: &Standalone, id: DiskId, stop: &Waker) {
        let shared = &self.shared;
        loop {
            let [stopped, _] = wait_for([stop.fd(), shared.wake.fd()], Some(LOOK));
            shared.wake.clear();
            shared.table.reap();
            shared.jobs.expire();
            let guest = shared.table.read(|disks| Some(disks.get(&id)?.tap.as_ref()?.guest));
            let has_left = guest.is_none_or(|guest| disk.guest.is_some() && guest.is_none());
            if stopped || has_left {
                return;
            }
        }
    }

    /// Closes the disk. The order: jobs, clients, the image.
    fn close_standalone(&self, disk: &Standalone, id: DiskId) -> Result<(), Failure> {
        let shared = &self.shared;
        while let Some(job) = shared.jobs.of_disk(id) {
            // One that cannot be cancelled ends soon.
            match shared.jobs.cancel(job) {
                Ok(()) => tracing::warn!("job {job} is cancelled, since its disk is closed"),
                Err(e) => tracing::info!("waiting for job {job}: {e}"),
            }
            if !shared.jobs.wait(job, CANCELLED_WITHIN).unwrap_or(true) {
                return Err(Failure {
                    why: format!("job {job} changes the images of the disk and does not end"),
                    help: "the disk stays served: run the same command again, and look at the job by ferrite job list"
                        .to_owned(),
                });
            }
        }
        if exports::has(shared, id) {
            exports::remove(shared, id).map_err(devices::NotDone::failure)?;
        }
        let _ = vhost::remove(shared, id);
        let of_entry = |entry: &Entry| {
            let guest = entry.tap.as_ref().and_then(|tap| tap.guest);
            (entry.image.clone(), guest, entry.phase == Phase::Paused)
        };
        let seen = shared.table.read(|disks| disks.get(&id).map(of_entry));
        let (image, guest, is_paused) = seen.unwrap_or_default();
        if guest.is_some() {
            return self.leave_guest(id, is_paused);
        }
        taps::close_for_good(shared, id.devid, CLOSED_WITHIN).map_err(|e| e.failure)?;
        if let Some(image) = image.filter(|image| *image != disk.image) {
            tracing::warn!("the disk is {} by now: name that next time", image.name().display());
        }
        if let Some(link) = &disk.socket {
            let _ = fs::remove_file(link);
        }
        Ok(())
    }
}

impl Daemon {
    /// Closes the image of a guest that stays. The run directory keeps the state of its rings, and that the disk is
    /// paused: the next process that serves it ends the pause, unless another client had asked for it.
    fn leave_guest(&self, id: DiskId, is_paused: bool) -> Result<(), Failure> {
        let pause = Pause::step_of("a stop of the process that serves it");
        if !is_paused {
            pause::pause(&self.shared, id, &pause, CLOSED_WITHIN).map_err(|e| match e {
                NotDone::NoDisk => detached(),
                NotDone::NotInTime(failure) | NotDone::Failed(failure) => failure,
            })?;
        }
        self.shared.serving.remove(id);
        tracing::info!("stopped; the guest waits until the same command serves its disk again");
        Ok(())
    }
}

/// Makes a link, or replaces that of a killed predecessor.
fn make_link(socket: &Path, link: &Path) -> io::Result<()> {
    match symlink(socket, link) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => match fs::read_link(link) {
            Ok(target) if target == socket => Ok(()),
            _ => Err(e),
        },
        made => made,
    }
}
