//! Random bytes from NBD clients, directly to the server and through a relay, while another client works: it gets its
//! answers, and after the others nothing remains. This test is alone in its program, because it counts the resources of
//! the process.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_host::frames::RELAY;
use ferrite_serve::nbd::relay;
use ferrite_testkit::nbd::{
    Client, PAYLOAD_LEN, Served, contexts, info, long_request, option, options, request,
};
use ferrite_testkit::proc::{Memory, descriptors, threads_named};
use ferrite_testkit::{PATIENCE, few_or_all, wait_until};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

const MIB: u64 = 1 << 20;
const BYTES: u64 = 16 * MIB;
/// The part of the disk that only the witness writes.
const WITNESS_FROM: u64 = 12 * MIB;
/// Concurrent streams.
const AT_ONCE: usize = 4;
/// KiB of a client: its buffers, its table and its thread, once for each concurrent one and for the witness; and the
/// pages of the disk, which is a file in memory.
const MOST_KIB: u64 = (AT_ONCE as u64 + 1) * (12 << 10) + (16 << 10);
/// Additional KiB of a relay for each of them.
const RELAY_KIB: u64 = (AT_ONCE as u64 + 1) * (9 << 10);

/// Handshakes by night, in clear and directly to the server.
const HANDSHAKES: u32 = 100_000;

/// An option of a client.
fn asked(option: u32, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    [&b"IHAVEOPT"[..], &option.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

/// The form of a client's requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Simple,
    Structured,
    Extended,
}

fn any_form() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Simple), Just(Form::Structured), Just(Form::Extended)]
}

fn greeting(form: Form) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    match form {
        Form::Simple => {}
        Form::Structured => bytes.extend(asked(option::STRUCTURED_REPLY, &[])),
        Form::Extended => bytes.extend(asked(option::EXTENDED_HEADERS, &[])),
    }
    if form != Form::Simple {
        let both = contexts("", &["base:allocation", "qemu:allocation-depth"]);
        bytes.extend(asked(option::SET_META_CONTEXT, &both));
    }
    bytes.extend(asked(option::GO, &info("")));
    bytes
}

/// An option as clients send it, or almost: known or not, with data of any option, some asked twice.
fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let data = prop_oneof![
        3 => Just(Vec::new()),
        3 => "[a-z:]{0,20}".prop_map(|name| info(&name)),
        3 => ("[a-z:]{0,9}", prop::collection::vec("base:(allocation)?|qemu:(allocation-depth)?|[a-z:]{0,9}", 0..6))
            .prop_map(|(name, queries)| {
                contexts(&name, &queries.iter().map(String::as_str).collect::<Vec<_>>())
            }),
        1 => prop::collection::vec(any::<u8>(), 0..300),
    ];
    let option = prop_oneof![12 => 0..13u32, 1 => any::<u32>()];
    (option, data, 0..300usize, any::<u8>(), 1..3usize).prop_map(
        |(option, data, at, damage, times)| {
            let mut bytes = asked(option, &data);
            // Every other one is damaged somewhere, or not, if it is shorter.
            if let Some(byte) = bytes.get_mut(at).filter(|_| damage % 2 == 0) {
                *byte ^= damage;
            }
            bytes.repeat(times)
        },
    )
}

/// A handshake, or almost.
fn any_handshake() -> impl Strategy<Value = Vec<u8>> {
    let flags = prop_oneof![8 => Just(3u32), 2 => 0..4u32, 1 => any::<u32>()];
    let options = prop::collection::vec(any_option(), 0..8);
    (flags, options, any::<u16>()).prop_map(|(flags, options, cut)| {
        let mut bytes = [flags.to_be_bytes().to_vec(), options.concat()].concat();
        if cut % 4 == 0 {
            bytes.truncate(usize::from(cut) % bytes.len());
        }
        bytes
    })
}

/// A valid request, or almost, with as many bytes of data as it says, or almost.
fn any_request(form: Form) -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![
        8 => (0..64u32).prop_map(|sectors| sectors * 512),
        1 => any::<u32>(),
        1 => 0..100_000u32,
        1 => (0..8u32).prop_map(|mib| mib << 20)
    ];
    let offset = prop_oneof![
        5 => (0..WITNESS_FROM / 512 - 20_000).prop_map(|sector| sector * 512),
        3 => 0..WITNESS_FROM - 20_000 * 512,
        1 => any::<u64>().prop_filter("the witness's", |at| !(0..BYTES).contains(at))
    ];
    let flags = prop_oneof![4 => Just(0u16), 1 => 0..16u16, 1 => any::<u16>()];
    let command = prop_oneof![12 => 0..9u16, 1 => any::<u16>()];
    let loss = prop_oneof![9 => Just(0usize), 1 => 1..600usize];
    (command, flags, any::<u64>(), offset, len, loss).prop_map(
        move |(command, flags, cookie, offset, len, loss)| {
            // Only ranges below the witness's part.
            let len = if offset < BYTES { len.min(8 << 20) } else { len };
            let data =
                if command == 1 { (len as usize).min(1 << 20).saturating_sub(loss) } else { 0 };
            let mut bytes = match form {
                Form::Extended if command == 1 => {
                    let len = u64::from(len);
                    long_request(command, flags ^ PAYLOAD_LEN, cookie, offset, len).to_vec()
                }
                // Some are longer than the disk.
                Form::Extended => {
                    let len = u64::from(len) | u64::from(cookie % 3 == 0) << 33;
                    long_request(command, flags, cookie, offset, len).to_vec()
                }
                _ => request(command, flags, cookie, offset, len).to_vec(),
            };
            bytes.resize(bytes.len() + data, 0x5A);
            bytes
        },
    )
}

