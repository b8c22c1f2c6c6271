//! A relay between a client and simulated workers: the exact bytes that each of them gets.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ferrite_host::frames::RELAY;
use ferrite_serve::nbd::relay;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::nbd::{
    ACK, Client, PAYLOAD_LEN, command, info, is_closed, long_request, option, request,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
const SIZE: u64 = 1 << 30;
/// The relay's own option.
const RELAYED: &[u8] = b"IHAVEOPTFRLY\0\0\0\x04\0\0\0\x02";
/// The same of the first version.
const RELAYED_FIRST: &[u8] = b"IHAVEOPTFRLY\0\0\0\0";
/// HAS_FLAGS and SEND_FLUSH.
const FLAGS: u16 = 5;

/// The keeper of a relay, which is a thread here.
struct Keeper(OwnedFd);

/// A worker's end of a link.
struct Worker(UnixStream);

impl Keeper {
    fn new() -> Keeper {
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        // It ends with this process's end of the socket.
        std::thread::spawn(move || relay(&theirs).unwrap_err());
        Keeper(ours)
    }

    fn hear(&self) -> String {
        let bytes = RELAY.receive(&self.0).unwrap().bytes;
        String::from_utf8(bytes).unwrap()
    }

    /// A client's end.
    fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        RELAY.try_send(&self.0, b"client", &[theirs.as_fd()]).unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        ours
    }

    /// Gives the client its requested link.
    fn link(&self) -> Worker {
        let asked = self.hear();
        assert!(asked.starts_with("link "), "{asked}");
        let (ours, theirs) = UnixStream::pair().unwrap();
        RELAY.try_send(&self.0, asked.as_bytes(), &[theirs.as_fd()]).unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        Worker(ours)
    }

    /// A client after negotiation, without chunks, and its worker.
    fn served(&self) -> (Client, Worker) {
        let stream = self.connect();
        let mut worker = self.link();
        let client = std::thread::spawn(move || {
            let mut client = Client::over(stream);
            assert_eq!(client.go(false), (SIZE, FLAGS));
            client
        });
        worker.greet(SIZE);
        (client.join().unwrap(), worker)
    }
}

impl Worker {
    fn say(&mut self, bytes: &[u8]) {
        // If the relay has disconnected, the test checks the relay's report instead.
        let _ = self.0.write_all(bytes);
    }

    #[track_caller]
    fn hears(&mut self, expected: &[u8]) {
        let mut bytes = vec![0; expected.len()];
        self.0.read_exact(&mut bytes).expect("the relay says more");
        assert!(bytes == expected, "{bytes:?}");
    }

    fn hears_nothing(&mut self) {
        self.0.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        assert!(self.0.read(&mut [0]).is_err());
        self.0.set_read_timeout(Some(PATIENCE)).unwrap();
    }

    /// The whole handshake of such a client.
    fn greet(&mut self, size: u64) {
        self.say(GREETING);
        let info = info("");
        let len = (info.len() as u32).to_be_bytes();
        self.hears(&[0, 0, 0, 3]);
        self.is_introduced();
        self.hears(&[&b"IHAVEOPT\0\0\0\x07"[..], &len, &info].concat());
        self.answer(3, &[&[0, 0][..], &size.to_be_bytes(), &FLAGS.to_be_bytes()].concat());
        self.answer(1, &[]);
    }

    /// The whole handshake of a client with extended heads.
    fn greet_extended(&mut self) {
        self.say(GREETING);
        let info = info("");
        let len = (info.len() as u32).to_be_bytes();
        self.hears(&[0, 0, 0, 3]);
        self.is_introduced();
        self.hears(b"IHAVEOPT\0\0\0\x0b\0\0\0\0");
        self.answer_to(option::EXTENDED_HEADERS, ACK, &[]);
        self.hears(&[&b"IHAVEOPT\0\0\0\x07"[..], &len, &info].concat());
        self.answer(3, &[&[0, 0][..], &SIZE.to_be_bytes(), &FLAGS.to_be_bytes()].concat());
        self.answer(1, &[]);
    }

    /// Knows the relay's option, and its version.
    fn is_introduced(&mut self) {
        self.hears(RELAYED);
        self.answer_to(u32::from_be_bytes(*b"FRLY"), ACK, &[0, 0, 0, 2]);
    }

