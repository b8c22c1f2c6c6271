//! A client of NBD that sends exactly what a test says, valid or not.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::PATIENCE;

/// Options of the negotiation.
pub mod option {
    #![allow(missing_docs, reason = "the protocol's names")]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Commands.
pub mod command {
    #![allow(missing_docs, reason = "the protocol's names")]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// The answer that ends the answers to an option.
pub const ACK: u32 = 1;

const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;
/// The flag of a request whose length is that of its data.
pub const PAYLOAD_LEN: u16 = 1 << 5;

/// An answer with all its chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// The cookie of the request.
    pub cookie: u64,
    /// The error; 0: none.
    pub error: u32,
    /// The read data, zeros of holes included.
    pub data: Vec<u8>,
    /// The number of chunks with data or holes.
    pub chunks: usize,
    /// Lengths and flags of the extents of `base:allocation`.
    pub extents: Vec<(u32, u32)>,
    /// The number of each context, and the lengths and states of its extents.
    pub contexts: Vec<(u32, Vec<(u64, u64)>)>,
}

/// See the module's text.
pub struct Client {
    /// Its connection.
    pub stream: UnixStream,
    /// Whether heads are extended, and the offsets of requests that were sent so, by cookie.
    extended: Option<HashMap<u64, u64>>,
    cookie: u64,
    /// Lengths of requested reads, by cookie.
    reads: HashMap<u64, (u64, usize)>,
    /// Incomplete answers, by cookie.
    parts: HashMap<u64, Reply>,
}

impl Client {
    /// Reads the greeting, and answers it.
    pub fn over(stream: UnixStream) -> Client {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let (reads, parts) = (HashMap::new(), HashMap::new());
        let mut client = Client { stream, extended: None, cookie: 0, reads, parts };
        let greeting = client.bytes(18);
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[16..], [0, 3]);
        client.say(&3u32.to_be_bytes());
        client
    }

    /// Sends these bytes.
    #[track_caller]
    pub fn say(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server listens");
    }

