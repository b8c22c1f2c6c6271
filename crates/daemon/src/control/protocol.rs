//! The messages of the control socket.

use ferrite_serve::path::full::OnFull;
use ferrite_serve::path::limit::Limits;
use ferrite_serve::polling::PollWindow;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use super::device_messages::*;
pub use super::export_messages::*;
pub use super::image_messages::*;
pub use super::job_messages::*;
pub use super::migration_messages::*;
pub use super::tap_messages::*;
use crate::params::Format;
use crate::pause::Pause;
use crate::state::DiskId;

/// Most bytes of a line, with its end.
pub const MAX_LINE: usize = 64 << 10;

/// The version of JSON-RPC.
pub const VERSION: &str = "2.0";

/// Error codes, by the specification of JSON-RPC; the last six are ferrite's.
pub mod code {
    /// The line is not JSON.
    pub const PARSE: i64 = -32700;
    /// The JSON is not a request.
    pub const INVALID_REQUEST: i64 = -32600;
    /// There is no such method.
    pub const NO_METHOD: i64 = -32601;
    /// The method does not take these parameters.
    pub const INVALID_PARAMS: i64 = -32602;
    /// There is no such disk.
    pub const NO_DISK: i64 = -32001;
    /// The operation failed.
    pub const FAILED: i64 = -32002;
    /// The operation did not end in time.
    pub const TIMEOUT: i64 = -32003;
    /// Too many clients wait for responses.
    pub const BUSY: i64 = -32004;
    /// There is no such job.
    pub const NO_JOB: i64 = -32005;
    /// A job changes the disk already.
    pub const IN_USE: i64 = -32006;
}

/// An error object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RpcError {
    /// The error code, see [`code`].
    pub code: i64,
    /// The failed step and its reason, for users.
    pub message: String,
    /// The next step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub data: Option<Help>,
}

/// Additional data of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Help {
    /// The next step, for the administrator.
    pub help: String,
    /// The number of the error for callers of tapdisk's tools, which compare it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub errno: Option<i32>,
}

impl RpcError {
    pub(crate) fn new(code: i64, message: impl Into<String>, help: &str) -> RpcError {
        let data = (!help.is_empty()).then(|| Help { help: help.to_owned(), errno: None });
        RpcError { code, message: message.into(), data }
    }
}

/// A response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Response {
    /// The version: [`VERSION`].
    pub jsonrpc: String,
    /// The method's result. Absent after an error.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<Value>,
    /// The error. Absent after a success.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<RpcError>,
    /// The identifier of the request; null if the request has no valid one.
    pub id: Value,
}

/// The parameters of `daemon.status`, `disk.list` and `job.list`: none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// The parameters of `disk.show`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowParams {
    /// The disk to show.
    pub disk: DiskId,
}

/// The parameters of `disk.detach`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetachParams {
    /// The disk to detach.
    pub disk: DiskId,
    /// Whether the disk is taken from a guest that does not let go.
    #[serde(default)]
    pub force: bool,
    /// How long the guest may take to let go, in seconds.
    #[serde(default = "ten")]
    pub timeout_s: u32,
}

/// The parameters of `disk.pause`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PauseParams {
    /// The disk to pause.
    pub disk: DiskId,
    /// The user or program that pauses it, for people who look later.
    pub by: String,
    /// How long requests under way may take, in seconds.
    #[serde(default = "sixty")]
    pub timeout_s: u32,
}

fn sixty() -> u32 {
    60
}

/// The parameters of `disk.resume`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResumeParams {
    /// The disk that goes on.
    pub disk: DiskId,
    /// The image that it goes on with, as `FORMAT:PATH`. Without it, the one that it had.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub image: Option<String>,
    /// How long to wait until it is open, in seconds.
    #[serde(default = "sixty")]
    pub timeout_s: u32,
}

/// The parameters of `disk.snapshot`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotParams {
    /// The disk.
    pub disk: DiskId,
    /// The absolute path that the disk as it is now gets; of a volume, the name of the snapshot in its
    /// store.
    pub name: String,
    /// The format of the new image that the guest goes on in. A raw disk needs one: qcow2.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub leaf: Option<Format>,
    /// The name of a dirty map that is begun at this moment. The others go on, and the snapshot keeps
    /// them as they are now.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub begin_map: Option<String>,
}

/// A change of the dirty maps of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MapVerb {
    /// Begins a map.
    Add,
    /// Ends a map.
    Remove,
    /// Ends a map, and begins another of its name.
    Clear,
}

impl MapVerb {
    /// The word of the command line.
    pub fn word(self) -> &'static str {
        match self {
            MapVerb::Add => "add",
            MapVerb::Remove => "remove",
            MapVerb::Clear => "clear",
        }
    }
}

/// The parameters of `disk.dirty`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirtyParams {
    /// The disk.
    pub disk: DiskId,
    /// The change.
    pub verb: MapVerb,
    /// The name of the map.
    pub map: String,
}

/// The parameters of `disk.resize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeParams {
    /// The disk.
    pub disk: DiskId,
    /// Its new size in bytes. It cannot shrink in use.
    pub bytes: u64,
    /// Whether `bytes` is how much larger it becomes.
    #[serde(default)]
    pub is_more: bool,
}

/// The parameters of `disk.switch`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchParams {
    /// The disk.
    pub disk: DiskId,
    /// The image that it goes on with, as `FORMAT:PATH`.
    pub image: String,
    /// Whether the contents are compared first, while the guest waits.
    #[serde(default)]
    pub compare: bool,
}

/// The parameters of `attach.wait`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WaitParams {
    /// The disk's backend directory in xenstore, as hotplug scripts get it in `XENBUS_PATH`.
    pub backend: String,
    /// How long to wait for the disk, in seconds.
    #[serde(default = "ten")]
    pub timeout_s: u32,
}

