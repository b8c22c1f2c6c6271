//! What a client has asked for, and was not answered yet: it is asked for again when a link ends.
//!
//! A request may so be carried out twice. All of them may: reads and questions change nothing, and a
//! change of a range leaves the same bytes there, however often it is made. What makes that safe:
//!
//! 1. An answer is passed on when it is there in full, and its request is asked for no more. So nothing
//!    that a client was answered is done again later, and no newer data are overwritten by it.
//! 2. A link ends when nothing of its requests is under way. A worker closes it then, and a dead worker's
//!    operations have ended before the next one opens the image (processes.md 4).
//! 3. Between two requests that nobody has answered there is no order, neither of one client nor of a
//!    client and the guest. So it does not matter that one is carried out at two moments. The guest's
//!    own requests are done again in the same way, by the in-flight table.
//! 4. They are asked for in their order.
//! 5. What a client has asked for that is gone is asked for no more. Its link ends as soon as the worker has
//!    that, and with the link what waits for space. Others go on, and their data are newer.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use super::super::negotiation::MAX_REQUEST_BYTES;
use super::super::wire::{
    CHUNK_MAGIC, DONE, Fields, REQUEST_BYTES, RawRequest, SIMPLE_REPLY_MAGIC, command,
};
use super::stream::{Inbox, MAX_PIECES, send};

/// Requests that are held at once, answers that the client has not read included.
const MAX_HELD: usize = 128;
/// Bytes of their data. A longer request is held alone.
const MAX_HELD_BYTES: usize = 4 << 20;
/// What an answer may have besides the data of a read: heads of chunks, extents.
const MORE_BYTES: usize = 8 << 10;
/// A request that is not answered before so many links have ended, one after the other: it may be what
/// ends them.
const MAX_SENDS: u32 = 8;

const SIMPLE_BYTES: usize = 16;
const CHUNK_BYTES: usize = 20;
/// Where the cookie stands, in a request and in both kinds of answers.
const COOKIE_AT: std::ops::Range<usize> = 8..16;

/// A request.
pub(super) struct Held {
    /// The client's own cookie. On a link each request has its number.
    cookie: [u8; 8],
    head: [u8; REQUEST_BYTES],
    command: u16,
    len: usize,
    /// Of a write.
    pub(super) data: Vec<u8>,
    /// What has come of its answer.
    reply: Vec<u8>,
    /// Links on which it was asked for.
    sends: u32,
    /// It was answered before all of it was sent.
    answered: bool,
}

/// The worker does not keep to the protocol.
#[derive(Debug)]
pub(super) struct Nonsense;

impl Held {
    pub(super) fn new(head: &[u8; REQUEST_BYTES], raw: &RawRequest) -> Held {
        let mut cookie = [0; 8];
        cookie.copy_from_slice(&head[COOKIE_AT]);
        Held {
            cookie,
            head: *head,
            command: raw.command,
            len: raw.len as usize,
            data: Vec::new(),
            reply: Vec::new(),
            sends: 0,
            answered: false,
        }
    }

    /// Bytes of data that follow the request.
    pub(super) fn data_bytes(&self) -> usize {
        if self.command == command::WRITE { self.len } else { 0 }
    }

    /// Bytes that are held for it at most, its answer included.
    fn cost(&self) -> usize {
        match self.command {
            // A longer one is refused.
            command::READ if self.len <= MAX_REQUEST_BYTES as usize => self.len,
            _ => self.data_bytes(),
        }
    }
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Requests {
    held: BTreeMap<u64, Held>,
    /// The number of the last.
    last: u64,
    cost: usize,
}

/// How far they were sent on a link, and what of an answer is coming on it.
pub(super) struct Progress {
    /// The next to be sent,
    next: u64,
    /// and so many bytes of it were.
    sent: usize,
    /// The answer to this request goes on until it has so many bytes; and it is complete then.
    coming: Option<(u64, usize, bool)>,
}

impl Progress {
    /// On a new link.
    pub(super) fn new() -> Progress {
        Progress { next: 0, sent: 0, coming: None }
    }

    /// Something of this request was sent.
    fn has_begun(&self, number: u64) -> bool {
        number < self.next || (number == self.next && self.sent > 0)
    }
}

impl Requests {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether there is room for one more, beside answers that the client has not read.
    pub(super) fn have_room(&self, more: &Held, unread: usize, unread_bytes: usize) -> bool {
        let bytes = self.cost + unread_bytes;
        let fits = bytes == 0 || bytes + more.cost() <= MAX_HELD_BYTES;
        fits && self.held.len() + unread < MAX_HELD
    }

    /// One that is there in full.
    pub(super) fn add(&mut self, mut request: Held) {
        self.last += 1;
        request.head[COOKIE_AT].copy_from_slice(&self.last.to_be_bytes());
        self.cost += request.cost();
        self.held.insert(self.last, request);
    }

    fn remove(&mut self, number: u64) -> Option<Held> {
        let request = self.held.remove(&number)?;
        self.cost -= request.cost();
        Some(request)
    }

