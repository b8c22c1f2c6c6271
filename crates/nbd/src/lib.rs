//! The NBD protocol: what its servers and clients send each other.

#![forbid(unsafe_code)]

pub mod address;
pub mod client;
pub mod old_style;
pub mod restriction;
pub mod uri;
pub mod wire;
