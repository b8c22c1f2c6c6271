//! The operations that an engine has taken and not given back.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::engine::Token;

/// The engine's knowledge of an operation besides its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The kernel moves data or changes a file.
    Data,
    /// It waits for a descriptor, and can be cancelled.
    Poll,
    /// It moves bytes of a socket as soon as that can be done, and can be cancelled.
    Stream,
    /// It waits for a time, and can be cancelled.
    Timer,
    /// The helper thread runs it.
    Offloaded,
}

#[derive(Clone, Copy)]
struct Entry {
    token: Token,
    /// `None`: the entry is free.
    kind: Option<Kind>,
}

/// A table with an entry for each operation. The index of the entry is what the kernel gives back
/// (`user_data`), so that callers may use any token, and a bogus index does no harm.
#[derive(Default)]
pub(super) struct Table {
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// The sockets of streams, by the index of the entry.
    sockets: Vec<Option<Arc<OwnedFd>>>,
}

impl Table {
    pub(super) fn insert(&mut self, token: Token, kind: Kind) -> u32 {
        let entry = Entry { token, kind: Some(kind) };
        match self.free.pop() {
            Some(i) => {
                self.entries[i as usize] = entry;
                i
            }
            None => {
                self.entries.push(entry);
                // An entry for each living operation: memory ends before 32 bits do.
                (self.entries.len() - 1) as u32
            }
        }
    }

    /// One for a transfer of this socket, which stays open until the entry is removed: until the kernel has
    /// looked at the descriptor, no other file may get its number.
    pub(super) fn insert_stream(&mut self, token: Token, socket: Arc<OwnedFd>) -> u32 {
        let index = self.insert(token, Kind::Stream);
        if self.sockets.len() < self.entries.len() {
            self.sockets.resize(self.entries.len(), None);
        }
        self.sockets[index as usize] = Some(socket);
        index
    }

    /// The socket of a stream's entry.
    pub(super) fn socket(&self, index: u32) -> Option<&Arc<OwnedFd>> {
        self.sockets.get(index as usize)?.as_ref()
    }

    pub(super) fn remove(&mut self, index: u64) -> Option<(Token, Kind)> {
        let entry = self.entries.get_mut(usize::try_from(index).ok()?)?;
        let kind = entry.kind.take()?;
        if kind == Kind::Stream {
            self.sockets[index as usize] = None;
        }
        // It was inserted with an index of 32 bits.
        self.free.push(index as u32);
        Some((entry.token, kind))
    }

    /// Operations in the table.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// The indices of what waits (and so can be cancelled), with their tokens.
    pub(super) fn waits(&self) -> impl Iterator<Item = (u64, Token)> + '_ {
        let waits = |e: &Entry| matches!(e.kind, Some(Kind::Poll | Kind::Stream | Kind::Timer));
        let indexed = self.entries.iter().enumerate();
        indexed.filter(move |(_, e)| waits(e)).map(|(i, e)| (i as u64, e.token))
    }
}
