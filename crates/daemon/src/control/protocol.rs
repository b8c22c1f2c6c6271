//! What is said on the control socket.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::params::Format;
use crate::state::DiskId;

/// Bytes of a line, with its end.
pub const MAX_LINE: usize = 64 << 10;

/// The one version there is.
pub const VERSION: &str = "2.0";

/// Numbers of errors, by the specification.
pub mod code {
    /// No JSON.
    pub const PARSE: i64 = -32700;
    /// JSON, and no request.
    pub const INVALID_REQUEST: i64 = -32600;
    /// There is no such method.
    pub const NO_METHOD: i64 = -32601;
    /// The method does not take these parameters.
    pub const INVALID_PARAMS: i64 = -32602;
    /// Ours: there is no such disk.
    pub const NO_DISK: i64 = -32001;
    /// Ours: it was tried and did not work.
    pub const FAILED: i64 = -32002;
    /// Ours: it did not happen in the time given.
    pub const TIMEOUT: i64 = -32003;
    /// Ours: too many clients at work.
    pub const BUSY: i64 = -32004;
}

/// An error object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RpcError {
    /// See [`code`].
    pub code: i64,
    /// What went wrong, for people.
    pub message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub data: Option<Help>,
}

/// The next step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Help {
    /// For the administrator.
    pub help: String,
}

impl RpcError {
    pub(crate) fn new(code: i64, message: impl Into<String>, help: &str) -> RpcError {
        let data = (!help.is_empty()).then(|| Help { help: help.to_owned() });
        RpcError { code, message: message.into(), data }
    }
}

/// A response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Response {
    /// [`VERSION`].
    pub jsonrpc: String,
    /// What came of it; absent in an error.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<Value>,
    /// Why nothing came of it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<RpcError>,
    /// The request's; null if it could not be told.
    pub id: Value,
}

/// `daemon.status` and `disk.list` take nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// `disk.show`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowParams {
    /// Which.
    pub disk: DiskId,
}

/// `disk.detach`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetachParams {
    /// Which.
    pub disk: DiskId,
    /// Take it from a guest that does not let go.
    #[serde(default)]
    pub force: bool,
    /// How long the guest has for it.
    #[serde(default = "ten")]
    pub timeout_s: u32,
}

/// `attach.wait`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WaitParams {
    /// The disk's directory in xenstore, as hotplug scripts are given it in `XENBUS_PATH`.
    pub backend: String,
    /// How long to wait for it.
    #[serde(default = "ten")]
    pub timeout_s: u32,
}

fn ten() -> u32 {
    10
}

/// `daemon.status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Since when it runs, in seconds since 1970.
    pub started: u64,
    /// Whether xenstore is followed.
    pub xen: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub no_xen: Option<String>,
    /// Disks that are served.
    pub served: u32,
    /// Disks that cannot be served now.
    pub failed: u32,
    /// All disks that are attached.
    pub disks: u32,
}

/// How far a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PhaseName {
    /// Its image is being opened.
    Starting,
    /// It is served.
    Served,
    /// It cannot be served now.
    Failed,
    /// A drive without a medium.
    Empty,
    /// Its image is left to a later attachment of the same VM.
    Resting,
}

/// Requests of a disk that wait for space, as its storage is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Full {
    /// How many.
    pub requests: u64,
    /// Since when, in seconds since 1970.
    pub since: u64,
}

/// A disk in `disk.list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Which.
    pub disk: DiskId,
    /// How far it is.
    pub phase: PhaseName,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// Its image's format.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub format: Option<Format>,
    /// Its image; what is no text in the name is replaced.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub image: Option<String>,
    /// The process that stands for it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pid: Option<u32>,
    /// tapdisk's number of it.
    pub minor: u32,
    /// How often it was started.
    pub starts: u64,
    /// Its requests that wait for space.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub full: Option<Full>,
    /// Why it is not served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub help: Option<String>,
}

/// `disk.list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disks {
    /// In the order of guests and devices.
    pub disks: Vec<Disk>,
    /// Why there may be others by now: xenstore is not followed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub no_xen: Option<String>,
}

/// Where a setting comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Nobody has said anything of it.
    Default,
    /// What the configuration says of all disks.
    Disks,
    /// What it says of this image.
    Image,
    /// What it said when the disk was attached, and does not say any more.
    Earlier,
}

/// A key of the configuration, for one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Its name.
    pub key: String,
    /// Its value, as the configuration has it; `-` for none.
    pub value: String,
    /// Where that comes from.
    pub from: Source,
}

/// `disk.show`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Details {
    /// As in the list.
    pub disk: Disk,
    /// The backend's state in xenstore, 1 to 6; 0: none.
    pub backend_state: u32,
    /// The frontend's.
    pub frontend_state: u32,
    /// The toolstack wants it to stay.
    pub online: bool,
    /// The toolstack does not let the guest write.
    pub read_only: bool,
    /// What the process that serves it goes by; none if there is no such process.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub settings: Vec<Setting>,
    /// The socket by which clients of NBD find it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub nbd: Option<String>,
    /// What the toolstack's script has said.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hotplug_status: Option<String>,
    /// What it waits for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub waits_for: Option<String>,
}

/// `disk.detach`, when the disk is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Detached {
    /// Which.
    pub disk: DiskId,
    /// It was taken from the guest.
    pub forced: bool,
}

/// `attach.wait`, when there is something to say to the script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attached {
    /// As in the list.
    pub disk: Disk,
}

/// `upgrade`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpgradeParams {
    /// The program that is to serve the disks, by its absolute path.
    pub binary: String,
    /// This disk alone; without it, all that are served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub disk: Option<DiskId>,
}

/// `upgrade`, when all was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upgraded {
    /// Disks that the program serves now.
    pub upgraded: Vec<DiskId>,
    /// Disks that are served as before, or not.
    pub failed: Vec<NotUpgraded>,
}

/// A disk that another program could not be made to serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NotUpgraded {
    /// Which.
    pub disk: DiskId,
    /// Why.
    pub why: String,
    /// What to do about it.
    pub help: String,
}
