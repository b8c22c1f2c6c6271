//! A client of xenstore.
pub mod wire;
