//! A disk that the daemon serves, for a backup while its guest writes.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrite_daemon::Paths;
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{
    Attached, CoalesceParams, Details, DirtyParams, Job, JobKind, JobList, JobParams, JobPhase,
    MapVerb, Nothing, ShowParams, SnapshotParams,
};
use ferrite_daemon::params::Format;
use ferrite_daemon::state::{DiskState, States};
use ferrite_disk::{DiskError, ErrorKind, ImageName};
use ferrite_image_tools::{BackupRecord, ImageTools, LiveDisk};
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::disk::change::{ANSWER as CHANGE, FROZEN, hook};
use crate::disk::{ANSWER, call, id, vbd};
use crate::exit::{Code, Failure};
use crate::guests::{GuestDisk, Names};
use crate::image::Out;
use crate::image::args::NamedArgs;
use crate::job::is_away;
use crate::store;
use crate::vdev::Vbd;

/// The pause between two looks at a job, or at a daemon that is being started again.
const LOOK: Duration = Duration::from_millis(100);
/// How long a daemon may take to come again.
const COMES_AGAIN: Duration = Duration::from_secs(60);
/// How often a merge is begun anew, if another job has come first.
const TRIES: u32 = 3;

/// See the module text.
pub(super) struct Served<'a> {
    pub(super) run: &'a Path,
    pub(super) disk: Vbd,
    /// The name of the disk for people.
    pub(super) name: String,
    /// The format of the image that a raw disk's guest goes on in.
    pub(super) leaf: Option<Format>,
    /// Most bytes a second of a merge.
    pub(super) speed: Option<u64>,
    /// The command that is run before and after the snapshot.
    pub(super) quiesce: Option<&'a str>,
    /// For the snapshots of a store.
    pub(super) tools: &'a ImageTools<'a>,
    pub(super) out: &'a Out<'a>,
}

/// The disk of the daemon that the argument of a command names; `None`: it names an image.
pub(super) fn named(args: &NamedArgs) -> Result<Option<GuestDisk>, Failure> {
    let text = args.image.to_str().filter(|_| args.format.is_none());
    let Some(disk) = text.and_then(|text| text.parse::<GuestDisk>().ok()) else { return Ok(None) };
    match Path::new(&args.image).symlink_metadata() {
        Err(_) => Ok(Some(disk)),
        Ok(_) => {
            let name = args.image.display();
            let what = format!("cannot tell what {name} is");
            let help = format!("say ./{name} for the file, or name the guest by its number");
            Err(Failure::new(what, "it can be a file here, and a guest's disk", help)
                .with_code(Code::USAGE))
        }
    }
}

/// Locks a disk against a second backup at the same time. The lock ends with the file.
pub(super) fn lock(run: &Path, disk: Vbd) -> Result<File, Failure> {
    let name = Names::read().disk(disk);
    let what = || format!("cannot back up {name}");
    let folder = run.join("backups");
    let path: PathBuf = folder.join(format!("{}-{}.lock", disk.domain, disk.device));
    let cannot = |e: std::io::Error| {
        let why = format!("cannot open {}: {e}", path.display());
        Failure::new(what(), why, "run this as root on the host of the daemon")
    };
    if run.exists() {
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&folder).map_err(cannot)?;
    }
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(cannot)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::AGAIN) => {
            let help = "wait for that command, and run this one again";
            Err(Failure::new(what(), "another backup of this disk is being made", help)
                .with_code(Code::BUSY))
        }
        Err(e) => Err(cannot(e.into())),
    }
}

/// The rest of an interrupted backup of a disk.
pub(crate) struct LeftBackup {
    /// The disk's name for people.
    pub(crate) name: String,
    /// The snapshot, which makes the disk's chain longer.
    pub(crate) snapshot: PathBuf,
    /// The folder of the backup.
    pub(crate) folder: PathBuf,
}

/// The rests of interrupted backups of disks that the daemon with this folder serves.
pub(crate) fn left_backups(run: &Path, names: &Names) -> Vec<LeftBackup> {
    let states = States::peek_all(&Paths { run: run.to_owned() }.states());
    let of_state = |state: DiskState| {
        let record = BackupRecord::of(&state.image().path).ok()??;
        let disk = vbd(state.id);
        let is_made = || lock(run, disk).is_err_and(|e| e.code == Code::BUSY);
        if !record.is_left() || is_made() {
            return None;
        }
        let (snapshot, folder) = (record.snapshot, record.folder);
        Some(LeftBackup { name: names.disk(disk), snapshot, folder })
    };
    states.into_iter().filter_map(of_state).collect()
}

