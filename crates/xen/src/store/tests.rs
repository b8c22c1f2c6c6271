//! The client against servers that follow a script, good and bad.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use proptest::prelude::*;
use rustix::net::{SendFlags, socketpair};

use super::wire::*;
use super::*;
use crate::hypervisor::DomId;

#[test]
fn ways_to_xenstore_that_do_not_exist_are_not_listed() {
    let error = |kind| ("/a/socket", io::Error::from(kind));
    let none = why_unreachable(&[error(io::ErrorKind::NotFound), error(io::ErrorKind::NotFound)]);
    assert!(!none.contains("/a/socket") && none.contains("-v"), "{none}");
    let denied = [error(io::ErrorKind::NotFound), error(io::ErrorKind::PermissionDenied)];
    assert!(why_unreachable(&denied).contains("/a/socket: permission denied"));
}

/// The server's end.
struct Peer {
    fd: OwnedFd,
    decoder: Decoder,
}

impl Peer {
    /// The next request; `None` when the client has gone.
    fn receive(&mut self) -> Option<Message> {
        loop {
            if let Some(m) = self.decoder.next_message().unwrap() {
                return Some(m);
            }
            let mut buffer = [0u8; 5000];
            match rustix::io::read(&self.fd, &mut buffer) {
                Ok(n) if n > 0 => self.decoder.push(&buffer[..n]),
                _ => return None,
            }
        }
    }

    /// The next request, which has to be this one.
    fn expect(&mut self, kind: MessageType, payload: &[u8]) -> Message {
        let m = self.receive().expect("a request");
        assert_eq!((m.header.kind(), m.payload.as_slice()), (Ok(kind), payload));
        m
    }

    fn send(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL) {
                Ok(n) => bytes = &bytes[n..],
                Err(_) => return,
            }
        }
    }

    fn reply(&self, to: &Message, payload: &[u8]) {
        self.send(&Message::reply(&to.header, payload).encode());
    }

    fn refuse(&self, to: &Message, name: ErrorName) {
        self.send(&Message::error(&to.header, name).encode());
    }

    /// Answers the next request, which has to be this one.
    fn serve(&mut self, kind: MessageType, payload: &[u8], reply: &[u8]) -> Message {
        let m = self.expect(kind, payload);
        self.reply(&m, reply);
        m
    }
}

fn event(path: &str, token: &str) -> Vec<u8> {
    Message::new(MessageType::WatchEvent, 0, 0, nul_terminated(&[path, token])).encode()
}

/// Sleeps without sleeping, and remembers how long.
#[derive(Default)]
struct CountingClock(AtomicU64);

