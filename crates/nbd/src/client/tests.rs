use proptest::prelude::*;

use super::*;
use crate::wire::{self, FIXED_NEWSTYLE, Head, NO_ZEROES, can, option, push_option_reply, reply};

/// The kinds and data of the replies to one option.
type Said = Vec<(u32, Vec<u8>)>;

/// A server of few words: what it sends by what it was asked.
struct Server {
    flags: u16,
    replies: Vec<(u32, Said)>,
}

impl Server {
    fn good() -> Server {
        let export = [&[0, 0][..], &(1u64 << 30).to_be_bytes(), &FLAGS.to_be_bytes()].concat();
        let sizes = [1u32, 4096, 1 << 20].map(u32::to_be_bytes).concat();
        let sizes = [&[0, 3][..], &sizes].concat();
        let context = [&7u32.to_be_bytes()[..], b"base:allocation"].concat();
        Server {
            flags: FIXED_NEWSTYLE | NO_ZEROES,
            replies: vec![
                (SESSION, vec![(reply::ACK, vec![])]),
                (option::STRUCTURED_REPLY, vec![(reply::ACK, vec![])]),
                (
                    option::SET_META_CONTEXT,
                    vec![(reply::META_CONTEXT, context), (reply::ACK, vec![])],
                ),
                (
                    option::GO,
                    vec![(reply::INFO, export), (reply::INFO, sizes), (reply::ACK, vec![])],
                ),
            ],
        }
    }

    fn answers(mut self, option: u32, replies: Vec<(u32, Vec<u8>)>) -> Server {
        self.replies.retain(|(asked, _)| *asked != option);
        self.replies.push((option, replies));
        self
    }

    /// The whole handshake.
    fn greet(&self, wanted: Wanted) -> Result<Export, Refusal> {
        let mut handshake = Handshake::new(wanted)?;
        let (mut sent, mut out) = (Vec::new(), Vec::new());
        sent.extend(wire::SERVER_MAGIC.to_be_bytes());
        sent.extend(wire::OPTION_MAGIC.to_be_bytes());
        sent.extend(self.flags.to_be_bytes());
        let mut skip = 4;
        loop {
            let needs = handshake.needs();
            if sent.len() < needs {
                return Err(handshake.closed());
            }
            let bytes: Vec<u8> = sent.drain(..needs).collect();
            if let Some(export) = handshake.take(&bytes, &mut out)? {
                assert_eq!((sent.len(), handshake.needs()), (0, 0));
                return Ok(export);
            }
            let asked: Vec<u8> = out.drain(..).skip(std::mem::take(&mut skip)).collect();
            if let Some(number) = asked.get(8..12) {
                self.reply(u32::from_be_bytes(number.try_into().unwrap()), &mut sent);
            }
        }
    }

    fn reply(&self, asked: u32, sent: &mut Vec<u8>) {
        if asked == option::EXPORT_NAME {
            sent.extend((1u64 << 20).to_be_bytes());
            sent.extend(FLAGS.to_be_bytes());
            sent.extend(vec![0; if self.flags & NO_ZEROES == 0 { 124 } else { 0 }]);
        }
        let replies = self.replies.iter().filter(|(option, _)| *option == asked);
        for (kind, data) in replies.flat_map(|(_, replies)| replies) {
            push_option_reply(sent, asked, *kind, &[data]);
        }
    }
}

const FLAGS: u16 = can::HAS_FLAGS | can::FLUSH | can::MULTI_CONN;

fn wanted() -> Wanted {
    Wanted {
        export: "e".into(),
        allocation: true,
        session: Some(session(1, 2)),
        ..Wanted::default()
    }
}

fn session(process: u64, connection: u32) -> Session {
    Session { user: [7; 16], process, connection }
}

#[test]
fn a_session_replaces_its_own_predecessor_and_those_of_earlier_processes() {
    let old = session(1, 2);
    assert_eq!(Session::parse(&old.to_bytes()), Some(old));
    assert_eq!(Session::parse(&old.to_bytes()[1..]), None);
    assert!(session(1, 2).replaces(&old) && session(2, 5).replaces(&old));
    assert!(!session(1, 3).replaces(&old));
    assert!(!Session { user: [8; 16], ..old }.replaces(&old));
}

