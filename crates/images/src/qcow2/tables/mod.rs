//! Tables of entries in memory, their changes that are not on disk yet, and I/O of metadata.

pub(in crate::qcow2) mod cache;
pub(in crate::qcow2) mod changes;
pub(in crate::qcow2) mod meta;
