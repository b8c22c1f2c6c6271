//! The handshake as a state machine: it takes bytes, and gives bytes.
//!
//! Steps: the server's greeting and the client's flags, [`SESSION`], structured replies, `base:allocation`, and GO,
//! or EXPORT_NAME where the server knows no GO. Steps that a server does not support are left out.

use super::Refusal;
use crate::wire::{
    CONTEXT, FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC,
    can, info, option, reply,
};

/// A private option of Ferrite's servers: the client's name for its session, [`SESSION_BYTES`] bytes. The server
/// ends the older connections that it [replaces](Session::replaces), and answers with ACK when nothing of theirs is
/// under way any more. Other servers answer that they do not support it.
pub const SESSION: u32 = u32::from_be_bytes(*b"FeSN");
/// Bytes of a session's name.
pub const SESSION_BYTES: usize = 28;

/// The name of a session: of one connection of one process that uses a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// The user of the disk. Processes that follow each other for one guest have the same.
    pub user: [u8; 16],
    /// The process, by a random number.
    pub process: u64,
    /// The number of the connection among those of the process.
    pub connection: u32,
}

impl Session {
    /// As data of [`SESSION`].
    pub fn to_bytes(self) -> [u8; SESSION_BYTES] {
        let mut bytes = [0; SESSION_BYTES];
        bytes[..16].copy_from_slice(&self.user);
        bytes[16..24].copy_from_slice(&self.process.to_be_bytes());
        bytes[24..].copy_from_slice(&self.connection.to_be_bytes());
        bytes
    }

    /// From such data. None: they are not as long.
    pub fn parse(data: &[u8]) -> Option<Session> {
        let (user, rest) = data.split_first_chunk()?;
        let mut fields = Fields(rest);
        let (process, connection) = (fields.u64()?, fields.u32()?);
        fields.0.is_empty().then_some(Session { user: *user, process, connection })
    }

    /// Whether what is left of `old` has to end before this one begins: it is the same connection's predecessor, or that
    /// of an earlier process of the same user.
    pub fn replaces(&self, old: &Session) -> bool {
        self.user == old.user && (self.process != old.process || self.connection == old.connection)
    }
}

/// The longest name of an export that servers have to accept.
pub const MAX_NAME_BYTES: usize = 4096;

/// The longest reply to an option that is read.
const MAX_REPLY_BYTES: u32 = 16 << 10;
/// Replies to one option before its last, at most.
const MAX_REPLIES: u32 = 64;
/// The first magic number of servers of the old style, which have no options.
const OLD_STYLE: u64 = 0x0000_4202_8186_1253;

const GREETING_BYTES: usize = 18;
const REPLY_HEAD_BYTES: usize = 20;
const NAMED_BYTES: usize = 10;
const PADDING_BYTES: usize = 124;

/// The options that the client asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The name of the export; empty: the server's default.
    pub export: String,
    /// Ask for `base:allocation`.
    pub allocation: bool,
    /// Ask for no replies in chunks: the stream is given to a client that does not know them, such as Linux' own.
    pub simple_replies: bool,
    /// Name the session, so that a server of ours ends an older one first.
    pub session: Option<Session>,
}

/// An export, as the server describes it. All of it was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Bytes; more than 0, and below 2^63.
    pub bytes: u64,
    /// See [`can`].
    pub flags: u16,
    /// Offsets and lengths are multiples of this power of two, at most 64 KiB.
    pub min_block_bytes: u32,
    /// The block that is best, a power of two.
    pub preferred_block_bytes: u32,
    /// The longest data of a request.
    pub max_block_bytes: u32,
    /// Replies come in chunks.
    pub structured: bool,
    /// The number of `base:allocation`.
    pub allocation: Option<u32>,
    /// The server has ended older connections of this session.
    pub fenced: bool,
}

/// The sizes that a server without block sizes accepts (the protocol of the NBD project, "Block size constraints").
const DEFAULT_MAX_BYTES: u32 = 32 << 20;
const DEFAULT_PREFERRED_BYTES: u32 = 4096;
const LARGEST_MIN_BYTES: u32 = 64 << 10;

