//! Input from xenstore: the stream of messages, and guests' values in it.

use std::os::fd::OwnedFd;
use std::time::Duration;

use ferrite_serve::blkif::negotiate::{Offer, read_frontend};
use ferrite_xen::store::Store;
use ferrite_xen::store::wire::{
    Decoder, ErrorName, HEADER_BYTES, Header, Message, MessageType, NO_TRANSACTION, PAYLOAD_MAX,
    decode_permissions, encode_permissions, is_node_path, strings,
};
use rustix::net::{AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType};

/// The most bytes that are written to a socket at once, so that no reader is needed at the other end.
const STREAM_BYTES: usize = 64 << 10;

/// The decoder of the stream, and of payloads. The first byte decides how the stream is split.
pub(crate) fn store_wire(input: &[u8]) {
    let Some((cut, stream)) = input.split_first() else { return };
    let mut decoder = Decoder::new();
    let mut decoded = 0;
    for piece in stream.chunks(usize::from(*cut) + 1) {
        decoder.push(piece);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => {
                    decoded += HEADER_BYTES + message.payload.len();
                    assert!(decoded <= stream.len() && message.payload.len() <= PAYLOAD_MAX);
                    check_message(&message);
                }
                Ok(None) => break,
                Err(e) => {
                    assert!(!e.to_string().is_empty());
                    return;
                }
            }
        }
    }
    assert_eq!(decoder.is_partial(), decoded < stream.len());
}

fn check_message(message: &Message) {
    let mut header = [0; HEADER_BYTES];
    header.copy_from_slice(&message.encode()[..HEADER_BYTES]);
    assert_eq!(Header::decode(&header), Ok(message.header));
    let _ = message.header.kind();
    let _ = ErrorName::from_payload(&message.payload);
    if let Some(list) = decode_permissions(&message.payload) {
        let again = encode_permissions(&list).and_then(|bytes| decode_permissions(&bytes));
        assert_eq!(again, Some(list));
    }
    for text in strings(&message.payload).unwrap_or_default() {
        assert!(!is_node_path(text) || text.bytes().all(|b| b > b' '), "{text:?}");
    }
}

/// A client whose server sends the input, and then disconnects.
pub(crate) fn store_client(input: &[u8]) {
    let (mut store, _server) = store_that_says(input);
    let _ = store.read("/a");
    let _ = store.list("/a");
    let _ = store.get_permissions("/a");
    let _ = store.watch("/a", "token");
    let _ = store.transaction(|tx| tx.read("/a").map(|_| ()));
    for _ in 0..4 {
        if let Ok(Some(event)) = store.poll_event() {
            let _ = format!("{event:?}");
        }
    }
    let _ = store.unwatch("/a", "token");
    let _ = store.write("/a", b"value");
}

/// The keys of a frontend: values, one per line, in the order of their reading; a line that begins with `-` is a
/// missing key.
pub(crate) fn store_keys(input: &[u8]) {
    let mut stream = Vec::new();
    for (i, line) in input.split(|b| *b == b'\n').take(512).enumerate() {
        let request = Header::new(MessageType::Read, i as u32 + 1, NO_TRANSACTION, 0);
        let reply = match line {
            [b'-', ..] => Message::error(&request, ErrorName::NoEnt),
            value => Message::reply(&request, &value[..value.len().min(PAYLOAD_MAX)]),
        };
        stream.extend(reply.encode());
    }
    let offer =
        Offer { max_queues: 4, max_ring_order: 4, max_indirect_segments: 256, persistent: true };
    let (mut store, _server) = store_that_says(&stream);
    match read_frontend(&mut store, "/local/domain/1/device/vbd/51712", &offer) {
        Ok(wanted) => {
            assert!((1..=4).contains(&wanted.queues.len()) && wanted.ring_order <= 4);
            assert!(wanted.queues.iter().all(|q| q.ring.len() == 1 << wanted.ring_order));
            assert!(wanted.has_rings_of(&wanted.clone()) && wanted.line().len() < 4096);
        }
        Err(e) => assert!(e.to_string().len() < 4096, "{e}"),
    }
}

/// A client, and its server's end, which must stay open for the client's requests.
fn store_that_says(stream: &[u8]) -> (Store, OwnedFd) {
    let (ours, theirs) = pair();
    let mut stream = &stream[..stream.len().min(STREAM_BYTES)];
    while !stream.is_empty() {
        match rustix::net::send(&theirs, stream, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => stream = &stream[sent..],
            Err(_) => break,
        }
    }
    let _ = rustix::net::shutdown(&theirs, Shutdown::Write);
    (Store::from_fd(ours).with_timeout(Duration::from_secs(1)), theirs)
}

fn pair() -> (OwnedFd, OwnedFd) {
    let made = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    );
    made.expect("a pair of sockets")
}
