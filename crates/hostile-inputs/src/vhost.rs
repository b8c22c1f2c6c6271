//! The bytes of front ends of vhost-user, and of their guests' memory.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_io::engines::test_engine;
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::vhost::{ID_BYTES, Options, requests_in, serve_one};
use ferrite_serve::waker::Waker;

/// A time limit far above the duration of any input.
const LONG: Duration = Duration::from_secs(60);
/// The bytes of an input that are used.
const MAX_INPUT_BYTES: usize = 4096;
/// The most bytes of answers to them: each message has a header of 12 bytes, and the longest answer is a configuration.
const MAX_ANSWER_BYTES: u64 = 512 * (MAX_INPUT_BYTES as u64 / 12 + 1);
/// Entries of the queue.
const ENTRIES: u16 = 16;
/// Bytes of a sector.
const SECTOR: u64 = 512;

/// A front end's messages, without descriptors. It gets its answers, or the end.
pub(crate) fn vhost(input: &[u8]) {
    let input = &input[..input.len().min(MAX_INPUT_BYTES)];
    let disk = Disk::open("null:2M", &OpenOptions::default()).expect("a disk of zeros opens");
    let device = Arc::new(Device::new(disk, SystemClock::shared()));
    let options = Options {
        read_only: false,
        queues: 2,
        memory: 2 << 20,
        id: [0; ID_BYTES],
        engine: Arc::new(|arena, entries| test_engine().open(arena, entries)),
        tuning: Tuning::default(),
        counters: None,
    };
    let (mut front, back) = UnixStream::pair().expect("a pair of sockets");
    front.set_read_timeout(Some(LONG)).expect("a limit");
    front.write_all(input).expect("the socket has room");
    front.shutdown(Shutdown::Write).expect("the end of the messages");
    let stop = Waker::new().expect("a waker");
    // An error is the end of the connection, which is as good.
    let _ = serve_one(&device, &options, back, &stop);
    let mut answers = Vec::new();
    // Messages that were not read reset the connection.
    let _ = front.take(MAX_ANSWER_BYTES + 1).read_to_end(&mut answers);
    assert!(answers.len() as u64 <= MAX_ANSWER_BYTES, "{} bytes of answers", answers.len());
}

/// The memory of a guest with a queue at its beginning. The first byte says which disk it is of.
pub(crate) fn vhost_ring(input: &[u8]) {
    let Some((about, memory)) = input.split_first() else { return };
    let (sectors, read_only) = (u64::from(about >> 1) * 8, about & 1 != 0);
    let found = requests_in(memory, ENTRIES, sectors, read_only).expect("memory for an input");
    // A request has at most 16 ranges, and parts of 1 MiB of at most 1024 descriptors of 4 GiB.
    for (work, data_bytes) in found {
        let end = work.sector.checked_add(work.sectors);
        assert!(end.is_some_and(|end| end <= sectors), "{work:?} on {sectors} sectors");
        assert!(!(read_only && work.action.changes_medium()), "{work:?}");
        assert!(
            data_bytes.is_none_or(|bytes| bytes >= work.sectors * SECTOR),
            "{work:?} of {data_bytes:?} bytes"
        );
    }
}