impl Export {
    /// Whether the export has this flag.
    pub fn can(&self, flag: u16) -> bool {
        self.flags & can::HAS_FLAGS != 0 && self.flags & flag != 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    /// The head of a reply to this option.
    Head(u32),
    /// The data of a reply: option, kind, bytes.
    Data(u32, u32, u32),
    /// The answer to EXPORT_NAME, with zeros behind it or without.
    Named {
        padded: bool,
    },
    Ended,
}

/// A handshake under way. Its user reads [`needs`](Self::needs) bytes, gives them to [`take`](Self::take), and sends
/// what that has to say.
#[derive(Debug)]
pub struct Handshake {
    wanted: Wanted,
    state: State,
    server_flags: u16,
    replies: u32,
    size: Option<(u64, u16)>,
    blocks: Option<(u32, u32, u32)>,
    structured: bool,
    allocation: Option<u32>,
    fenced: bool,
}

impl Handshake {
    /// A new one. Nothing is sent before the server's greeting.
    ///
    /// # Errors
    /// The name of the export is too long.
    pub fn new(wanted: Wanted) -> Result<Handshake, Refusal> {
        if wanted.export.len() > MAX_NAME_BYTES {
            let why = format!("the name of the export is longer than {MAX_NAME_BYTES} bytes");
            return Err(Refusal::unfit(why, "use a shorter name"));
        }
        Ok(Handshake {
            wanted,
            state: State::Greeting,
            server_flags: 0,
            replies: 0,
            size: None,
            blocks: None,
            structured: false,
            allocation: None,
            fenced: false,
        })
    }

    /// The number of bytes that [`take`](Self::take) is to be called with: at most 16 KiB; 0 after the end.
    pub fn needs(&self) -> usize {
        match self.state {
            State::Greeting => GREETING_BYTES,
            State::Head(_) => REPLY_HEAD_BYTES,
            State::Data(_, _, len) => len as usize,
            State::Named { padded: false } => NAMED_BYTES,
            State::Named { padded: true } => NAMED_BYTES + PADDING_BYTES,
            State::Ended => 0,
        }
    }

    /// The meaning of an end of the stream now.
    pub fn closed(&self) -> Refusal {
        match self.state {
            State::Greeting => Refusal {
                why: "the server closed the connection at once".into(),
                help: "check that it is an NBD server, that it allows this client, and that it does not \
                       serve its only client already"
                    .into(),
                passes: true,
            },
            State::Named { .. } => Refusal::unfit(
                format!("the server closed the connection when asked for {:?}", self.wanted.export),
                "check the name of the export: an old server does not say why",
            ),
            _ => Refusal {
                why: "the server closed the connection within the handshake".into(),
                help: "look into the server's log".into(),
                passes: true,
            },
        }
    }

    /// Takes the next bytes, and adds what is to be sent to `out`. `Some`: the handshake is over.
    ///
    /// # Errors
    /// The server refuses, or contradicts the protocol: the connection is of no use any more.
    pub fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Option<Export>, Refusal> {
        if bytes.len() != self.needs() || self.state == State::Ended {
            self.state = State::Ended;
            return Err(Refusal::nonsense("the server's bytes end within a message"));
        }
        let state = std::mem::replace(&mut self.state, State::Ended);
        match state {
            State::Greeting => self.greeting(bytes, out).map(|()| None),
            State::Head(asked) => self.head(asked, bytes, out),
            State::Data(asked, kind, _) => self.reply(asked, kind, bytes, out),
            State::Named { .. } => self.named(bytes).map(Some),
            State::Ended => Ok(None),
        }
    }