    /// Answers GO.
    fn answer(&mut self, kind: u32, data: &[u8]) {
        self.answer_to(option::GO, kind, data);
    }

    fn answer_to(&mut self, option: u32, kind: u32, data: &[u8]) {
        let head = 0x0003_e889_0455_65a9u64.to_be_bytes();
        let len = (data.len() as u32).to_be_bytes();
        self.say(&[&head[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, data].concat());
    }

    /// A chunk behind an extended head.
    fn chunk(&mut self, done: bool, kind: u16, cookie: u64, offset: u64, data: &[u8]) {
        let head = [&0x6e8a_278cu32.to_be_bytes()[..], &[0, done.into()], &kind.to_be_bytes()];
        let numbers = [cookie, offset, data.len() as u64].map(u64::to_be_bytes).concat();
        self.say(&[&head.concat()[..], &numbers, data].concat());
    }

    fn done(&mut self, cookie: u64, error: u32) {
        let head = [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes()].concat();
        self.say(&[&head[..], &cookie.to_be_bytes()].concat());
    }
}

#[test]
fn what_was_not_answered_is_asked_again_in_its_order_and_an_answer_in_part_is_nobodys() {
    let keeper = Keeper::new();
    let (mut client, mut worker) = keeper.served();
    client.send(command::WRITE, 1, 512, 512, &[7; 512]);
    client.send(command::FLUSH, 0, 0, 0, &[]);
    client.send(command::READ, 0, 1024, 512, &[]);
    client.send(command::WRITE, 0, 2048, 512, &[8; 512]);
    let write = [&request(command::WRITE, 1, 1, 512, 512)[..], &[7; 512]].concat();
    let flush = request(command::FLUSH, 0, 2, 0, 0);
    let read = request(command::READ, 0, 3, 1024, 512);
    let last = [&request(command::WRITE, 0, 4, 2048, 512)[..], &[8; 512]].concat();
    worker.hears(&[&write[..], &flush, &read, &last].concat());
    worker.done(2, 0);
    assert_eq!(client.reply().cookie, 2);
    // Half of an answer to the read.
    worker.done(3, 0);
    worker.say(&[1; 300]);
    drop(worker);
    let mut worker = keeper.link();
    // The requests come only after the same answers as before.
    worker.say(GREETING);
    worker.hears(&[0, 0, 0, 3]);
    worker.is_introduced();
    let rest = info("");
    let mut all = vec![0; 16 + rest.len()];
    worker.0.read_exact(&mut all).unwrap();
    worker.hears_nothing();
    worker.answer(3, &[&[0, 0][..], &SIZE.to_be_bytes(), &FLAGS.to_be_bytes()].concat());
    worker.hears_nothing();
    worker.answer(1, &[]);
    worker.hears(&[&write[..], &read, &last].concat());
    worker.done(3, 0);
    worker.say(&[2; 512]);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.data), (3, vec![2; 512]));
    worker.done(4, 28);
    assert_eq!(client.reply().error, 28);
    worker.done(1, 0);
    assert_eq!(client.reply().cookie, 1);
    // No request is left to be repeated.
    drop(worker);
    let mut worker = keeper.link();
    worker.greet(SIZE);
    worker.hears_nothing();
    drop(client);
    assert_eq!(worker.0.read(&mut [0]).unwrap(), 0);
    assert_eq!(keeper.hear(), "idle 1");
}

