//! The bytes of an owner at a server of a pool, from the first one on, or within a session of a copy.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ferrite_member::Server;
use ferrite_pool::wire::{
    Extent, Greeting, HEADER_BYTES, Header, Kind, MAX_PAYLOAD, OPTION, regions_from_bytes,
    regions_to_bytes,
};
use tempfile::TempDir;

/// The bytes of an input that are used. A socket has room for them, and answers to them end within a second.
const MAX_INPUT_BYTES: usize = 4 << 10;
const POOL: [u8; 16] = [1; 16];
const SERVER: &str = "a";
/// Bytes of a copy.
const COPY_BYTES: u64 = 4 << 20;
/// Bytes of NBD's first words, and of the head of the answer to an option.
const HELLO_BYTES: usize = 18;
const REPLY_BYTES: usize = 20;

/// The server, which lives as long as the process, and a copy of its own.
struct Peer {
    server: Server,
    folder: TempDir,
    /// Counts the sessions, which have these generations.
    generation: u64,
    /// Counts the copies: an input may remove one, or open it with a higher generation.
    copies: u64,
}

/// The first byte says what follows: 0 the messages alone, 1 a session's messages to a server, otherwise a whole connection.
pub(crate) fn pool_wire(input: &[u8]) {
    let Some((first, input)) = input.split_first() else { return };
    let input = &input[..input.len().min(MAX_INPUT_BYTES)];
    match first {
        0 => messages(input),
        1 => in_session(input),
        _ => connection(input),
    }
}

/// A message that can be read is written as it was.
fn messages(input: &[u8]) {
    if let Some(bytes) = input.first_chunk::<HEADER_BYTES>()
        && let Ok(header) = Header::from_bytes(bytes)
    {
        assert!(header.payload <= MAX_PAYLOAD);
        assert_eq!(&header.to_bytes(), bytes);
    }
    if let Ok(extent) = Extent::from_bytes(input) {
        assert_eq!(extent.to_bytes(), input);
        assert!(!extent.name.contains(['/', '.', '\0']), "no name is a path");
    }
    if let Ok(greeting) = Greeting::from_bytes(input) {
        assert_eq!(greeting.to_bytes(), input);
    }
    if let Ok(regions) = regions_from_bytes(input) {
        assert_eq!(regions_to_bytes(regions), input);
    }
}

fn peer() -> MutexGuard<'static, Peer> {
    static PEER: OnceLock<Mutex<Peer>> = OnceLock::new();
    let peer = PEER.get_or_init(|| {
        let folder = TempDir::new().expect("a folder");
        let server = Server::new(folder.path(), POOL, SERVER).expect("an empty folder");
        Mutex::new(Peer { server, folder, generation: 0, copies: 0 })
    });
    peer.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peer {
    fn connect(&self) -> UnixStream {
        let (own, other) = UnixStream::pair().expect("there are descriptors");
        self.server.connect(own.into(), "an input".to_owned());
        other
    }

    /// A connection in a session of a copy.
    fn open(&mut self) -> UnixStream {
        loop {
            self.generation += 1;
            let extent = Extent {
                id: self.copies.to_be_bytes().repeat(2).try_into().expect("16"),
                name: format!("own{}", self.copies),
            };
            let mut made = self.connect();
            greet(&mut made);
            ask(&mut made, Kind::Create, 0, COPY_BYTES, &extent.to_bytes());
            let mut stream = self.connect();
            greet(&mut stream);
            let opened = ask(&mut stream, Kind::Open, self.generation, 1, &extent.to_bytes());
            if opened.kind == Kind::Opened {
                return stream;
            }
            self.copies += 1;
        }
    }

    /// All files are those of the server and of copies: no input names another.
    fn check_files(&self) {
        for entry in std::fs::read_dir(self.folder.path()).expect("the folder") {
            let name = entry.expect("the folder").file_name();
            let name = name.to_str().expect("a name");
            let is_own = ["lock", "identity", "gone"].contains(&name);
            assert!(is_own || name.ends_with(".raw") || name.ends_with(".state"), "{name}");
        }
    }
}

fn greet(stream: &mut UnixStream) {
    stream.write_all(&greeting()).expect("there is room");
    let mut answer = [0; HELLO_BYTES + REPLY_BYTES];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer[HELLO_BYTES + 12..][..4], &[0, 0, 0, 1], "it is the server that is meant");
}

/// The first message of an owner.
fn greeting() -> Vec<u8> {
    let data = Greeting { pool: POOL, server: SERVER.to_owned() }.to_bytes();
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    bytes.extend(b"IHAVEOPT");
    bytes.extend(OPTION.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn ask(stream: &mut UnixStream, kind: Kind, start: u64, len: u64, payload: &[u8]) -> Header {
    let header = Header { kind, op: u64::MAX, start, len, payload: payload.len() as u32 };
    stream.write_all(&[&header.to_bytes(), payload].concat()).expect("there is room");
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes).expect("an answer");
    let header = Header::from_bytes(&bytes).expect("a header");
    let mut payload = vec![0; header.payload as usize];
    stream.read_exact(&mut payload).expect("a payload");
    header
}

fn in_session(input: &[u8]) {
    let mut peer = peer();
    let mut stream = peer.open();
    say(&mut stream, input);
    answers(&all(stream));
    peer.check_files();
}

fn connection(input: &[u8]) {
    let peer = peer();
    let mut stream = peer.connect();
    say(&mut stream, input);
    let said = all(stream);
    let (hello, rest) = said.split_at_checked(HELLO_BYTES).expect("the server speaks first");
    assert!(hello.starts_with(b"NBDMAGICIHAVEOPT"));
    if let Some((head, rest)) = rest.split_at_checked(REPLY_BYTES) {
        let number = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| head[at + i]));
        let (kind, len) = (number(12), number(16) as usize);
        assert!(len <= rest.len() && (kind == 1 || len == rest.len()), "refused means the end");
        answers(&rest[len..]);
    }
    peer.check_files();
}

/// The server may have ended the connection already.
fn say(stream: &mut UnixStream, input: &[u8]) {
    let _ = stream.write_all(input).and_then(|()| stream.shutdown(Shutdown::Write));
}

fn all(mut stream: UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // It is an error if the server ends without having read all bytes.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// Answers are whole messages of the kinds that a server sends. The last one may be cut by the end.
fn answers(mut said: &[u8]) {
    while let Some((bytes, rest)) = said.split_first_chunk() {
        let header = Header::from_bytes(bytes).expect("a header");
        assert!(header.kind as u16 > 0x100, "{header:?} is no answer");
        said = rest.get(header.payload as usize..).unwrap_or_default();
    }
}
