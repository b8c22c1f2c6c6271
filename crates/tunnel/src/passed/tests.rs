//! Queues of a worker, and targets that are strangers.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::JoinHandle;

use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_nbd::old_style::Greeting;
use ferrite_nbd::wire::{OPTION_MAGIC, RawRequest, can, command, option};

use super::passed_client;
use crate::Fault;

const BYTES: u64 = 1 << 20;

/// A target whose greeting is this, and the process between it and the queues.
struct Between {
    dir: tempfile::TempDir,
    target: UnixStream,
    end: JoinHandle<Result<(), Fault>>,
}

impl Between {
    fn new(greeting: &[u8]) -> Between {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let (mut target, near) = UnixStream::pair().unwrap();
        target.write_all(greeting).unwrap();
        let end = std::thread::spawn(move || passed_client(near.into(), listener.into()));
        Between { dir, target, end }
    }

    fn of_flags(flags: u16) -> Between {
        Between::new(&Greeting { bytes: BYTES, flags }.to_bytes())
    }

    fn queue(&self) -> UnixStream {
        queue(&self.dir.path().join("socket"))
    }

    /// The next request of any queue.
    fn request(&mut self) -> RawRequest {
        let mut bytes = [0; 28];
        self.target.read_exact(&mut bytes).unwrap();
        RawRequest::parse(&bytes).unwrap()
    }

    fn answer(&mut self, cookie: u64, error: u32, data: &[u8]) {
        let head =
            [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()];
        self.target.write_all(&[&head.concat(), data].concat()).unwrap();
    }

    /// The target goes, and the process with it: its reason.
    fn end(self) -> String {
        drop(self.target);
        self.end.join().unwrap().unwrap_err().why
    }
}

/// A queue that has shaken hands.
fn queue(socket: &Path) -> UnixStream {
    let mut queue = UnixStream::connect(socket).unwrap();
    let mut greeting = [0; 18];
    queue.read_exact(&mut greeting).unwrap();
    let head = [OPTION_MAGIC.to_be_bytes()].concat();
    let numbers = [option::EXPORT_NAME, 3].map(u32::to_be_bytes).concat();
    queue.write_all(&[&3u32.to_be_bytes()[..], &head, &numbers, b"any"].concat()).unwrap();
    let mut told = [0; 10];
    queue.read_exact(&mut told).unwrap();
    assert_eq!(told[..8], BYTES.to_be_bytes());
    let flags = u16::from_be_bytes([told[8], told[9]]);
    assert_eq!(flags & can::MULTI_CONN, can::MULTI_CONN);
    queue
}

fn ask(queue: &mut UnixStream, kind: u16, cookie: u64, len: u32, data: &[u8]) {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(4096u64.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(data);
    queue.write_all(&bytes).unwrap();
}

/// A reply: its error, cookie and data.
fn reply(queue: &mut UnixStream, data: usize) -> (u32, u64, Vec<u8>) {
    let mut bytes = vec![0; 16 + data];
    queue.read_exact(&mut bytes).unwrap();
    let error = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
    (error, u64::from_be_bytes(bytes[8..16].try_into().unwrap()), bytes.split_off(16))
}

#[test]
fn each_queue_gets_its_own_replies_whatever_its_numbers_are() {
    let mut between = Between::of_flags(can::HAS_FLAGS);
    let [mut one, mut two] = [between.queue(), between.queue()];
    ask(&mut one, command::READ, 7, 3, &[]);
    let first = between.request();
    ask(&mut two, command::READ, 7, 3, &[]);
    let second = between.request();
    assert_eq!((first.offset, first.len, second.len), (4096, 3, 3));
    between.answer(second.cookie, 0, b"two");
    between.answer(first.cookie, 0, b"one");
    assert_eq!(reply(&mut one, 3), (0, 7, b"one".to_vec()));
    assert_eq!(reply(&mut two, 3), (0, 7, b"two".to_vec()));
    // An error has no data.
    ask(&mut two, command::READ, 8, 3, &[]);
    let failed = between.request();
    between.answer(failed.cookie, 5, &[]);
    assert_eq!(reply(&mut two, 0), (5, 8, Vec::new()));
    // A command that the target does not support is not sent to it.
    ask(&mut two, command::FLUSH, 9, 0, &[]);
    assert_eq!(reply(&mut two, 0), (22, 9, Vec::new()));
    // A queue that ends is no end of the others, nor are its requests.
    ask(&mut one, command::READ, 10, 3, &[]);
    let orphan = between.request();
    drop(one);
    between.answer(orphan.cookie, 0, b"old");
    ask(&mut two, command::WRITE, 11, 4, b"data");
    let written = between.request();
    let mut data = [0; 4];
    between.target.read_exact(&mut data).unwrap();
    between.answer(written.cookie, 0, &[]);
    assert_eq!((reply(&mut two, 0), &data), ((0, 11, Vec::new()), b"data"));
    assert!(between.end().contains("closed"));
}

#[test]
fn a_write_that_is_cut_leaves_nothing_on_the_connection() {
    let mut between = Between::of_flags(can::HAS_FLAGS);
    let mut dies = between.queue();
    ask(&mut dies, command::WRITE, 1, 4096, &[7; 100]);
    drop(dies);
    let mut other = between.queue();
    ask(&mut other, command::READ, 2, 1, &[]);
    let request = between.request();
    assert_eq!(request.command, command::READ);
    between.answer(request.cookie, 0, b"x");
    assert_eq!(reply(&mut other, 1).2, b"x");
    // One that is too long ends its queue.
    ask(&mut other, command::WRITE, 3, u32::MAX, &[]);
    assert_eq!(other.read(&mut [0]).unwrap(), 0);
    between.end();
}

#[test]
fn nonsense_of_the_target_is_the_end_with_a_reason() {
    for (greeting, word) in [(&[7; 152][..], "no NBD server"), (&[7; 100], "left")] {
        assert!(Between::new(greeting).end().contains(word));
    }
    let mut random = SplitMix64::new(0x0D15_EA5E);
    for _ in 0..50 {
        let mut between = Between::of_flags(u16::MAX);
        let mut queue = between.queue();
        ask(&mut queue, command::READ, 1, 512, &[]);
        between.request();
        let bytes: Vec<u8> = (0..64).map(|_| random.below(256) as u8).collect();
        between.target.write_all(&bytes).unwrap();
        between.target.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(!between.end.join().unwrap().unwrap_err().why.is_empty());
    }
    // A reply without a request.
    let mut between = Between::of_flags(can::HAS_FLAGS);
    between.answer(77, 0, &[]);
    assert!(between.end.join().unwrap().unwrap_err().why.contains("that was not sent"));
}

#[test]
fn queues_that_are_strangers_do_no_harm() {
    let mut between = Between::of_flags(can::HAS_FLAGS);
    let socket = between.dir.path().join("socket");
    let mut random = SplitMix64::new(0x5EED);
    for round in 0..100 {
        let mut stranger = match round % 2 {
            0 => UnixStream::connect(&socket).unwrap(),
            _ => queue(&socket),
        };
        let bytes: Vec<u8> = (0..200).map(|_| random.below(256) as u8).collect();
        // It may be refused already.
        let _ = stranger.write_all(&bytes);
        let _ = stranger.shutdown(std::net::Shutdown::Write);
        let _ = stranger.read_to_end(&mut Vec::new());
    }
    let mut good = between.queue();
    ask(&mut good, command::READ, 1, 1, &[]);
    let request = between.request();
    between.answer(request.cookie, 0, b"x");
    assert_eq!(reply(&mut good, 1), (0, 1, b"x".to_vec()));
    between.end();
}