impl Served<'_> {
    fn error(&self, what: &str, e: &ClientError) -> DiskError {
        let kind = match (e.is_no_disk(), e.is_in_use()) {
            (true, _) => ErrorKind::NotFound,
            (_, true) => ErrorKind::InUse,
            _ => ErrorKind::Io,
        };
        DiskError::new(kind, format!("cannot {what} disk {}", self.name), e.to_string(), e.help())
    }

    fn refused(&self, what: &str, why: impl Into<String>, help: impl Into<String>) -> DiskError {
        let what = format!("cannot {what} disk {}", self.name);
        DiskError::new(ErrorKind::Refused, what, why, help)
    }

    /// Sends a request to a daemon that may be starting again. It may be executed twice.
    fn ask<T: DeserializeOwned>(
        &self,
        method: &str,
        params: &impl Serialize,
        within: Duration,
    ) -> Result<T, ClientError> {
        let end = Instant::now() + COMES_AGAIN;
        loop {
            match call(self.run, method, params, within) {
                Err(e) if is_away(&e) && Instant::now() < end => std::thread::sleep(LOOK),
                answered => return answered,
            }
        }
    }

    fn show(&self) -> Result<Option<Details>, DiskError> {
        let asked = ShowParams { disk: id(self.disk) };
        match self.ask("disk.show", &asked, ANSWER) {
            Ok(details) => Ok(Some(details)),
            Err(e) if e.is_no_disk() => Ok(None),
            Err(e) => Err(self.error("look at", &e)),
        }
    }

    /// The job that changes the disk's images now.
    fn job(&self) -> Result<Option<Job>, DiskError> {
        let jobs: JobList = self
            .ask("job.list", &Nothing {}, ANSWER)
            .map_err(|e| self.error("list the jobs of", &e))?;
        let is_it = |job: &Job| job.disk == id(self.disk) && !job.phase.has_ended();
        Ok(jobs.jobs.into_iter().find(is_it))
    }

    /// Waits for the end of a job. An interruption does not end it: the job belongs to the daemon.
    fn wait(&self, job: u64) -> Result<Job, DiskError> {
        loop {
            let found: Job = self
                .ask("job.show", &JobParams { id: job }, ANSWER)
                .map_err(|e| self.error("follow the merge of", &e))?;
            if found.phase.has_ended() {
                return Ok(found);
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl LiveDisk for Served<'_> {
    fn leaf(&self) -> Result<Option<ImageName>, DiskError> {
        let Some(details) = self.show()? else { return Ok(None) };
        let (Some(format), Some(image)) = (details.disk.format, details.disk.image) else {
            return Err(self.refused("back up", "it has no image", "it is an empty drive"));
        };
        match format {
            Format::Nbd => {
                let why = "its data are on another server";
                Err(self.refused("back up", why, "back it up where that server runs"))
            }
            Format::Raw if self.leaf.is_none() => {
                let why = "a raw image has no snapshots of its own";
                let help = "with --leaf qcow2 the guest goes on in a qcow2 image on it, once and for all; or detach the \
                            disk, and back up its image";
                Err(self.refused("back up", why, help))
            }
            _ => ImageName::parse(&format!("{}:{image}", format.word())).map(Some),
        }
    }

    fn snapshot(&self, to: &ImageName, begin_map: Option<&str>) -> Result<(), DiskError> {
        // A snapshot of a volume is in the same store.
        let name = to.volume().map_or(to.path.to_str(), |(_, snapshot)| Some(snapshot));
        let Some(name) = name.map(str::to_owned) else {
            return Err(self.refused("back up", "its name is not UTF-8", "rename its image"));
        };
        let leaf = self.leaf.filter(|_| to.format == ferrite_disk::Format::Raw);
        let begin_map = begin_map.map(str::to_owned);
        let asked = SnapshotParams { disk: id(self.disk), name, leaf, begin_map };
        let quiesce = |word: &str| self.quiesce.map_or(Ok(()), |command| hook(command, word));
        if let Err(why) = quiesce("before") {
            let help = match quiesce("after") {
                Ok(()) => "nothing was changed: run it by hand with the word before",
                Err(_) => FROZEN,
            };
            let why = format!("the command of --quiesce has failed (before): {why}");
            return Err(self.refused("back up", why, help));
        }
        // Not twice: the first one may have been made.
        let done = call::<Attached>(self.run, "disk.snapshot", &asked, CHANGE)
            .map(drop)
            .map_err(|e| self.error("snapshot", &e));
        // The guest is to work on whatever became of the snapshot.
        let thawed = quiesce("after");
        done?;
        thawed.map_err(|why| {
            let why = format!("the command of --quiesce has failed (after): {why}");
            self.refused("back up", why, FROZEN)
        })
    }

    fn end_map(&self, map: &str) -> Result<(), DiskError> {
        let asked = DirtyParams { disk: id(self.disk), verb: MapVerb::Remove, map: map.to_owned() };
        self.ask::<Attached>("disk.dirty", &asked, CHANGE)
            .map(drop)
            .map_err(|e| self.error("end a dirty map of", &e))
    }

    fn remove_snapshot(&self, snapshot: &ImageName) -> Result<(), DiskError> {
        store::remove_snapshot(self.tools, self.out, &snapshot.path)
    }

    fn merge(&self, leaf: &ImageName, snapshot: &ImageName) -> Result<(), DiskError> {
        let is_there = || snapshot.path.symlink_metadata().is_ok();
        let path = |image: &ImageName| Some(image.path.to_str()?.to_owned());
        for _ in 0..TRIES {
            if let Some(job) = self.job()? {
                if job.kind != JobKind::Coalesce {
                    let (why, help) = (
                        format!("job {} works on it", job.id),
                        format!("wait for that job, or cancel it (ferrite job cancel {})", job.id),
                    );
                    return Err(self.refused("merge the snapshot of", why, help));
                }
                self.wait(job.id)?;
            }
            if !is_there() {
                return Ok(());
            }
            let asked = CoalesceParams {
                disk: id(self.disk),
                from: path(leaf),
                to: path(snapshot),
                force: false,
                speed: self.speed,
            };
            let job: Job = match self.ask("disk.coalesce", &asked, ANSWER) {
                Ok(job) => job,
                Err(e) if e.is_in_use() => continue,
                Err(e) => return Err(self.error("merge the snapshot of", &e)),
            };
            let job = self.wait(job.id)?;
            if job.phase == JobPhase::Done {
                return Ok(());
            }
            let why = job.why.unwrap_or_else(|| format!("job {} was cancelled", job.id));
            let help = job.help.unwrap_or_else(|| format!("ferrite job show {}", job.id));
            return Err(self.refused("merge the snapshot of", why, help));
        }
        let help = "ferrite job list shows them; run the same command again";
        Err(self.refused("merge the snapshot of", "other jobs change it", help))
    }
}
