//! The state files of jobs: one small file for each in `/run/ferrite/jobs`, for the next daemon.
//!
//! A job's file is written before each of its steps. It stays when the job has ended, with the
//! result. `crate::state_files` replaces and reads it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use ferrite_host::clock::secret;
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::params::{Format, Image, Params};
use crate::state::DiskId;
use crate::state_files::{StateFiles, Stated};

/// The version of the files.
const VERSION: u32 = 1;

/// The number of a job.
pub type JobId = u64;

/// What a job does, and how far it is. Each kind has steps of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Merges images of a running disk's chain.
    Coalesce(Coalesce),
    /// Has all writes of a running disk go to another one, too.
    Mirror(Mirror),
}

/// A mirror of a running disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mirror {
    /// The image that the disk is served from.
    pub source: Image,
    /// The target, as `FORMAT:PATH` or the URI of an export.
    pub target: String,
    /// The name of its sessions with the target's server: so the server ends those of a killed worker.
    #[serde(default)]
    pub session: String,
    /// Whether the disk goes on with the target, once that has all.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub switches: bool,
    /// Whether this mirror resumes an earlier one: no other program has written to the target since then.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub resumes: bool,
    /// Whether what the target has already is compared, and not written.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub compares: bool,
    /// Bytes of the disk, once that is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes: Option<u64>,
    /// The name of the source's dirty map that says what the target lacks, once that is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub map: Option<String>,
    /// The reason and the help of the failure that ends it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failed: Option<(String, String)>,
    /// The migration to another host that it is the copy of.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub migration: Option<MirrorMigration>,
    /// The step that was begun.
    pub step: MirrorStep,
}

/// The migration of a mirror (`crate::migration`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorMigration {
    /// Its identifier.
    pub id: String,
}

/// The steps of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MirrorStep {
    /// Whether the target fits.
    Check,
    /// The disk is paused, and goes on with the mirror.
    Attach,
    /// The target gets what it lacks.
    Copy,
    /// The target has all, and gets each write.
    Mirror,
    /// The disk is paused, and goes on with the target.
    Switch,
    /// The disk is paused, and goes on without the mirror.
    Detach,
}

impl MirrorStep {
    /// The step's name for people.
    pub fn word(self) -> &'static str {
        match self {
            MirrorStep::Check => "check",
            MirrorStep::Attach => "attach",
            MirrorStep::Copy => "copy",
            MirrorStep::Mirror => "mirror",
            MirrorStep::Switch => "switch",
            MirrorStep::Detach => "detach",
        }
    }

    /// Whether workers that open the source have to open the mirror, too.
    pub fn is_mirrored(self) -> bool {
        !matches!(self, MirrorStep::Check | MirrorStep::Detach)
    }
}

impl Mirror {
    /// A mirror that has not begun.
    pub fn new(source: &Image, target: String, switches: bool) -> Mirror {
        let (source, step, map) = (source.clone(), MirrorStep::Check, None);
        let (resumes, compares) = (false, false);
        // Without a random number it has no name, and a server is given time to end older requests.
        let session =
            secret::<8>().map(|number| format!("mirror-{:016x}", u64::from_ne_bytes(number)));
        let session = session.unwrap_or_default();
        let (bytes, failed, migration) = (None, None, None);
        Mirror {
            source,
            target,
            session,
            switches,
            resumes,
            compares,
            bytes,
            map,
            failed,
            migration,
            step,
        }
    }

    /// Goes on with a target that an earlier mirror had.
    #[must_use]
    pub fn resumed(self, resumes: bool) -> Mirror {
        Mirror { resumes, ..self }
    }

    /// Compares what the target has, and writes only what differs.
    #[must_use]
    pub fn comparing(self, compares: bool) -> Mirror {
        Mirror { compares, ..self }
    }

    /// The target as workers open it.
    pub fn worker_target(&self) -> String {
        let is_export = self.target.contains("://") && self.target.starts_with("nbd");
        if !is_export || self.session.is_empty() || self.target.contains("session=") {
            return self.target.clone();
        }
        let sign = if self.target.contains('?') { '&' } else { '?' };
        format!("{}{sign}session={}", self.target, self.session)
    }

    /// The target as an image that a disk can have.
    pub fn target_image(&self) -> Option<Image> {
        match Params::parse(self.target.as_bytes()) {
            Params::Image(image) => Some(image),
            _ => None,
        }
    }
}

/// The merge of a stretch of a chain, below its leaf.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coalesce {
    format: Format,
    /// The leaf's path as bytes, since paths need not be text.
    leaf: Vec<u8>,
    /// The highest image that is merged.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from: Option<String>,
    /// The image that it is merged into.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub to: Option<String>,
    /// Whether it is merged even if images elsewhere change, or may.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub force: bool,
    /// The merge of the leaf itself, once it is known to be one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub top: Option<Top>,
    /// The step that was begun.
    pub step: CoalesceStep,
}

