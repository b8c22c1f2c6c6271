//! The structures of an image, as pure code over bytes.

pub(in crate::qcow2) mod backing;
pub(in crate::qcow2) mod entry;
pub(in crate::qcow2) mod extended;
pub(in crate::qcow2) mod header;
pub(in crate::qcow2) mod refcount;
pub(in crate::qcow2) mod unpack;