#[test]
fn requests_with_extended_heads_are_asked_again_as_they_came() {
    const MUCH: u64 = 1 << 40;
    let keeper = Keeper::new();
    let stream = keeper.connect();
    let mut worker = keeper.link();
    let client = std::thread::spawn(move || {
        let mut client = Client::over(stream);
        client.extend();
        assert_eq!(client.go(false), (SIZE, FLAGS));
        client
    });
    worker.greet_extended();
    let mut client = client.join().unwrap();
    // No worker gets the data of this one: the relay refuses them.
    let too_much = vec![1; (32 << 20) + 1];
    let refused =
        client.send_long(command::WRITE, PAYLOAD_LEN, 512, too_much.len() as u64, &too_much);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (refused, 22));
    let zeroes = client.send_long(command::WRITE_ZEROES, 1, 512, MUCH, &[]);
    let write = client.send_long(command::WRITE, PAYLOAD_LEN, 0, 512, &[7; 512]);
    let read = client.send_long(command::READ, 0, 1024, 512, &[]);
    let odd = client.send_long(command::TRIM, PAYLOAD_LEN, 0, 100, &[8; 100]);
    let zeroed = long_request(command::WRITE_ZEROES, 1, 1, 512, MUCH);
    let others = [
        &long_request(command::WRITE, PAYLOAD_LEN, 2, 0, 512)[..],
        &[7; 512],
        &long_request(command::READ, 0, 3, 1024, 512),
        &long_request(command::TRIM, PAYLOAD_LEN, 4, 0, 100),
        &[8; 100],
    ];
    worker.hears(&[&zeroed[..], &others.concat()].concat());
    let at = |offset: u64, data: &[u8]| [&offset.to_be_bytes()[..], data].concat();
    worker.chunk(false, 1, 3, 1024, &at(1024, &[1; 256]));
    worker.chunk(true, 0, 1, 512, &[]);
    assert_eq!(client.reply().cookie, zeroes);
    drop(worker);
    let mut worker = keeper.link();
    worker.greet_extended();
    worker.hears(&others.concat());
    worker.chunk(false, 1, 3, 1024, &at(1024, &[2; 256]));
    worker.chunk(true, 1 << 15 | 1, 4, 0, &[0, 0, 0, 22, 0, 0]);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (odd, 22));
    worker.chunk(true, 2, 3, 1024, &at(1280, &[0, 0, 1, 0]));
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.data), (read, [[2; 256], [0; 256]].concat()));
    worker.chunk(true, 0, 2, 0, &[]);
    assert_eq!(client.reply().cookie, write);
    // A chunk without end.
    client.send_long(command::FLUSH, 0, 0, 0, &[]);
    worker.hears(&long_request(command::FLUSH, 0, 5, 0, 0));
    let head = [&0x6e8a_278cu32.to_be_bytes()[..], &[0, 1, 0, 0]].concat();
    worker.say(&[&head[..], &[5, 0, u64::MAX].map(u64::to_be_bytes).concat()].concat());
    assert!(is_closed(&worker.0));
}

/// Otherwise the agreed features would differ.
#[test]
fn a_client_whose_first_worker_was_older_keeps_what_that_one_offered() {
    let keeper = Keeper::new();
    let stream = keeper.connect();
    let mut worker = keeper.link();
    let client = std::thread::spawn(move || {
        let mut client = Client::over(stream);
        let unsupported = 1 << 31 | 1;
        // The relay passes on its own option if a client sends it.
        let asked = u32::from_be_bytes(*b"FRLY");
        assert_eq!(client.option(asked, b""), [(unsupported, vec![])]);
        assert_eq!(client.go(false), (SIZE, FLAGS));
        client
    });
    let unsupported = 1 << 31 | 1;
    let (relayed, info) = (u32::from_be_bytes(*b"FRLY"), info(""));
    let go = [&b"IHAVEOPT\0\0\0\x07"[..], &(info.len() as u32).to_be_bytes(), &info].concat();
    worker.say(GREETING);
    worker.hears(&[0, 0, 0, 3]);
    for options in [&[RELAYED, RELAYED_FIRST][..], &[RELAYED_FIRST]] {
        for option in options {
            worker.hears(option);
            worker.answer_to(relayed, unsupported, &[]);
        }
        worker.hears(&go);
        worker.answer(3, &[&[0, 0][..], &SIZE.to_be_bytes(), &FLAGS.to_be_bytes()].concat());
        worker.answer(1, &[]);
        if options.len() == 1 {
            break;
        }
        drop(worker);
        worker = keeper.link();
        worker.say(GREETING);
        // Only the client's own options come.
        worker.hears(&[0, 0, 0, 3]);
    }
    let mut client = client.join().unwrap();
    client.send(command::FLUSH, 0, 0, 0, &[]);
    worker.hears(&request(command::FLUSH, 0, 1, 0, 0));
    worker.done(1, 0);
    assert_eq!(client.reply().error, 0);
}

