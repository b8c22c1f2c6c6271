//! The control socket: JSON-RPC 2.0, one message a line, on a Unix socket for root only.
//!
//! `docs/control.schema.json` describes each message. A test compares it with the types here.

pub mod client;
mod device_messages;
mod devices;
mod export_messages;
mod exports;
mod image_messages;
mod images;
mod job_messages;
mod jobs;
mod limits;
mod methods;
mod migration_messages;
mod migrations;
mod pauses;
pub mod protocol;
pub(crate) mod server;
mod tap_messages;
mod taps;
#[cfg(test)]
mod tests;
pub(crate) mod upgrades;
mod waits;

pub(crate) use exports::{export, list as exports};
pub(crate) use jobs::list as jobs;
pub(crate) use methods::{counters_of, list, status};