impl Clock for CountingClock {
    fn now_ns(&self) -> u64 {
        SystemClock.now_ns()
    }
    fn sleep(&self, how_long: Duration) {
        self.0.fetch_add(how_long.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// A client whose server runs `script`. Join the thread to see whether the script was kept to.
fn store_with(script: impl FnOnce(Peer) + Send + 'static) -> (Store, JoinHandle<()>) {
    let (ours, theirs) = pair();
    let peer = Peer { fd: theirs, decoder: Decoder::new() };
    let store = Store::from_fd(ours)
        .with_world(Arc::new(CountingClock::default()), Box::new(SplitMix64::new(1)))
        .with_timeout(Duration::from_secs(5));
    (store, std::thread::spawn(move || script(peer)))
}

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// Events one after the other, until there is one.
fn next_event(store: &mut Store) -> WatchEvent {
    for _ in 0..5000 {
        if let Some(e) = store.poll_event().unwrap() {
            return e;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("no event");
}

#[test]
fn requests_have_the_payloads_of_the_protocol() {
    use MessageType::*;
    let (mut store, server) = store_with(|mut peer| {
        peer.serve(Read, b"/a\0", b"v\0w");
        let m = peer.expect(Read, b"/none\0");
        peer.refuse(&m, ErrorName::NoEnt);
        peer.serve(Write, b"/a\0val", OK_PAYLOAD);
        peer.serve(Mkdir, b"/a/b\0", OK_PAYLOAD);
        peer.serve(Directory, b"/a\0", b"b\0c\0");
        peer.serve(Directory, b"/e\0", b"");
        peer.serve(SetPerms, b"/a\0n3\0r0\0", OK_PAYLOAD);
        peer.serve(GetPerms, b"/a\0", b"n3\0r0\0");
        peer.serve(Rm, b"/a\0", OK_PAYLOAD);
        let m = peer.expect(Rm, b"/a/b\0");
        peer.refuse(&m, ErrorName::NoEnt);
    });
    assert_eq!(store.read("/a").unwrap().as_deref(), Some(b"v\0w".as_slice()));
    assert_eq!(store.read("/none").unwrap(), None);
    store.write("/a", b"val").unwrap();
    store.mkdir("/a/b").unwrap();
    assert_eq!(store.list("/a").unwrap(), ["b", "c"]);
    assert!(store.list("/e").unwrap().is_empty());
    let permissions = [('n', DomId(3)), ('r', DomId(0))];
    store.set_permissions("/a", &permissions).unwrap();
    assert_eq!(store.get_permissions("/a").unwrap(), permissions);
    store.remove("/a").unwrap();
    store.remove("/a/b").unwrap();
    drop(store);
    server.join().unwrap();
}

#[test]
fn a_reply_in_single_bytes_among_events_is_put_together() {
    let (mut store, server) = store_with(|mut peer| {
        let m = peer.serve(MessageType::Watch, b"/w\0t\0", OK_PAYLOAD);
        assert_ne!(m.header.request_id, 0);
        let m = peer.expect(MessageType::Read, b"/a\0");
        let mut bytes = event("/w", "t");
        bytes.extend(event("/w/x", "unknown"));
        bytes.extend(Message::reply(&m.header, vec![7; PAYLOAD_MAX]).encode());
        bytes.iter().for_each(|b| peer.send(&[*b]));
        let m = peer.expect(MessageType::Read, b"/b\0");
        peer.reply(&m, b"");
        peer.send(&event("/w/late", "t"));
        peer.receive();
    });
    store.watch("/w", "t").unwrap();
    assert_eq!(store.read("/a").unwrap(), Some(vec![7; PAYLOAD_MAX]));
    assert_eq!(next_event(&mut store).path, "/w", "the one that came before the reply");
    assert_eq!(store.poll_event().unwrap(), None);
    store.read("/b").unwrap();
    assert_eq!(next_event(&mut store).path, "/w/late", "the one that came after a reply");
    drop(store);
    server.join().unwrap();
}

#[test]
fn a_flood_of_events_is_one_event_and_a_bounded_wait() {
    let (mut store, server) = store_with(|mut peer| {
        peer.serve(MessageType::Watch, b"/w\0t\0", OK_PAYLOAD);
        let flood: Vec<u8> = (0..5000).flat_map(|_| event("/w", "t")).collect();
        peer.send(&flood);
        peer.serve(MessageType::Read, b"/a\0", b"1");
        peer.expect(MessageType::Read, b"/b\0");
        // No answer any more, but events for ever.
        while rustix::net::send(&peer.fd, &flood, SendFlags::NOSIGNAL).is_ok() {}
    });
    store.watch("/w", "t").unwrap();
    assert!(store.read("/a").unwrap().is_some());
    assert!(store.poll_event().unwrap().is_some());
    assert_eq!(store.poll_event().unwrap(), None, "5000 events are one");
    store = store.with_timeout(Duration::from_millis(100));
    assert!(matches!(store.read("/b"), Err(StoreError::Timeout { .. })));
    drop(store);
    server.join().unwrap();
}

#[test]
fn a_late_reply_is_dropped_and_the_right_one_taken() {
    let (mut store, server) = store_with(|mut peer| {
        let late = peer.expect(MessageType::Read, b"/late\0");
        let now = peer.expect(MessageType::Read, b"/now\0");
        let after = {
            peer.reply(&now, b"now");
            peer.reply(&late, b"late");
            peer.expect(MessageType::Read, b"/after\0")
        };
        peer.reply(&after, b"after");
        peer.receive();
    });
    store = store.with_timeout(Duration::from_millis(50));
    assert!(matches!(store.read("/late"), Err(StoreError::Timeout { .. })));
    store = store.with_timeout(Duration::from_secs(5));
    assert_eq!(store.read_string("/now").unwrap().as_deref(), Some("now"));
    assert_eq!(store.read_string("/after").unwrap().as_deref(), Some("after"));
    assert!(!store.is_dead());
    drop(store);
    server.join().unwrap();
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let (mut store, server) = store_with(|mut peer| while peer.receive().is_some() {});
    store = store.with_timeout(Duration::from_millis(1));
    let mut timeouts = 0;
    let last = loop {
        match store.read("/a") {
            Err(StoreError::Timeout { .. }) => timeouts += 1,
            other => break other,
        }
        assert!(timeouts < 100);
    };
    assert!(matches!(last, Err(StoreError::Dead { .. })), "{last:?}");
    assert!(timeouts >= 16);
    drop(store);
    server.join().unwrap();
}

#[test]
fn a_request_that_cannot_be_sent_times_out_too() {
    let (ours, _theirs) = pair();
    let mut store = Store::from_fd(ours).with_timeout(Duration::from_millis(5));
    let value = [0u8; 4000];
    let result = loop {
        match store.write("/a", &value) {
            Err(StoreError::Timeout { .. }) => {}
            other => break other,
        }
    };
    assert!(matches!(result, Err(StoreError::Dead { .. })));
}

#[test]
fn a_conflicting_transaction_is_done_again_as_a_whole() {
    use MessageType::*;
    let (mut store, server) = store_with(|mut peer| {
        for attempt in 1..=3 {
            let id = format!("{}\0", attempt * 10);
            peer.serve(TransactionStart, b"\0", id.as_bytes());
            let m = peer.serve(Read, b"/n\0", &[b'0' + attempt]);
            assert_eq!(m.header.transaction_id, u32::from(attempt) * 10);
            peer.serve(Write, &[b"/n\0".as_slice(), &[b'0' + attempt]].concat(), OK_PAYLOAD);
            let end = peer.expect(TransactionEnd, b"T\0");
            assert_eq!(end.header.transaction_id, u32::from(attempt) * 10);
            match attempt {
                3 => peer.reply(&end, OK_PAYLOAD),
                _ => peer.refuse(&end, ErrorName::Again),
            }
        }
    });
    let mut runs = 0;
    let value = store.transaction(|t| {
        runs += 1;
        let n = t.read("/n")?.unwrap_or_default();
        t.write("/n", &n)?;
        Ok(n)
    });
    assert_eq!((value.unwrap().as_slice(), runs), (b"3".as_slice(), 3));
    drop(store);
    server.join().unwrap();
}

#[test]
fn a_transaction_that_always_conflicts_ends_after_bounded_pauses() {
    let (ours, theirs) = pair();
    let server = std::thread::spawn(move || {
        let mut peer = Peer { fd: theirs, decoder: Decoder::new() };
        while let Some(m) = peer.receive() {
            match m.header.kind().unwrap() {
                MessageType::TransactionStart => peer.reply(&m, b"1\0"),
                _ => peer.refuse(&m, ErrorName::Again),
            }
        }
    });
    let clock = Arc::new(CountingClock::default());
    let mut store = Store::from_fd(ours).with_world(clock.clone(), Box::new(SplitMix64::new(5)));
    let mut runs = 0;
    let result = store.transaction(|_| {
        runs += 1;
        Ok(())
    });
    assert!(matches!(result, Err(StoreError::Again { attempts: 64 })));
    assert_eq!(runs, 64);
    let slept_ms = clock.0.load(Ordering::Relaxed) / 1_000_000;
    assert!((1000..8000).contains(&slept_ms), "{slept_ms} ms");
    drop(store);
    server.join().unwrap();
}

#[test]
fn a_transaction_that_fails_is_abandoned() {
    use MessageType::*;
    let (mut store, server) = store_with(|mut peer| {
        peer.serve(TransactionStart, b"\0", b"77\0");
        let m = peer.expect(Write, b"/full\0x");
        peer.refuse(&m, ErrorName::Quota);
        let end = peer.expect(TransactionEnd, b"F\0");
        assert_eq!(end.header.transaction_id, 77);
        let read = peer.expect(Read, b"/a\0");
        assert_eq!(read.header.transaction_id, NO_TRANSACTION);
        peer.reply(&end, OK_PAYLOAD);
        peer.reply(&read, b"still alive");
    });
    let result = store.transaction(|t| t.write("/full", b"x"));
    assert!(matches!(result, Err(StoreError::Quota { name: "EQUOTA", .. })), "{result:?}");
    assert_eq!(store.read("/a").unwrap().unwrap(), b"still alive");
    drop(store);
    server.join().unwrap();
}

#[test]
fn garbage_ends_the_connection_with_an_error_and_no_more() {
    let too_long = Header { len: 4097, ..Header::new(MessageType::Read, 1, 0, 0) }.encode();
    let unknown = Header { number: 20, ..Header::new(MessageType::Read, 1, 0, 0) }.encode();
    let not_asked = Message::new(MessageType::Read, 99, 0, Vec::new()).encode();
    let other_type = Message::new(MessageType::Write, 1, 0, *b"OK\0").encode();
    let no_token = Message::new(MessageType::WatchEvent, 0, 0, *b"/w\0").encode();
    for bytes in [&too_long[..], &unknown, &not_asked, &other_type, &no_token, &[0xFF; 64], b""] {
        let bytes = bytes.to_vec();
        let (mut store, server) = store_with({
            let bytes = bytes.clone();
            move |mut peer| {
                peer.receive();
                peer.send(&bytes);
            }
        });
        let first = store.read("/a").unwrap_err();
        assert!(matches!(first, StoreError::Protocol { .. }), "{bytes:?}: {first}");
        assert!(first.is_fatal() && store.is_dead());
        let second = store.write("/a", b"").unwrap_err();
        assert!(matches!(second, StoreError::Dead { .. }), "{second}");
        assert!(store.poll_event().is_err());
        server.join().unwrap();
    }
}

#[test]
fn a_transaction_without_a_number_is_a_broken_protocol() {
    for id in [b"\0".as_slice(), b"0\0", b"x\0", b"4294967296\0", b"5"] {
        let (mut store, server) = store_with(move |mut peer| {
            peer.serve(MessageType::TransactionStart, b"\0", id);
        });
        let result = store.transaction(|_| Ok(()));
        assert!(matches!(result, Err(StoreError::Protocol { .. })), "{id:?}: {result:?}");
        server.join().unwrap();
    }
}

#[test]
fn bad_arguments_never_reach_the_server() {
    let (ours, _theirs) = pair();
    let mut store = Store::from_fd(ours);
    let long = format!("/{}", "a".repeat(ABSOLUTE_PATH_MAX));
    for path in ["", "/a\0b", &long, &"a".repeat(RELATIVE_PATH_MAX + 1)] {
        assert!(matches!(store.read(path), Err(StoreError::Invalid { .. })));
        assert!(matches!(store.write(path, b""), Err(StoreError::Invalid { .. })));
        assert!(matches!(store.watch(path, "t"), Err(StoreError::Invalid { .. })));
    }
    assert!(matches!(store.write("/a", &[0; PAYLOAD_MAX]), Err(StoreError::Invalid { .. })));
    assert!(matches!(store.watch("/a", "\0"), Err(StoreError::Invalid { .. })));
    assert!(matches!(store.set_permissions("/a", &[]), Err(StoreError::Invalid { .. })));
    assert!(matches!(
        store.set_permissions("/a", &[('q', DomId(1))]),
        Err(StoreError::Invalid { .. })
    ));
    assert!(!store.is_dead());
}

#[test]
fn text_with_a_nul_or_in_another_encoding_is_refused() {
    let (mut store, server) = store_with(|mut peer| {
        peer.serve(MessageType::Read, b"/a\0", b"1\0");
        peer.serve(MessageType::Read, b"/a\0", b"\xff");
        peer.serve(MessageType::Read, b"/a\0", b"");
    });
    assert!(matches!(store.read_string("/a"), Err(StoreError::Invalid { .. })));
    assert!(matches!(store.read_string("/a"), Err(StoreError::Invalid { .. })));
    assert_eq!(store.read_string("/a").unwrap().as_deref(), Some(""));
    server.join().unwrap();
}

#[test]
fn a_watch_has_a_token_of_its_own_and_ends_for_good() {
    use MessageType::*;
    let (mut store, server) = store_with(|mut peer| {
        peer.serve(Watch, b"/a\0t\0", OK_PAYLOAD);
        let m = peer.expect(Watch, b"/b\0u\0");
        peer.refuse(&m, ErrorName::NoSpc);
        peer.send(&[event("/a", "t"), event("/b", "u")].concat());
        peer.serve(Unwatch, b"/a\0t\0", OK_PAYLOAD);
        peer.send(&event("/a", "t"));
        peer.serve(Read, b"/a\0", b"");
        peer.receive();
    });
    store.watch("/a", "t").unwrap();
    store.watch("/a", "t").unwrap();
    assert!(matches!(store.watch("/other", "t"), Err(StoreError::Invalid { .. })));
    assert!(matches!(store.watch("/b", "u"), Err(StoreError::Quota { .. })));
    store.unwatch("/a", "t").unwrap();
    store.unwatch("/a", "t").unwrap();
    store.read("/a").unwrap();
    assert_eq!(store.poll_event().unwrap(), None);
    drop(store);
    server.join().unwrap();
}

#[test]
fn a_long_list_is_fetched_in_parts_and_again_if_it_changed() {
    use MessageType::*;
    let (mut store, server) = store_with(|mut peer| {
        let m = peer.expect(Directory, b"/d\0");
        peer.refuse(&m, ErrorName::TooBig);
        peer.serve(DirectoryPart, b"/d\0\x30\0", b"5\0one\0");
        peer.serve(DirectoryPart, b"/d\0\x34\0", b"6\0two\0\0");
        peer.serve(DirectoryPart, b"/d\0\x30\0", b"6\0one\0");
        peer.serve(DirectoryPart, b"/d\0\x34\0", b"6\0two\0");
        peer.serve(DirectoryPart, b"/d\0\x38\0", b"6\0three\0\0");
    });
    assert_eq!(store.list("/d").unwrap(), ["one", "two", "three"]);
    server.join().unwrap();
}

#[test]
fn errors_say_what_was_tried_and_stay_short() {
    let long = format!("/{}\n", "x".repeat(2000));
    let what = What { verb: "read", path: &long };
    let text = StoreError::refused(what, &[b'E'; 4096]).to_string();
    assert!(text.len() < 600 && !text.contains('\n'), "{text}");
    let text = StoreError::named(What { verb: "write", path: "/a" }, ErrorName::Acces).to_string();
    assert!(text.contains("cannot write /a: permission denied"), "{text}");
}

#[test]
fn a_store_can_move_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<Store>();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_stream_of_bytes_upsets_the_client(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let (ours, theirs) = pair();
        let mut store = Store::from_fd(ours).with_timeout(Duration::from_millis(1));
        rustix::net::send(&theirs, &bytes, SendFlags::NOSIGNAL).unwrap();
        drop(theirs);
        prop_assert!(store.read("/a").is_err());
        let _ = store.poll_event();
    }

    #[test]
    fn no_small_change_of_a_reply_upsets_the_client(
        at in 0usize..40, to in any::<u8>(), cut in 0usize..40,
    ) {
        let (ours, theirs) = pair();
        let mut store = Store::from_fd(ours).with_timeout(Duration::from_millis(1));
        let mut bytes = event("/w", "t");
        bytes.extend(Message::new(MessageType::Directory, 1, 0, *b"a\0b\0").encode());
        if let Some(b) = bytes.get_mut(at) {
            *b = to;
        }
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        rustix::net::send(&theirs, &bytes, SendFlags::NOSIGNAL).unwrap();
        if let Ok(names) = store.list("/d") {
            prop_assert!(names.len() <= 4);
        }
    }
}
