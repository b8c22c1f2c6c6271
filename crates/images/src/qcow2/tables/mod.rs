//! Tables of entries in memory, what of them is not on disk yet, and metadata read and written.

pub(in crate::qcow2) mod cache;
pub(in crate::qcow2) mod changes;
pub(in crate::qcow2) mod meta;
