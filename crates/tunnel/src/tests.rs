//! Streams of strangers, byte by byte, before TLS and in it.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_host::tunnel::{Files, Inward};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConfig, ServerConnection};

use crate::credentials::{self, Contents};
use crate::faults::Peer;
use crate::greeting::until_tls;
use crate::pump::{bound, handshake};
use crate::stream::{Socket, Timed};
use crate::{End, inward};

const SEED: u64 = 0x7E57_5EED;

/// A stream that a stranger has sent, and its end.
fn stream(bytes: &[u8]) -> (OwnedFd, UnixStream) {
    let (own, mut stranger) = UnixStream::pair().unwrap();
    stranger.write_all(bytes).unwrap();
    stranger.shutdown(std::net::Shutdown::Write).unwrap();
    (own.into(), stranger)
}

fn timed(socket: &OwnedFd) -> Timed<'_> {
    Timed { socket, end: Instant::now() + Duration::from_secs(30), whom: "client" }
}

/// Changes, repeats or cuts some bytes.
fn harm(bytes: &[u8], random: &mut SplitMix64) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len().max(1) as u64) as usize;
        match random.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.extend_from_within(at..),
            _ if bytes.is_empty() => bytes.push(random.next_u64() as u8),
            2 => bytes[at] ^= 1 << random.below(8),
            _ => bytes[at] = random.next_u64() as u8,
        }
        bytes.truncate(16 << 10);
    }
    bytes
}

/// The certificate and key of a server. `None`: openssl is not installed.
fn server() -> Option<Arc<ServerConfig>> {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]);
    command.args(["-noenc", "-subj", "/CN=x", "-addext", "subjectAltName=DNS:localhost"]);
    command.args(["-keyout", "server-key.pem", "-out", "server-cert.pem"]).stderr(Stdio::null());
    if !command.current_dir(dir.path()).status().ok()?.success() {
        return None;
    }
    let files = Files::of_server(dir.path(), false).unwrap();
    Some(credentials::server(&Contents::read(&files).unwrap(), false).unwrap())
}

/// What a client of TLS says first.
fn client_hello() -> Vec<u8> {
    let config = credentials::client(&Contents::default()).unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let mut client = ClientConnection::new(config, name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

#[test]
fn random_streams_end_one_connection_each() {
    println!("seed {SEED}");
    let mut random = SplitMix64::new(SEED);
    let good = b"\0\0\0\x03IHAVEOPT\0\0\0\x03\0\0\0\0IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0\
                 IHAVEOPT\0\0\0\x05\0\0\0\0";
    let mut through = 0;
    for _ in 0..100_000 {
        let (socket, _stranger) = stream(&harm(good, &mut random));
        through += u32::from(until_tls(&timed(&socket)).is_ok());
    }
    // Some harm is none, and most is.
    assert!((1..90_000).contains(&through), "{through}");
}

#[test]
fn random_streams_of_tls_end_one_connection_each() {
    let Some(config) = server() else { return };
    println!("seed {SEED}");
    let mut random = SplitMix64::new(SEED);
    let hello = client_hello();
    for i in 0..10_000u32 {
        let mut bytes = harm(&hello, &mut random);
        if i % 4 == 0 {
            // A good beginning, and records of each kind behind it.
            bytes.clone_from(&hello);
            let len = random.below(300) as u16;
            bytes.extend([20 + random.below(5) as u8, 3, 3]);
            bytes.extend(len.to_be_bytes());
            bytes.extend((0..len).map(|_| random.next_u64() as u8));
        }
        let (socket, _stranger) = stream(&bytes);
        let mut tls = Connection::Server(ServerConnection::new(config.clone()).unwrap());
        bound(&mut tls);
        let done = handshake(&mut tls, &timed(&socket), Peer::Client);
        assert!(matches!(done, Err(End::Left | End::Refused(_))));
    }
}

/// A tunnel that serves nobody yet ends with its starter.
#[test]
fn a_tunnel_ends_with_its_starter() {
    let (starter, own) = ferrite_host::frames::pair().unwrap();
    let tunnel = std::thread::spawn(move || {
        inward(own, Inward::Tls { verifies: true }, None).map(|never| match never {})
    });
    drop(starter);
    assert!(tunnel.join().unwrap().is_err());
}

#[test]
fn a_socket_that_has_nothing_says_so_and_does_not_wait() {
    let (own, _other) = UnixStream::pair().unwrap();
    let own = OwnedFd::from(own);
    let read = std::io::Read::read(&mut Socket(&own), &mut [0; 8]);
    assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}