    /// A link has ended, and all is asked for again. `false`: one of them was asked for too often.
    pub(super) fn begin_again(&mut self, progress: &Progress) -> bool {
        let answered: Vec<u64> =
            self.held.iter().filter(|(_, held)| held.answered).map(|(n, _)| *n).collect();
        answered.into_iter().for_each(|number| drop(self.remove(number)));
        for (number, held) in &mut self.held {
            held.reply = Vec::new();
            held.sends += u32::from(progress.has_begun(*number));
        }
        self.held.values().all(|held| held.sends < MAX_SENDS)
    }

    /// Whether something is to be sent.
    pub(super) fn are_to_be_sent(&self, progress: &Progress) -> bool {
        self.last >= progress.next && self.held.range(progress.next..).next().is_some()
    }

    /// Sends what there is room for. Whether there was some.
    ///
    /// # Errors
    /// The link has ended.
    pub(super) fn send(&mut self, link: &OwnedFd, progress: &mut Progress) -> io::Result<bool> {
        let mut pieces = Vec::with_capacity(MAX_PIECES);
        let mut skip = progress.sent;
        for held in self.held.range(progress.next..).map(|(_, held)| held) {
            for piece in [&held.head[..], &held.data] {
                let skipped = skip.min(piece.len());
                skip -= skipped;
                if skipped < piece.len() && pieces.len() < MAX_PIECES {
                    pieces.push(IoSlice::new(&piece[skipped..]));
                }
            }
            if pieces.len() == MAX_PIECES {
                break;
            }
        }
        if pieces.is_empty() {
            return Ok(false);
        }
        let sent = send(link, &pieces)?;
        progress.sent += sent;
        while let Some((&number, held)) = self.held.range(progress.next..).next() {
            let all = held.head.len() + held.data.len();
            if progress.sent < all {
                // Numbers that are gone are not waited for.
                progress.next = number;
                break;
            }
            progress.sent -= all;
            progress.next = number + 1;
            if held.answered {
                self.remove(number);
            }
        }
        Ok(sent > 0)
    }

    /// Takes what the worker says next. The answer that is complete with it, if one is: nothing of it was
    /// there before.
    pub(super) fn hear(
        &mut self,
        inbox: &mut Inbox,
        progress: &mut Progress,
    ) -> Result<Option<Vec<u8>>, Nonsense> {
        loop {
            if let Some((number, all, ends)) = progress.coming {
                let held = self.held.get_mut(&number).ok_or(Nonsense)?;
                inbox.pour(&mut held.reply, all);
                if held.reply.len() < all {
                    return Ok(None);
                }
                progress.coming = None;
                if ends {
                    return Ok(Some(self.answered(number, progress)));
                }
            }
            let Some(coming) = self.begin_answer(inbox, progress)? else { return Ok(None) };
            progress.coming = Some(coming);
        }
    }

    /// The head of an answer, or of a chunk of one.
    fn begin_answer(
        &mut self,
        inbox: &mut Inbox,
        progress: &Progress,
    ) -> Result<Option<(u64, usize, bool)>, Nonsense> {
        let magic = inbox.peek(4).and_then(|bytes| Fields(bytes).u32());
        let bytes = match magic {
            None => return Ok(None),
            Some(SIMPLE_REPLY_MAGIC) => SIMPLE_BYTES,
            Some(CHUNK_MAGIC) => CHUNK_BYTES,
            Some(_) => return Err(Nonsense),
        };
        let Some(head) = inbox.peek(bytes) else { return Ok(None) };
        let mut fields = Fields(&head[4..]);
        let (first, cookie) = (fields.u32().ok_or(Nonsense)?, fields.u64().ok_or(Nonsense)?);
        let held = self.held.get_mut(&cookie).ok_or(Nonsense)?;
        if !progress.has_begun(cookie) || held.answered {
            return Err(Nonsense);
        }
        let is_simple = bytes == SIMPLE_BYTES;
        let (more, ends) = match is_simple {
            true if held.command == command::READ && first == 0 => (held.len, true),
            true => (0, true),
            // Flags and kind.
            false => (fields.u32().ok_or(Nonsense)? as usize, first >> 16 & u32::from(DONE) != 0),
        };
        let at = held.reply.len();
        let all = at + bytes + more;
        let data = if held.command == command::READ { held.cost() } else { 0 };
        if all > data + MORE_BYTES || (is_simple && at > 0) {
            return Err(Nonsense);
        }
        held.reply.reserve(all - at);
        held.reply.extend_from_slice(head);
        held.reply[at..][COOKIE_AT].copy_from_slice(&held.cookie);
        inbox.skip(bytes);
        Ok(Some((cookie, all, ends)))
    }

    fn answered(&mut self, number: u64, progress: &Progress) -> Vec<u8> {
        if number < progress.next {
            return self.remove(number).map(|held| held.reply).unwrap_or_default();
        }
        // A write is refused before its data have come, and they follow all the same.
        match self.held.get_mut(&number) {
            Some(held) => {
                held.answered = true;
                std::mem::take(&mut held.reply)
            }
            None => Vec::new(),
        }
    }
}
