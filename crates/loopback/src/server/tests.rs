use std::time::Duration;

use super::*;
use ferrite_xen::store::wire::{Decoder, Message, MessageType, NO_TRANSACTION, nul_terminated};
use ferrite_xen::store::{Store, StoreError, WatchEvent};
use rustix::event::{PollFd, PollFlags};

const GUEST: DomId = DomId(5);

fn server() -> (StoreServer, Store, Store) {
    let server = StoreServer::start().unwrap();
    let mut dom0 = Store::from_fd(server.connect(DomId(0)).unwrap());
    dom0.mkdir(&home(GUEST)).unwrap();
    dom0.set_permissions(&home(GUEST), &[('n', GUEST)]).unwrap();
    let guest = Store::from_fd(server.connect(GUEST).unwrap());
    (server, dom0, guest)
}

fn next_event(store: &mut Store) -> Option<WatchEvent> {
    for _ in 0..200 {
        if let Some(event) = store.poll_event().unwrap() {
            return Some(event);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

fn event(path: &str, token: &str) -> Option<WatchEvent> {
    Some(WatchEvent { path: path.into(), token: token.into() })
}

#[test]
fn values_are_bytes_and_relative_paths_are_the_callers_own() {
    let (_server, mut dom0, mut guest) = server();
    guest.write("data/x", b"a\0b").unwrap();
    assert_eq!(dom0.read("/local/domain/5/data/x").unwrap(), Some(b"a\0b".to_vec()));
    assert!(matches!(guest.read_string("data/x"), Err(StoreError::Invalid { .. })));
    assert_eq!(guest.list("data").unwrap(), ["x"]);
    assert_eq!(guest.read("data/y").unwrap(), None);
    guest.remove("data").unwrap();
    assert_eq!(guest.read("data/x").unwrap(), None);
}

#[test]
fn permissions_hold_between_domains() {
    let (server, mut dom0, mut guest) = server();
    dom0.write("/secret", b"1").unwrap();
    dom0.set_permissions("/secret", &[('n', DomId(0)), ('r', DomId(9))]).unwrap();
    assert!(matches!(guest.read("/secret"), Err(StoreError::Access { .. })));
    assert!(matches!(guest.write("/local/domain/6/x", b""), Err(StoreError::Access { .. })));
    let mut other = Store::from_fd(server.connect(DomId(9)).unwrap());
    assert_eq!(other.read("/secret").unwrap(), Some(b"1".to_vec()));
    assert!(matches!(other.write("/secret", b"2"), Err(StoreError::Access { .. })));
    assert_eq!(dom0.get_permissions("/secret").unwrap(), [('n', DomId(0)), ('r', DomId(9))]);
}

#[test]
fn a_watch_fires_at_once_and_for_changes_at_and_below_its_node() {
    let (_server, mut dom0, mut guest) = server();
    dom0.watch("/local/domain/5/device", "t").unwrap();
    assert_eq!(next_event(&mut dom0), event("/local/domain/5/device", "t"));
    guest.write("device/vbd/1/state", b"3").unwrap();
    assert_eq!(next_event(&mut dom0), event("/local/domain/5/device/vbd/1/state", "t"));
    guest.write("devices", b"").unwrap();
    guest.remove("device").unwrap();
    assert_eq!(next_event(&mut dom0), event("/local/domain/5/device", "t"));
    assert_eq!(dom0.poll_event().unwrap(), None);
    dom0.unwatch("/local/domain/5/device", "t").unwrap();
    guest.write("device", b"").unwrap();
    assert_eq!(dom0.poll_event().unwrap(), None);
}

#[test]
fn a_relative_watch_gets_relative_paths() {
    let (_server, mut dom0, mut guest) = server();
    guest.watch("device", "t").unwrap();
    assert_eq!(next_event(&mut guest), event("device", "t"));
    dom0.write("/local/domain/5/device/0", b"").unwrap();
    assert_eq!(next_event(&mut guest), event("device/0", "t"));
}

#[test]
fn a_guest_does_not_hear_of_what_it_may_not_read() {
    let (_server, mut dom0, mut guest) = server();
    guest.watch("/hidden", "t").unwrap();
    assert!(next_event(&mut guest).is_some(), "the first one says nothing");
    dom0.write("/hidden", b"1").unwrap();
    dom0.set_permissions("/hidden", &[('n', DomId(0))]).unwrap();
    // The reply to its request comes after all queued messages.
    guest.read("x").unwrap();
    while guest.poll_event().unwrap().is_some() {}
    dom0.write("/hidden/below", b"1").unwrap();
    guest.read("x").unwrap();
    assert_eq!(guest.poll_event().unwrap(), None);
    assert!(matches!(guest.watch("@releaseDomain", "r"), Err(StoreError::Access { .. })));
}

#[test]
fn a_transaction_is_seen_as_a_whole_or_not_at_all() {
    let (server, mut dom0, mut guest) = server();
    let mut other = Store::from_fd(server.connect(DomId(0)).unwrap());
    dom0.watch("/t", "w").unwrap();
    assert!(next_event(&mut dom0).is_some());
    other
        .transaction(|t| {
            t.write("/t/a", b"1")?;
            assert_eq!(dom0.read("/t/a").unwrap(), None);
            t.write("/t/b", b"2")
        })
        .unwrap();
    assert!(next_event(&mut dom0).is_some());
    assert_eq!(dom0.read("/t/b").unwrap(), Some(b"2".to_vec()));

    let mut attempts = 0;
    guest.write("n", b"0").unwrap();
    guest
        .transaction(|t| {
            attempts += 1;
            let value = t.read("n")?;
            if attempts == 1 {
                dom0.write("/local/domain/5/n", b"5").unwrap();
            }
            t.write("n", &[value.unwrap(), b"+".to_vec()].concat())
        })
        .unwrap();
    assert_eq!(attempts, 2);
    assert_eq!(guest.read("n").unwrap(), Some(b"5+".to_vec()));
}

#[test]
fn a_failed_transaction_leaves_nothing() {
    let (_server, mut dom0, _guest) = server();
    let outcome = dom0.transaction(|t| {
        t.write("/half", b"1")?;
        t.list("/none").map(drop)
    });
    assert!(outcome.is_err());
    assert_eq!(dom0.read("/half").unwrap(), None);
}

#[test]
fn a_flood_of_changes_waits_as_one_event_for_a_client_that_does_not_read() {
    let (server, mut dom0, mut guest) = server();
    let slow = server.connect(DomId(0)).unwrap();
    let payload = nul_terminated(&["/local/domain/5", "t"]);
    let watch = Message::new(MessageType::Watch, 1, NO_TRANSACTION, payload);
    rustix::io::write(&slow, &watch.encode()).unwrap();
    for _ in 0..5_000 {
        guest.write("state", b"3").unwrap();
    }
    assert_eq!(dom0.read("/local/domain/5/state").unwrap(), Some(b"3".to_vec()));
    let (mut decoder, mut events, mut bytes) = (Decoder::new(), 0, vec![0; 1 << 20]);
    while let Ok(n) = rustix::io::read(&slow, &mut bytes) {
        decoder.push(&bytes[..n]);
        while decoder.next_message().unwrap().is_some() {
            events += 1;
        }
        // The server sends waiting messages once there is room.
        dom0.read("/").unwrap();
    }
    // The others are in the kernel's socket buffer.
    assert!((2..2_000).contains(&events), "{events} messages");
}

#[test]
fn a_directory_too_large_for_one_message_is_listed_in_parts() {
    let (_server, mut dom0, _guest) = server();
    let mut expected: Vec<String> = (0..900).map(|i| format!("some-name-{i}")).collect();
    for name in &expected {
        dom0.write(&format!("/many/{name}"), b"").unwrap();
    }
    expected.sort();
    assert_eq!(dom0.list("/many").unwrap(), expected);
}

#[test]
fn domains_that_come_and_go_are_announced() {
    let (server, mut dom0, _guest) = server();
    dom0.watch("@releaseDomain", "r").unwrap();
    assert_eq!(next_event(&mut dom0), event("@releaseDomain", "r"));
    server.announce_introduced();
    server.announce_released();
    assert_eq!(next_event(&mut dom0), event("@releaseDomain", "r"));
    assert_eq!(dom0.poll_event().unwrap(), None);
}

#[test]
fn a_client_that_sends_nonsense_is_closed_and_others_go_on() {
    let (server, mut dom0, _guest) = server();
    let bad = server.connect(GUEST).unwrap();
    rustix::io::write(&bad, &[0xFF; 64]).unwrap();
    let mut fds = [PollFd::new(&bad, PollFlags::IN)];
    rustix::event::poll(&mut fds, None).unwrap();
    assert_eq!(rustix::io::read(&bad, &mut [0; 16]), Ok(0));
    dom0.write("/x", b"1").unwrap();
}