fn any_stream() -> impl Strategy<Value = Vec<u8>> {
    let requests = any_form()
        .prop_flat_map(|form| (Just(form), prop::collection::vec(any_request(form), 0..20)));
    prop_oneof![
        2 => prop::collection::vec(any::<u8>(), 0..2000),
        2 => any_handshake(),
        1 => (any_form(), prop::collection::vec(any::<u8>(), 0..200))
            .prop_map(|(form, bytes)| [greeting(form), bytes].concat()),
        4 => (requests, any::<u16>()).prop_map(|((form, requests), cut)| {
            let mut bytes = greeting(form);
            requests.iter().for_each(|request| bytes.extend(request));
            // Some end at any byte.
            let cut = if cut % 4 == 0 { usize::from(cut) % bytes.len() } else { bytes.len() };
            bytes.truncate(cut);
            bytes
        }),
    ]
}

/// Sends everything, reads all replies, and disconnects.
fn play(stream: &UnixStream, bytes: &[u8]) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    std::thread::scope(|scope| {
        let (mut writer, mut reader) = (stream, stream);
        scope.spawn(move || {
            // The server disconnects after an invalid request.
            let _ = writer.write_all(bytes);
            let _ = writer.shutdown(Shutdown::Write);
        });
        let mut buffer = vec![0; 256 << 10];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    panic!("a client that goes is not let go")
                }
                Err(_) => break,
            }
        }
    });
}

/// The keeper of a relay, both as threads of this process: a link is a connection with the server.
fn relayed(served: &Served) -> impl Fn() -> UnixStream + Sync {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    std::thread::spawn(move || relay(&theirs).unwrap_err());
    let (ours, socket) = (Arc::new(ours), served.socket.clone());
    let keeper = ours.clone();
    std::thread::spawn(move || {
        loop {
            let asked = RELAY.receive(&keeper).unwrap().bytes;
            if asked.starts_with(b"link ") {
                let link = UnixStream::connect(&socket).unwrap();
                RELAY.try_send(&keeper, &asked, &[link.as_fd()]).unwrap();
            }
        }
    });
    move || {
        let (client, theirs) = UnixStream::pair().unwrap();
        RELAY.try_send(&ours, b"client", &[theirs.as_fd()]).unwrap();
        client
    }
}

#[test]
fn random_bytes_of_clients_are_felt_by_nobody_else() {
    let served = Served::new("raw", BYTES, options());
    let direct = || UnixStream::connect(&served.socket).unwrap();
    let streams = few_or_all(30, 500) * AT_ONCE as u32;
    let gone = || threads_named("nbd-client").is_empty();
    felt_by_nobody(&direct, MOST_KIB, streams, &|| any_stream().boxed());
    wait_until("the end of the witness", gone);
    felt_by_nobody(&relayed(&served), MOST_KIB + RELAY_KIB, streams, &|| any_stream().boxed());
    wait_until("the end of the other witness", gone);
    felt_by_nobody(&direct, MOST_KIB, few_or_all(4_000, HANDSHAKES), &|| any_handshake().boxed());
}

fn felt_by_nobody(
    connect: &(dyn Fn() -> UnixStream + Sync),
    most_kib: u64,
    streams: u32,
    any: &(dyn Fn() -> BoxedStrategy<Vec<u8>> + Sync),
) {
    let mut witness = Client::over(connect());
    witness.go(true);
    witness.write(0, &[1; 4096]);
    let (descriptors_before, memory) = (descriptors(), Memory::watch());
    let ended = AtomicBool::new(false);
    let each = streams / AT_ONCE as u32;
    std::thread::scope(|scope| {
        let watched = scope.spawn(|| {
            let mut rounds = 0u64;
            while !ended.load(Ordering::SeqCst) || rounds == 0 {
                let at = WITNESS_FROM + rounds % 64 * 4096;
                witness.write(at, &[rounds as u8; 4096]);
                witness.flush();
                assert_eq!(witness.read(at, 4096), [rounds as u8; 4096]);
                rounds += 1;
            }
            witness
        });
        let players: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                scope.spawn(move || {
                    let mut runner = TestRunner::default();
                    let any = any();
                    for _ in 0..each {
                        let stream = any.new_tree(&mut runner).unwrap().current();
                        play(&connect(), &stream);
                    }
                })
            })
            .collect();
        let played: Vec<_> = players.into_iter().map(|player| player.join()).collect();
        ended.store(true, Ordering::SeqCst);
        let mut witness = watched.join().unwrap();
        played.into_iter().for_each(|played| played.unwrap());
        wait_until("the end of all other clients", || threads_named("nbd-client").len() == 1);
        witness.flush();
    });
    assert!(memory.taken_kib() < most_kib, "{} KiB", memory.taken_kib());
    // The last thread's descriptors are closed before it ends.
    wait_until("all is closed", || descriptors() <= descriptors_before);
}