#[test]
fn a_server_that_knows_all_gives_all() {
    let export = Server::good().greet(wanted()).unwrap();
    let expected = Export {
        bytes: 1 << 30,
        flags: FLAGS,
        min_block_bytes: 1,
        preferred_block_bytes: 4096,
        max_block_bytes: 1 << 20,
        structured: true,
        allocation: Some(7),
        fenced: true,
    };
    assert_eq!(export, expected);
    assert!(export.can(can::FLUSH) && !export.can(can::TRIM));
}

#[test]
fn what_an_older_server_does_not_know_is_left_out() {
    let none = |_| vec![(reply::UNSUPPORTED, b"no".to_vec())];
    let server =
        Server::good().answers(SESSION, none(())).answers(option::STRUCTURED_REPLY, none(()));
    let export = server.greet(wanted()).unwrap();
    assert_eq!((export.fenced, export.structured, export.allocation), (false, false, None));
    let server = server.answers(option::GO, none(()));
    assert_eq!(server.greet(wanted()).unwrap().bytes, 1 << 20);
    for flags in [0, NO_ZEROES] {
        let export = Server { flags, replies: Vec::new() }.greet(wanted()).unwrap();
        assert_eq!((export.bytes, export.max_block_bytes), (1 << 20, 32 << 20));
    }
}

#[test]
fn each_error_of_a_server_says_what_to_do() {
    let failed =
        |code: u32| Server::good().answers(option::GO, vec![(1 << 31 | code, b"te\nxt".into())]);
    for (code, why, help, passes) in [
        (2, "configuration refuses", "allow this host", false),
        (3, "invalid", "name of the export", false),
        (4, "platform", "another server", false),
        (5, "encrypted", "nbds://", false),
        (6, "no such export: the export \"e\" (text)", "nbdinfo --list", false),
        (7, "shutting down", "start the server", true),
        (8, "block sizes", "version", false),
        (9, "too large", "shorter", false),
        (77, "0x8000004d", "log", false),
    ] {
        let refusal = failed(code).greet(wanted()).unwrap_err();
        assert!(refusal.why.contains(why) && refusal.help.contains(help), "{refusal:?}");
        assert_eq!(refusal.passes, passes, "{refusal:?}");
    }
}

#[test]
fn impossible_exports_and_answers_are_refused() {
    let size = |bytes: u64| {
        let export = [&[0, 0][..], &bytes.to_be_bytes(), &FLAGS.to_be_bytes()].concat();
        Server::good().answers(option::GO, vec![(reply::INFO, export), (reply::ACK, vec![])])
    };
    assert!(size(512).greet(wanted()).is_ok());
    for bytes in [0, 1 << 63, u64::MAX] {
        assert!(size(bytes).greet(wanted()).unwrap_err().why.contains("bytes"), "{bytes}");
    }
    let two = |first: u64, second: u64| {
        let info = |bytes: u64| {
            (reply::INFO, [&[0, 0][..], &bytes.to_be_bytes(), &FLAGS.to_be_bytes()].concat())
        };
        Server::good().answers(option::GO, vec![info(first), info(second), (reply::ACK, vec![])])
    };
    assert!(two(512, 512).greet(wanted()).is_ok());
    assert!(two(512, 1024).greet(wanted()).unwrap_err().why.contains("two sizes"));
    let none = Server::good().answers(option::GO, vec![(reply::ACK, vec![])]);
    assert!(none.greet(wanted()).unwrap_err().why.contains("no size"));
    let context = [&7u32.to_be_bytes()[..], b"base:allocation"].concat();
    let twice = vec![(reply::META_CONTEXT, context); 2];
    let twice = Server::good().answers(option::SET_META_CONTEXT, twice);
    assert!(twice.greet(wanted()).unwrap_err().why.contains("context"));
    let endless = vec![(reply::INFO, vec![0, 9]); 1000];
    let endless = Server::good().answers(option::GO, endless);
    assert!(endless.greet(wanted()).unwrap_err().why.contains("no end"));
    for sizes in
        [[3, 4096, 1 << 20], [1 << 17, 1 << 17, 1 << 20], [512, 256, 1 << 20], [512, 512, 700]]
    {
        let sizes = [&[0, 3][..], &sizes.map(u32::to_be_bytes).concat()].concat();
        let server = Server::good().answers(option::GO, vec![(reply::INFO, sizes)]);
        assert!(server.greet(wanted()).unwrap_err().why.contains("block sizes"));
    }
}

