//! Frames between two ends of one test, as processes exchange them.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ferrite_host::frames::lines::{self, Lines};
use ferrite_host::frames::{self, MAX_FILES, Protocol, Version, first_version};
use proptest::prelude::*;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, listen, send,
    socket_with,
};

const TEST: Protocol = Protocol { name: "a test", max_bytes: 8, max_files: 1 };
const PATIENCE: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(20);

fn streams() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    (ours, theirs)
}

/// A file with this text, open for reading.
fn file(text: &str) -> OwnedFd {
    let path = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(path.path(), text).unwrap();
    File::open(path.path()).unwrap().into()
}

fn text(file: OwnedFd) -> String {
    let mut text = String::new();
    File::from(file).read_to_string(&mut text).unwrap();
    text
}

fn kind<T: std::fmt::Debug>(received: std::io::Result<T>) -> ErrorKind {
    received.unwrap_err().kind()
}

#[test]
fn frames_come_whole_and_in_order_with_their_descriptors_and_then_the_end() {
    let (ours, theirs) = frames::pair().unwrap();
    assert!(TEST.try_receive(&theirs).unwrap().is_none());
    TEST.send(&ours, b"one", &[file("1").as_fd()]).unwrap();
    TEST.try_send(&ours, b"01234567", &[]).unwrap();
    let first = TEST.receive(&theirs).unwrap();
    assert_eq!(first.bytes, b"one");
    assert_eq!(first.files.into_iter().map(text).collect::<Vec<_>>(), ["1"]);
    let second = TEST.try_receive(&theirs).unwrap().unwrap();
    assert_eq!((second.bytes.as_slice(), second.files.len()), (b"01234567".as_slice(), 0));
    TEST.send(&ours, b"last", &[]).unwrap();
    drop(ours);
    assert_eq!(TEST.receive(&theirs).unwrap().bytes, b"last");
    assert_eq!(kind(TEST.receive(&theirs)), ErrorKind::UnexpectedEof);
    assert_eq!(kind(TEST.try_receive(&theirs)), ErrorKind::UnexpectedEof);
    assert!(TEST.send(&theirs, b"gone", &[]).is_err());
    // An end that has not read everything is an end, too.
    let (ours, theirs) = frames::pair().unwrap();
    TEST.send(&theirs, b"unread", &[]).unwrap();
    drop(ours);
    assert_eq!(kind(TEST.try_receive(&theirs)), ErrorKind::UnexpectedEof);
}

#[test]
fn what_exceeds_a_bound_is_not_sent_and_is_refused_by_who_receives_it() {
    let (ours, theirs) = frames::pair().unwrap();
    let (one, other) = (file("1"), file("2"));
    let both = [one.as_fd(), other.as_fd()];
    for (bytes, files) in [(b"012345678".as_slice(), 0), (b"a", 2), (b"", 0)] {
        assert_eq!(kind(TEST.send(&ours, bytes, &both[..files])), ErrorKind::InvalidInput);
    }
    // A peer that keeps to no bounds.
    send(&ours, &[b'x'; 100_000], SendFlags::NOSIGNAL).unwrap();
    let wide = Protocol { max_files: MAX_FILES, ..TEST };
    wide.send(&ours, b"many", &both).unwrap();
    TEST.send(&ours, b"good", &[]).unwrap();
    let refused = TEST.try_receive(&theirs).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidData);
    assert_eq!(refused.to_string(), "a message of a test has more than 8 bytes");
    let many = TEST.receive(&theirs).unwrap();
    assert_eq!(many.files.into_iter().map(text).collect::<Vec<_>>(), ["1"]);
    assert_eq!(TEST.receive(&theirs).unwrap().bytes, b"good");
}

#[test]
fn a_protocol_without_descriptors_closes_those_that_come() {
    let (ours, theirs) = frames::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    TEST.send(&ours, b"file", &[writer.as_fd()]).unwrap();
    drop(writer);
    let none = Protocol { max_files: 0, ..TEST };
    assert!(none.receive(&theirs).unwrap().files.is_empty());
    // The pipe has no writer any more.
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

#[test]
fn who_does_not_read_is_not_waited_for() {
    let (ours, _theirs) = frames::pair().unwrap();
    let full = (0..100_000).find_map(|_| TEST.try_send(&ours, b"01234567", &[]).err());
    assert_eq!(full.unwrap().kind(), ErrorKind::WouldBlock);
}

#[test]
fn who_accepts_nobody_or_does_not_answer_is_waited_for_until_the_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    assert_eq!(kind(frames::connect(&path, SHORT)), ErrorKind::NotFound);
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 0).unwrap();
    let first = frames::connect(&path, SHORT).unwrap();
    assert_eq!(kind(TEST.receive(&first)), ErrorKind::WouldBlock);
    assert_eq!(kind(frames::connect(&path, SHORT)), ErrorKind::WouldBlock);
}