pub(super) fn ten() -> u32 {
    10
}

/// The result of `daemon.status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// The daemon's process number.
    pub pid: u32,
    /// The daemon's start, in seconds since 1970.
    pub started: u64,
    /// Whether the daemon follows xenstore.
    pub xen: bool,
    /// Why it does not follow xenstore.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub no_xen: Option<String>,
    /// Number of disks that are served.
    pub served: u32,
    /// Number of disks that cannot be served now.
    pub failed: u32,
    /// Number of attached disks.
    pub disks: u32,
}

/// The phase of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PhaseName {
    /// Its image is being opened.
    Starting,
    /// The disk is served.
    Served,
    /// The disk cannot be served now.
    Failed,
    /// The drive has no medium.
    Empty,
    /// Its image is left to a later attachment of the same VM.
    Resting,
    /// Its image is closed on request, and its guest waits.
    Paused,
}

/// Requests of a disk that wait for space, as its storage is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Full {
    /// Number of requests.
    pub requests: u64,
    /// The time of the first one, in seconds since 1970.
    pub since: u64,
}

/// Requests of a disk whose storage does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hangs {
    /// Number of requests.
    pub requests: u64,
    /// The time at which that was seen first, in seconds since 1970.
    pub since: u64,
}

/// A disk in `disk.list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The disk.
    pub disk: DiskId,
    /// The disk's phase.
    pub phase: PhaseName,
    /// The time of the last change of the phase, in seconds since 1970.
    pub since: u64,
    /// The image's format.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub format: Option<Format>,
    /// The image's path. Bytes that are not UTF-8 are replaced.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub image: Option<String>,
    /// The process number of its keeper.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pid: Option<u32>,
    /// The disk's number for tapdisk's tools.
    pub minor: u32,
    /// How often it was started.
    pub starts: u64,
    /// Its requests that wait for space.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub full: Option<Full>,
    /// Its requests that its storage does not answer.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hangs: Option<Hangs>,
    /// Whether two hosts may write to its LUN when its target has started again (`fence = "weak-reservation"`).
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub weak: bool,
    /// Its pause, also while it begins or ends.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub paused: Option<Pause>,
    /// Of a tap: the guest's disk that has joined it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub guest: Option<DiskId>,
    /// Why the disk is not served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
    /// The next step for the administrator.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub help: Option<String>,
}

/// The result of `disk.list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disks {
    /// The disks in the order of guests and devices.
    pub disks: Vec<Disk>,
    /// Why the list may be out of date: the daemon does not follow xenstore.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub no_xen: Option<String>,
}

/// The source of a setting's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The built-in default.
    Default,
    /// The configuration's table `disks`.
    Disks,
    /// The configuration's table of this image.
    Image,
    /// The configuration at the time of the attachment, which has changed since.
    Earlier,
    /// The running disk: `disk.limit` or `disk.set`.
    Running,
}

/// A key of the configuration with its value for one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// The key's name.
    pub key: String,
    /// The value, as the configuration has it; `-` for none.
    pub value: String,
    /// The value's source.
    pub from: Source,
}

/// The result of `disk.show`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Details {
    /// The disk, as in the list.
    pub disk: Disk,
    /// The backend's state in xenstore, 1 to 6; 0 if there is none.
    pub backend_state: u32,
    /// The frontend's state in xenstore, 1 to 6; 0 if there is none.
    pub frontend_state: u32,
    /// Whether the toolstack wants the disk to stay.
    pub online: bool,
    /// Whether the toolstack lets the guest only read.
    pub read_only: bool,
    /// The settings of its worker. Empty if there is none.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub settings: Vec<Setting>,
    /// The path of its NBD socket.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub nbd: Option<String>,
    /// The status that the toolstack's hotplug script has written.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hotplug_status: Option<String>,
    /// What the disk waits for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub waits_for: Option<String>,
}

/// The result of `disk.detach`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Detached {
    /// The disk.
    pub disk: DiskId,
    /// Whether the disk was taken from the guest.
    pub forced: bool,
}

/// The result of `attach.wait`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attached {
    /// The disk, as in the list.
    pub disk: Disk,
}

/// The parameters of `upgrade`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpgradeParams {
    /// The absolute path of the program that is to serve the disks.
    pub binary: String,
    /// The disk to upgrade. Without it, all served disks are.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub disk: Option<DiskId>,
}

/// The result of `upgrade`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upgraded {
    /// Disks that the program serves now.
    pub upgraded: Vec<DiskId>,
    /// Disks that were not upgraded: they are served as before, or not at all.
    pub failed: Vec<NotUpgraded>,
}

/// A disk that was not upgraded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NotUpgraded {
    /// The disk.
    pub disk: DiskId,
    /// The reason.
    pub why: String,
    /// The next step.
    pub help: String,
}

/// The parameters of `disk.limit`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitParams {
    /// The disk to limit.
    pub disk: DiskId,
    /// All limits that it has from now on.
    pub limits: Limits,
}

/// The result of `disk.limit`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limited {
    /// The disk.
    pub disk: DiskId,
    /// Its limits.
    pub limits: Limits,
}

/// The parameters of `disk.set`. A setting that is left out stays as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetParams {
    /// The disk to change.
    pub disk: DiskId,
    /// What happens to requests that find no space.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub on_full: Option<OnFull>,
    /// How long its queues poll before they sleep: `auto`, or microseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub poll_us: Option<PollWindow>,
    /// Its limit of processor time, in percent of one processor; 0 for none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cpu: Option<u32>,
}

/// The result of `disk.set`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetDone {
    /// The disk.
    pub disk: DiskId,
    /// The settings that were made on it while it runs, also earlier ones.
    pub settings: Vec<Setting>,
}
