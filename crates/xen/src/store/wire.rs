//! xenstore's messages, for either end of a connection (blkif.md 6).
//!
//! Pure functions over bytes: no sockets, no policy. A message is a [`Header`] of 16 bytes, little
//! endian, and a payload of at most [`PAYLOAD_MAX`] bytes.

use crate::hypervisor::DomId;

/// Bytes of a message's header.
pub const HEADER_BYTES: usize = 16;
/// Most bytes of a message's payload.
pub const PAYLOAD_MAX: usize = 4096;
/// Most bytes of an absolute path, without its NUL.
pub const ABSOLUTE_PATH_MAX: usize = 3072;
/// Most bytes of a path relative to the caller's own directory, without its NUL.
pub const RELATIVE_PATH_MAX: usize = 2048;
/// The transaction number of everything that is in no transaction.
pub const NO_TRANSACTION: u32 = 0;
/// The payload of a reply that says no more than that the request was carried out.
pub const OK_PAYLOAD: &[u8] = b"OK\0";

/// The type of a message; a reply has the type of its request, or
/// [`Error`](MessageType::Error).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MessageType {
    /// Maintenance of xenstored itself.
    Control = 0,
    /// `path\0` -> `child\0`...
    Directory = 1,
    /// `path\0` -> value.
    Read = 2,
    /// `path\0` -> `letter+domid\0`...
    GetPerms = 3,
    /// `path\0token\0` -> OK; fires once at once.
    Watch = 4,
    /// `path\0token\0` -> OK.
    Unwatch = 5,
    /// `\0` -> `id\0`.
    TransactionStart = 6,
    /// `T\0` (commit) or `F\0` (abandon) -> OK.
    TransactionEnd = 7,
    /// A new domain's connection.
    Introduce = 8,
    /// The end of one.
    Release = 9,
    /// `domid\0` -> `path\0`.
    GetDomainPath = 10,
    /// `path\0value` -> OK; makes missing parents.
    Write = 11,
    /// `path\0` -> OK; makes missing parents.
    Mkdir = 12,
    /// `path\0` -> OK; children too.
    Rm = 13,
    /// `path\0letter+domid\0`... -> OK.
    SetPerms = 14,
    /// `path\0token\0`, from the server, with request number 0.
    WatchEvent = 15,
    /// `NAME\0`, see [`ErrorName`].
    Error = 16,
    /// `domid\0` -> `T\0` or `F\0`.
    IsDomainIntroduced = 17,
    /// A domain that was shut down runs again.
    Resume = 18,
    /// One domain acts for another.
    SetTarget = 19,
    /// `\0` -> OK; drops every watch and transaction of this connection.
    ResetWatches = 21,
    /// `path\0offset\0` -> `generation\0child\0`...
    DirectoryPart = 22,
    /// The features of the server.
    GetFeature = 23,
    /// Restricts what a domain is told it can do.
    SetFeature = 24,
    /// A domain's limits.
    GetQuota = 25,
    /// Changes them.
    SetQuota = 26,
}

impl MessageType {
    /// Every type there is.
    pub const ALL: [MessageType; 26] = {
        use MessageType::*;
        [
            Control,
            Directory,
            Read,
            GetPerms,
            Watch,
            Unwatch,
            TransactionStart,
            TransactionEnd,
            Introduce,
            Release,
            GetDomainPath,
            Write,
            Mkdir,
            Rm,
            SetPerms,
            WatchEvent,
            Error,
            IsDomainIntroduced,
            Resume,
            SetTarget,
            ResetWatches,
            DirectoryPart,
            GetFeature,
            SetFeature,
            GetQuota,
            SetQuota,
        ]
    };

    /// Its number on the wire.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The type with this number on the wire, if there is one.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.number() == number)
    }
}

/// Why bytes are not a message. After one, nothing else in that stream can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The header announces more than fits in a message.
    #[error("a message of {len} bytes was announced, and the limit is {PAYLOAD_MAX}")]
    TooLong {
        /// The value of `len`.
        len: u32,
    },
    /// Not a type of this protocol.
    #[error("message type {number} does not exist")]
    UnknownType {
        /// The value of `type`.
        number: u32,
    },
}

/// The fixed part of a message. The type is kept as a number: a server answers an unknown one
/// with an error, a client gives the connection up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// See [`MessageType`].
    pub number: u32,
    /// Chosen by the client, echoed by the server; 0 in watch events.
    pub request_id: u32,
    /// Which transaction, or [`NO_TRANSACTION`].
    pub transaction_id: u32,
    /// Payload bytes.
    pub len: u32,
}

