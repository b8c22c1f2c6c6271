//! The half of a queue that takes responses, and waits for them.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ferrite_host::clock::{Clock, SystemClock};
use rustix::event::{PollFd, PollFlags};

use super::super::super::LoopbackError;
use super::super::error::FrontError;
use super::super::ring::RingWord;
use super::{FrontQueue, Tag};
use crate::grants::InUse;
use ferrite_xen::abi::{OP_READ, OP_WRITE, Response, STATUS_NOT_SUPPORTED, STATUS_OKAY, Slot};

/// A checked response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request's tag.
    pub tag: Tag,
    /// Its id on the wire.
    pub id: u64,
    /// The request's operation; READ or WRITE for INDIRECT.
    pub operation: u8,
    /// `STATUS_OKAY` and the like.
    pub status: i16,
    /// The slot's first bytes: the response with its padding, and the bytes after it.
    pub raw: [u8; 16],
}

impl Reply {
    /// Whether the request succeeded.
    pub fn is_ok(&self) -> bool {
        self.status == STATUS_OKAY
    }
}

impl FrontQueue {
    /// The next response, checked; `None` if there is none now.
    ///
    /// # Errors
    /// The breaches of protocol in [`FrontError`].
    pub fn take(&mut self) -> Result<Option<Reply>, FrontError> {
        let Some(raw) = self.next_response()? else { return Ok(None) };
        let response = decode(&raw);
        let id = response.id;
        let number = id ^ self.options.id_bits;
        let pending = usize::try_from(number).ok().and_then(|n| self.pending.get_mut(n));
        let Some(pending) = pending.filter(|p| p.active) else {
            return Err(FrontError::NotPending { id });
        };
        pending.active = false;
        let expected = pending.operation;
        let tag = Tag(number as u16);
        self.free.push(tag);
        let Response { operation, status, .. } = response;
        self.take_pages(tag, status == STATUS_OKAY);
        self.check_release(tag, id)?;
        if operation != expected {
            return Err(FrontError::WrongOperation { id, got: operation, expected });
        }
        if status == STATUS_NOT_SUPPORTED && matches!(operation, OP_READ | OP_WRITE) {
            return Err(FrontError::NotSupported { operation });
        }
        Ok(Some(Reply { tag, id, operation, status, raw }))
    }

    /// The next response, unchecked, for requests of [`raw_request`](Self::raw_request): decoded, and its bytes.
    ///
    /// # Errors
    /// [`FrontError::BogusProducer`].
    pub fn take_raw(&mut self) -> Result<Option<(Response, [u8; 16])>, FrontError> {
        Ok(self.next_response()?.map(|raw| (decode(&raw), raw)))
    }

    fn next_response(&mut self) -> Result<Option<[u8; 16]>, FrontError> {
        let rsp_prod = self.ring.load(RingWord::RspProd);
        if rsp_prod == self.rsp_cons {
            return Ok(None);
        }
        let unanswered = self.req_published.wrapping_sub(self.rsp_cons);
        if rsp_prod.wrapping_sub(self.rsp_cons) > unanswered {
            let (rsp_cons, req_prod) = (self.rsp_cons, self.req_published);
            return Err(FrontError::BogusProducer { rsp_prod, rsp_cons, req_prod });
        }
        let raw = self.ring.response_bytes(self.rsp_cons);
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        Ok(Some(raw))
    }

    /// Returns pages to the pool, after copying read data.
    fn take_pages(&mut self, tag: Tag, is_ok: bool) {
        let table = self.space.memory().grants();
        for bounce in self.pending[tag.0 as usize].bounces.drain(..) {
            self.pool.give(bounce.finish(&self.space, is_ok), &table);
        }
    }

