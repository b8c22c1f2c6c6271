//! Servers of NBD whose client we are.

use ferrite_nbd::client::{Answer, Command, Event, Handshake, Next, Replies, Session, Wanted};
use ferrite_nbd::uri::Uri;

/// The server's side of a handshake. The rest of the input after a good one are its replies to requests of every kind.
/// The first byte selects some of the kinds.
pub(crate) fn nbd_client(input: &[u8]) {
    let Some((kinds, stream)) = input.split_first() else { return };
    let session = Some(Session { user: [1; 16], process: 2, connection: 3 });
    let wanted =
        Wanted { export: "e".into(), allocation: kinds & 1 != 0, session, ..Wanted::default() };
    let mut handshake = Handshake::new(wanted).expect("the name is short");
    let (mut rest, mut out) = (stream, Vec::new());
    let (structured, context) = loop {
        let needs = handshake.needs();
        assert!((1..=16 << 10).contains(&needs) && out.len() < 1 << 20);
        let Some((bytes, behind)) = rest.split_at_checked(needs) else { return };
        rest = behind;
        match handshake.take(bytes, &mut out) {
            Ok(Some(export)) => {
                assert!(export.bytes > 0 && export.bytes < 1 << 63);
                assert!(export.min_block_bytes.is_power_of_two());
                assert!(export.max_block_bytes >= export.min_block_bytes);
                break (export.structured, export.allocation);
            }
            Ok(None) => {}
            Err(refusal) => return assert!(!refusal.why.is_empty() && !refusal.help.is_empty()),
        }
    };
    replies(structured, context, rest);
}

/// Replies of a server to a connection whose handshake is over; the first byte says whether they are structured.
pub(crate) fn nbd_replies(input: &[u8]) {
    let Some((first, stream)) = input.split_first() else { return };
    replies(first & 1 != 0, Some(1), stream);
}

const READ: (u64, u32) = (1 << 20, 8192);

fn replies(structured: bool, context: Option<u32>, stream: &[u8]) {
    let mut replies = Replies::new(structured, context);
    let (offset, len) = READ;
    let commands = [
        Command::Read { offset, len },
        Command::Status { offset, len },
        Command::Write { offset, len: 512 },
        Command::Flush,
        Command::Read { offset: 0, len: 512 },
    ];
    commands.iter().for_each(|command| assert!(replies.begin(*command).is_some()));
    let (mut rest, mut events, mut under_way) = (stream, Vec::new(), commands.len());
    loop {
        let taken = match replies.next() {
            Next::Bytes(bytes) => {
                assert!((1..=8 << 10).contains(&bytes), "{bytes}");
                let Some(bytes) = rest.get(..bytes) else { return };
                if replies.take(bytes, &mut events).is_err() {
                    return assert!(replies.take(&[0; 16], &mut events).is_err());
                }
                bytes.len()
            }
            Next::Data { slot, at, len } => {
                let range = commands[usize::from(slot)].range().1;
                assert!(len > 0 && at.checked_add(len).is_some_and(|end| end <= range));
                let some = (len as usize).min(rest.len());
                if some == 0 || replies.took_data(some as u32, &mut events).is_err() {
                    return;
                }
                some
            }
        };
        rest = &rest[taken..];
        for event in events.drain(..) {
            under_way -= usize::from(matches!(event, Event::Ended { .. }));
            check(&commands, &event);
        }
        assert_eq!(replies.under_way(), under_way);
    }
}

fn check(commands: &[Command], event: &Event) {
    match event {
        Event::Zeros { slot, at, len } => {
            let range = commands[usize::from(*slot)].range().1;
            assert!(*len > 0 && at.checked_add(*len).is_some_and(|end| end <= range));
        }
        Event::Ended { slot, answer: Answer::Extents(extents) } => {
            let told: u64 = extents.iter().map(|extent| extent.len).sum();
            let range = u64::from(commands[usize::from(*slot)].range().1);
            assert!(!extents.is_empty() && told <= range);
        }
        Event::Ended { answer, .. } => assert_ne!(*answer, Answer::Failed(0)),
    }
}

/// Names of exports.
pub(crate) fn nbd_uri(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match Uri::parse(text) {
        Ok(uri) => assert!(uri.deadline.as_secs() > 0),
        Err(e) => assert!(!e.why.is_empty() && !e.help.is_empty()),
    }
}
