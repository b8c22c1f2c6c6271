//! The unanswered requests of a client: a fixed table.

use ferrite_nbd::wire::{RawRequest, command, flag};

/// Most unanswered requests of a client. Further ones stay in its socket.
pub(in crate::nbd) const REQUESTS: usize = 128;

/// The number of a request in the table.
pub(super) type Slot = u8;

const _: () = assert!(REQUESTS <= 256);

/// A request of the client, and its progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) raw: RawRequest,
    /// Bytes that were not handed to the path yet.
    pub(super) left: u64,
    /// The number of its parts on the path.
    pub(super) under_way: u32,
    /// The first error of its parts, as NBD numbers errors; 0 means none.
    pub(super) error: u32,
    /// The request must be flushed before its answer, and the flush was not started.
    pub(super) flush_due: bool,
    /// The head of a simple reply to a read was sent. It promised that there is no error.
    pub(super) promised: bool,
    /// The client was gone before it sent the whole request, so there is no answer.
    pub(super) silent: bool,
    /// It was counted as waiting for the disk's limit.
    pub(super) limited: bool,
}

impl Request {
    pub(super) fn new(raw: RawRequest) -> Request {
        let changes = [command::WRITE, command::TRIM, command::WRITE_ZEROES].contains(&raw.command);
        let left = if raw.command == command::FLUSH { 0 } else { raw.len };
        Request {
            raw,
            left,
            under_way: 0,
            error: 0,
            flush_due: changes && raw.has(flag::FUA),
            promised: false,
            silent: false,
            limited: false,
        }
    }

    /// Returns whether no part is under way and none is left to start.
    pub(super) fn has_ended(&self) -> bool {
        self.left == 0 && self.under_way == 0
    }
}

/// The table of unanswered requests.
pub(super) struct Requests {
    requests: Vec<Option<Request>>,
    free: Vec<Slot>,
}

impl Requests {
    pub(super) fn new() -> Requests {
        Requests {
            requests: vec![None; REQUESTS],
            free: (0..REQUESTS).rev().map(|slot| slot as Slot).collect(),
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    pub(super) fn in_use(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// Adds a request. Returns `None` if the table is full.
    pub(super) fn add(&mut self, request: Request) -> Option<Slot> {
        let slot = self.free.pop()?;
        self.requests[usize::from(slot)] = Some(request);
        Some(slot)
    }

    /// Returns the request of a slot that is in use.
    pub(super) fn get(&mut self, slot: Slot) -> &mut Request {
        match &mut self.requests[usize::from(slot)] {
            Some(request) => request,
            None => unreachable!("a slot is freed by who has it"),
        }
    }

    /// Frees the slot of an answered request.
    pub(super) fn remove(&mut self, slot: Slot) {
        self.requests[usize::from(slot)] = None;
        self.free.push(slot);
    }
}