    fn check_release(&mut self, tag: Tag, id: u64) -> Result<(), FrontError> {
        let tag = tag.0 as usize;
        let table = self.space.memory().grants();
        let pending = &mut self.pending[tag];
        if pending.fresh {
            // All of them are revoked, even if one fails.
            let mut outcome = Ok(());
            for gref in pending.grefs.drain(..) {
                match table.revoke(gref) {
                    Ok(()) => self.spare_grants.push(gref),
                    Err(in_use) => outcome = Err(FrontError::StillUsed { id, in_use }),
                }
            }
            outcome?;
        }
        if !self.options.check_release || self.options.persistent {
            return Ok(());
        }
        let descriptors = self.indirect[tag].iter().flat_map(|b| (0..b.pages()).map(|p| b.gref(p)));
        match pending.grefs.iter().copied().chain(descriptors).find(|g| table.in_use(*g)) {
            Some(gref) => {
                let in_use = InUse(gref);
                Err(FrontError::StillUsed { id, in_use })
            }
            None => Ok(()),
        }
    }

    /// Whether there is a response to [`take`](Self::take), without requesting an event.
    pub fn has_response(&self) -> bool {
        self.ring.load(RingWord::RspProd) != self.rsp_cons
    }

    /// RING_FINAL_CHECK_FOR_RESPONSES: requests an event with the next response; returns whether one came meanwhile.
    pub fn final_check(&self) -> bool {
        if self.ring.load(RingWord::RspProd) != self.rsp_cons {
            return true;
        }
        self.ring.store(RingWord::RspEvent, self.rsp_cons.wrapping_add(1));
        fence(Ordering::SeqCst);
        self.ring.load(RingWord::RspProd) != self.rsp_cons
    }

    /// Readable when the backend has sent an event.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.space.event_fd(self.port)
    }

    /// Takes a pending event.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take_event(&self) -> Result<bool, FrontError> {
        match rustix::io::read(self.event_fd(), &mut [0; 8]) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::AGAIN) => Ok(false),
            Err(e) => Err(FrontError::Event(e.into())),
        }
    }

    /// Waits for an event; whether one came in time.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait_event(&self, timeout: Duration) -> Result<bool, FrontError> {
        let mut fds = [PollFd::from_borrowed_fd(self.event_fd(), PollFlags::IN)];
        let timeout = rustix::event::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(false),
            Ok(_) => self.take_event(),
            Err(e) => Err(FrontError::Event(e.into())),
        }
    }

    /// Waits for a response, as a guest does: requests an event, sleeps, checks again. `false` if none came in time.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn wait(&self, timeout: Duration) -> Result<bool, FrontError> {
        let end_ns = SystemClock.now_ns().saturating_add(timeout.as_nanos() as u64);
        while !self.final_check() {
            let left = end_ns.saturating_sub(SystemClock.now_ns());
            if left == 0 {
                return Ok(false);
            }
            self.wait_event(Duration::from_nanos(left))?;
        }
        Ok(true)
    }

    /// Pushes, and waits for the next response.
    ///
    /// # Errors
    /// [`LoopbackError::Timeout`], or as [`take`](Self::take).
    pub fn next_reply(&mut self, timeout: Duration) -> Result<Reply, FrontError> {
        self.push()?;
        loop {
            if let Some(reply) = self.take()? {
                return Ok(reply);
            }
            if !self.wait(timeout)? {
                let what = format!("no response to {} requests came", self.in_flight());
                let ms = timeout.as_millis() as u64;
                return Err(LoopbackError::Timeout { what, ms }.into());
            }
        }
    }

    /// Pushes, and waits until everything is answered; the replies in the order they came.
    ///
    /// # Errors
    /// As [`next_reply`](Self::next_reply).
    pub fn drain(&mut self, timeout: Duration) -> Result<Vec<Reply>, FrontError> {
        let mut replies = Vec::with_capacity(self.in_flight());
        while self.in_flight() > 0 {
            replies.push(self.next_reply(timeout)?);
        }
        Ok(replies)
    }
}

fn decode(raw: &[u8; 16]) -> Response {
    let mut slot = Slot::default();
    slot.0[..16].copy_from_slice(raw);
    Response::decode(&slot)
}
