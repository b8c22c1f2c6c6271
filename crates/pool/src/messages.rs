//! The messages between owners and members.

use std::collections::BTreeSet;

use crate::owner::RequestId;
use crate::{Blocks, Generation, OpId, OwnerId, Region};

/// From an owner to a member. Those of one connection arrive in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Begins a session. The first message of a connection.
    Open {
        /// The owner's generation.
        generation: Generation,
        /// The owner.
        owner: OwnerId,
    },
    /// An operation within the session.
    Io {
        /// Its number.
        op: OpId,
        /// The operation.
        io: Io,
    },
}

/// An operation on a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Io {
    /// Writes to the medium.
    Write {
        /// Where.
        blocks: Blocks,
        /// The data.
        data: Data,
    },
    /// Writes to the medium if it has something else there. So equal regions get no bit.
    Repair {
        /// Where.
        blocks: Blocks,
        /// The data.
        data: Data,
    },
    /// Reads from the medium.
    Read {
        /// Where.
        blocks: Blocks,
    },
    /// Makes durable what was answered before.
    Flush,
    /// Says whether the session still is the member's.
    Confirm,
    /// Tells the dirty regions.
    Bits,
    /// Marks regions as dirty, durably.
    Mark(BTreeSet<Region>),
    /// Regions are not dirty any more.
    Clear(BTreeSet<Region>),
    /// The member's copy is whole.
    Complete,
}

/// The data of a write, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Those of a request.
    OfRequest(RequestId),
    /// Those that this read has found.
    OfRead(OpId),
}

/// From a member to an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The session has begun: no earlier one has I/O under way.
    Opened {
        /// Whether the copy may lack what was answered (R10).
        incomplete: bool,
        /// The dirty regions.
        dirty: BTreeSet<Region>,
    },
    /// The member has had a later owner.
    Refused {
        /// Its generation.
        stored: Generation,
    },
    /// An operation is done.
    Done {
        /// Its number.
        op: OpId,
    },
    /// The answer to [`Io::Bits`].
    Bits {
        /// The operation's number.
        op: OpId,
        /// The dirty regions.
        dirty: BTreeSet<Region>,
    },
}
