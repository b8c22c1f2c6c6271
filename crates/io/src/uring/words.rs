//! Small reads and writes of event descriptors, handed over with everything else: a system call
//! each saved, which under a hypervisor is the dearest part of an event.

use std::sync::atomic::AtomicU64;

use io_uring::types::Fd;
use io_uring::{opcode, squeue};

use super::Uring;
use super::table::Kind;
use crate::engine::{Completion, Token};

/// `user_data` of a [`put`](Uring::put_word), which the kernel gives back only if it failed.
pub(super) const PUT: u64 = u64::MAX - 3;

/// No position in the file: descriptors of events have none.
const NO_OFFSET: u64 = u64::MAX;

/// The memory that the kernel reads and writes in these operations.
pub(super) struct Words {
    /// The words put, by place in the submission queue: each is read while the kernel takes the
    /// entry from the queue, since the descriptor does not block.
    put: Box<[u32]>,
    /// Where what is read goes. Nobody looks.
    sink: Box<AtomicU64>,
    /// Whom to tell of a failed put.
    token: Option<Token>,
}

impl Words {
    pub(super) fn new(places: u32) -> Words {
        Words { put: vec![0; places as usize].into(), sink: Box::default(), token: None }
    }

    /// The kernel may go on using them.
    pub(super) fn abandon(&mut self) {
        Box::leak(std::mem::take(&mut self.sink));
        Box::leak(std::mem::take(&mut self.put));
    }

    /// The completion of a put that failed.
    pub(super) fn failed(&self, raw: i32) -> Option<Completion> {
        self.token.map(|token| Completion { token, raw })
    }
}

impl Uring {
    /// See [`Engine::drain`](crate::engine::Engine::drain).
    pub(super) fn drain_word(&mut self, token: Token, fd: i32) -> bool {
        if !self.has_room() {
            return false;
        }
        let index = self.table.insert(token, Kind::Data);
        let sink = self.words.sink.as_ptr().cast();
        let read = opcode::Read::new(Fd(fd), sink, 8).offset(NO_OFFSET).build();
        self.hand_over(&read.user_data(u64::from(index)));
        true
    }

    /// See [`Engine::put`](crate::engine::Engine::put).
    pub(super) fn put_word(&mut self, token: Token, fd: i32, word: u32) -> bool {
        if !self.ring.params().is_feature_skip_cqe_on_success() || !self.has_room() {
            return false;
        }
        let place = self.place();
        self.words.put[place] = word;
        self.words.token = Some(token);
        let from = (&raw const self.words.put[place]).cast();
        let write = opcode::Write::new(Fd(fd), from, 4).offset(NO_OFFSET).build();
        self.hand_over(&write.flags(squeue::Flags::SKIP_SUCCESS).user_data(PUT));
        // It has no completion to wait for.
        self.pending -= 1;
        true
    }
}
