//! The uplink against this machine's kernel: a TAP device in a network namespace of its own. Needs root and
//! `/dev/net/tun`; without these a test says so and passes.

use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ferrite_net::packet::{Offload, Uplink};
use ferrite_net::tap::TapUplink;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, recv, sendto, socket};

const DEVICE: &str = "ferrite0";
const OURS: [u8; 6] = [0x00, 0x16, 0x3e, 1, 2, 3];
const ADDRESS: [u8; 4] = [10, 77, 0, 2];
const PATIENCE: Duration = Duration::from_secs(20);
const ROLE: &str = "FERRITE_TEST_TAP_ROLE";

/// Runs a role in a network namespace of its own: this program with the one test that is none.
fn in_namespace(role: &str) {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        eprintln!("SKIPPED: {role} needs root and /dev/net/tun");
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.arg("--net").arg(program).args(["--exact", "process_in_a_namespace", "--nocapture"]);
    let done = command.env(ROLE, role).output().unwrap();
    let said = [done.stdout, done.stderr].concat();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&said));
}

#[test]
fn the_kernel_pings_a_guest_through_the_device() {
    in_namespace("ping");
}

#[test]
fn the_kernel_fills_in_and_leaves_out_checksums() {
    in_namespace("checksums");
}

#[test]
fn a_device_that_is_down_drops_and_one_that_is_removed_is_an_error() {
    in_namespace("removed");
}

/// Not a test: a process in a namespace.
#[test]
fn process_in_a_namespace() {
    match std::env::var(ROLE).as_deref() {
        Ok("ping") => ping(),
        Ok("checksums") => checksums(),
        Ok("removed") => removed(),
        _ => {}
    }
}

fn ip(words: &str) {
    let done = Command::new("ip").args(words.split_whitespace()).output().unwrap();
    assert!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr));
}

fn up() -> TapUplink {
    let tap = TapUplink::open(DEVICE).unwrap();
    ip(&format!("addr add 10.77.0.1/24 dev {DEVICE}"));
    ip(&format!("link set {DEVICE} up"));
    tap
}

/// The next frame that `take` makes something of.
fn next<T>(tap: &mut TapUplink, mut take: impl FnMut(&[u8], Offload) -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    let mut frame = vec![0; 65_536];
    while Instant::now() < end {
        if let Some((len, offload)) = tap.receive(&mut frame).unwrap() {
            if let Some(found) = take(&frame[..len], offload) {
                return found;
            }
            continue;
        }
        let fd = tap.fd();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
    }
    panic!("nothing came within {PATIENCE:?}");
}

/// The answer of a guest to a question for its address.
fn arp_reply(frame: &[u8]) -> Option<Vec<u8>> {
    let is_ours = frame.get(12..14)? == [8, 6] && frame.get(20..22)? == [0, 1];
    if !is_ours || frame.get(38..42)? != ADDRESS {
        return None;
    }
    let mut reply = frame[..42].to_vec();
    reply[..6].copy_from_slice(&frame[6..12]);
    reply[6..12].copy_from_slice(&OURS);
    reply[21] = 2;
    reply[22..28].copy_from_slice(&OURS);
    reply[28..32].copy_from_slice(&ADDRESS);
    reply[32..42].copy_from_slice(&frame[22..32]);
    Some(reply)
}

/// The answer to a ping.
fn echo(frame: &[u8]) -> Option<Vec<u8>> {
    if frame.get(12..14)? != [8, 0] || *frame.get(23)? != 1 || *frame.get(34)? != 8 {
        return None;
    }
    let mut reply = frame.to_vec();
    reply[..6].copy_from_slice(&frame[6..12]);
    reply[6..12].copy_from_slice(&OURS);
    reply[26..30].copy_from_slice(&frame[30..34]);
    reply[30..34].copy_from_slice(&frame[26..30]);
    reply[34] = 0;
    // The type is 8 less, so the sum's complement is 0x0800 more.
    let sum = u32::from(u16::from_be_bytes([frame[36], frame[37]])) + 0x0800;
    reply[36..38].copy_from_slice(&((sum & 0xffff) as u16 + (sum >> 16) as u16).to_be_bytes());
    Some(reply)
}