impl Header {
    /// The header of a message with `len` bytes of payload.
    pub fn new(kind: MessageType, request_id: u32, transaction_id: u32, len: usize) -> Self {
        debug_assert!(len <= PAYLOAD_MAX);
        Header { number: kind.number(), request_id, transaction_id, len: len as u32 }
    }

    /// Its type.
    ///
    /// # Errors
    /// [`WireError::UnknownType`].
    pub fn kind(&self) -> Result<MessageType, WireError> {
        MessageType::from_number(self.number).ok_or(WireError::UnknownType { number: self.number })
    }

    /// As on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let fields = [self.number, self.request_id, self.transaction_id, self.len];
        for (to, from) in out.chunks_exact_mut(4).zip(fields) {
            to.copy_from_slice(&from.to_le_bytes());
        }
        out
    }

    /// From the wire; the length is checked, the type is not.
    ///
    /// # Errors
    /// [`WireError::TooLong`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let field = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let header = Header {
            number: field(0),
            request_id: field(4),
            transaction_id: field(8),
            len: field(12),
        };
        if header.len as usize > PAYLOAD_MAX {
            return Err(WireError::TooLong { len: header.len });
        }
        Ok(header)
    }
}

/// A whole message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// With `len` equal to the payload's length.
    pub header: Header,
    /// At most [`PAYLOAD_MAX`] bytes.
    pub payload: Vec<u8>,
}

impl Message {
    /// A message; `payload` must not be longer than [`PAYLOAD_MAX`].
    pub fn new(
        kind: MessageType,
        request_id: u32,
        transaction_id: u32,
        payload: impl Into<Vec<u8>>,
    ) -> Self {
        let payload = payload.into();
        Message { header: Header::new(kind, request_id, transaction_id, payload.len()), payload }
    }

    /// The answer to `request` that refuses it.
    pub fn error(request: &Header, name: ErrorName) -> Self {
        let payload = nul_terminated(&[name.name()]);
        Message::new(MessageType::Error, request.request_id, request.transaction_id, payload)
    }

    /// The answer to `request` with this payload; its type is the request's.
    pub fn reply(request: &Header, payload: impl Into<Vec<u8>>) -> Self {
        let payload = payload.into();
        Message { header: Header { len: payload.len() as u32, ..*request }, payload }
    }

    /// Header and payload as on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + self.payload.len());
        out.extend_from_slice(&self.header.encode());
        out.extend_from_slice(&self.payload);
        out
    }
}

/// Cuts a stream of bytes into messages. Holds no more than one message beyond what it was given.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// Bytes at the front that were given out already.
    taken: usize,
}

