//! Writes that take more than a place that is there: copies, new tables, zeros.

pub(in crate::qcow2) mod copying;
pub(in crate::qcow2) mod cow;
pub(in crate::qcow2) mod zero;
