//! The NBD frontend of the path: clients of Unix sockets (docs/internals/nbd-rules.md).
//!
//! * [`Clients`]: a bounded number of clients. Each has a thread with its negotiation in bounded
//!   time (`handshake.rs`, `negotiation.rs`), then a path (`client/`). [`Server`] accepts them.
//! * [`bind()`]: the listening socket, and the file that may be in its place.
//! * [`relay()`]: the process that keeps a disk's clients when its worker ends.
//! * `ferrite_nbd::wire`: the messages as bytes.
//!
//! Clients share the disk, and the memory for data beside the 1 MiB that each has to itself
//! (`buffers.rs`). Each has an engine and a table of requests of a fixed size. When these or its
//! buffers are in use, further bytes stay in its socket.

mod bind;
mod buffers;
mod client;
mod contexts;
mod handshake;
mod negotiation;
mod relay;
mod server;
mod sessions;

pub use bind::{BindError, Bound, bind};
pub use relay::relay;
pub use server::{COURTESY, Clients, EngineFactory, Exported, Options, Server, Source, serve_one};