    /// The next so many bytes.
    #[track_caller]
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).expect("the server answers");
        bytes
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes(2).try_into().unwrap())
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes(8).try_into().unwrap())
    }

    /// Whether the server has closed the connection, without unread data.
    pub fn is_closed(&mut self) -> bool {
        is_closed(&self.stream)
    }

    /// Sends an option.
    pub fn ask(&mut self, option: u32, data: &[u8]) {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.say(&bytes);
    }

    /// Reads one answer to an option.
    #[track_caller]
    pub fn answer(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!(self.u64(), OPTION_REPLY_MAGIC);
        assert_eq!(self.u32(), option);
        let (kind, len) = (self.u32(), self.u32());
        (kind, self.bytes(len as usize))
    }

    /// Sends an option and reads all answers: the last is an ACK or an error.
    #[track_caller]
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.ask(option, data);
        let mut answers = Vec::new();
        loop {
            let answer = self.answer(option);
            let kind = answer.0;
            answers.push(answer);
            if kind == ACK || kind >> 31 == 1 {
                return answers;
            }
        }
    }

    /// Negotiates the export; returns the size and the flags.
    #[track_caller]
    pub fn go(&mut self, structured: bool) -> (u64, u16) {
        if structured {
            assert_eq!(self.option(option::STRUCTURED_REPLY, &[]), [(ACK, vec![])]);
            let queries = contexts("", &["base:allocation"]);
            assert_eq!(self.option(option::SET_META_CONTEXT, &queries).len(), 2);
        }
        let answers = self.option(option::GO, &info(""));
        let export = answers.iter().find(|(kind, data)| *kind == 3 && data[..2] == [0, 0]);
        let data = &export.expect("the export is told").1;
        let size = u64::from_be_bytes(data[2..10].try_into().unwrap());
        (size, u16::from_be_bytes(data[10..12].try_into().unwrap()))
    }

    /// Negotiates extended heads.
    #[track_caller]
    pub fn extend(&mut self) {
        assert_eq!(self.option(option::EXTENDED_HEADERS, &[]), [(ACK, vec![])]);
        self.extended = Some(HashMap::new());
    }

    /// Negotiates the export with extended heads and these contexts; returns the size and the flags.
    #[track_caller]
    pub fn go_extended(&mut self, names: &[&str]) -> (u64, u16) {
        self.extend();
        let answers = self.option(option::SET_META_CONTEXT, &contexts("", names));
        assert_eq!(answers.len(), names.len() + 1);
        self.go(false)
    }

    /// Sends a request with its data; returns its cookie.
    #[track_caller]
    pub fn send(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> u64 {
        if self.extended.is_some() {
            let payload = if command == command::WRITE { PAYLOAD_LEN } else { 0 };
            return self.send_long(command, flags | payload, offset, len.into(), data);
        }
        self.cookie += 1;
        let cookie = self.cookie;
        if command == command::READ {
            self.reads.insert(cookie, (offset, len as usize));
        }
        let bytes = [&request(command, flags, cookie, offset, len)[..], data].concat();
        self.say(&bytes);
        cookie
    }

    /// Sends a request with an extended head, and exactly these flags.
    #[track_caller]
    pub fn send_long(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u64,
        data: &[u8],
    ) -> u64 {
        self.cookie += 1;
        let cookie = self.cookie;
        if command == command::READ {
            self.reads.insert(cookie, (offset, len as usize));
        }
        self.extended.as_mut().expect("extended heads").insert(cookie, offset);
        let bytes = [&long_request(command, flags, cookie, offset, len)[..], data].concat();
        self.say(&bytes);
        cookie
    }

    /// Sends a request with an extended head and reads its answer, without others in flight.
    #[track_caller]
    pub fn call_long(&mut self, command: u16, flags: u16, offset: u64, len: u64) -> Reply {
        let cookie = self.send_long(command, flags, offset, len, &[]);
        let reply = self.reply();
        assert_eq!(reply.cookie, cookie);
        reply
    }

    /// Reads the next complete answer. Chunks of several may be interleaved.
    #[track_caller]
    pub fn reply(&mut self) -> Reply {
        loop {
            let magic = self.u32();
            if magic == SIMPLE_REPLY_MAGIC && self.extended.is_none() {
                let (error, cookie) = (self.u32(), self.u64());
                let mut reply = Reply { cookie, error, ..Reply::default() };
                if let Some((_, len)) = self.reads.remove(&cookie)
                    && error == 0
                {
                    reply.data = self.bytes(len);
                }
                return reply;
            }
            match &self.extended {
                None => assert_eq!(magic, CHUNK_MAGIC, "neither a simple reply nor a chunk"),
                Some(_) => assert_eq!(magic, EXTENDED_CHUNK_MAGIC, "no chunk"),
            }
            let (flags, kind, cookie) = (self.u16(), self.u16(), self.u64());
            let len = self.length(cookie);
            let mut reply = self.parts.remove(&cookie).unwrap_or_default();
            reply.cookie = cookie;
            self.chunk(kind, len, &mut reply);
            if flags & 1 == 1 {
                self.reads.remove(&cookie);
                return reply;
            }
            self.parts.insert(cookie, reply);
        }
    }

    /// The rest of a chunk's head: its length, behind the offset of its request if it is extended.
    #[track_caller]
    fn length(&mut self, cookie: u64) -> u32 {
        let Some(offsets) = &self.extended else { return self.u32() };
        let expected = offsets[&cookie];
        assert_eq!(self.u64(), expected, "the offset of the request");
        self.u64().try_into().unwrap()
    }

    #[track_caller]
    fn chunk(&mut self, kind: u16, len: u32, reply: &mut Reply) {
        let read = self.reads.get(&reply.cookie).copied();
        let mut put = |offset: u64, bytes: &[u8]| {
            let (start, all) = read.expect("a chunk of a read");
            reply.data.resize(all, 0xEE);
            let at = (offset - start) as usize;
            reply.data[at..at + bytes.len()].copy_from_slice(bytes);
            reply.chunks += 1;
        };
        match kind {
            1 => {
                let offset = self.u64();
                put(offset, &self.bytes(len as usize - 8));
            }
            2 => {
                let (offset, len) = (self.u64(), self.u32());
                put(offset, &vec![0; len as usize]);
            }
            0 => assert_eq!(len, 0),
            5 => {
                let context = self.u32();
                let all: Vec<_> = (0..(len - 4) / 8).map(|_| (self.u32(), self.u32())).collect();
                if context == 1 {
                    reply.extents.extend(&all);
                }
                let long = all.into_iter().map(|(len, state)| (len.into(), state.into()));
                reply.contexts.push((context, long.collect()));
            }
            6 => {
                let (context, count) = (self.u32(), self.u32());
                assert_eq!(len, 8 + 16 * count);
                let all = (0..count).map(|_| (self.u64(), self.u64())).collect();
                reply.contexts.push((context, all));
            }
            _ => {
                assert_eq!(kind, 1 << 15 | 1);
                reply.error = self.u32();
                let text = self.u16();
                assert_eq!(len, 6 + u32::from(text));
                self.bytes(usize::from(text));
            }
        }
    }

    /// Sends a request and reads its answer, without others in flight.
    #[track_caller]
    pub fn call(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> Reply {
        let cookie = self.send(command, flags, offset, len, data);
        let reply = self.reply();
        assert_eq!(reply.cookie, cookie);
        reply
    }

    /// Writes, which has to succeed.
    #[track_caller]
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        assert_eq!(self.call(command::WRITE, 0, offset, data.len() as u32, data).error, 0);
    }

    /// Reads, which has to succeed.
    #[track_caller]
    pub fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        let reply = self.call(command::READ, 0, offset, len, &[]);
        assert_eq!(reply.error, 0);
        reply.data
    }

    /// Flushes, which has to succeed.
    #[track_caller]
    pub fn flush(&mut self) {
        assert_eq!(self.call(command::FLUSH, 0, 0, 0, &[]).error, 0);
    }
}

/// Whether the other end of a stream is closed, without unread data.
pub fn is_closed(mut stream: &UnixStream) -> bool {
    use std::io::ErrorKind::{ConnectionReset, Interrupted};
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    loop {
        match stream.read(&mut [0]) {
            Ok(bytes) => return bytes == 0,
            Err(e) if e.kind() == Interrupted => {}
            // The server had not read everything that was sent.
            Err(e) => return e.kind() == ConnectionReset,
        }
    }
}

/// A request's head.
pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// A request's extended head.
pub fn long_request(command: u16, flags: u16, cookie: u64, offset: u64, len: u64) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// The data of INFO and GO.
pub fn info(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), &[0, 1, 0, 3]].concat()
}

/// The data of the options of contexts.
pub fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat();
    let mut bytes = [text(name), (queries.len() as u32).to_be_bytes().to_vec()].concat();
    queries.iter().for_each(|query| bytes.extend(text(query)));
    bytes
}
