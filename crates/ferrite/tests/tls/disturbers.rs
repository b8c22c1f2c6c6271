//! Clients that are slow or renegotiate inside TLS, and what others notice of them.

use std::io::Write as _;
use std::process::{ChildStdin, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{Export, Outward, Pki, SClient};

/// An option's head, and the first of its data.
const BEGUN: &[u8] = b"IHAVEOPT\0\0\0\x63\0\0\x10\0";

/// Sends what is in `BEGUN`, and zeros behind it, a byte in a record of TLS. Returns the number of bytes that the pipe
/// has taken when it is told to `stop` or the client has ended.
fn trickle(mut into: ChildStdin, pause: Duration, on: &AtomicBool, stop: &AtomicBool) -> u32 {
    let mut bytes = BEGUN.iter().copied().chain(std::iter::repeat(0));
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(pause);
        if on.load(Ordering::Relaxed) {
            let byte = bytes.next().unwrap();
            if into.write_all(&[byte]).and_then(|()| into.flush()).is_err() {
                break;
            }
            sent += 1;
        }
    }
    sent
}

/// Reads of a client in a time, one after another.
fn reads(client: &mut Outward, time: Duration) -> u32 {
    let end = Instant::now() + time;
    let mut count = 0;
    while Instant::now() < end {
        assert_eq!(client.client.read(0, 4096).len(), 4096);
        count += 1;
    }
    count
}

#[test]
fn a_client_that_renegotiates_or_sends_single_bytes_in_tls_does_not_slow_down_others() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    let mut good = Outward::to(&pki, "client", "localhost", export.port);
    good.client.go(true);
    // A client of TLS 1.2 asks for a new handshake when it reads this line. The server does not have one.
    let mut again = SClient::start(&export, &pki, &["-tls1_2"], Stdio::piped());
    let mut input = again.child.stdin.take().unwrap();
    input.write_all(b"R\n").unwrap();
    let said = again.end();
    drop(input);
    assert!(said.contains("RENEGOTIATING") && said.contains("no renegotiation"), "{said}");
    // Time with a client that sends single bytes, and time without, in turn.
    let mut slow = SClient::start(&export, &pki, &["-quiet"], Stdio::piped());
    let input = slow.child.stdin.take().unwrap();
    let (on, stop) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let (sent, beside, alone) = std::thread::scope(|scope| {
        let thread = scope.spawn(|| trickle(input, Duration::from_millis(1), on, stop));
        let (mut beside, mut alone) = (0, 0);
        for _ in 0..8 {
            on.store(true, Ordering::Relaxed);
            beside += reads(&mut good, Duration::from_millis(100));
            on.store(false, Ordering::Relaxed);
            alone += reads(&mut good, Duration::from_millis(100));
        }
        stop.store(true, Ordering::Relaxed);
        (thread.join().unwrap(), beside, alone)
    });
    println!("{sent} single bytes; reads beside them {beside}, alone {alone}");
    assert!(sent > 50, "{sent}");
    // On a quiet machine they are equal. A machine that is busy with something else has bad moments.
    assert!(f64::from(beside) > 0.6 * f64::from(alone), "{beside} reads beside, {alone} alone");
    slow.end();
    export.serves(&pki, "client");
}

/// It takes as long as a client has for its options. `cargo xtask nightly --only peers` runs it.
#[test]
#[ignore = "it waits for the end of a handshake's time"]
fn a_client_that_sends_a_byte_a_second_in_tls_ends_in_time_and_others_go_on() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    let mut good = Outward::to(&pki, "client", "localhost", export.port);
    good.client.go(true);
    let mut slow = SClient::start(&export, &pki, &["-quiet"], Stdio::piped());
    let input = slow.child.stdin.take().unwrap();
    let (on, stop) = (&AtomicBool::new(true), &AtomicBool::new(false));
    let (sent, served) = (AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let all = trickle(input, Duration::from_secs(1), on, stop);
            sent.store(all, Ordering::Relaxed);
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                served.fetch_add(reads(&mut good, Duration::from_millis(200)), Ordering::Relaxed);
            }
        });
        // It ends by itself: the server has closed its connection.
        slow.end();
        stop.store(true, Ordering::Relaxed);
    });
    let (sent, served) = (sent.into_inner(), served.into_inner());
    // Within its time it cannot have sent the whole option, and it has not.
    assert!(sent < 40 && served > 100, "{sent} bytes; {served} reads of the other client");
    export.serves(&pki, "client");
}
