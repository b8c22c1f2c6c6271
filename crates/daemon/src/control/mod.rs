//! The control socket: JSON-RPC 2.0, a message a line, on a Unix socket that is root's alone.
//!
//! `docs/control.schema.json` describes every message; a test compares it with the types here.

pub mod client;
mod methods;
pub mod protocol;
pub(crate) mod server;
#[cfg(test)]
mod tests;
mod waits;

pub(crate) use methods::{list, status};
