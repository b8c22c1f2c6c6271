//! The faults that a frontend finds.

use super::super::LoopbackError;
use super::super::grants::InUse;
use ferrite_xen::store::StoreError;

/// Why a frontend could not go on. The middle group are breaches of the protocol by the backend:
/// for each of them a hardened blkfront disables the disk (blkif.md 2, rules 1, 2, 5, 6).
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The loopback's own: memory, grants, ports, time.
    #[error(transparent)]
    Loopback(#[from] LoopbackError),
    /// The store's.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The kernel's, about events.
    #[error("cannot wait for or send an event: {0}")]
    Event(#[from] std::io::Error),
    /// The backend has written something that is no number where one is expected.
    #[error("the backend's key {key} is {value:?}, which is no number")]
    Key {
        /// Which key.
        key: String,
        /// The value that it holds.
        value: String,
    },

    /// More responses than requests.
    #[error(
        "the backend produced responses up to {rsp_prod}: {rsp_cons} were taken and {req_prod} \
         requests made"
    )]
    BogusProducer {
        /// The value that the backend published.
        rsp_prod: u32,
        /// Responses taken.
        rsp_cons: u32,
        /// Requests made.
        req_prod: u32,
    },
    /// A response to something that was never asked, or was answered already.
    #[error("a response references no pending request: id {id:#x}")]
    NotPending {
        /// The response's id.
        id: u64,
    },
    /// A response that names another operation than its request (rule 1: INDIRECT is answered as
    /// READ or WRITE).
    #[error("the response to {id:#x} names operation {got} instead of {expected}")]
    WrongOperation {
        /// The request's id.
        id: u64,
        /// The value in the response.
        got: u8,
        /// The value that it must have.
        expected: u8,
    },
    /// A read or write that is "not supported", which Windows takes for success (rule 2).
    #[error("the backend says that it does not support operation {operation}")]
    NotSupported {
        /// Which, READ or WRITE.
        operation: u8,
    },
    /// A response before the backend has let go of the request's pages (rule 5, T14).
    #[error("the response to {id:#x} came while {in_use}")]
    StillUsed {
        /// The request's id.
        id: u64,
        /// Which page.
        in_use: InUse,
    },
    /// After the connection was closed, the backend has still mapped the ring (T7).
    #[error("the queue is closed, and {0}")]
    StillMapped(InUse),

    /// No slot is free.
    #[error("the ring is full: {entries} requests are in flight")]
    Full {
        /// Slots.
        entries: u32,
    },
    /// The request has more segments than the connection allows.
    #[error("{segments} segments are more than this connection's limit, {limit}")]
    TooManySegments {
        /// Asked for.
        segments: usize,
        /// Allowed: 11 without indirect requests.
        limit: usize,
    },
}
