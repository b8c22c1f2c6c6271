//! What a client and the first worker agree upon, word for word. The next worker is told the same, and
//! has to answer the same: only then it serves the disk that the client knows.
//!
//! One option is passed on at a time. So it is known which one an answer belongs to.

use super::super::negotiation::{MAX_NAME_BYTES, MAX_OPTION_BYTES, OPTION_HEAD_BYTES, PADDING};
use super::super::wire::{
    FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, option,
    reply,
};
use super::stream::Inbox;

/// Most that a client may say before its first request.
const MAX_ASKED_BYTES: usize = 64 << 10;
/// Most that it is told.
const MAX_SAID_BYTES: usize = 256 << 10;
/// Magic, magic and flags.
const GREETING_BYTES: usize = 18;
/// Bytes of an answer to an option, before its data.
const REPLY_HEAD_BYTES: usize = 20;
/// Size and flags.
const EXPORT_BYTES: usize = 10;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The server greets.
    Greeting,
    /// The client says its flags,
    Flags,
    /// or what it wants.
    Option,
    /// The server answers that option.
    Answers(u32),
    /// The client has its export.
    Through,
    /// It wanted none.
    Over,
}

/// See the module's text.
pub(super) struct Handshake {
    stage: Stage,
    /// All that the client has said.
    pub(super) asked: Vec<u8>,
    /// All that it was told.
    pub(super) said: Vec<u8>,
    /// The answer to `EXPORT_NAME` has no bytes to fill it.
    no_zeroes: bool,
}

/// It makes no sense.
#[derive(Debug)]
pub(super) struct Nonsense;

impl Handshake {
    pub(super) fn new() -> Handshake {
        Handshake { stage: Stage::Greeting, asked: Vec::new(), said: Vec::new(), no_zeroes: false }
    }

    pub(super) fn is_through(&self) -> bool {
        self.stage == Stage::Through
    }

    /// The client has said that it wants nothing, and was answered.
    pub(super) fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    pub(super) fn is_clients_turn(&self) -> bool {
        matches!(self.stage, Stage::Flags | Stage::Option)
    }

    /// The client waits for an answer.
    pub(super) fn is_asked(&self) -> bool {
        matches!(self.stage, Stage::Answers(_))
    }

    /// Takes what the client says next. Whether it was there.
    pub(super) fn hear_client(&mut self, inbox: &mut Inbox) -> Result<bool, Nonsense> {
        let (count, stage) = match self.stage {
            Stage::Flags => {
                let Some(flags) = inbox.peek(4).and_then(|bytes| Fields(bytes).u32()) else {
                    return Ok(false);
                };
                if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
                    return Err(Nonsense);
                }
                self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
                (4, Stage::Option)
            }
            Stage::Option => {
                let Some(head) = inbox.peek(OPTION_HEAD_BYTES) else { return Ok(false) };
                let mut fields = Fields(head);
                let (magic, option, len) = (fields.u64(), fields.u32(), fields.u32());
                let (Some(option), Some(len)) = (option, len) else { return Err(Nonsense) };
                let len = len as usize;
                let most = match option {
                    option::EXPORT_NAME => MAX_NAME_BYTES,
                    _ => MAX_OPTION_BYTES,
                };
                if magic != Some(OPTION_MAGIC) || len > most {
                    return Err(Nonsense);
                }
                (OPTION_HEAD_BYTES + len, Stage::Answers(option))
            }
            _ => return Ok(false),
        };
        let Some(bytes) = inbox.peek(count) else { return Ok(false) };
        if self.asked.len() + count > MAX_ASKED_BYTES {
            return Err(Nonsense);
        }
        self.asked.extend_from_slice(bytes);
        inbox.skip(count);
        self.stage = stage;
        Ok(true)
    }

    /// Takes what the server says next, which is new. Where it begins in `said`, if it was there.
    pub(super) fn hear_server(&mut self, inbox: &mut Inbox) -> Result<Option<usize>, Nonsense> {
        let (count, stage) = match self.stage {
            Stage::Greeting => {
                let Some(mut fields) = inbox.peek(GREETING_BYTES).map(Fields) else {
                    return Ok(None);
                };
                if (fields.u64(), fields.u64()) != (Some(SERVER_MAGIC), Some(OPTION_MAGIC)) {
                    return Err(Nonsense);
                }
                (GREETING_BYTES, Stage::Flags)
            }
            Stage::Answers(option::EXPORT_NAME) => {
                let padding = if self.no_zeroes { 0 } else { PADDING.len() };
                (EXPORT_BYTES + padding, Stage::Through)
            }
            Stage::Answers(asked) => {
                let Some(head) = inbox.peek(REPLY_HEAD_BYTES) else { return Ok(None) };
                let mut fields = Fields(head);
                let (magic, option) = (fields.u64(), fields.u32());
                let (Some(kind), Some(len)) = (fields.u32(), fields.u32()) else {
                    return Err(Nonsense);
                };
                let len = len as usize;
                if (magic, option) != (Some(OPTION_REPLY_MAGIC), Some(asked))
                    || len > MAX_OPTION_BYTES
                {
                    return Err(Nonsense);
                }
                let stage = match (kind, asked) {
                    (reply::ACK, option::GO) => Stage::Through,
                    (reply::ACK, option::ABORT) => Stage::Over,
                    (reply::ACK, _) => Stage::Option,
                    // An error is the last answer, too.
                    _ if kind >> 31 == 1 => Stage::Option,
                    _ => self.stage,
                };
                (REPLY_HEAD_BYTES + len, stage)
            }
            // It was not asked.
            _ => return if inbox.left().is_empty() { Ok(None) } else { Err(Nonsense) },
        };
        let Some(bytes) = inbox.peek(count) else { return Ok(None) };
        let at = self.said.len();
        if at + count > MAX_SAID_BYTES {
            return Err(Nonsense);
        }
        self.said.extend_from_slice(bytes);
        inbox.skip(count);
        self.stage = stage;
        Ok(Some(at))
    }
}
