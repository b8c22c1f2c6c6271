//! The messages of the control socket about taps.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::protocol::Disk;

/// The parameters of `tap.attach`, `tap.detach`, `tap.pause`, `tap.unpause`, `tap.close` and
/// `tap.open`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapParams {
    /// The tap's process.
    pub pid: u32,
    /// The tap's minor.
    pub minor: u32,
    /// The image, as `FORMAT:PATH`. `tap.open` needs it. `tap.unpause` goes on with the one before
    /// without it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub image: Option<String>,
    /// Whether `tap.open` opens the image for reading only.
    #[serde(default)]
    pub read_only: bool,
    /// The log of changed blocks that `tap.open` and `tap.unpause` go on with; without it there is none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub log: Option<PathBuf>,
    /// The second disk that writes go to, for `tap.open` and `tap.unpause`: `nbd:NAME` of a connection that was passed,
    /// or `null`. Without it the second disk stays.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mirror: Option<String>,
    /// Whether `tap.close` does not wait for a guest.
    #[serde(default)]
    pub force: bool,
    /// How long requests under way may take, in seconds.
    #[serde(default = "two_minutes")]
    pub timeout_s: u32,
}

fn two_minutes() -> u32 {
    120
}

/// The parameters of `tap.free` and `tap.stats`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MinorParams {
    /// The tap's minor.
    pub minor: u32,
}

/// The result of most methods of taps: what was allocated, started or changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapDone {
    /// The tap's minor.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub minor: Option<u32>,
    /// The process.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pid: Option<u32>,
}

/// An allocated minor, a process without a tap, or a tap of both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapRow {
    /// Its keeper's process number.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pid: Option<u32>,
    /// Its minor.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub minor: Option<u32>,
    /// Its state, in tapdisk's bits: 0 runs, 0x2 is closed, 0x2a is paused, 0x22a could not go on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub state: Option<u32>,
    /// Its image, as `TYPE:PATH` with tapdisk's types.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub args: Option<String>,
    /// Its worker's process number.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub worker: Option<u32>,
}

/// The result of `tap.list`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapRows {
    /// All taps, by minor; then the processes without one.
    pub taps: Vec<TapRow>,
    /// The disks that a toolstack has attached. Older daemons do not send them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub disks: Option<Vec<Disk>>,
}

/// The result of `tap.stats`. Pairs are of reads and writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapStatistics {
    /// Its image, as `TYPE:PATH`. Absent if it is closed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub args: Option<String>,
    /// Whether it is paused.
    pub is_paused: bool,
    /// Sectors of 512 bytes.
    pub sectors: [u64; 2],
    /// Failed requests.
    pub errors: [u64; 2],
    /// Requests that are under way.
    pub in_flight: u64,
    /// Whether its second disk lacks writes.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub mirror_failed: bool,
    /// The images of its chain, the leaf first. Absent if the worker did not tell.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub chain: Vec<TapImage>,
}

/// An image of a tap's chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapImage {
    /// Its name, as `TYPE:PATH`.
    pub args: String,
    /// Sectors of 512 bytes that were read from it, below the leaf, since the chain was opened. 0 for the leaf.
    pub read_sectors: u64,
}