/// A worker that knows the option and no version offers no dirty maps, and its successor does not hear of a version.
#[test]
fn a_client_whose_first_worker_knew_no_version_of_relays_keeps_what_that_one_offered() {
    let keeper = Keeper::new();
    let stream = keeper.connect();
    let mut worker = keeper.link();
    let client = std::thread::spawn(move || {
        let mut client = Client::over(stream);
        assert_eq!(client.go(false), (SIZE, FLAGS));
        client
    });
    let (relayed, info) = (u32::from_be_bytes(*b"FRLY"), info(""));
    let go = [&b"IHAVEOPT\0\0\0\x07"[..], &(info.len() as u32).to_be_bytes(), &info].concat();
    for option in [RELAYED, RELAYED_FIRST] {
        worker.say(GREETING);
        worker.hears(&[0, 0, 0, 3]);
        worker.hears(option);
        worker.answer_to(relayed, ACK, &[]);
        worker.hears(&go);
        worker.answer(3, &[&[0, 0][..], &SIZE.to_be_bytes(), &FLAGS.to_be_bytes()].concat());
        worker.answer(1, &[]);
        if option == RELAYED {
            drop(worker);
            worker = keeper.link();
        }
    }
    let mut client = client.join().unwrap();
    client.send(command::FLUSH, 0, 0, 0, &[]);
    worker.hears(&request(command::FLUSH, 0, 1, 0, 0));
    worker.done(1, 0);
    assert_eq!(client.reply().error, 0);
}

/// Its write may wait for space, and other clients write meanwhile.
#[test]
fn what_a_client_that_is_gone_has_asked_for_ends_with_its_link() {
    let keeper = Keeper::new();
    let (mut client, mut worker) = keeper.served();
    client.send(command::WRITE, 0, 512, 512, &[7; 512]);
    worker.hears(&[&request(command::WRITE, 0, 1, 512, 512)[..], &[7; 512]].concat());
    // Requests that came together with the client's end are passed on.
    client.send(command::WRITE, 0, 1024, 512, &[8; 512]);
    drop(client);
    worker.hears(&[&request(command::WRITE, 0, 2, 1024, 512)[..], &[8; 512]].concat());
    assert_eq!(worker.0.read(&mut [0]).unwrap(), 0);
    assert_eq!(keeper.hear(), "idle 1");
}

#[test]
fn another_disk_than_the_clients_own_ends_it() {
    let keeper = Keeper::new();
    let (mut client, worker) = keeper.served();
    client.send(command::WRITE, 0, 0, 512, &[7; 512]);
    drop(worker);
    let mut worker = keeper.link();
    worker.greet(SIZE + 512);
    assert!(client.is_closed());
    assert_eq!(keeper.hear(), "idle 1");
}

#[test]
fn a_request_that_ends_its_links_is_given_up_with_its_client() {
    let keeper = Keeper::new();
    let (mut client, mut worker) = keeper.served();
    let (mut other, mut others) = keeper.served();
    client.send(command::READ, 0, 0, 512, &[]);
    for round in 1.. {
        worker.hears(&request(command::READ, 0, 1, 0, 512));
        drop(worker);
        if round == 8 {
            break;
        }
        worker = keeper.link();
        worker.greet(SIZE);
    }
    assert!(client.is_closed());
    other.send(command::FLUSH, 0, 0, 0, &[]);
    others.hears(&request(command::FLUSH, 0, 1, 0, 0));
    others.done(1, 0);
    assert_eq!(other.reply().error, 0);
}

#[test]
fn a_worker_that_talks_nonsense_is_asked_again_on_another_link() {
    let nonsense: [&[u8]; 4] = [
        // Not an answer; an answer without a request; data for a flush; an endless chunk.
        &[0xff; 16],
        b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\0\x09",
        b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\0\x02\0\0\0\0",
        b"\x66\x8e\x33\xef\0\0\0\x01\0\0\0\0\0\0\0\x01\xff\xff\xff\xff",
    ];
    let keeper = Keeper::new();
    let (mut client, mut worker) = keeper.served();
    client.send(command::READ, 0, 0, 512, &[]);
    for (i, nonsense) in nonsense.iter().enumerate() {
        worker.hears(&request(command::READ, 0, 1, 0, 512));
        worker.say(nonsense);
        assert!(is_closed(&worker.0), "{i}");
        worker = keeper.link();
        worker.greet(SIZE);
    }
    worker.hears(&request(command::READ, 0, 1, 0, 512));
    worker.done(1, 0);
    worker.say(&[3; 512]);
    assert_eq!(client.reply().data, [3; 512]);
}

