//! The errors that a frontend finds.

use super::super::LoopbackError;
use super::super::grants::InUse;
use ferrite_xen::store::StoreError;

/// Why a frontend stopped. The middle group are breaches of the protocol by the backend: a hardened blkfront disables
/// the disk for each of them (blkif.md 2, rules 1, 2, 5, 6).
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// An error of the loopback: memory, grants, ports, time.
    #[error(transparent)]
    Loopback(#[from] LoopbackError),
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An error of the kernel, about events.
    #[error("cannot wait for or send an event: {0}")]
    Event(#[from] std::io::Error),
    /// The backend has written a key that should be a number and is none.
    #[error("the backend's key {key} is {value:?}, which is no number")]
    Key {
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },

    /// More responses than requests.
    #[error(
        "the backend produced responses up to {rsp_prod}: {rsp_cons} were taken and {req_prod} \
         requests made"
    )]
    BogusProducer {
        /// The producer index that the backend published.
        rsp_prod: u32,
        /// Responses taken.
        rsp_cons: u32,
        /// Requests made.
        req_prod: u32,
    },
    /// A response to a request that was never made, or was answered already.
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
    /// A read or write with the status "not supported", which Windows takes for success (rule 2).
    #[error("the backend says that it does not support operation {operation}")]
    NotSupported {
        /// The operation, READ or WRITE.
        operation: u8,
    },
    /// A response before the backend has released the request's pages (rule 5, T14).
    #[error("the response to {id:#x} came while {in_use}")]
    StillUsed {
        /// The request's id.
        id: u64,
        /// The page.
        in_use: InUse,
    },
    /// After the connection was closed, the backend still has the ring mapped (T7).
    #[error("the queue is closed, and {0}")]
    StillMapped(InUse),

    /// No slot is free.
    #[error("the ring is full: {entries} requests are in flight")]
    Full {
        /// The number of slots.
        entries: u32,
    },
    /// The request has more segments than the connection allows.
    #[error("{segments} segments are more than this connection's limit, {limit}")]
    TooManySegments {
        /// Segments of the request.
        segments: usize,
        /// The most that are allowed: 11 without indirect requests.
        limit: usize,
    },
}
