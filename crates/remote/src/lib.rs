//! A disk whose data another server has: a client of NBD.
//!
//! * [`RemoteExport`]: what is known of the export, for all threads.
//! * `link`: one connection, from the first byte to the end of the handshake.
//! * `session`: what one thread has of the disk. It sends requests, decodes replies, and connects again.
//!
//! The server is another party: it may answer wrongly, late, or never. Every request has a deadline here, memory is
//! bounded, and a server that breaks the protocol loses its connection (docs/internals/remotes.md).

#![forbid(unsafe_code)]

mod client;
mod disk;
mod link;
mod session;
mod signal;

pub use client::client_of;
pub use disk::{RemoteExport, server_of};
