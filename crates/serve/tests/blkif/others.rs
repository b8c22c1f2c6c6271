//! Clients of a worker that speak no NBD, as they come by the client channel: what is said on their status sockets.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_host::frames::Frame;
use ferrite_serve::counters::Counters;
use ferrite_serve::others::{Newcomer, Options, Others, Told, is_over, status, told};
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::nbd::engines;
use ferrite_testkit::{PATIENCE, images, places, wait_until};

const BYTES: u64 = 4 << 20;

fn others(dir: &std::path::Path) -> Others {
    let disk = Disk::open(&images::make(dir, "raw", BYTES), &OpenOptions::default()).unwrap();
    let device = Arc::new(Device::new(disk, SystemClock::shared()));
    let (engine, tuning, counters) = (engines(), Tuning::default(), Counters::default());
    Others::new(device, Options { memory: 4 << 20, engine, tuning, counters })
}

/// Sends a client, and returns its status socket.
fn admit(others: &mut Others, bytes: &[u8], file: Option<OwnedFd>) -> OwnedFd {
    let [theirs, ours] = status().unwrap();
    let files = std::iter::once(theirs).chain(file).collect();
    others.admit(Frame { bytes: bytes.to_vec(), files });
    ours
}

fn say(others: &mut Others, newcomer: &Newcomer, file: Option<OwnedFd>) -> OwnedFd {
    admit(others, &serde_json::to_vec(newcomer).unwrap(), file)
}

fn device(number: u32) -> Newcomer {
    Newcomer::Device { number, queues: 1, depth: 8, read_only: false }
}

fn front_end() -> Newcomer {
    Newcomer::FrontEnd { queues: 2, read_only: false, name: "a".to_owned() }
}

#[test]
fn a_question_is_answered_and_what_makes_no_sense_is_dropped() {
    let dir = places::dir_in_memory();
    let mut others = others(dir.path());
    let asked = say(&mut others, &Newcomer::Question { read_only: true }, None);
    let parameters = told(&asked, PATIENCE).unwrap().parameters().unwrap();
    assert_eq!((parameters.sectors, parameters.read_only), (BYTES / 512, true));
    assert!(is_over(&asked));
    for nonsense in [&b"{"[..], b"client", b"{\"device\":{}}", b"\"tape\"", &[0xff; 512]] {
        let dropped = admit(&mut others, nonsense, Some(File::open("/dev/null").unwrap().into()));
        assert!(is_over(&dropped), "{nonsense:?}");
    }
    // A frame for whose descriptors no number was free.
    others.admit(Frame { bytes: b"\"no_front_end\"".to_vec(), files: Vec::new() });
    for asked in [device(0), front_end(), Newcomer::NoFrontEnd] {
        let asked = say(&mut others, &asked, None);
        assert!(matches!(told(&asked, PATIENCE), Ok(Told::Refused(_))));
        assert!(is_over(&asked));
    }
    assert!(!others.are_there());
    others.end();
}

#[test]
fn a_device_that_is_none_is_refused_and_its_descriptor_is_closed() {
    let dir = places::dir_in_memory();
    let mut others = others(dir.path());
    let (file, other_end) = UnixStream::pair().unwrap();
    let status = say(&mut others, &device(3), Some(file.into()));
    let said = told(&status, PATIENCE).unwrap();
    assert!(matches!(&said, Told::Refused(why) if !why.is_empty()), "{said:?}");
    wait_until("the end of the thread", || is_over(&status));
    other_end.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(std::io::Read::read(&mut &other_end, &mut [0; 1]).unwrap(), 0);
    let asked = say(&mut others, &device(3), None);
    assert!(matches!(told(&asked, PATIENCE), Ok(Told::Refused(_))));
    others.end();
}

#[test]
fn a_front_end_is_served_until_it_or_its_service_ends() {
    let dir = places::dir_in_memory();
    let mut others = others(dir.path());
    let mut connect = || {
        let (file, front) = UnixStream::pair().unwrap();
        let status = say(&mut others, &front_end(), Some(file.into()));
        assert!(matches!(told(&status, PATIENCE), Ok(Told::Served { .. })));
        (status, front)
    };
    let (first, front) = connect();
    assert!(!is_over(&first));
    drop(front);
    wait_until("the end of the front end", || is_over(&first));
    let [(second, _held), (third, _other)] = [connect(), connect()];
    // A third beside these would take their memory's worth again.
    let status = say(&mut others, &front_end(), Some(UnixStream::pair().unwrap().0.into()));
    assert!(matches!(told(&status, PATIENCE), Ok(Told::Refused(_))));
    let asked = say(&mut others, &front_end(), None);
    assert!(matches!(told(&asked, PATIENCE), Ok(Told::Served { .. })));
    assert!(others.are_there() && !is_over(&asked));
    let ended = say(&mut others, &Newcomer::NoFrontEnd, None);
    assert!(told(&ended, Duration::from_secs(20)).is_ok());
    let all = [&second, &third, &asked, &ended];
    wait_until("the end of all", || all.iter().all(|status| is_over(status)));
    others.end();
}