    fn greeting(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let mut fields = Fields(bytes);
        let magics = (fields.u64(), fields.u64());
        match magics {
            (Some(SERVER_MAGIC), Some(OPTION_MAGIC)) => {}
            (Some(SERVER_MAGIC), Some(OLD_STYLE)) => {
                let why = "the server speaks the old protocol without options";
                return Err(Refusal::unfit(why, "use a server of this decade"));
            }
            _ => return Err(Refusal::nonsense("what answers there is no NBD server")),
        }
        self.server_flags = fields.u16().unwrap_or_default();
        let ours = self.server_flags & (FIXED_NEWSTYLE | NO_ZEROES);
        out.extend(u32::from(ours).to_be_bytes());
        if self.server_flags & FIXED_NEWSTYLE == 0 {
            self.ask_by_name(out);
        } else if let Some(session) = self.wanted.session {
            self.ask(SESSION, &[&session.to_bytes()], out);
        } else {
            self.ask_for_chunks(out);
        }
        Ok(())
    }

    fn ask_for_chunks(&mut self, out: &mut Vec<u8>) {
        match self.wanted.simple_replies {
            true => self.ask_to_go(out),
            false => self.ask(option::STRUCTURED_REPLY, &[], out),
        }
    }

    fn ask(&mut self, asked: u32, parts: &[&[u8]], out: &mut Vec<u8>) {
        push_option(asked, parts, out);
        self.replies = 0;
        self.state = State::Head(asked);
    }

    fn ask_by_name(&mut self, out: &mut Vec<u8>) {
        push_option(option::EXPORT_NAME, &[self.wanted.export.as_bytes()], out);
        self.state = State::Named { padded: self.server_flags & NO_ZEROES == 0 };
    }

    fn ask_for_context(&mut self, out: &mut Vec<u8>) {
        let name = self.wanted.export.clone();
        let parts: [&[u8]; 5] = [
            &length(name.as_bytes()),
            name.as_bytes(),
            &1u32.to_be_bytes(),
            &length(CONTEXT.as_bytes()),
            CONTEXT.as_bytes(),
        ];
        self.ask(option::SET_META_CONTEXT, &parts, out);
    }

    fn ask_to_go(&mut self, out: &mut Vec<u8>) {
        let name = self.wanted.export.clone();
        let parts: [&[u8]; 4] = [
            &length(name.as_bytes()),
            name.as_bytes(),
            &1u16.to_be_bytes(),
            &info::BLOCK_SIZE.to_be_bytes(),
        ];
        self.ask(option::GO, &parts, out);
    }

