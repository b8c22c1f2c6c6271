//! The messages of the control socket about jobs.

use serde::{Deserialize, Serialize};

use crate::state::DiskId;

/// The parameters of `disk.coalesce`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoalesceParams {
    /// The disk whose images are merged.
    pub disk: DiskId,
    /// The absolute path of the highest image that is merged: also the leaf. Without it, the leaf's
    /// parent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from: Option<String>,
    /// The absolute path of the image that it is merged into. Without it, the parent of `from`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub to: Option<String>,
    /// Whether they are merged even if images elsewhere change, or may.
    #[serde(default)]
    pub force: bool,
    /// Most bytes a second. Without it, there is no limit.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub speed: Option<u64>,
}

/// The parameters of `disk.mirror`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorParams {
    /// The disk that is mirrored.
    pub disk: DiskId,
    /// The target, as `FORMAT:PATH` or the URI of an NBD export.
    pub target: String,
    /// Whether the disk goes on with the target, once that has all.
    #[serde(default)]
    pub switch: bool,
    /// Whether only what the target of an earlier mirror lacks is copied. No other program may have written to it.
    #[serde(default)]
    pub resume: bool,
    /// Whether what the target has already is compared, and not written: for a target on the same base.
    #[serde(default)]
    pub compare: bool,
    /// Most bytes a second. Without it, there is no limit.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub speed: Option<u64>,
}

/// The parameters of `job.show`, `job.cancel`, `job.complete`, `job.pause` and `job.resume`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobParams {
    /// The job's number.
    pub id: u64,
}

/// The parameters of `job.wait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobWaitParams {
    /// The job's number.
    pub id: u64,
    /// How long to wait for its end, in seconds.
    #[serde(default = "super::protocol::ten")]
    pub timeout_s: u32,
}

/// The parameters of `job.limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobLimitParams {
    /// The job's number.
    pub id: u64,
    /// Most bytes a second. Without it, there is no limit.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub speed: Option<u64>,
}

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobKind {
    /// It merges images of a running disk's chain.
    Coalesce,
    /// It has all writes of a disk go to another one, too.
    Mirror,
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobPhase {
    /// It works.
    Running,
    /// It rests until it is resumed.
    Paused,
    /// It is to be cancelled, and its process ends.
    Cancelling,
    /// It has done all of its steps.
    Done,
    /// It was cancelled: its disk is as before, or `why` names the image that is left.
    Cancelled,
    /// A step has failed.
    Failed,
}

impl JobPhase {
    /// Whether the job has ended.
    pub fn has_ended(self) -> bool {
        match self {
            JobPhase::Running | JobPhase::Paused | JobPhase::Cancelling => false,
            JobPhase::Done | JobPhase::Cancelled | JobPhase::Failed => true,
        }
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The job's number.
    pub id: u64,
    /// What it does.
    pub kind: JobKind,
    /// The disk that it works on.
    pub disk: DiskId,
    /// The image's path. Bytes that are not UTF-8 are replaced.
    pub image: String,
    /// The highest image that is merged, once that is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from: Option<String>,
    /// The image that it is merged into, once that is known; the target of a mirror.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub to: Option<String>,
    /// Its state.
    pub phase: JobPhase,
    /// The step that was begun last.
    pub step: String,
    /// When it was begun, in seconds since 1970.
    pub created: u64,
    /// When it has ended, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ended: Option<u64>,
    /// Bytes that are done.
    pub done: u64,
    /// All bytes that are to be done; 0 while that is not known.
    pub all: u64,
    /// Bytes a second, by the last ten seconds.
    pub rate: u64,
    /// Seconds until all bytes are done, if that can be told.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub left_s: Option<u64>,
    /// Most bytes a second, if there is a limit.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub speed: Option<u64>,
    /// Why it has failed, or which image it has left in the chain; of a mirror that goes on, why it is not complete.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
    /// The next step for the administrator.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub help: Option<String>,
}

/// The result of `job.list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobList {
    /// All jobs, in the order of their start. Those that have ended are kept for a day.
    pub jobs: Vec<Job>,
}
