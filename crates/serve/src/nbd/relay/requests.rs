//! A client's requests without a reply. They are sent again when a link ends.
//!
//! So a request may be carried out twice. All of them may: reads and queries change nothing, and a
//! change of a range leaves the same bytes there, however often it is made. The reasons why that is safe:
//!
//! 1. A reply is passed on when it is complete, and its request is not sent again. So no request
//!    with a reply is repeated later, and newer data are not overwritten by it.
//! 2. A link ends when none of its requests is under way. A worker closes it then. A dead worker's
//!    operations have ended before the next one opens the image (processes.md 4).
//! 3. Two requests without a reply have no order, neither those of one client nor those of a client
//!    and the guest. So it does not matter that one is carried out at two moments. The guest's own
//!    requests are repeated in the same way, by the in-flight table.
//! 4. They are sent in their order.
//! 5. Requests of a client that is gone are not sent again. Its link ends as soon as the worker has
//!    them, and with it the requests that wait for space. Other clients go on, and their data are
//!    newer.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use super::super::contexts::MAX_EXTENTS;
use super::super::negotiation::MAX_REQUEST_BYTES;
use super::stream::{Inbox, MAX_PIECES, send};
use ferrite_nbd::wire::{
    CHUNK_MAGIC, DONE, EXTENDED_CHUNK_MAGIC, EXTENDED_REQUEST_BYTES, Fields, Form, RawRequest,
    SIMPLE_REPLY_MAGIC, command,
};

/// Most requests of a client, including replies that the client has not read.
const MAX_HELD: usize = 128;
/// Most bytes of their data. A longer request is held alone.
const MAX_HELD_BYTES: usize = 4 << 20;
/// Bytes of a reply besides the data of a read and extents: heads of chunks.
const MORE_BYTES: usize = 8 << 10;
/// Most bytes of the extents of a reply, of all contexts together.
const EXTENTS_BYTES: usize = MAX_EXTENTS * 16;
/// After this many ended links in a row, a request without a reply is not sent again: it may be
/// what ends them.
const MAX_SENDS: u32 = 8;

const SIMPLE_BYTES: usize = 16;
const CHUNK_BYTES: usize = 20;
const EXTENDED_CHUNK_BYTES: usize = 32;
/// The place of the cookie in a request and in both kinds of replies.
const COOKIE_AT: std::ops::Range<usize> = 8..16;

/// A request.
pub(super) struct PendingRequest {
    /// The client's cookie. On a link, the request's number replaces it.
    cookie: [u8; 8],
    form: Form,
    /// As many of these as a request of that form has.
    head: [u8; EXTENDED_REQUEST_BYTES],
    command: u16,
    len: u64,
    data_bytes: usize,
    /// The data of a write.
    pub(super) data: Vec<u8>,
    /// The part of the reply that has come.
    reply: Vec<u8>,
    /// Links on which the request was sent.
    sends: u32,
    /// Whether the reply came before the request was sent in full.
    answered: bool,
}

/// The worker has broken the protocol.
#[derive(Debug)]
pub(super) struct ProtocolError;

impl PendingRequest {
    pub(super) fn new(form: Form, head: &[u8], raw: &RawRequest) -> PendingRequest {
        let mut held = PendingRequest {
            cookie: raw.cookie.to_be_bytes(),
            form,
            head: [0; EXTENDED_REQUEST_BYTES],
            command: raw.command,
            len: raw.len,
            data_bytes: form.data_bytes(raw) as usize,
            data: Vec::new(),
            reply: Vec::new(),
            sends: 0,
            answered: false,
        };
        held.head[..head.len()].copy_from_slice(head);
        held
    }

    /// Bytes of data that follow the request.
    pub(super) fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    fn head(&self) -> &[u8] {
        &self.head[..self.form.request_bytes()]
    }

    /// Most bytes of its reply besides heads.
    fn reply_bytes(&self) -> usize {
        match self.command {
            // A longer read is refused.
            command::READ if self.len <= MAX_REQUEST_BYTES.into() => self.len as usize,
            command::BLOCK_STATUS => EXTENTS_BYTES,
            _ => 0,
        }
    }

    /// Most bytes that are held for it, its reply included.
    fn cost(&self) -> usize {
        self.data_bytes.saturating_add(self.reply_bytes())
    }
}

/// A client's requests without a reply, see the module's text.
#[derive(Default)]
pub(super) struct Requests {
    held: BTreeMap<u64, PendingRequest>,
    /// The number of the last request.
    last: u64,
    cost: usize,
}

/// The progress of the requests on a link.
pub(super) struct Progress {
    /// The next request to be sent.
    next: u64,
    /// Bytes of it that were sent.
    sent: usize,
    /// The request whose reply is coming, the length that the reply reaches with this part, and
    /// whether it is complete then.
    incoming: Option<(u64, usize, bool)>,
}

impl Progress {
    /// The progress on a new link.
    pub(super) fn new() -> Progress {
        Progress { next: 0, sent: 0, incoming: None }
    }

