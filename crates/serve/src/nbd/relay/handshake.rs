//! The handshake of a client with the first worker, byte by byte. The next worker gets the same
//! bytes, and has to send the same replies: only then does it serve the disk that the client knows.
//!
//! One option is passed on at a time, so that each reply belongs to a known option. Before the first one the relay says
//! by an option of its own that it understands all that this version's workers offer. An older worker does not know
//! that option, or not its version. Later workers then do not hear of it, or of the version, and offer what the older
//! one did.

use std::ops::Range;

use super::super::negotiation::{
    MAX_NAME_BYTES, MAX_OPTION_BYTES, OPTION_HEAD_BYTES, PADDING, RELAY_VERSION,
};
use super::stream::Inbox;
use ferrite_nbd::wire::{
    FIXED_NEWSTYLE, Fields, Form, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC,
    option, reply,
};

/// Most bytes of a client before its first request.
const MAX_CLIENT_BYTES: usize = 64 << 10;
/// Most bytes of the server before the first request.
const MAX_SAID_BYTES: usize = 256 << 10;
/// Bytes of the greeting: two magic numbers and flags.
const GREETING_BYTES: usize = 18;
/// Bytes of the client's flags.
const FLAGS_BYTES: usize = 4;
/// Bytes of a reply to an option, before its data.
const REPLY_HEAD_BYTES: usize = 20;
/// Bytes of an export's size and flags.
const EXPORT_BYTES: usize = 10;

/// The progress of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The server's greeting is next.
    Greeting,
    /// The client's flags are next.
    Flags,
    /// The server's answer to the relay's own option is next.
    Introduced,
    /// An option of the client is next.
    Option,
    /// The server's replies to this option are next.
    Answers(u32),
    /// The client has its export.
    Through,
    /// The client has ended the handshake without an export.
    Over,
}

/// The handshake of one client.
pub(super) struct Handshake {
    stage: Stage,
    /// All bytes that the client has sent.
    pub(super) client_bytes: Vec<u8>,
    /// All bytes that the server has sent.
    pub(super) server_bytes: Vec<u8>,
    /// Whether the reply to `EXPORT_NAME` has no padding.
    no_zeroes: bool,
    /// The form of requests and replies. The relay does not tell simple from structured ones.
    pub(super) form: Form,
}

/// The bytes are not a valid handshake.
#[derive(Debug)]
pub(super) struct ProtocolError;

impl Handshake {
    pub(super) fn new() -> Handshake {
        Handshake {
            stage: Stage::Greeting,
            client_bytes: Vec::new(),
            server_bytes: Vec::new(),
            no_zeroes: false,
            form: Form::Simple,
        }
    }

    pub(super) fn is_through(&self) -> bool {
        self.stage == Stage::Through
    }

    /// Whether the client has ended the handshake without an export, and has its reply.
    pub(super) fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    pub(super) fn is_clients_turn(&self) -> bool {
        matches!(self.stage, Stage::Flags | Stage::Option)
    }

    /// Whether the client waits for a reply.
    pub(super) fn is_asked(&self) -> bool {
        matches!(self.stage, Stage::Introduced | Stage::Answers(_))
    }