/// How far a merge of the leaf itself is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Top {
    /// The name of the snapshot, as `FORMAT:PATH`. It is written here before it is given.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub snapshot: Option<String>,
    /// How many snapshots were made for it, with this one.
    pub rounds: u32,
    /// Bytes of data in the leaf after the last round.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub left: Option<u64>,
    /// Whether the lower end has to grow.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub must_grow: bool,
    /// The reason and the help of the failure that is undone.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failed: Option<(String, String)>,
}

/// The steps of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CoalesceStep {
    /// The ends of the stretch are found.
    Plan,
    /// The lower end grows while the disk is paused.
    Grow,
    /// Data are copied while the disk is served.
    Copy,
    /// The chain gets its new links while the disk is paused.
    Relink,
    /// Images that are not used any more are removed.
    Clean,
    /// The leaf gets another name, and a new leaf its own, while the disk is paused.
    Split,
    /// A small leaf is merged while the disk is paused.
    Leaf,
    /// A split is taken back while the disk is paused.
    Undo,
}

impl CoalesceStep {
    /// The step's name for people, and for the command that does it.
    pub fn word(self) -> &'static str {
        match self {
            CoalesceStep::Plan => "plan",
            CoalesceStep::Grow => "grow",
            CoalesceStep::Copy => "copy",
            CoalesceStep::Relink => "relink",
            CoalesceStep::Clean => "clean",
            CoalesceStep::Split => "split",
            CoalesceStep::Leaf => "leaf",
            CoalesceStep::Undo => "undo",
        }
    }
}

impl Coalesce {
    /// A merge that has not begun.
    pub fn new(leaf: &Image, from: Option<String>, to: Option<String>) -> Coalesce {
        let leaf_path = leaf.path.as_os_str().as_bytes().to_vec();
        let step = CoalesceStep::Plan;
        let (format, top) = (leaf.format, None);
        Coalesce { format, leaf: leaf_path, from, to, force: false, top, step }
    }

    /// Merges even if images elsewhere change, or may.
    #[must_use]
    pub fn forced(self, force: bool) -> Coalesce {
        Coalesce { force, ..self }
    }

    /// The image that the disk is served from.
    pub fn leaf(&self) -> Image {
        let path = PathBuf::from(OsString::from_vec(self.leaf.clone()));
        Image { format: self.format, path }
    }
}

impl Task {
    /// The image that the job changes.
    pub fn image(&self) -> Image {
        match self {
            Task::Coalesce(coalesce) => coalesce.leaf(),
            Task::Mirror(mirror) => mirror.source.clone(),
        }
    }

    /// The name of the step that was begun.
    pub fn step(&self) -> &'static str {
        match self {
            Task::Coalesce(coalesce) => coalesce.step.word(),
            Task::Mirror(mirror) => mirror.step.word(),
        }
    }

    /// Whether the job can be cancelled now: nothing that it has done shows, or it can be undone.
    pub fn may_cancel(&self) -> bool {
        match self {
            Task::Coalesce(coalesce) => match coalesce.step {
                CoalesceStep::Plan | CoalesceStep::Copy => true,
                CoalesceStep::Split | CoalesceStep::Grow => coalesce.top.is_some(),
                _ => false,
            },
            Task::Mirror(mirror) => !matches!(mirror.step, MirrorStep::Switch | MirrorStep::Detach),
        }
    }
}

/// How a job has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It has done all of its steps.
    Done,
    /// It was cancelled, and its disk is as before.
    Cancelled,
    /// It was cancelled, and its disk's chain is longer than before.
    Longer {
        /// The image that is left in the chain, and the reason.
        why: String,
        /// The next step for the administrator.
        help: String,
    },
    /// A step has failed.
    Failed {
        /// The failed step and its reason.
        why: String,
        /// The next step for the administrator.
        help: String,
    },
}

impl From<Failure> for Outcome {
    fn from(Failure { why, help }: Failure) -> Outcome {
        Outcome::Failed { why, help }
    }
}

/// The end of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct End {
    /// When it has ended, in seconds since 1970.
    pub at: u64,
    /// How it has ended.
    pub outcome: Outcome,
}

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobState {
    version: u32,
    /// The job's number.
    pub id: JobId,
    /// The disk that it works on.
    pub disk: DiskId,
    /// What it does, and its step.
    pub task: Task,
    /// Most bytes a second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub speed: Option<u64>,
    /// Whether it rests until it is resumed.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub paused: bool,
    /// Whether it is to be cancelled.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub cancelled: bool,
    /// When it was begun, in seconds since 1970.
    pub created: u64,
    /// Bytes that were done when the file was written.
    pub done: u64,
    /// All bytes that are to be done, as far as that was known.
    pub all: u64,
    /// Its end.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub end: Option<End>,
}

impl JobState {
    /// A job that has not begun.
    pub fn new(id: JobId, disk: DiskId, task: Task, speed: Option<u64>, created: u64) -> JobState {
        let (paused, cancelled, done, all, end) = (false, false, 0, 0, None);
        let version = VERSION;
        JobState { version, id, disk, task, speed, paused, cancelled, created, done, all, end }
    }
}

