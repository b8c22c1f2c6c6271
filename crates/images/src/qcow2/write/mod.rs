//! Writes that need more than an existing place: copies, new tables, zeros.

pub(in crate::qcow2) mod copying;
pub(in crate::qcow2) mod cow;
pub(in crate::qcow2) mod zero;
