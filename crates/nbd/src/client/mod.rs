//! The client's side of the protocol without its I/O: what it sends, and what it makes of the bytes that come.
//!
//! A server is not trusted. Whatever it sends, memory is bounded, nothing panics, and what contradicts the protocol
//! is an error that ends the session.

mod handshake;
mod refusal;
mod replies;
mod requests;

pub use handshake::{Export, Handshake, MAX_NAME_BYTES, SESSION, SESSION_BYTES, Wanted};
pub use refusal::Refusal;
pub use replies::{Allocation, Answer, Broken, Event, MAX_EXTENTS, Next, Replies};
pub use requests::{Command, MAX_REQUESTS, Ticket};

#[cfg(test)]
mod tests;