/// All that replies say to a reader with these bytes.
fn decode(replies: &mut Replies, mut bytes: &[u8]) -> Result<Vec<Event>, Broken> {
    let mut events = Vec::new();
    loop {
        let taken = match replies.next() {
            Next::Bytes(len) if len <= bytes.len() => {
                replies.take(&bytes[..len], &mut events)?;
                len
            }
            Next::Data { len, .. } if !bytes.is_empty() => {
                let len = (len as usize).min(bytes.len());
                replies.took_data(len as u32, &mut events)?;
                len
            }
            _ => return Ok(events),
        };
        bytes = &bytes[taken..];
    }
}

fn read(offset: u64, len: u32) -> (Replies, u64) {
    let mut replies = Replies::new(true, Some(7));
    let ticket = replies.begin(Command::Read { offset, len }).unwrap();
    (replies, ticket.cookie())
}

fn bytes_of(parts: &[(Head, usize)]) -> Vec<u8> {
    let part = |(head, data): &(Head, usize)| [head.bytes(), &vec![5; *data][..]].concat();
    parts.iter().flat_map(part).collect()
}

#[test]
fn a_read_may_come_in_any_order_and_each_byte_once() {
    let (mut replies, cookie) = read(8192, 8192);
    let sent = bytes_of(&[
        (Head::data(cookie, false, 12288, 4096), 4096),
        (Head::hole(cookie, true, 8192, 4096), 0),
    ]);
    let events = decode(&mut replies, &sent).unwrap();
    let zeros = Event::Zeros { slot: 0, at: 0, len: 4096 };
    assert_eq!(events, [zeros, Event::Ended { slot: 0, answer: Answer::Done }]);
    assert_eq!(replies.under_way(), 0);

    for (parts, broken) in [
        (vec![(Head::hole(cookie, true, 8192, 4096), 0)], "lacks a part"),
        (vec![(Head::hole(cookie, false, 8192, 4096), 0); 2], "twice"),
        (vec![(Head::data(cookie, true, 4096, 4096), 4096)], "outside"),
        (vec![(Head::data(cookie, true, 8192, 8193), 8193)], "outside"),
        (vec![(Head::hole(cookie, true, u64::MAX, 4096), 0)], "outside"),
        (vec![(Head::hole(cookie, true, 8192, 0), 0)], "twice"),
        (vec![(Head::data(cookie + 1, true, 8192, 4096), 4096)], "not under way"),
        (vec![(Head::data(cookie + (1 << 16), true, 8192, 4096), 4096)], "not under way"),
        (vec![(Head::status(cookie, 1), 8)], "does not fit"),
        (vec![(Head::simple(cookie, 0), 8192)], "without chunks"),
    ] {
        let (mut replies, same) = read(8192, 8192);
        assert_eq!(same, cookie);
        let error = decode(&mut replies, &bytes_of(&parts)).unwrap_err();
        assert!(error.0.contains(broken), "{error} for {broken}");
        assert!(decode(&mut replies, &[0; 64]).is_err(), "a broken connection stays broken");
    }
}

#[test]
fn an_error_counts_whatever_came_before_it() {
    let (mut replies, cookie) = read(0, 8192);
    let sent = bytes_of(&[(Head::data(cookie, false, 0, 4096), 4096), (Head::error(cookie, 5), 0)]);
    let events = decode(&mut replies, &sent).unwrap();
    assert_eq!(events, [Event::Ended { slot: 0, answer: Answer::Failed(5) }]);
    let (mut replies, cookie) = read(0, 8192);
    assert!(decode(&mut replies, Head::error(cookie, 0).bytes()).is_err());
}

