//! Connections that say nothing (docs/internals/threats.md T46).

#[allow(dead_code, reason = "a module of several tests, not all of which use all")]
mod peers;

use std::io::Read as _;
use std::net::TcpStream;
use std::time::Duration;

use ferrite_pool::wire::Kind;
use peers::{Owner, Process};
use tempfile::TempDir;

/// The places of a server, and some.
const STRANGERS: usize = 540;

/// Not a test by itself: the server's process.
#[test]
fn a_server_process() {
    peers::be_server();
}

#[test]
fn strangers_in_all_places_end_no_session_and_leave_them_when_they_go() {
    let folder = TempDir::new().unwrap();
    let server = Process::start(folder.path());
    assert_eq!(Owner::create(&server, "d", 1 << 20).header.kind, Kind::Done);
    let (mut owner, _) = Owner::open(&server, "d", 1, 7);
    let connect = |_| TcpStream::connect(&server.address).unwrap();
    let mut strangers: Vec<TcpStream> = (0..STRANGERS).map(connect).collect();
    // The last ones hear nothing but the end.
    let last = strangers.last_mut().unwrap();
    last.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(last.read(&mut [0; 18]).unwrap(), 0);
    owner.done(Kind::Write, 0, 0, &[1; 512]);
    assert_eq!(owner.done(Kind::Read, 0, 512, &[]), [1; 512]);
    drop(strangers);
    // Their places are free when the server has seen that they have gone.
    let free = || {
        let mut next = TcpStream::connect(&server.address).ok()?;
        let _ = next.set_read_timeout(Some(Duration::from_secs(60)));
        next.read_exact(&mut [0; 18]).ok()
    };
    while free().is_none() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let (mut next, _) = Owner::open(&server, "d", 2, 8);
    assert_eq!(next.done(Kind::Read, 0, 512, &[]), [1; 512]);
}