    /// Reads the client's next message. Returns whether it was complete.
    pub(super) fn read_client(&mut self, inbox: &mut Inbox) -> Result<bool, ProtocolError> {
        let (count, stage) = match self.stage {
            Stage::Flags => {
                let Some(flags) = inbox.peek(FLAGS_BYTES).and_then(|bytes| Fields(bytes).u32())
                else {
                    return Ok(false);
                };
                if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
                    return Err(ProtocolError);
                }
                self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
                (FLAGS_BYTES, Stage::Introduced)
            }
            Stage::Option => {
                let Some(head) = inbox.peek(OPTION_HEAD_BYTES) else { return Ok(false) };
                let mut fields = Fields(head);
                let (magic, option, len) = (fields.u64(), fields.u32(), fields.u32());
                let (Some(option), Some(len)) = (option, len) else { return Err(ProtocolError) };
                let len = len as usize;
                let most = match option {
                    option::EXPORT_NAME => MAX_NAME_BYTES,
                    _ => MAX_OPTION_BYTES,
                };
                if magic != Some(OPTION_MAGIC) || len > most {
                    return Err(ProtocolError);
                }
                (OPTION_HEAD_BYTES + len, Stage::Answers(option))
            }
            _ => return Ok(false),
        };
        let Some(bytes) = inbox.peek(count) else { return Ok(false) };
        if self.client_bytes.len() + count > MAX_CLIENT_BYTES {
            return Err(ProtocolError);
        }
        self.client_bytes.extend_from_slice(bytes);
        if self.stage == Stage::Flags {
            self.introduce(&RELAY_VERSION.to_be_bytes());
        }
        inbox.skip(count);
        self.stage = stage;
        Ok(true)
    }

    /// Reads the server's next message, which is new. If it was complete, returns which of `server_bytes` the client
    /// gets. An older worker's answer to the relay is forgotten, and so is that the relay has asked.
    pub(super) fn read_server(
        &mut self,
        inbox: &mut Inbox,
    ) -> Result<Option<Range<usize>>, ProtocolError> {
        let (mut knows_relays, mut knows_version) = (false, false);
        let (count, stage) = match self.stage {
            Stage::Greeting => {
                let Some(mut fields) = inbox.peek(GREETING_BYTES).map(Fields) else {
                    return Ok(None);
                };
                if (fields.u64(), fields.u64()) != (Some(SERVER_MAGIC), Some(OPTION_MAGIC)) {
                    return Err(ProtocolError);
                }
                (GREETING_BYTES, Stage::Flags)
            }
            Stage::Answers(option::EXPORT_NAME) => {
                let padding = if self.no_zeroes { 0 } else { PADDING.len() };
                (EXPORT_BYTES + padding, Stage::Through)
            }
            Stage::Introduced | Stage::Answers(_) => {
                let asked = match self.stage {
                    Stage::Answers(asked) => asked,
                    _ => option::RELAYED,
                };
                let Some(head) = inbox.peek(REPLY_HEAD_BYTES) else { return Ok(None) };
                let mut fields = Fields(head);
                let (magic, option) = (fields.u64(), fields.u32());
                let (Some(kind), Some(len)) = (fields.u32(), fields.u32()) else {
                    return Err(ProtocolError);
                };
                let len = len as usize;
                if (magic, option) != (Some(OPTION_REPLY_MAGIC), Some(asked))
                    || len > MAX_OPTION_BYTES
                {
                    return Err(ProtocolError);
                }
                knows_relays = (kind, asked) == (reply::ACK, option::RELAYED);
                knows_version = len > 0;
                if (kind, asked) == (reply::ACK, option::EXTENDED_HEADERS) {
                    self.form = Form::Extended;
                }
                let stage = match (kind, asked) {
                    (reply::ACK, option::GO) => Stage::Through,
                    (reply::ACK, option::ABORT) => Stage::Over,
                    (reply::ACK, _) => Stage::Option,
                    // An error is the last reply, too.
                    _ if kind >> 31 == 1 => Stage::Option,
                    _ => self.stage,
                };
                (REPLY_HEAD_BYTES + len, stage)
            }
            // The server must not send anything now.
            _ => return if inbox.left().is_empty() { Ok(None) } else { Err(ProtocolError) },
        };
        let Some(bytes) = inbox.peek(count) else { return Ok(None) };
        let at = self.server_bytes.len();
        if at + count > MAX_SAID_BYTES {
            return Err(ProtocolError);
        }
        self.server_bytes.extend_from_slice(bytes);
        inbox.skip(count);
        if std::mem::replace(&mut self.stage, stage) != Stage::Introduced {
            return Ok(Some(at..at + count));
        }
        if !knows_relays || !knows_version {
            self.client_bytes.truncate(FLAGS_BYTES);
        }
        match knows_relays {
            true if !knows_version => self.introduce(&[]),
            true => {}
            false => self.server_bytes.truncate(at),
        }
        Ok(Some(at..at))
    }

    /// Adds the relay's own option.
    fn introduce(&mut self, version: &[u8]) {
        self.client_bytes.extend(OPTION_MAGIC.to_be_bytes());
        self.client_bytes.extend(option::RELAYED.to_be_bytes());
        self.client_bytes.extend((version.len() as u32).to_be_bytes());
        self.client_bytes.extend(version);
    }
}
