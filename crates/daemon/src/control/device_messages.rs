//! The messages of the control socket about devices of this host.

use serde::{Deserialize, Serialize};

pub use crate::devices::Kind as DeviceKind;
use crate::state::DiskId;

/// The parameters of `device.add`: a disk, or an image that is not in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddDeviceParams {
    /// The disk to show.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub disk: Option<DiskId>,
    /// The image to open and show, as `FORMAT:PATH`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub image: Option<String>,
    /// Whether the device is for reading only.
    #[serde(default)]
    pub read_only: bool,
    /// Whether the device may be written beside a guest that writes, too.
    #[serde(default)]
    pub shared: bool,
    /// The number of connections or queues, 1 to 4.
    #[serde(default = "one")]
    pub connections: u32,
    /// Which driver of the kernel makes the device. Without it, the one for NBD.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub by: Option<DeviceKind>,
}

fn one() -> u32 {
    1
}

/// The parameters of `device.remove`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveDeviceParams {
    /// The device, as `/dev/nbdN` or `/dev/ublkbN`.
    pub device: String,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRow {
    /// The device, as `/dev/nbdN` or `/dev/ublkbN`.
    pub device: String,
    /// The disk that it shows.
    pub disk: DiskId,
    /// The disk's image, as `FORMAT:PATH`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub image: Option<String>,
    /// Its size in bytes, as it was made.
    pub bytes: u64,
    /// Whether it is for reading only.
    pub read_only: bool,
    /// The number of its connections or queues.
    pub connections: u32,
    /// Which driver of the kernel has it.
    #[serde(default)]
    pub by: DeviceKind,
    /// The users of the device, for people: mount points and others.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub users: Vec<String>,
}

/// The result of `device.list`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRows {
    /// All devices.
    pub devices: Vec<DeviceRow>,
}

/// The result of `device.clean`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CleanedDevices {
    /// The devices that were removed.
    pub removed: Vec<String>,
}
