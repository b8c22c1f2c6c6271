//! The messages of the control socket about exports to other hosts.

use serde::{Deserialize, Serialize};

use crate::state::DiskId;

/// The parameters of `disk.export`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportParams {
    /// The disk to export.
    pub disk: DiskId,
    /// Where to listen for clients of NBD, as `ADDRESS:PORT`. Without it `vhost_user` is given.
    #[serde(default)]
    pub listen: Vec<String>,
    /// The absolute path of the socket for front ends of vhost-user, such as QEMU's.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub vhost_user: Option<String>,
    /// The number of queues that a front end is offered: 1 to 16. Without it, 4.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub queues: Option<u16>,
    /// The absolute path of the folder of certificates. Without it `plain` has to be true.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tls: Option<String>,
    /// Whether clients need no certificates.
    #[serde(default)]
    pub any_client: bool,
    /// Whether clients speak in clear.
    #[serde(default)]
    pub plain: bool,
    /// The export's name. Without it, that of the image's file without extension, or of the volume.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// Whether clients may not change anything.
    #[serde(default)]
    pub read_only: bool,
    /// Whether clients may write beside a guest that writes, too.
    #[serde(default)]
    pub shared: bool,
    /// Whether clients are not told the name.
    #[serde(default)]
    pub no_list: bool,
}

/// The parameters of `disk.unexport`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnexportParams {
    /// The disk.
    pub disk: DiskId,
}

/// An export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportRow {
    /// The disk.
    pub disk: DiskId,
    /// The export's name.
    pub name: String,
    /// Where it listens for clients of NBD, as `ADDRESS:PORT`.
    pub listen: Vec<String>,
    /// The path of its socket for front ends of vhost-user.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub vhost_user: Option<String>,
    /// The folder of certificates. Without it clients speak in clear.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tls: Option<String>,
    /// Whether clients need no certificates.
    pub any_client: bool,
    /// Whether clients may not change anything.
    pub read_only: bool,
    /// Whether clients are not told the name.
    pub no_list: bool,
    /// The number of the process that listens.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pid: Option<u32>,
    /// Why the export is not served now.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
}

/// The result of `disk.exports`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportRows {
    /// All exports.
    pub exports: Vec<ExportRow>,
}
