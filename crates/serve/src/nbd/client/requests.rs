//! What a client waits for: a fixed table.

use super::super::wire::{RawRequest, command, flag};

/// Requests of a client that are not answered; of more, the rest stays in its socket.
pub(in crate::nbd) const REQUESTS: usize = 128;

/// The number of a request in the table.
pub(super) type Slot = u8;

const _: () = assert!(REQUESTS <= 256);

/// A request that may be carried out, and how far that is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) raw: RawRequest,
    /// Bytes that the path was not given yet.
    pub(super) left: u64,
    /// Its parts on the path.
    pub(super) under_way: u32,
    /// The first error of those that have ended; 0: none.
    pub(super) error: u32,
    /// It is flushed before it is answered, and that was not begun.
    pub(super) flush_due: bool,
    /// The head of a simple reply to a read was sent, which has promised that there is no error.
    pub(super) promised: bool,
    /// The client is gone before it had sent all of it: there is no answer.
    pub(super) silent: bool,
}

impl Request {
    pub(super) fn new(raw: RawRequest) -> Request {
        let changes = [command::WRITE, command::TRIM, command::WRITE_ZEROES].contains(&raw.command);
        let left = if raw.command == command::FLUSH { 0 } else { u64::from(raw.len) };
        Request {
            raw,
            left,
            under_way: 0,
            error: 0,
            flush_due: changes && raw.has(flag::FUA),
            promised: false,
            silent: false,
        }
    }

    /// Nothing of it is under way or has to be begun.
    pub(super) fn has_ended(&self) -> bool {
        self.left == 0 && self.under_way == 0
    }
}

/// See the module's text.
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

    /// `None`: the table is full.
    pub(super) fn add(&mut self, request: Request) -> Option<Slot> {
        let slot = self.free.pop()?;
        self.requests[usize::from(slot)] = Some(request);
        Some(slot)
    }

    /// Whoever has the slot has the request.
    pub(super) fn get(&mut self, slot: Slot) -> &mut Request {
        match &mut self.requests[usize::from(slot)] {
            Some(request) => request,
            None => unreachable!("a slot is freed by who has it"),
        }
    }

    /// It is answered.
    pub(super) fn remove(&mut self, slot: Slot) {
        self.requests[usize::from(slot)] = None;
        self.free.push(slot);
    }
}