/// A question of the kernel of this namespace.
fn echo_request(number: u8) -> Vec<u8> {
    let mut request = vec![8, 0, 0, 0, 0x77, 0x01, 0, number];
    request.extend((0..1400_u32).map(|i| (i % 251) as u8 ^ number));
    let words = request.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !((sum & 0xffff) as u16 + (sum >> 16) as u16);
    request[2..4].copy_from_slice(&sum.to_be_bytes());
    request
}

fn ping() {
    let mut tap = up();
    let socket = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP)).unwrap();
    let guest = SocketAddrV4::new(ADDRESS.into(), 0);
    for number in 0..3 {
        let request = echo_request(number);
        sendto(&socket, &request, SendFlags::empty(), &guest).unwrap();
        loop {
            let (reply, is_echo) = next(&mut tap, |frame, _| {
                let arp = arp_reply(frame).map(|reply| (reply, false));
                arp.or_else(|| echo(frame).map(|reply| (reply, true)))
            });
            assert!(tap.send(&reply, Offload::default()).unwrap());
            if is_echo {
                break;
            }
        }
        let mut heard = vec![0; 4096];
        let len = recv(&socket, &mut heard[..], RecvFlags::empty()).unwrap().0;
        let heard = &heard[20..len];
        assert_eq!(
            (heard[0], &heard[4..]),
            (0, &request[4..]),
            "the answer has the question's bytes"
        );
    }
}

fn checksums() {
    let mut tap = up();
    let socket = UdpSocket::bind("10.77.0.1:7000").unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    ip(&format!("neigh add 10.77.0.2 lladdr 00:16:3e:01:02:03 dev {DEVICE}"));

    // From the kernel: the checksum is left out, and the field has the pseudo-header's sum.
    socket.send_to(&[7; 1000], "10.77.0.2:7001").unwrap();
    let (sent, offload) =
        next(&mut tap, |frame, offload| (frame.len() == 1042).then(|| (frame.to_vec(), offload)));
    assert!(offload.csum_blank, "{offload:?}");

    // To the kernel: the same frame back. As it is, the checksum is wrong; as a blank one it is right.
    let mut back = sent.clone();
    back[..6].copy_from_slice(&sent[6..12]);
    back[6..12].copy_from_slice(&sent[..6]);
    back[26..30].copy_from_slice(&sent[30..34]);
    back[30..34].copy_from_slice(&sent[26..30]);
    back[34..36].copy_from_slice(&sent[36..38]);
    back[36..38].copy_from_slice(&sent[34..36]);
    back[42] = 1;
    assert!(tap.send(&back, Offload::default()).unwrap());
    back[42] = 2;
    let blank = Offload { csum_blank: true, csum_valid: true, gso: None };
    assert!(tap.send(&back, blank).unwrap());
    let mut heard = [0; 2000];
    let len = socket.recv(&mut heard).unwrap();
    assert_eq!((len, heard[0]), (1000, 2), "the frame with a wrong checksum is not heard");
}

fn removed() {
    let mut tap = TapUplink::open(DEVICE).unwrap();
    let frame = [[0xff; 6].as_slice(), &OURS, &[0x88, 0xb5], &[0; 50]].concat();
    assert!(!tap.send(&frame, Offload::default()).unwrap(), "it is down");
    ip(&format!("link set {DEVICE} up"));
    assert!(tap.send(&frame, Offload::default()).unwrap());
    ip(&format!("link delete {DEVICE}"));
    assert!(tap.send(&frame, Offload::default()).is_err());
    assert!(tap.receive(&mut [0; 2000]).is_err());
    assert!(tap.fd().as_fd().try_clone_to_owned().is_ok());
    for bad in ["", "a-name-that-is-far-too-long", "a/b", "tap%d"] {
        assert!(TapUplink::open(bad).is_err(), "{bad}");
    }
}
