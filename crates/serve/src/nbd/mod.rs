//! Frontend of the path for NBD: clients of Unix sockets (docs/internals/nbd-rules.md).
//!
//! * [`Clients`]: up to a number; each has a thread, and there its negotiation in bounded time
//!   (`handshake.rs`, `negotiation.rs`), then a path (`client/`). [`Server`] accepts them.
//! * [`bind`]: the socket itself, and what may be in its place.
//! * [`relay`]: the process that keeps the clients of a disk when its worker ends.
//! * `wire.rs`: the messages as bytes.
//!
//! Clients share nothing but the disk. Each has an engine, buffers and a table of requests of a fixed
//! size; when these are in use, its bytes stay in its socket.

mod bind;
mod client;
mod handshake;
mod negotiation;
mod relay;
mod server;
mod wire;

pub use bind::{BindError, Bound, bind};
pub use relay::relay;
pub use server::{COURTESY, Clients, EngineFactory, Options, Server, serve_one};