impl Decoder {
    /// With nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that arrived. Callers take every whole message out, by
    /// [`next_message`](Self::next_message), before they add more: that is what bounds the memory.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message, if it is there.
    ///
    /// # Errors
    /// [`WireError::TooLong`], as soon as the header is there; the stream is of no more use.
    pub fn next_message(&mut self) -> Result<Option<Message>, WireError> {
        let rest = &self.bytes[self.taken..];
        let Some((header, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::decode(header)?;
        let Some(payload) = rest.get(..header.len as usize) else { return Ok(None) };
        let message = Message { header, payload: payload.to_vec() };
        self.taken += HEADER_BYTES + message.payload.len();
        Ok(Some(message))
    }

    /// Whether a message has begun that is not there as a whole.
    pub fn is_partial(&self) -> bool {
        self.taken < self.bytes.len()
    }
}

/// The names that errors have on the wire, whatever their numbers are on either system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // each is the errno(3) of its name
pub enum ErrorName {
    Inval,
    Acces,
    Exist,
    IsDir,
    NoEnt,
    NoMem,
    NoSpc,
    Io,
    NotEmpty,
    NoSys,
    RoFs,
    Busy,
    Again,
    IsConn,
    TooBig,
    Perm,
    /// Oxenstored's answer where xenstored says ENOSPC.
    Quota,
}

impl ErrorName {
    const ALL: [(ErrorName, &'static str, i32); 17] = [
        (ErrorName::Inval, "EINVAL", libc::EINVAL),
        (ErrorName::Acces, "EACCES", libc::EACCES),
        (ErrorName::Exist, "EEXIST", libc::EEXIST),
        (ErrorName::IsDir, "EISDIR", libc::EISDIR),
        (ErrorName::NoEnt, "ENOENT", libc::ENOENT),
        (ErrorName::NoMem, "ENOMEM", libc::ENOMEM),
        (ErrorName::NoSpc, "ENOSPC", libc::ENOSPC),
        (ErrorName::Io, "EIO", libc::EIO),
        (ErrorName::NotEmpty, "ENOTEMPTY", libc::ENOTEMPTY),
        (ErrorName::NoSys, "ENOSYS", libc::ENOSYS),
        (ErrorName::RoFs, "EROFS", libc::EROFS),
        (ErrorName::Busy, "EBUSY", libc::EBUSY),
        (ErrorName::Again, "EAGAIN", libc::EAGAIN),
        (ErrorName::IsConn, "EISCONN", libc::EISCONN),
        (ErrorName::TooBig, "E2BIG", libc::E2BIG),
        (ErrorName::Perm, "EPERM", libc::EPERM),
        (ErrorName::Quota, "EQUOTA", libc::EDQUOT),
    ];

    /// As on the wire, without its NUL.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(e, ..)| *e == self).map_or("EIO", |(_, name, _)| name)
    }

    /// This system's number for it.
    pub fn errno(self) -> i32 {
        Self::ALL.iter().find(|(e, ..)| *e == self).map_or(libc::EIO, |(.., errno)| *errno)
    }

    /// From an error reply's payload, with or without its NUL.
    pub fn from_payload(payload: &[u8]) -> Option<Self> {
        let name = payload.strip_suffix(b"\0").unwrap_or(payload);
        Self::ALL.iter().find(|(_, n, _)| n.as_bytes() == name).map(|(e, ..)| *e)
    }

    /// From this system's number.
    pub fn from_errno(errno: i32) -> Option<Self> {
        Self::ALL.iter().find(|(.., n)| *n == errno).map(|(e, ..)| *e)
    }
}

/// Strings, each with its NUL, as most payloads have them.
pub fn nul_terminated(parts: &[&str]) -> Vec<u8> {
    let mut out = Vec::with_capacity(parts.iter().map(|p| p.len() + 1).sum());
    for part in parts {
        out.extend_from_slice(part.as_bytes());
        out.push(0);
    }
    out
}

/// Takes one NUL-terminated string off the front; `None` if there is no NUL or it is not UTF-8.
pub fn split_string(payload: &[u8]) -> Option<(&str, &[u8])> {
    let end = payload.iter().position(|b| *b == 0)?;
    let text = std::str::from_utf8(&payload[..end]).ok()?;
    Some((text, &payload[end + 1..]))
}

/// All of `payload` as NUL-terminated strings; `None` if it is anything else.
pub fn strings(mut payload: &[u8]) -> Option<Vec<&str>> {
    let mut out = Vec::new();
    while !payload.is_empty() {
        let (text, rest) = split_string(payload)?;
        out.push(text);
        payload = rest;
    }
    Some(out)
}

/// One entry of a node's permissions: `n`one, `r`ead, `w`rite or `b`oth. The first entry's domain
/// owns the node, and its letter is for all domains that are not listed (blkif.md 3.2).
pub type Permission = (char, DomId);

/// `b0\0n5\0`... as on the wire; `None` if a letter is not one of n, r, w, b.
pub fn encode_permissions(permissions: &[Permission]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(permissions.len() * 7);
    for (letter, domid) in permissions {
        if !matches!(letter, 'n' | 'r' | 'w' | 'b') {
            return None;
        }
        out.extend_from_slice(format!("{letter}{domid}\0").as_bytes());
    }
    Some(out)
}

/// The reverse of [`encode_permissions`]; `None` if it is anything else.
pub fn decode_permissions(payload: &[u8]) -> Option<Vec<Permission>> {
    strings(payload)?.into_iter().map(decode_permission).collect()
}

fn decode_permission(text: &str) -> Option<Permission> {
    let letter = text.chars().next().filter(|c| matches!(c, 'n' | 'r' | 'w' | 'b'))?;
    let digits = &text[1..];
    // u16's parser takes a sign, which the protocol does not have.
    let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten().map(|domid| (letter, DomId(domid)))
}

/// Whether a server accepts `path` as a node's: limits, characters, no empty component. Watches
/// may name `@introduceDomain` and the like, too, which this does not accept.
pub fn is_node_path(path: &str) -> bool {
    let limit = if path.starts_with('/') { ABSOLUTE_PATH_MAX } else { RELATIVE_PATH_MAX };
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'/' | b'_' | b'@');
    path == "/"
        || !path.is_empty()
            && path.len() <= limit
            && !path.starts_with('@')
            && !path.ends_with('/')
            && !path.contains("//")
            && path.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_number_and_20_is_none() {
        let numbers: Vec<u32> = MessageType::ALL.iter().map(|t| t.number()).collect();
        let expected: Vec<u32> = (0..=19).chain(21..=26).collect();
        assert_eq!(numbers, expected);
        for t in MessageType::ALL {
            assert_eq!(MessageType::from_number(t.number()), Some(t));
        }
        assert_eq!(MessageType::from_number(20), None);
        assert_eq!(MessageType::from_number(27), None);
    }

    #[test]
    fn a_header_is_sixteen_little_endian_bytes() {
        let h = Header::new(MessageType::Write, 0x0102_0304, 5, 6);
        assert_eq!(h.encode(), [11, 0, 0, 0, 4, 3, 2, 1, 5, 0, 0, 0, 6, 0, 0, 0]);
        assert_eq!(Header::decode(&h.encode()), Ok(h));
        assert_eq!(h.kind(), Ok(MessageType::Write));
    }

    #[test]
    fn a_message_over_the_limit_is_refused_by_its_header_alone() {
        let mut h = Header::new(MessageType::Read, 1, 0, PAYLOAD_MAX);
        assert!(Header::decode(&h.encode()).is_ok());
        h.len += 1;
        let mut d = Decoder::new();
        d.push(&h.encode());
        assert_eq!(d.next_message(), Err(WireError::TooLong { len: 4097 }));
    }

    #[test]
    fn a_stream_cut_anywhere_gives_the_same_messages() {
        let messages = [
            Message::new(MessageType::Read, 1, 0, *b"/a\0"),
            Message::new(MessageType::TransactionStart, 2, 7, Vec::new()),
            Message::new(MessageType::Write, 3, 7, vec![9; PAYLOAD_MAX]),
        ];
        let stream: Vec<u8> = messages.iter().flat_map(Message::encode).collect();
        for chunk in [1, 15, 16, 17, 100, 4096, stream.len()] {
            let mut d = Decoder::new();
            let mut got = Vec::new();
            for bytes in stream.chunks(chunk) {
                d.push(bytes);
                while let Some(m) = d.next_message().unwrap() {
                    got.push(m);
                }
            }
            assert_eq!(got, messages, "in chunks of {chunk}");
            assert!(!d.is_partial());
        }
    }

    #[test]
    fn errors_travel_by_name() {
        let request = Header::new(MessageType::Read, 9, 4, 0);
        let m = Message::error(&request, ErrorName::NoEnt);
        assert_eq!(m.payload, b"ENOENT\0");
        assert_eq!((m.header.request_id, m.header.transaction_id), (9, 4));
        for (error, name, errno) in ErrorName::ALL {
            assert_eq!(ErrorName::from_payload(name.as_bytes()), Some(error));
            assert_eq!(error.name(), name);
            assert_eq!(ErrorName::from_errno(errno), Some(error));
        }
        assert_eq!(ErrorName::from_payload(b"EWHATEVER\0"), None);
    }

    #[test]
    fn permissions_are_a_letter_and_a_domain() {
        let list = vec![('n', DomId(5)), ('r', DomId(0))];
        let bytes = encode_permissions(&list).unwrap();
        assert_eq!(bytes, b"n5\0r0\0");
        assert_eq!(decode_permissions(&bytes), Some(list));
        assert_eq!(encode_permissions(&[('x', DomId(0))]), None);
        for bad in ["x5\0", "r\0", "r+5\0", "r70000\0", "r5", "\u{e9}5\0", "\0"] {
            assert_eq!(decode_permissions(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn node_paths_follow_the_servers_rules() {
        for good in ["/", "/local/domain/0/backend/vbd3/1/51712", "device/vbd", "/a-b_c@d"] {
            assert!(is_node_path(good), "{good}");
        }
        let long = format!("/{}", "a".repeat(ABSOLUTE_PATH_MAX));
        for bad in ["", "/a/", "//a", "/a//b", "/a b", "/a\0b", "@releaseDomain", &long] {
            assert!(!is_node_path(bad), "{bad}");
        }
    }
}