    /// Whether any byte of this request was sent.
    fn has_begun(&self, number: u64) -> bool {
        number < self.next || (number == self.next && self.sent > 0)
    }
}

impl Requests {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether there is room for one more, besides replies that the client has not read.
    pub(super) fn have_room(
        &self,
        more: &PendingRequest,
        unread: usize,
        unread_bytes: usize,
    ) -> bool {
        let bytes = self.cost + unread_bytes;
        let fits = bytes == 0 || bytes.saturating_add(more.cost()) <= MAX_HELD_BYTES;
        fits && self.held.len() + unread < MAX_HELD
    }

    /// Adds a complete request.
    pub(super) fn add(&mut self, mut request: PendingRequest) {
        self.last += 1;
        request.head[COOKIE_AT].copy_from_slice(&self.last.to_be_bytes());
        self.cost += request.cost();
        self.held.insert(self.last, request);
    }

    fn remove(&mut self, number: u64) -> Option<PendingRequest> {
        let request = self.held.remove(&number)?;
        self.cost -= request.cost();
        Some(request)
    }

    /// Prepares all requests for the next link. `false`: one of them was sent too often.
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

    /// Whether there is something to send.
    pub(super) fn are_to_be_sent(&self, progress: &Progress) -> bool {
        self.last >= progress.next && self.held.range(progress.next..).next().is_some()
    }

    /// Sends as much as there is room for. Returns whether that was any.
    ///
    /// # Errors
    /// The link has ended.
    pub(super) fn send(&mut self, link: &OwnedFd, progress: &mut Progress) -> io::Result<bool> {
        let mut pieces = Vec::with_capacity(MAX_PIECES);
        let mut skip = progress.sent;
        for held in self.held.range(progress.next..).map(|(_, held)| held) {
            for piece in [held.head(), &held.data] {
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
            let all = held.head().len() + held.data.len();
            if progress.sent < all {
                // Numbers of removed requests are skipped.
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

    /// Reads the worker's replies. Returns the next complete one, if there is one, with all its
    /// bytes.
    pub(super) fn read_replies(
        &mut self,
        inbox: &mut Inbox,
        progress: &mut Progress,
    ) -> Result<Option<Vec<u8>>, ProtocolError> {
        loop {
            if let Some((number, all, ends)) = progress.incoming {
                let held = self.held.get_mut(&number).ok_or(ProtocolError)?;
                inbox.pour(&mut held.reply, all);
                if held.reply.len() < all {
                    return Ok(None);
                }
                progress.incoming = None;
                if ends {
                    return Ok(Some(self.answered(number, progress)));
                }
            }
            let Some(incoming) = self.begin_answer(inbox, progress)? else { return Ok(None) };
            progress.incoming = Some(incoming);
        }
    }

    /// Reads the head of a reply, or of a chunk of one.
    fn begin_answer(
        &mut self,
        inbox: &mut Inbox,
        progress: &Progress,
    ) -> Result<Option<(u64, usize, bool)>, ProtocolError> {
        let magic = inbox.peek(4).and_then(|bytes| Fields(bytes).u32());
        let bytes = match magic {
            None => return Ok(None),
            Some(SIMPLE_REPLY_MAGIC) => SIMPLE_BYTES,
            Some(CHUNK_MAGIC) => CHUNK_BYTES,
            Some(EXTENDED_CHUNK_MAGIC) => EXTENDED_CHUNK_BYTES,
            Some(_) => return Err(ProtocolError),
        };
        let Some(head) = inbox.peek(bytes) else { return Ok(None) };
        let mut fields = Fields(&head[4..]);
        let (first, cookie) =
            (fields.u32().ok_or(ProtocolError)?, fields.u64().ok_or(ProtocolError)?);
        let held = self.held.get_mut(&cookie).ok_or(ProtocolError)?;
        if !progress.has_begun(cookie) || held.answered {
            return Err(ProtocolError);
        }
        // The first number of a chunk has its flags and kind.
        let done = first >> 16 & u32::from(DONE) != 0;
        let (more, ends) = match bytes {
            SIMPLE_BYTES if held.command == command::READ && first == 0 => (held.len, true),
            SIMPLE_BYTES => (0, true),
            CHUNK_BYTES => (fields.u32().ok_or(ProtocolError)?.into(), done),
            // The offset is before the length.
            _ => (fields.u64().and(fields.u64()).ok_or(ProtocolError)?, done),
        };
        let at = held.reply.len();
        let all = usize::try_from(more).unwrap_or(usize::MAX).saturating_add(at + bytes);
        if all > held.reply_bytes() + MORE_BYTES || (bytes == SIMPLE_BYTES && at > 0) {
            return Err(ProtocolError);
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
        // A write was refused before its data were sent, and they still have to follow.
        match self.held.get_mut(&number) {
            Some(held) => {
                held.answered = true;
                std::mem::take(&mut held.reply)
            }
            None => Vec::new(),
        }
    }
}