#[test]
fn extents_are_within_their_range() {
    let status = |extents: &[(u32, u32)]| {
        let mut replies = Replies::new(true, Some(wire::CONTEXT_ID));
        let ticket = replies.begin(Command::Status { offset: 0, len: 8192 }).unwrap();
        let mut sent = Head::status(ticket.cookie(), extents.len()).bytes().to_vec();
        for (len, flags) in extents {
            sent.extend(len.to_be_bytes());
            sent.extend(flags.to_be_bytes());
        }
        decode(&mut replies, &sent)
    };
    let extents = [(4096, 0), (1024, 3), (1024, 3), (1 << 20, 2)];
    let Event::Ended { answer: Answer::Extents(told), .. } = &status(&extents).unwrap()[0] else {
        panic!("no extents")
    };
    let told: Vec<_> = told.iter().map(|e| (e.len, e.zero, e.hole)).collect();
    assert_eq!(told, [(4096, false, false), (2048, true, true), (2048, true, false)]);
    for extents in [&[(0, 0)][..], &[(8192, 0), (1, 0)], &[(u32::MAX, 0), (1, 0)], &[]] {
        assert!(status(extents).is_err(), "{extents:?}");
    }
    // More of them than are kept: those that follow are left out.
    let mut replies = Replies::new(true, Some(wire::CONTEXT_ID));
    let ticket = replies.begin(Command::Status { offset: 0, len: 1 << 30 }).unwrap();
    let count = MAX_EXTENTS + 5000;
    let mut sent = Head::status(ticket.cookie(), count).bytes().to_vec();
    (0..count as u32)
        .for_each(|i| wire::push_extent(&mut sent, 512, if i % 2 == 0 { 3 } else { 0 }));
    let events = decode(&mut replies, &sent).unwrap();
    let Event::Ended { answer: Answer::Extents(told), .. } = &events[0] else { panic!("none") };
    assert_eq!(told.len(), MAX_EXTENTS);
    assert_eq!(told.iter().map(|e| e.len).sum::<u64>(), 512 * MAX_EXTENTS as u64);
}

#[test]
fn a_table_that_is_full_takes_no_request_until_one_has_ended() {
    let mut replies = Replies::new(false, None);
    let tickets: Vec<_> =
        (0..MAX_REQUESTS).map(|_| replies.begin(Command::Flush).unwrap()).collect();
    assert!(replies.begin(Command::Flush).is_none() && !replies.has_room());
    decode(&mut replies, Head::simple(tickets[9].cookie(), 0).bytes()).unwrap();
    assert!(replies.begin(Command::Flush).is_some());
    // The place is the same one, the request is another.
    let old = Head::simple(tickets[9].cookie(), 0);
    assert!(decode(&mut replies, old.bytes()).is_err());
}

proptest! {
    #[test]
    fn any_bytes_end_a_handshake_or_leave_it_waiting(stream in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut handshake = Handshake::new(wanted()).unwrap();
        let (mut rest, mut out) = (&stream[..], Vec::new());
        while handshake.needs() <= rest.len() && handshake.needs() > 0 {
            let (bytes, behind) = rest.split_at(handshake.needs());
            rest = behind;
            if handshake.take(bytes, &mut out).is_err() {
                break;
            }
        }
        prop_assert!(out.len() < 4096);
    }

    /// For any cuts that a server makes in a read, the parts come back as they were sent.
    #[test]
    fn parts_in_any_order_make_a_whole(
        order in prop::collection::vec(any::<prop::sample::Index>(), 32), zeros in any::<u32>()
    ) {
        let (mut replies, cookie) = read(1 << 40, 32 * 512);
        let mut parts: Vec<u32> = (0..32).collect();
        order.iter().enumerate().for_each(|(i, with)| parts.swap(i, with.index(32)));
        let mut seen = Vec::new();
        for (i, part) in parts.iter().enumerate() {
            let offset = (1 << 40) + u64::from(part * 512);
            let sent = match zeros >> part & 1 {
                1 => bytes_of(&[(Head::hole(cookie, i == 31, offset, 512), 0)]),
                _ => bytes_of(&[(Head::data(cookie, i == 31, offset, 512), 512)]),
            };
            seen.extend(decode(&mut replies, &sent).unwrap());
        }
        let ends = seen.iter().filter(|event| matches!(event, Event::Ended { .. })).count();
        prop_assert_eq!((ends, seen.len() - ends), (1, zeros.count_ones() as usize));
    }

    #[test]
    fn any_bytes_end_the_replies_or_leave_them_waiting(stream in prop::collection::vec(any::<u8>(), 0..400)) {
        let (mut replies, cookie) = read(0, 4096);
        // The first bytes fit, as random ones never would.
        let mut sent = wire::CHUNK_MAGIC.to_be_bytes().to_vec();
        sent.extend(stream.iter().take(4));
        sent.extend(cookie.to_be_bytes());
        sent.extend(stream.iter().skip(4));
        let _ = decode(&mut replies, &sent);
    }
}
