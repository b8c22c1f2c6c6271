//! Small reads and writes of event descriptors, handed over with everything else: a system call
//! each saved, which under a hypervisor is the dearest part of an event.

use std::sync::atomic::AtomicU64;

use io_uring::types::Fd;
use io_uring::{opcode, squeue};

use super::Uring;
use crate::engine::{Completion, Token};

/// `user_data` of a [`put`](Uring::put_word), which the kernel gives back only if it failed,
pub(super) const PUT: u64 = u64::MAX - 3;
/// and of a [`drain`](Uring::drain_word) likewise.
pub(super) const DRAIN: u64 = u64::MAX - 4;

/// No position in the file: descriptors of events have none.
const NO_OFFSET: u64 = u64::MAX;

/// The memory that the kernel reads and writes in these operations.
pub(super) struct Words {
    /// The words put, by place in the submission queue: each is read while the kernel takes the
    /// entry from the queue, since the descriptor does not block.
    put: Box<[u32]>,
    /// The target of drains. Its value is not used.
    sink: Box<AtomicU64>,
    /// The token of a failed put.
    putter: Option<Token>,
    /// And of a failed drain.
    drainer: Option<Token>,
}

impl Words {
    pub(super) fn new(places: u32) -> Words {
        Words {
            put: vec![0; places as usize].into(),
            sink: Box::default(),
            putter: None,
            drainer: None,
        }
    }

    /// The kernel may go on using them.
    pub(super) fn abandon(&mut self) {
        Box::leak(std::mem::take(&mut self.sink));
        Box::leak(std::mem::take(&mut self.put));
    }

    /// The completion of a put or a drain that failed. A drain that got fewer bytes than it asked for is such a one to the
    /// kernel.
    pub(super) fn failed(&self, which: u64, raw: i32) -> Option<Completion> {
        let token = if which == PUT { self.putter } else { self.drainer };
        token.map(|token| Completion { token, raw })
    }

    /// Whether a drain may be under way: one that finds nothing may be kept by the kernel until there
    /// is something.
    pub(super) fn may_drain(&self) -> bool {
        self.drainer.is_some()
    }
}

impl Uring {
    /// See [`Engine::drain`](crate::engine::Engine::drain).
    ///
    /// # Panics
    /// It is more than a word.
    pub(super) fn drain_word(&mut self, token: Token, fd: i32, bytes: u32) -> bool {
        assert!(bytes as usize <= size_of::<AtomicU64>(), "a word is drained, not {bytes} bytes");
        if !self.can_be_silent() {
            return false;
        }
        self.words.drainer = Some(token);
        let sink = self.words.sink.as_ptr().cast();
        let read = opcode::Read::new(Fd(fd), sink, bytes).offset(NO_OFFSET).build();
        self.hand_over_silently(read, DRAIN);
        true
    }

    /// See [`Engine::put`](crate::engine::Engine::put).
    pub(super) fn put_word(&mut self, token: Token, fd: i32, word: u32) -> bool {
        if !self.can_be_silent() {
            return false;
        }
        let place = self.place();
        self.words.put[place] = word;
        self.words.putter = Some(token);
        let from = (&raw const self.words.put[place]).cast();
        let write = opcode::Write::new(Fd(fd), from, 4).offset(NO_OFFSET).build();
        self.hand_over_silently(write, PUT);
        true
    }

    /// Whether there is room, and a kernel that keeps successes to itself (Linux 5.17).
    fn can_be_silent(&mut self) -> bool {
        self.ring.params().is_feature_skip_cqe_on_success() && self.has_room()
    }

    fn hand_over_silently(&mut self, entry: squeue::Entry, which: u64) {
        self.hand_over(&entry.flags(squeue::Flags::SKIP_SUCCESS).user_data(which));
        // It has no completion to wait for.
        self.pending -= 1;
    }
}