    fn head(
        &mut self,
        asked: u32,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Export>, Refusal> {
        let mut fields = Fields(bytes);
        let head = (fields.u64(), fields.u32(), fields.u32(), fields.u32());
        let (Some(OPTION_REPLY_MAGIC), Some(option), Some(kind), Some(len)) = head else {
            return Err(Refusal::nonsense("a reply of the server does not begin as one"));
        };
        if option != asked {
            return Err(Refusal::nonsense("the server answers an option that was not asked"));
        }
        self.replies += 1;
        if len > MAX_REPLY_BYTES || self.replies > MAX_REPLIES {
            return Err(Refusal::nonsense("the server's reply to an option has no end"));
        }
        if len == 0 {
            return self.reply(asked, kind, &[], out);
        }
        self.state = State::Data(asked, kind, len);
        Ok(None)
    }

    fn reply(
        &mut self,
        asked: u32,
        kind: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Export>, Refusal> {
        let refused = || Refusal::of_reply(asked, kind, data, &self.wanted.export);
        match (asked, kind) {
            (option::GO, reply::INFO) => self.information(data)?,
            (option::GO, reply::ACK) => return self.ended().map(Some),
            (option::GO, reply::UNSUPPORTED) => {
                self.ask_by_name(out);
                return Ok(None);
            }
            (option::SET_META_CONTEXT, reply::META_CONTEXT) => self.context(data)?,
            (option::SET_META_CONTEXT, reply::ACK | reply::UNSUPPORTED | reply::INVALID) => {
                if kind != reply::ACK {
                    self.allocation = None;
                }
                self.ask_to_go(out);
                return Ok(None);
            }
            (option::STRUCTURED_REPLY, _) if kind == reply::ACK || is_no(kind) => {
                self.structured = kind == reply::ACK;
                match self.structured && self.wanted.allocation {
                    true => self.ask_for_context(out),
                    false => self.ask_to_go(out),
                }
                return Ok(None);
            }
            (SESSION, _) if kind == reply::ACK || is_no(kind) => {
                self.fenced = kind == reply::ACK;
                self.ask_for_chunks(out);
                return Ok(None);
            }
            (_, kind) if kind >> 31 == 1 => return Err(refused()),
            _ => return Err(Refusal::nonsense("the server's reply does not fit the option")),
        }
        self.state = State::Head(asked);
        Ok(None)
    }

    fn context(&mut self, data: &[u8]) -> Result<(), Refusal> {
        let mut fields = Fields(data);
        let id = fields.u32();
        match (id, fields.0 == CONTEXT.as_bytes(), self.allocation) {
            (Some(id), true, None) => self.allocation = Some(id),
            _ => return Err(Refusal::nonsense("the server offers a context that was not asked")),
        }
        Ok(())
    }

    fn information(&mut self, data: &[u8]) -> Result<(), Refusal> {
        let mut fields = Fields(data);
        let short = || Refusal::nonsense("the server's information about the export is cut off");
        match fields.u16().ok_or_else(short)? {
            info::EXPORT => {
                let size = fields.u64().zip(fields.u16()).ok_or_else(short)?;
                let differs = self.size.is_some_and(|told| told != size);
                if differs || !fields.0.is_empty() {
                    return Err(Refusal::nonsense("the server tells two sizes of the export"));
                }
                self.size = Some(size);
            }
            info::BLOCK_SIZE => {
                let sizes = (fields.u32(), fields.u32(), fields.u32());
                let (Some(min), Some(preferred), Some(max)) = sizes else { return Err(short()) };
                self.blocks = Some(checked_blocks(min, preferred, max)?);
            }
            // Name, description and what is to come: nothing depends on it.
            _ => {}
        }
        Ok(())
    }

    fn named(&mut self, bytes: &[u8]) -> Result<Export, Refusal> {
        let mut fields = Fields(bytes);
        self.size = fields.u64().zip(fields.u16());
        self.ended()
    }

    fn ended(&mut self) -> Result<Export, Refusal> {
        let (bytes, flags) =
            self.size.ok_or_else(|| Refusal::nonsense("the server tells no size of the export"))?;
        let (min, preferred, max) =
            self.blocks.unwrap_or((1, DEFAULT_PREFERRED_BYTES, DEFAULT_MAX_BYTES));
        if bytes == 0 || bytes >= 1 << 63 {
            let why = format!("the export has {bytes} bytes");
            let help = "give the server an image with a size of at least one sector, below 8 EiB";
            return Err(Refusal::unfit(why, help));
        }
        Ok(Export {
            bytes,
            flags,
            min_block_bytes: min,
            preferred_block_bytes: preferred,
            max_block_bytes: max,
            structured: self.structured,
            allocation: self.allocation,
            fenced: self.fenced,
        })
    }
}

/// Block sizes as they may be used; a server may have no largest one (2^32 - 1).
fn checked_blocks(min: u32, preferred: u32, max: u32) -> Result<(u32, u32, u32), Refusal> {
    let is_fit = min.is_power_of_two()
        && min <= LARGEST_MIN_BYTES
        && preferred.is_power_of_two()
        && preferred >= min
        && max >= min
        && (max.is_multiple_of(min) || max == u32::MAX);
    match is_fit {
        true => Ok((min, preferred, max.min(DEFAULT_MAX_BYTES).max(min))),
        false => {
            let why = format!("the server has impossible block sizes: {min}, {preferred}, {max}");
            Err(Refusal::nonsense(why))
        }
    }
}

/// Whether an option that can be done without is declined.
fn is_no(kind: u32) -> bool {
    matches!(kind, reply::UNSUPPORTED | reply::INVALID)
}

fn length(bytes: &[u8]) -> [u8; 4] {
    // Names are bounded in `Handshake::new`.
    (bytes.len() as u32).to_be_bytes()
}

fn push_option(option: u32, parts: &[&[u8]], out: &mut Vec<u8>) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend((len as u32).to_be_bytes());
    parts.iter().for_each(|part| out.extend(*part));
}