impl Stated for JobState {
    const VERSION: u32 = VERSION;
    const WITHOUT: &'static str =
        "the job does not go on: ferrite disk list says whether its disk is paused";

    fn name(&self) -> String {
        self.id.to_string()
    }

    fn check(&self) -> Result<(), String> {
        match self.task.image().path.is_absolute() {
            true => Ok(()),
            false => Err("it names no image".to_owned()),
        }
    }
}

/// The directory of the state files.
#[derive(Clone, Debug)]
pub struct JobFiles(StateFiles<JobState>);

impl JobFiles {
    /// Opens the directory, and creates it if it is missing.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open(folder: &Path) -> io::Result<JobFiles> {
        StateFiles::open(folder).map(JobFiles)
    }

    /// The directory.
    pub fn folder(&self) -> &Path {
        self.0.folder()
    }

    /// The file that the processes of a job have as standard error, and hold the lock of.
    pub fn errors(&self, id: JobId) -> PathBuf {
        self.folder().join(format!("{id}.errors"))
    }

    /// Replaces a job's file.
    ///
    /// # Errors
    /// Errors of the file system. The old file stays.
    pub fn write(&self, state: &JobState) -> io::Result<()> {
        self.0.write(state)
    }

    /// Removes the files of a job. A failure is logged.
    pub fn remove(&self, id: JobId) {
        self.0.remove(&id.to_string());
        let errors = self.errors(id);
        match fs::remove_file(&errors) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {e}", errors.display());
            }
            _ => {}
        }
    }

    /// Reads the files of all jobs, in order. Half-written files are removed, and invalid ones are
    /// set aside. Files that cannot be read now are left out.
    pub fn all(&self) -> Vec<JobState> {
        let mut states = self.0.all();
        states.sort_by_key(|state| state.id);
        states
    }

    /// The highest number that any file here has: of jobs, and of files that were set aside.
    pub fn highest(&self) -> JobId {
        let number = |path: PathBuf| path.file_name()?.to_str()?.split('.').next()?.parse().ok();
        self.0.paths().filter_map(number).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> (tempfile::TempDir, JobFiles) {
        let dir = tempfile::tempdir().unwrap();
        let files = JobFiles::open(&dir.path().join("jobs")).unwrap();
        (dir, files)
    }

    fn state(id: JobId) -> JobState {
        let path = Path::new(std::ffi::OsStr::from_bytes(b"/srv/\xff:1.vhd"));
        let leaf = Image { format: Format::Vhd, path: path.to_owned() };
        let task = Coalesce::new(&leaf, Some("/srv/b.vhd".to_owned()), None);
        let disk = DiskId { domid: 3, devid: 51712 };
        JobState::new(id, disk, Task::Coalesce(task), Some(7), 1 << 33)
    }

    #[test]
    fn what_was_written_is_read_and_removed() {
        let (_dir, files) = files();
        let outcome = Outcome::Failed { why: "no".to_owned(), help: "yes".to_owned() };
        let ended = JobState { end: Some(End { at: 5, outcome }), paused: true, ..state(9) };
        files.write(&ended).unwrap();
        files.write(&state(2)).unwrap();
        assert_eq!(files.all(), [state(2), ended]);
        let newer = JobState { cancelled: true, ..state(2) };
        files.write(&newer).unwrap();
        files.remove(9);
        files.remove(9);
        assert_eq!(files.all(), [newer]);
        assert_eq!(files.highest(), 2);
    }

    #[test]
    fn what_is_torn_foreign_or_newer_is_put_aside_and_disturbs_no_other() {
        let (dir, files) = files();
        files.write(&state(1)).unwrap();
        let whole = serde_json::to_string(&state(2)).unwrap();
        let bad = [
            String::new(),
            whole[..whole.len() / 2].to_owned(),
            whole.replace("\"version\":1", "\"version\":2"),
            whole.replace("\"version\":1,", ""),
            whole.replace("\"id\":2", "\"id\":3"),
            whole.replace("coalesce", "resize"),
            whole.replace("\"plan\"", "\"burn\""),
            whole.replace("\"leaf\":[47", "\"leaf\":[48"),
            whole.replace("\"created\"", "\"colour\""),
            "[".repeat(60_000),
            "x".repeat(200_000),
        ];
        let path = dir.path().join("jobs/2.json");
        for text in bad {
            fs::write(&path, &text).unwrap();
            assert_eq!(files.all(), [state(1)], "{text:.40}");
            let aside = path.with_extension("odd");
            assert_eq!(fs::read_to_string(&aside).unwrap(), text);
            fs::remove_file(&aside).unwrap();
        }
        for name in ["02.json", "-2.json", "two.json", "2.odd"] {
            fs::write(dir.path().join("jobs").join(name), &whole).unwrap();
        }
        fs::write(dir.path().join("jobs/1.new"), "{").unwrap();
        fs::create_dir(dir.path().join("jobs/4.json")).unwrap();
        assert_eq!(files.all(), [state(1)]);
        assert!(!dir.path().join("jobs/1.new").exists());
        // The number of a job that was set aside is not used again.
        assert_eq!(files.highest(), 4);
    }
}
