//! Streams of strangers, byte by byte, before TLS and in it.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_host::tunnel::{Files, Inward};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use crate::credentials::{self, Contents};
use crate::faults::Peer;
use crate::greeting::{restrict, until_tls};
use crate::pump::{Pump, bound, handshake};
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

/// How many times longer than usual the tests with loops run, as those of other crates.
fn scale() -> u32 {
    let scale = std::env::var("FERRITE_TEST_SCALE").ok();
    scale.map_or(1, |scale| scale.parse().expect("FERRITE_TEST_SCALE is a number"))
}

/// A server, and a client who knows it. `None`: openssl is not installed.
fn both() -> Option<(Arc<ServerConfig>, Arc<ClientConfig>)> {
    let dir = tempfile::tempdir().unwrap();
    let openssl = |kind: &str, more: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]);
        command.args(["-noenc", "-subj", &format!("/CN={kind}")]).args(more);
        command.args(["-keyout", &format!("{kind}-key.pem"), "-out", &format!("{kind}-cert.pem")]);
        let status = command.current_dir(dir.path()).stderr(Stdio::null()).status();
        status.ok()?.success().then_some(())
    };
    openssl("ca", &[])?;
    let signed = ["-CA", "ca-cert.pem", "-CAkey", "ca-key.pem", "-addext"];
    let names = ["basicConstraints=critical,CA:FALSE", "-addext", "subjectAltName=DNS:localhost"];
    openssl("server", &[&signed[..], &names].concat())?;
    let read = |files: Files| Contents::read(&files).unwrap();
    let server = credentials::server(&read(Files::of_server(dir.path(), false).unwrap()), false);
    let client = credentials::client(&read(Files::of_client(dir.path()).unwrap()));
    Some((server.unwrap(), client.unwrap()))
}

fn server() -> Option<Arc<ServerConfig>> {
    Some(both()?.0)
}

/// The first message of a client of TLS.
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
    let rounds = if scale() > 1 { 100_000 } else { 3_000 };
    for i in 0..rounds {
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

/// A client's stream inside TLS, in pieces of any size, through a tunnel to a server that says all of it again.
#[test]
fn random_streams_inside_tls_arrive_whole_and_end() {
    let Some((server, client)) = both() else { return };
    println!("seed {SEED}");
    let mut random = SplitMix64::new(SEED);
    let good = b"\0\0\0\x03IHAVEOPT\0\0\0\x08\0\0\0\0IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";
    let rounds = if scale() > 1 { 100_000 } else { 96 };
    for round in 0..rounds {
        let mut bytes = harm(good, &mut random);
        if round % 16 == 0 {
            // Longer than all buffers between, so both sides have to wait.
            bytes.extend((0..1 << 20).map(|i: u32| (i / 253) as u8));
        }
        let ((outside, own), (inside, other)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let (server, client, sent) = (server.clone(), client.clone(), &bytes);
        let most = 1 + random.below(100_000) as usize;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (own, inside) = (OwnedFd::from(own), OwnedFd::from(inside));
                let mut tls = Connection::Server(ServerConnection::new(server).unwrap());
                bound(&mut tls);
                handshake(&mut tls, &timed(&own), Peer::Client).unwrap();
                Pump::new(&mut tls, Peer::Client, &own, &inside).run().unwrap();
            });
            scope.spawn(move || {
                std::io::copy(&mut &other, &mut &other).unwrap();
                other.shutdown(std::net::Shutdown::Write).unwrap();
            });
            let name = ServerName::try_from("localhost").unwrap();
            let (mut tls, mut outside) = (ClientConnection::new(client, name).unwrap(), outside);
            // A client without a word has a handshake as well.
            tls.complete_io(&mut outside).unwrap();
            let mut got = vec![0; sent.len()];
            let mut read = 0;
            for piece in sent.chunks(most) {
                rustls::Stream::new(&mut tls, &mut outside).write_all(piece).unwrap();
                // As much of it as has come back.
                let part = &mut got[read..read + piece.len()];
                rustls::Stream::new(&mut tls, &mut outside).read_exact(part).unwrap();
                read += piece.len();
            }
            tls.send_close_notify();
            let mut rest = Vec::new();
            rustls::Stream::new(&mut tls, &mut outside).read_to_end(&mut rest).unwrap();
            assert!(got == *sent && rest.is_empty(), "round {round}");
        });
    }
}

/// A tunnel without clients ends with its starter.
#[test]
fn a_tunnel_ends_with_its_starter() {
    let (starter, own) = ferrite_host::frames::pair().unwrap();
    let tunnel = std::thread::spawn(move || {
        inward(own, Inward::Tls { verifies: true }, None, Vec::new()).map(|never| match never {})
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

/// A server of this host answers `FeEX`. Only one that has understood it gets the client.
#[test]
fn a_client_is_not_given_to_a_server_that_does_not_limit_it() {
    let restriction = ferrite_nbd::restriction::Restriction {
        name: "web".to_owned(),
        read_only: true,
        hides_names: false,
    };
    let answer = |option: &[u8; 4], kind: u32, len: u32| {
        let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        bytes.extend(option);
        bytes.extend(kind.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes
    };
    let said = |bytes: &[u8]| {
        let (server, _stranger) = stream(bytes);
        restrict(&timed(&server), &restriction)
    };
    assert!(said(&answer(b"FeEX", 1, 0)).is_ok());
    let unsupported = 1 << 31 | 1;
    for refused in [answer(b"FeEX", unsupported, 0), answer(b"FeEX", 1, 1), answer(b"FRLY", 1, 0)] {
        let Err(End::Refused(fault)) = said(&refused) else { panic!("{refused:?}") };
        assert!(fault.help.contains("ferrite upgrade"), "{fault}");
    }
    assert!(matches!(said(&answer(b"FeEX", 1, 0)[..19]), Err(End::Left)));
}
