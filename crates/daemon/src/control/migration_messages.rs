//! The messages of the control socket about migrations to and from other hosts.

use serde::{Deserialize, Serialize};

use crate::state::DiskId;

/// The parameters of `migrate.prepare`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigratePrepareParams {
    /// The disk.
    pub disk: DiskId,
    /// The other host: a name of the configuration, or HOST:PORT.
    pub host: String,
    /// The name of the image's file there. Without it, the name that it has here.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// The image there that becomes the parent: one of `bases` of its configuration. Only what differs from it is copied.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub base: Option<String>,
    /// Whether the parents of the disk are copied, too, down to `base`. It is answered when they are there.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub chain: bool,
}

/// The parameters of `migrate.run`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateRunParams {
    /// The disk.
    pub disk: DiskId,
    /// Most bytes a second. Without it, there is no limit.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub speed: Option<u64>,
}

/// The parameters of `migrate.commit`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateCommitParams {
    /// The disk.
    pub disk: DiskId,
    /// Whether its guest goes on here, with the image of the other host.
    #[serde(default)]
    pub keep: bool,
}

/// The parameters of `migrate.abort` and `migrate.forget`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationParams {
    /// The migration's identifier.
    pub id: String,
}

/// The parameters of `migrate.resolve`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateResolveParams {
    /// The migration's identifier.
    pub id: String,
    /// Whether this host has the disk. Otherwise the other one has it.
    pub here: bool,
}

/// Where a disk of a migration goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MigrationDirection {
    /// It leaves this host.
    Out,
    /// It comes to this host.
    In,
}

/// Which host has the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Holder {
    /// This one.
    Here,
    /// The other one.
    There,
    /// This host does not know it, and does not open its image.
    Doubt,
}

/// A migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Migration {
    /// Its identifier, the same on both hosts.
    pub id: String,
    /// Where the disk goes.
    pub direction: MigrationDirection,
    /// The disk, if it leaves.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub disk: Option<DiskId>,
    /// The image's path on this host. Bytes that are not UTF-8 are replaced.
    pub image: String,
    /// The other host, if the disk leaves.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub host: Option<String>,
    /// The URI of the image there, if the disk leaves.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub target: Option<String>,
    /// Which host has the disk.
    pub holder: Holder,
    /// Whether it is over.
    pub over: bool,
    /// The job that copies the disk, while it does.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub job: Option<u64>,
    /// When it was begun, in seconds since 1970.
    pub created: u64,
    /// What it waits for, or what was lost.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
    /// The next step for the administrator.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub help: Option<String>,
}

/// The result of `migrate.list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationList {
    /// All migrations whose records are kept.
    pub migrations: Vec<Migration>,
}
