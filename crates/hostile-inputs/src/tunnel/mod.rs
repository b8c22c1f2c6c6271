//! The bytes of clients and of servers of a tunnel: NBD in clear up to STARTTLS, and TLS behind it.
//!
//! The key beside this file is that of these tests alone.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use ferrite_host::tunnel::{CA, Files, SERVER_CERTIFICATE, SERVER_KEY};
use ferrite_tunnel::{greet_client, outward};
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};

const CERTIFICATE: &[u8] = include_bytes!("server-cert.pem");
const KEY: &[u8] = include_bytes!("server-key.pem");

/// The bytes of an input that are used. A socket has room for them.
const MAX_INPUT_BYTES: usize = 16 << 10;
/// The most bytes of an answer: a text for each of 64 options, and a certificate.
const MAX_ANSWER_BYTES: usize = 32 << 10;

/// The flag of the first byte for a server's bytes; without it they are a client's.
const SERVER: u8 = 1;
/// The flag of the first byte for TLS alone: NBD's part before it is there.
const IN_TLS: u8 = 2;

/// A client up to STARTTLS.
const CLIENT_UNTIL_TLS: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0";
/// A server up to its consent to STARTTLS.
const SERVER_UNTIL_TLS: &[u8] = b"NBDMAGICIHAVEOPT\0\x03\0\x03\xe8\x89\x04\x55\x65\xa9\
    \0\0\0\x05\0\0\0\x01\0\0\0\0";
/// The inner client of a tunnel to a server: GO, and ABORT after its answer.
const INNER_CLIENT: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0\
    IHAVEOPT\0\0\0\x02\0\0\0\0";

/// A socket on which the peer has sent all its bytes, and the peer's end of it.
fn said(parts: &[&[u8]]) -> (OwnedFd, UnixStream) {
    let (own, mut other) = UnixStream::pair().expect("there are descriptors");
    parts.iter().for_each(|bytes| other.write_all(bytes).expect("there is room"));
    other.shutdown(Shutdown::Write).expect("it is connected");
    (own.into(), other)
}

/// The bytes of the answer. Our end is closed with it.
fn answered(own: OwnedFd, mut other: UnixStream) -> Vec<u8> {
    drop(own);
    let mut bytes = Vec::new();
    // It is an error if the tunnel ends without having read all bytes.
    let _ = other.read_to_end(&mut bytes);
    bytes
}

fn file(bytes: &[u8]) -> File {
    let file = memfd_create("pem", MemfdFlags::CLOEXEC).expect("there is memory");
    let mut file = File::from(file);
    file.write_all(bytes).expect("there is memory");
    seek(&file, SeekFrom::Start(0)).expect("it is a file");
    file
}

/// Gives a tunnel these bytes of a client or a server. None of them can have spoken TLS to its end.
pub(crate) fn tunnel(input: &[u8]) {
    let Some((how, bytes)) = input.split_first() else { return };
    let bytes = &bytes[..bytes.len().min(MAX_INPUT_BYTES)];
    let before = |good: &'static [u8]| if how & IN_TLS != 0 { good } else { &[] };
    match how & SERVER {
        0 => client(&[before(CLIENT_UNTIL_TLS), bytes]),
        _ => server(&[before(SERVER_UNTIL_TLS), bytes]),
    }
}

fn client(bytes: &[&[u8]]) {
    let files = [(SERVER_CERTIFICATE, CERTIFICATE), (SERVER_KEY, KEY), (CA, CERTIFICATE)];
    let files = Files::of(files.map(|(name, bytes)| (name, file(bytes))).into());
    let (socket, other) = said(bytes);
    match greet_client(&socket, &files) {
        Ok(()) => panic!("a client without a key has spoken TLS"),
        Err(Some(fault)) => is_line(&fault.to_string()),
        Err(None) => {}
    }
    let answer = answered(socket, other);
    assert!(answer.len() < MAX_ANSWER_BYTES, "{} bytes for {bytes:?}", answer.len());
}

fn server(bytes: &[&[u8]]) {
    let (outside, other) = said(bytes);
    let (inside, client) = said(&[INNER_CLIENT]);
    let files = Files::of(vec![(CA, file(CERTIFICATE))]);
    let fault = outward("localhost", &outside, &inside, &files);
    is_line(&fault.expect_err("a server without a key has spoken TLS").to_string());
    let asked = answered(outside, other);
    assert!(asked.len() < MAX_ANSWER_BYTES, "{} bytes for {bytes:?}", asked.len());
    let told = answered(inside, client);
    // The client is greeted, hears why there is no TLS, and is let go.
    assert!(told.starts_with(b"NBDMAGICIHAVEOPT") && told.ends_with(&[0, 0, 0, 1, 0, 0, 0, 0]));
}

/// A text for people, of which the peer may have written a part.
fn is_line(text: &str) {
    assert!(!text.contains(char::is_control) && text.len() < 4096, "{text:?}");
}
