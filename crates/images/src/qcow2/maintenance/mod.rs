//! Maintenance of images that are not served: making, checking, repairing, changing size or version.

pub(in crate::qcow2) mod bitmaps;
pub(in crate::qcow2) mod check;
mod counts;
pub(in crate::qcow2) mod create;
pub(in crate::qcow2) mod info;
pub(in crate::qcow2) mod inner;
pub(in crate::qcow2) mod lineage;
mod rebuild;
mod relink;
pub(in crate::qcow2) mod repair;
pub(in crate::qcow2) mod resize;
pub(in crate::qcow2) mod snapshots;
pub(in crate::qcow2) mod upgrade;
mod walk;
