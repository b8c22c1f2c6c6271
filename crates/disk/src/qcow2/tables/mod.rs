//! Tables of entries in memory, and metadata read and written.

pub(in crate::qcow2) mod cache;
pub(in crate::qcow2) mod meta;
