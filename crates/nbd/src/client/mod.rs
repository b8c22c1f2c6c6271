//! The client's side of the protocol without its I/O: the bytes that it sends, and the parser of the bytes that come.
//!
//! A server is not trusted. For any bytes from it, memory is bounded and nothing panics. A violation of the protocol is
//! an error that ends the session.

mod handshake;
mod refusal;
mod replies;
mod requests;

pub use handshake::{Export, Handshake, MAX_NAME_BYTES, SESSION, SESSION_BYTES, Session, Wanted};
pub use refusal::Refusal;
pub use replies::{Allocation, Answer, Broken, Event, MAX_EXTENTS, Next, Replies};
pub use requests::{Command, MAX_REQUESTS, Ticket};

#[cfg(test)]
mod tests;
