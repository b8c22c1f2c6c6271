//! The bytes of NBD clients.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_io::engines::test_engine;
use ferrite_serve::nbd::{Options, serve_one};
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::waker::Waker;

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

/// The client's stream. The first byte gives the meaning of the others: the whole stream (0), the stream from the first
/// request on (1), or requests whose magic is corrected, each with its data (others).
fn stream(input: &[u8]) -> Vec<u8> {
    let Some((how, bytes)) = input.split_first() else { return Vec::new() };
    match how {
        0 => bytes.to_vec(),
        1 => [GREETING, bytes].concat(),
        _ => {
            let mut stream = GREETING.to_vec();
            for request in bytes.chunks(28) {
                let mut head = [0; 28];
                head[..request.len()].copy_from_slice(request);
                head[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
                // Mostly known commands and small numbers.
                head[6] = 0;
                head[7] %= 10;
                head[16..20].fill(0);
                head[24] &= 1;
                let len = u32::from_be_bytes([head[24], head[25], head[26], head[27]]);
                let is_write = head[7] == 1 && len < 64 << 10;
                stream.extend(head);
                stream.resize(stream.len() + if is_write { len as usize } else { 0 }, how & 0x7f);
            }
            stream
        }
    }
}

/// Sends a client's bytes to a server of a null disk. The server ends with the client.
pub(crate) fn nbd(input: &[u8]) {
    let input = &input[..input.len().min(MAX_INPUT_BYTES)];
    let disk = Disk::open("null:2M", &OpenOptions::default()).expect("it takes nothing");
    let device = Arc::new(Device::new(disk, SystemClock::shared()));
    let options = Options {
        read_only: input.len() % 7 == 6,
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
    };
    let stop = Arc::new(Waker::new().expect("there are descriptors"));
    let (ours, theirs) = UnixStream::pair().expect("there are descriptors");
    let stream = stream(input);
    std::thread::scope(|scope| {
        let mut writer = &theirs;
        scope.spawn(move || {
            // The server disconnects after an invalid stream.
            let _ = writer.write_all(&stream);
            let _ = writer.shutdown(Shutdown::Write);
        });
        let mut reader = &theirs;
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
        // The server's end is closed with it.
        match serve_one(&device, &options, &stop, ours) {
            Ok(_) => {}
            Err(e) if e.raw_os_error().is_some() => {}
            Err(e) => panic!("{e}"),
        }
        let answered = reader.join().expect("it only reads");
        let most = (input.len() as u64 / 16 + 1) * (DISK_BYTES + MORE_BYTES);
        assert!(answered < most, "{answered} bytes for {} of a client", input.len());
    });
}