#[test]
fn a_write_that_is_refused_before_its_data_have_come_leaves_the_next_request_where_it_is() {
    let keeper = Keeper::new();
    let (mut client, mut worker) = keeper.served();
    let data = vec![1; 8 << 20];
    let mut sender = client.stream.try_clone().unwrap();
    let long = [&request(command::WRITE, 0, 1, 0, data.len() as u32)[..], &data].concat();
    let sent = std::thread::spawn(move || {
        sender.write_all(&long).unwrap();
        // And a request that exceeds every limit.
        sender.write_all(&request(command::WRITE, 0, 5, 0, (32 << 20) + 512)).unwrap();
        std::io::copy(&mut std::io::repeat(2).take((32 << 20) + 512), &mut sender).unwrap();
        sender.write_all(&request(command::FLUSH, 0, 6, 0, 0)).unwrap();
    });
    worker.hears(&request(command::WRITE, 0, 1, 0, data.len() as u32));
    worker.done(1, 22);
    assert_eq!(client.reply().error, 22);
    worker.hears(&data);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (5, 22));
    worker.hears(&request(command::FLUSH, 0, 2, 0, 0));
    // The relay keeps no copy of the first request: the next worker gets only the flush.
    drop(worker);
    let mut worker = keeper.link();
    worker.greet(SIZE);
    worker.hears(&request(command::FLUSH, 0, 2, 0, 0));
    worker.done(2, 0);
    assert_eq!(client.reply().cookie, 6);
    sent.join().unwrap();
}

#[test]
fn at_the_bound_no_more_is_taken_from_a_client_and_its_answers_free_room() {
    let keeper = Keeper::new();
    let (mut client, mut worker) = keeper.served();
    let mib = 1 << 20;
    for i in 0..8 {
        client.send(command::READ, 0, i * u64::from(mib), mib, &[]);
    }
    let of = |cookie: u64| request(command::READ, 0, cookie, (cookie - 1) * u64::from(mib), mib);
    (1..=4).for_each(|cookie| worker.hears(&of(cookie)));
    worker.hears_nothing();
    worker.done(1, 0);
    worker.say(&vec![1; mib as usize]);
    assert_eq!(client.reply().data.len(), mib as usize);
    worker.hears(&of(5));
    worker.hears_nothing();
    // Without the client, no worker gets a request again.
    drop((client, worker));
    assert_eq!(keeper.hear(), "idle 1");
}

#[test]
fn a_handshake_goes_on_where_it_was_and_a_client_that_is_silent_in_it_ends() {
    let keeper = Keeper::new();
    let mut client = keeper.connect();
    drop(keeper.link());
    let mut worker = keeper.link();
    worker.say(GREETING);
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).unwrap();
    client.write_all(&[0, 0, 0, 3]).unwrap();
    worker.hears(&[0, 0, 0, 3]);
    worker.hears(RELAYED);
    drop(worker);
    worker = keeper.link();
    worker.say(GREETING);
    worker.hears(&[0, 0, 0, 3]);
    worker.is_introduced();
    client.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    worker.hears(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
    worker.say(&SIZE.to_be_bytes());
    worker.say(&FLAGS.to_be_bytes());
    let mut export = [0; 10];
    client.read_exact(&mut export).unwrap();
    assert_eq!(export[..8], SIZE.to_be_bytes());
    // A client that is silent, and a client that sends invalid data.
    let mut silent = keeper.connect();
    let mut silents = keeper.link();
    silents.say(GREETING);
    silent.read_exact(&mut greeting).unwrap();
    let mut wrong = keeper.connect();
    worker = keeper.link();
    worker.say(GREETING);
    wrong.read_exact(&mut greeting).unwrap();
    wrong.write_all(&[0xff; 64]).unwrap();
    assert!(is_closed(&wrong) && is_closed(&silent));
}