#[test]
fn two_programs_speak_the_lower_version_and_say_both_if_they_are_too_far_apart() {
    let version = |own| Version { protocol: "a test", own };
    assert_eq!(version(first_version()).agree(first_version()), Ok(1));
    assert_eq!((version(3).agree(2), version(3).agree(4)), (Ok(2), Ok(3)));
    for theirs in [0, 1, 5, u32::MAX] {
        let refused = version(3).agree(theirs).unwrap_err();
        let said =
            format!("the other process speaks version {theirs} of a test, and this one 2 and 3");
        assert_eq!(refused.to_string(), said);
        let e = std::io::Error::from(refused);
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.to_string().contains("run ferrite upgrade"), "{e}");
    }
    let first = version(1).agree(0).unwrap_err().to_string();
    assert!(first.ends_with("and this one 1"), "{first}");
    // A process that does not know a version cannot read a message in it.
    assert_eq!((version(3).read(3), version(3).read(2)), (Ok(3), Ok(2)));
    assert!(version(3).read(4).is_err() && version(3).read(1).is_err());
}

#[test]
fn a_line_that_is_too_long_or_has_no_end_is_refused() {
    for (sent, received) in [
        ("1234567\nrest", Ok("1234567\n")),
        ("12345678\n", Err(ErrorKind::InvalidData)),
        ("12345678", Err(ErrorKind::InvalidData)),
        ("1234", Err(ErrorKind::UnexpectedEof)),
        ("", Err(ErrorKind::UnexpectedEof)),
        ("\n", Ok("\n")),
    ] {
        let (ours, mut theirs) = streams();
        theirs.write_all(sent.as_bytes()).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        let line = Lines::default().receive(&ours, 8, || true).map_err(|e| e.kind());
        assert_eq!(line, received.map(|line| line.as_bytes().to_vec()), "{sent:?}");
    }
    // A line that came along with a longer one's bound is bounded all the same.
    let (ours, mut theirs) = streams();
    theirs.write_all(b"a\nlong line\n").unwrap();
    let mut lines = Lines::default();
    assert_eq!(lines.receive(&ours, 100, || true).unwrap(), b"a\n");
    assert_eq!(kind(lines.receive(&ours, 8, || true)), ErrorKind::InvalidData);
}

#[test]
fn a_wait_for_a_line_ends_as_the_caller_says_and_by_the_peers_end() {
    let (ours, mut theirs) = streams();
    theirs.write_all(b"half").unwrap();
    let end = Instant::now() + SHORT;
    let waited = Lines::default().receive(&ours, 100, || Instant::now() < end);
    assert_eq!(kind(waited), ErrorKind::TimedOut);
    assert!(!lines::has_ended(&ours));
    // The end comes while the other half is waited for, and what was sent was not read.
    lines::send(&ours, b"unread".to_vec(), SHORT).unwrap();
    let end = std::thread::spawn(move || {
        std::thread::sleep(SHORT);
        drop(theirs);
    });
    assert_eq!(kind(Lines::default().receive(&ours, 100, || true)), ErrorKind::UnexpectedEof);
    end.join().unwrap();
    assert!(lines::has_ended(&ours));
}

#[test]
fn a_line_is_sent_whole_to_a_slow_reader_and_given_up_for_one_that_does_not_read() {
    let (ours, mut theirs) = streams();
    let long = vec![b'x'; 4 << 20];
    let late = lines::send(&ours, long.clone(), SHORT);
    assert_eq!(kind(late), ErrorKind::TimedOut);
    let (ours, reader) = streams();
    drop(std::mem::replace(&mut theirs, reader));
    let reader = std::thread::spawn(move || {
        let mut read = vec![0; long.len() + 1];
        theirs.read_exact(&mut read).unwrap();
        assert!(read[..long.len()] == long && read.ends_with(b"\n"));
    });
    lines::send(&ours, vec![b'x'; 4 << 20], PATIENCE).unwrap();
    reader.join().unwrap();
}

proptest! {
    /// However a stream is cut into pieces, its lines are the same.
    #[test]
    fn lines_come_as_they_were_sent_whatever_the_pieces(
        sent in prop::collection::vec("[a-z]{0,30}", 1..8),
        pieces in prop::collection::vec(1..40_usize, 1..40),
    ) {
        let (ours, mut theirs) = streams();
        let all = sent.iter().flat_map(|line| [line.as_bytes(), b"\n"].concat()).collect::<Vec<_>>();
        let (mut received, mut lines, mut left) = (Vec::new(), Lines::default(), &all[..]);
        let mut pieces = pieces.into_iter().cycle();
        while received.len() < sent.len() {
            match lines.receive(&ours, 64, || false) {
                Ok(line) => received.push(String::from_utf8(line).unwrap()),
                Err(e) => {
                    prop_assert_eq!(e.kind(), ErrorKind::TimedOut);
                    let piece = pieces.next().unwrap().min(left.len());
                    theirs.write_all(&left[..piece]).unwrap();
                    left = &left[piece..];
                }
            }
        }
        let expected: Vec<String> = sent.iter().map(|line| format!("{line}\n")).collect();
        prop_assert_eq!(received, expected);
    }
}
