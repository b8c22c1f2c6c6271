//! The bytes of NBD clients.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_host::frames::RELAY;
use ferrite_io::engines::test_engine;
use ferrite_serve::nbd::{Options, relay, serve_one};
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::waker::Waker;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// A time limit far above the duration of any input.
const LONG: Duration = Duration::from_secs(60);
/// The bytes of an input that are used: each request may be answered with all of the disk.
const MAX_INPUT_BYTES: usize = 4096;
/// Size of the disk; its longest reads have several parts.
const DISK_BYTES: u64 = 2 << 20;
/// The most bytes of an answer besides data: options and headers.
const MORE_BYTES: u64 = 64 << 10;

/// The flags and options before requests: structured replies, `base:allocation`, GO.
const GREETING: &[u8] = b"\0\0\0\x03\
    IHAVEOPT\0\0\0\x08\0\0\0\0\
    IHAVEOPT\0\0\0\x0a\0\0\0\x1b\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation\
    IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";

/// The greeting of a client that asks for extended heads and both contexts.
const EXTENDED_GREETING: &[u8] = b"\0\0\0\x03\
    IHAVEOPT\0\0\0\x0b\0\0\0\0\
    IHAVEOPT\0\0\0\x0a\0\0\0\x34\0\0\0\0\0\0\0\x02\0\0\0\x0fbase:allocation\
    \0\0\0\x15qemu:allocation-depth\
    IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";
/// The first byte of an input whose requests have extended heads.
const EXTENDED: u8 = 0x80;

/// The client's stream. The first byte gives the meaning of the others: the whole stream (0), the stream from the first
/// request on (1), or requests whose magic is corrected, each with its data (others). With the highest bit set, heads
/// are extended.
fn stream(input: &[u8]) -> Vec<u8> {
    let Some((how, bytes)) = input.split_first() else { return Vec::new() };
    let extended = how & EXTENDED != 0;
    let greeting = if extended { EXTENDED_GREETING } else { GREETING };
    match how & !EXTENDED {
        0 => bytes.to_vec(),
        1 => [greeting, bytes].concat(),
        fill => {
            let mut stream = greeting.to_vec();
            for request in bytes.chunks(if extended { 32 } else { 28 }) {
                corrected(request, extended, fill, &mut stream);
            }
            stream
        }
    }
}

/// Adds a request with the right magic, and its data.
fn corrected(request: &[u8], extended: bool, fill: u8, stream: &mut Vec<u8>) {
    let mut head = [0; 32];
    head[..request.len()].copy_from_slice(request);
    // Mostly known commands and small numbers.
    head[6] = 0;
    head[7] %= 10;
    head[16..20].fill(0);
    let (magic, bytes) = if extended { (0x21e4_1c71u32, 32) } else { (0x2560_9513, 28) };
    head[..4].copy_from_slice(&magic.to_be_bytes());
    head[bytes - 4] &= 1;
    if extended {
        // Some are longer than 4 GiB.
        head[24..27].fill(0);
        head[27] &= 1;
    }
    let len = head[24..bytes].iter().fold(0u64, |len, byte| len << 8 | u64::from(*byte));
    let has_data = if extended { head[5] & 1 << 5 != 0 } else { head[7] == 1 };
    let data = if has_data && len < 64 << 10 { len as usize } else { 0 };
    stream.extend(&head[..bytes]);
    stream.resize(stream.len() + data, fill);
}

/// A null disk, and how it is served.
struct Null {
    device: Arc<Device>,
    options: Options,
    stop: Arc<Waker>,
}

impl Null {
    fn new(read_only: bool, relayed: bool) -> Null {
        let disk = Disk::open("null:2M", &OpenOptions::default()).expect("it takes nothing");
        let options = Options {
            read_only,
            max_clients: 1,
            client_bytes: 2 << 20,
            greeting: LONG,
            goodbye: LONG,
            at_stop: LONG,
            engine: Arc::new(|arena, entries| test_engine().open(arena, entries)),
            tuning: Tuning::default(),
            counters: None,
            keeps_all: false,
            traces: None,
            hides_names: false,
            relayed,
        };
        let device = Arc::new(Device::new(disk, SystemClock::shared()));
        Null { device, options, stop: Arc::new(Waker::new().expect("there are descriptors")) }
    }

    /// Serves a client on this thread. The server's end is closed with it.
    fn serve(&self, socket: UnixStream) {
        match serve_one(&self.device, &self.options, &self.stop, socket) {
            Ok(_) => {}
            Err(e) if e.raw_os_error().is_some() => {}
            Err(e) => panic!("{e}"),
        }
    }
}

/// Sends the bytes of a client, while `serve` serves it.
fn played(input: &[u8], client: &UnixStream, serve: impl FnOnce()) {
    let stream = stream(input);
    std::thread::scope(|scope| {
        let mut writer = client;
        scope.spawn(move || {
            // The server disconnects after an invalid stream.
            let _ = writer.write_all(&stream);
            let _ = writer.shutdown(Shutdown::Write);
        });
        let mut reader = client;
        let reader = scope.spawn(move || {
            let (mut bytes, mut buffer) = (0, vec![0; 1 << 20]);
            loop {
                match reader.read(&mut buffer) {
                    Ok(0) => return bytes,
                    Ok(more) => bytes += more as u64,
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(_) => return bytes,
                }
            }
        });
        serve();
        let answered = reader.join().expect("it only reads");
        let most = (input.len() as u64 / 16 + 1) * (DISK_BYTES + MORE_BYTES);
        assert!(answered < most, "{answered} bytes for {} of a client", input.len());
    });
}

/// Sends a client's bytes to a server of a null disk. The server ends with the client.
pub(crate) fn nbd(input: &[u8]) {
    let input = &input[..input.len().min(MAX_INPUT_BYTES)];
    let null = Null::new(input.len() % 7 == 6, false);
    let (ours, theirs) = UnixStream::pair().expect("there are descriptors");
    played(input, &theirs, || null.serve(ours));
}

/// Sends them to a relay, whose links lead to such a server. The relay says when the client has gone.
pub(crate) fn nbd_relay(input: &[u8]) {
    let input = &input[..input.len().min(MAX_INPUT_BYTES)];
    let null = &Null::new(input.len() % 7 == 6, true);
    let kind = SocketType::SEQPACKET;
    let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
    let (keeper, relays) = pair.expect("there are descriptors");
    let (ours, theirs) = UnixStream::pair().expect("there are descriptors");
    RELAY.try_send(&keeper, b"client", &[ours.as_fd()]).expect("there is room");
    drop(ours);
    std::thread::scope(|scope| {
        // It ends with the keeper's end of the socket.
        scope.spawn(move || relay(&relays).map(|never| match never {}));
        played(input, &theirs, || {
            loop {
                let asked = RELAY.receive(&keeper).expect("the relay goes on").bytes;
                if !asked.starts_with(b"link ") {
                    break;
                }
                let (link, workers) = UnixStream::pair().expect("there are descriptors");
                scope.spawn(move || null.serve(workers));
                RELAY.try_send(&keeper, &asked, &[link.as_fd()]).expect("there is room");
            }
            drop(keeper);
        });
    });
}
