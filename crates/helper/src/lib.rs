//! The work of every helper process: it takes streams from its starter, and answers NBD on them
//! (docs/internals/processes.md 16).
//!
//! The disk behind it is a [`Medium`]. [`Links`] has the connections to it; each is a session with a thread that reads, and one
//! that sends what the socket had no room for ([`Outbox`]). All connections share the room for requests ([`Budget`]).

#![forbid(unsafe_code)]

mod budget;
mod fault;
mod greeting;
mod links;
mod outbox;
mod record;
mod session;

pub use budget::{Budget, Permit};
pub use fault::Fault;
pub use greeting::MAX_REQUEST_BYTES;
pub use links::{Links, refuse_links};
pub use outbox::{Message, Outbox};
pub use record::{Record, State};

/// Called once, when a request has ended: with the bytes that were moved or an errno, and the memory that it had.
pub type Done = Box<dyn FnOnce(Result<usize, i32>, Vec<u8>) + Send>;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Fill the memory.
    Read,
    /// Write the memory.
    Write,
    /// The range is unused.
    Discard,
    /// The range reads as zeros. `thick`: they take space.
    Zero {
        /// Whether they take space.
        thick: bool,
    },
    /// Make the writes durable that were answered before.
    Flush,
}

/// A request of a client, which lies within the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its kind.
    pub what: What,
    /// The first byte. 0 for a flush.
    pub offset: u64,
    /// Its bytes. 0 for a flush; at least 1 otherwise.
    pub len: u64,
    /// It is to be durable when it is answered.
    pub durable: bool,
}

/// The disk of a helper.
pub trait Medium: Send + Sync + 'static {
    /// Its bytes now. `None`: they are not known.
    fn bytes(&self) -> Option<u64>;

    /// Nothing may be written.
    fn is_read_only(&self) -> bool;

    /// Another owner has it: nothing succeeds any more.
    fn has_lost(&self) -> bool;

    /// Begins a request. `data` has `len` bytes for a read or a write, and none otherwise. `done` may be called before this
    /// returns, or by any thread later; it never waits.
    fn submit(&self, request: Request, data: Vec<u8>, done: Done);

    /// A request has failed with this errno.
    fn failed(&self, errno: i32);
}
