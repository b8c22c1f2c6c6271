//! The known sequences of frontends and toolstacks, as tables: the states in the store and the actions that follow. Each
//! row is read twice, as watches may fire without a change: the second read changes nothing.

use ferrite_xen::abi::Protocol;
use ferrite_xen::hypervisor::GrantRef;

use super::*;
use crate::blkif::negotiate::QueueKeys;

/// The result of connections.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Host {
    Works,
    /// The run directory has no space.
    Full,
    /// The predecessor's table is of another connection.
    Foreign,
    /// The predecessor's table is of other rings of the same guest.
    OtherRings,
    /// The table is of other rings, and there is no space for a new table.
    OtherRingsAndFull,
    /// The predecessor's table is of another image.
    WrongImage,
    /// The frontend writes its state while its keys are read.
    Overtaken,
}

/// The store, and a backend that carries out the actions.
struct Play {
    xenbus: Xenbus,
    snapshot: Snapshot,
    /// The frontend's ring. `None`: its keys are invalid.
    ring: Option<u32>,
    host: Host,
    /// Whether serving has ended.
    ended: bool,
}

fn rings(ring: u32) -> Wanted {
    Wanted {
        protocol: Protocol::X86_64,
        ring_order: 0,
        queues: vec![QueueKeys { ring: vec![GrantRef(ring)], port: 7 }],
        persistent: false,
    }
}

fn state(text: &str) -> XenbusState {
    XenbusState::parse(Some(text.as_bytes()))
}

impl Play {
    fn new() -> Play {
        let snapshot = Snapshot { online: true, plugged: true, ..Snapshot::default() };
        Play { xenbus: Xenbus::new(), snapshot, ring: Some(1), host: Host::Works, ended: false }
    }

    /// Applies changes by guest, toolstack and host: words with or without a number.
    fn happens(&mut self, what: &str) {
        for what in what.split(", ").filter(|what| !what.is_empty()) {
            let (word, value) = what.split_once(' ').unwrap_or((what, ""));
            match word {
                "front" => {
                    (self.snapshot.front, self.snapshot.frontend_changed) = (state(value), true)
                }
                "vanishes" => {
                    (self.snapshot.front, self.snapshot.frontend_changed) =
                        (XenbusState::Unknown, true)
                }
                "own" => self.snapshot.own = state(value),
                "ring" => self.ring = value.parse().ok(),
                // Both keys are written in one transaction (3.6).
                "unplug" => {
                    (self.snapshot.online, self.snapshot.own) = (false, XenbusState::Closing)
                }
                "offline" => self.snapshot.online = false,
                "removed" => (self.snapshot.gone, self.snapshot.own) = (true, XenbusState::Unknown),
                // Another attachment of the same name counts as a missing directory.
                "replaced" => {
                    (self.snapshot.gone, self.snapshot.online) = (true, true);
                    (self.snapshot.own, self.snapshot.front) =
                        (XenbusState::Initialising, XenbusState::Initialising);
                }
                "destroyed" => {
                    (self.snapshot.dead, self.snapshot.front) = (true, XenbusState::Unknown)
                }
                "script" => self.snapshot.plugged = value == "done",
                "host" => {
                    self.host = match value {
                        "works" => Host::Works,
                        "full" => Host::Full,
                        "foreign" => Host::Foreign,
                        "other rings" => Host::OtherRings,
                        "other rings and full" => Host::OtherRingsAndFull,
                        "wrong image" => Host::WrongImage,
                        "overtaken" => Host::Overtaken,
                        _ => panic!("{value}"),
                    }
                }
                _ => panic!("{what}"),
            }
        }
    }

    /// Reads the states, and carries out the actions. Returns them in short form.
    fn snapshot(&mut self) -> Vec<String> {
        let mut done = Vec::new();
        loop {
            let mut again = false;
            let snapshot = self.snapshot;
            self.snapshot.frontend_changed = false;
            let mut actions = self.xenbus.observe(snapshot);
            while !actions.is_empty() {
                let mut answer = None;
                for action in std::mem::take(&mut actions) {
                    assert!(answer.is_none(), "{action:?} after one that has an answer");
                    again |= action == Action::Recheck;
                    done.extend(self.short(&action));
                    answer = self.carry_out(&action);
                }
                if let Some(answer) = answer {
                    actions = self.xenbus.handle_answer(answer);
                }
            }
            if !again || self.ended {
                return done;
            }
            self.snapshot.frontend_changed = true;
        }
    }

    fn short(&self, action: &Action) -> Option<String> {
        Some(match action {
            Action::Offer(state) => format!("offer {}", *state as u32),
            Action::Write(state) => format!("write {}", *state as u32),
            Action::Unplug { announce: true } => "unplugged, write 6".to_owned(),
            Action::Unplug { announce: false } => "unplugged".to_owned(),
            // These follow each read that is not the last one. They have a test of their own below.
            Action::Save | Action::CheckSize => return None,
            action => {
                let name = format!("{action:?}");
                let name = name.split(['(', ' ']).next().unwrap_or_default();
                let mut short = String::new();
                for c in name.chars() {
                    if c.is_uppercase() && !short.is_empty() {
                        short.push(' ');
                    }
                    short.extend(c.to_lowercase());
                }
                short
            }
        })
    }

    fn carry_out(&mut self, action: &Action) -> Option<Answer> {
        let why = || "why".to_owned();
        match action {
            // The toolstack's state 5 stays.
            Action::Offer(state) if self.snapshot.online => self.snapshot.own = *state,
            Action::Write(state) => self.snapshot.own = *state,
            Action::Unplug { announce } => {
                self.ended = true;
                if *announce {
                    self.snapshot.own = XenbusState::Closed;
                }
            }
            Action::GiveUp(_) => self.ended = true,
            Action::ReadRings => return Some(Answer::Rings(self.ring.map(rings))),
            Action::Connect => {
                return Some(match (self.host, self.ring) {
                    (Host::Full | Host::OtherRingsAndFull, _) => Answer::Delayed { why: why() },
                    (Host::Overtaken, _) => {
                        self.host = Host::Works;
                        Answer::Refused { why: why(), stale: true }
                    }
                    (_, Some(ring)) => Answer::Connected(rings(ring)),
                    (_, None) => Answer::Refused { why: why(), stale: false },
                });
            }
            Action::TakeOver => {
                return Some(match (self.host, self.ring) {
                    (Host::Full, _) => Answer::Delayed { why: why() },
                    (Host::OtherRings | Host::OtherRingsAndFull, _) => Answer::OtherRings,
                    (Host::WrongImage, _) => Answer::WrongImage { why: why() },
                    (Host::Works, Some(ring)) => Answer::TakenOver(rings(ring)),
                    _ => Answer::NotTakenOver { why: why() },
                });
            }
            _ => {}
        }
        None
    }
}

/// Plays the rows to a new backend.
#[track_caller]
fn play(rows: &[(&str, &str)]) {
    let mut play = Play::new();
    for (i, (happens, follows)) in rows.iter().enumerate() {
        play.happens(happens);
        let done = play.snapshot().join(", ");
        assert_eq!(done, *follows, "row {i}: {happens}");
        if !play.ended && !matches!(play.host, Host::Full | Host::OtherRingsAndFull) {
            let more = play.snapshot();
            let nothing = more.iter().all(|a| ["hurry", "read rings"].contains(&a.as_str()));
            assert!(nothing, "row {i}: {happens}, and then {more:?}");
        }
    }
}

/// The first row of most tables.
const ATTACHED: (&str, &str) = ("own 1, front 1", "forget, offer 2, clear error, recheck");
/// The actions for rings that were not connected before.
const CONNECTED: &str = "connect, clear error, offer 4";

#[test]
fn linux_boots_works_and_lets_go_of_an_unplugged_disk() {
    play(&[
        ATTACHED,
        ("front 3", CONNECTED),
        ("front 4", "read rings"),
        ("unplug", "hurry"),
        ("front 5", "hurry"),
        ("front 6", "hurry, detach, unplugged, write 6"),
    ]);
}

/// blkif.md 3.6: the frontend may show 4 before 3 was seen, and does not always pass through 5.
#[test]
fn states_that_nobody_has_seen_are_not_missed() {
    play(&[
        ATTACHED,
        ("front 4", CONNECTED),
        ("front 6", "detach, write 6"),
        ("front 1", "offer 2"),
        ("front 3", CONNECTED),
        // States 6 and 1 were missed, and 3 is back with other rings.
        ("ring 2, front 3", "read rings, note, release, connect, clear error, offer 4"),
        ("ring 3, front 4", "read rings, note, release, connect, clear error, offer 4"),
        // States 6 and 1 were missed on the way.
        ("front 1", "detach, offer 2"),
    ]);
}

/// Windows stays at 1 until the backend is at neither 1 nor 6, at 5 until the backend is at 5 or 6,
/// and at 6 until the backend is at 6. It does so when it hibernates, and when it writes a crash
/// dump with another driver.
#[test]
fn windows_closes_and_connects_anew_to_hibernate_and_to_dump() {
    let again = [
        ("front 5", "write 5"),
        ("front 6", "detach, write 6"),
        ("front 1", "offer 2"),
        ("ring 9, front 3", CONNECTED),
        ("front 4", "read rings"),
    ];
    let mut rows = vec![ATTACHED, ("front 3", CONNECTED), ("front 4", "read rings")];
    rows.extend(again);
    rows.extend(again);
    play(&rows);
    // This holds also before it was connected.
    play(&[ATTACHED, ("front 6", "write 6"), ("front 1", "offer 2"), ("front 3", CONNECTED)]);
}

/// FreeBSD writes its keys one by one, and 3 after them. A frontend with the wrong order gets an
/// error.
#[test]
fn freebsd_is_connected_when_its_keys_are_there_and_refused_once_if_they_are_not() {
    play(&[ATTACHED, ("front 3", CONNECTED), ("front 4", "read rings")]);
    play(&[
        ATTACHED,
        ("ring none, front 4", "connect, report, write 5"),
        // The frontend is left alone, whatever it writes, until it closes or begins anew.
        ("ring 1, front 3", ""),
        ("front 4", ""),
        ("front 5", ""),
        ("front 6", "write 6"),
        ("front 1", "offer 2"),
        ("front 3", CONNECTED),
    ]);
    play(&[
        ATTACHED,
        ("ring none, front 3", "connect, report, write 5"),
        ("ring 1, front 1", "offer 2"),
        ("front 3", CONNECTED),
    ]);
    play(&[
        ATTACHED,
        ("ring none, front 3", "connect, report, write 5"),
        ("vanishes", "write 6"),
        ("ring 1, front 3", CONNECTED),
    ]);
    play(&[
        ATTACHED,
        ("ring none, front 3", "connect, report, write 5"),
        ("front 5", ""),
        ("ring 1, front 3", CONNECTED),
    ]);
}

#[test]
fn keys_that_change_while_they_are_read_are_read_again_before_anybody_is_refused() {
    play(&[
        ATTACHED,
        ("front 3, host overtaken", "connect, recheck, connect, clear error, offer 4"),
    ]);
}

#[test]
fn firmware_connects_and_closes_and_then_the_system_connects() {
    play(&[
        ATTACHED,
        ("front 4", CONNECTED),
        ("front 5", "write 5"),
        ("front 6", "detach, write 6"),
        // Linux finds its device at 6, and begins at 1.
        ("front 1", "offer 2"),
        ("ring 2, front 3", CONNECTED),
        ("front 4", "read rings"),
    ]);
}

/// Linux moves a driver that has not closed to 1 by 5 and 6. Others begin at once.
#[test]
fn a_kernel_that_another_one_has_started_finds_a_fresh_disk() {
    let boot = [ATTACHED, ("front 3", CONNECTED), ("front 4", "read rings")];
    let linux = [
        ("front 5", "write 5"),
        ("front 6", "detach, write 6"),
        ("front 1", "offer 2"),
        ("ring 2, front 3", CONNECTED),
    ];
    play(&[&boot[..], &linux].concat());
    let others = [("front 1", "detach, offer 2"), ("ring 2, front 3", CONNECTED)];
    play(&[&boot[..], &others].concat());
}

/// blkif.md 3.8.
#[test]
fn a_resumed_guest_is_connected_to_its_new_rings_and_to_the_same_ones_not_again() {
    play(&[
        ATTACHED,
        ("front 3", CONNECTED),
        ("front 4", "read rings"),
        ("front 3", "read rings"),
        ("front 4", "read rings"),
        ("ring 2, front 3", "read rings, note, release, connect, clear error, offer 4"),
        ("front 4", "read rings"),
        // Half-written keys are no reason to release the rings of a frontend at 4.
        ("ring none, front 4", "read rings"),
        ("front 3", "read rings, note, release, connect, report, write 5"),
    ]);
}

#[test]
fn a_frontend_that_has_no_state_has_let_go() {
    play(&[
        ATTACHED,
        ("vanishes", ""),
        ("front 3", CONNECTED),
        ("vanishes", "detach, write 6"),
        ("front 3", CONNECTED),
    ]);
    // States that frontends of disks do not have change nothing.
    play(&[ATTACHED, ("front 3", CONNECTED), ("front 2", ""), ("front 7", ""), ("front 8", "")]);
    play(&[ATTACHED, ("front 2", ""), ("front 99", ""), ("front 3", CONNECTED)]);
}

#[test]
fn the_toolstack_takes_a_disk_back_whatever_its_frontend_does() {
    // No frontend has connected yet.
    play(&[ATTACHED, ("unplug", "unplugged, write 6")]);
    play(&[("own 1, front 1, unplug", "remember, clear error, recheck, unplugged, write 6")]);
    play(&[("own 1, front 1, offline", "forget, clear error, recheck, unplugged, write 6")]);
    // The toolstack's 5 stays until the guest has let go, and no frontend is connected meanwhile.
    play(&[
        ATTACHED,
        ("front 3, unplug", ""),
        ("front 4", ""),
        ("front 5", ""),
        ("front 6", "unplugged, write 6"),
    ]);
    let connected = [ATTACHED, ("front 3", CONNECTED), ("front 4", "read rings")];
    let unplugged = |end: &[(&'static str, &'static str)]| play(&[&connected[..], end].concat());
    unplugged(&[("unplug", "hurry"), ("front 1", "hurry, detach, unplugged, write 6")]);
    unplugged(&[("unplug", "hurry"), ("vanishes", "hurry, detach, unplugged, write 6")]);
    // The guest ignores the request, and sets up new rings.
    unplugged(&[
        ("unplug", "hurry"),
        ("ring 2, front 3", "hurry, read rings, note, release, connect, clear error, offer 4"),
        ("front 6", "hurry, detach, unplugged, write 6"),
    ]);
    // By force: the frontend's directory is removed first, or both are.
    unplugged(&[("unplug, vanishes", "hurry, detach, unplugged, write 6")]);
    unplugged(&[("removed", "detach, unplugged")]);
    play(&[ATTACHED, ("removed", "unplugged")]);
    // The next disk of that name is not this backend's, whatever its frontend does.
    unplugged(&[("replaced", "detach, unplugged")]);
    unplugged(&[("unplug", "hurry"), ("replaced, front 3", "detach, unplugged")]);
    play(&[ATTACHED, ("replaced", "unplugged")]);
    unplugged(&[("destroyed", "detach, unplugged, write 6")]);
    play(&[ATTACHED, ("destroyed", "unplugged, write 6")]);
}

#[test]
fn nobody_is_connected_before_the_hotplug_script_is_done() {
    play(&[
        ("own 1, front 1, script runs", "forget, offer 2, note, clear error, recheck"),
        ("front 3", ""),
        ("front 4", ""),
        ("script done", CONNECTED),
        // The key was removed, which changes nothing for a connected disk.
        ("script runs", ""),
        ("ring 2, front 3", "read rings, note, release, connect, clear error, offer 4"),
    ]);
}

#[test]
fn a_host_without_space_is_asked_again_and_refuses_nobody() {
    play(&[
        ATTACHED,
        ("front 3, host full", "connect, delay"),
        ("", "connect, delay"),
        ("host works", CONNECTED),
    ]);
}

#[test]
fn what_xenstore_did_not_take_is_said_again() {
    play(&[ATTACHED, ("front 3", CONNECTED), ("own 2", "read rings, offer 4")]);
    play(&[
        ATTACHED,
        ("front 3", CONNECTED),
        ("front 5", "write 5"),
        ("own 4", "write 5"),
        ("front 6", "detach, write 6"),
        ("own 5", "write 6"),
        ("front 1", "offer 2"),
        ("own 6", "offer 2"),
    ]);
    // The backend is still at 2 in the store, and its guest is gone.
    play(&[ATTACHED, ("front 3", CONNECTED), ("own 2, vanishes", "detach, write 6")]);
}

/// blkif.md 3.9: the backend passes neither 5 nor 6, whatever the result is.
#[test]
fn a_successor_goes_on_where_its_predecessor_was() {
    play(&[
        ("own 4, front 4", "remember, take over, clear error, recheck, read rings"),
        ("front 5", "write 5"),
        ("front 6", "detach, write 6"),
    ]);
    // The toolstack wants the disk back.
    play(&[
        ("own 4, front 4, unplug", "remember, take over, clear error, recheck, hurry, read rings"),
        ("front 6", "hurry, detach, unplugged, write 6"),
    ]);
    // An old blkfront with a mounted file system works on at 5.
    play(&[("own 5, front 5", "remember, take over, clear error, recheck")]);
    // Another process has not left the run directory yet.
    play(&[
        ("own 4, front 4, host full", "remember, take over, delay"),
        ("front 4", "take over, delay"),
        ("host works", "take over, clear error, recheck, read rings"),
    ]);
    play(&[
        ("own 4, front 4, host full", "remember, take over, delay"),
        ("front 6", "clear error, recheck, write 6"),
    ]);
}

#[test]
fn what_cannot_be_taken_over_ends_the_backend_of_a_running_guest_and_of_no_other() {
    play(&[("own 4, front 4, host foreign", "remember, take over, give up")]);
    let resumed = "remember, take over, note, clear error, recheck, connect, clear error, offer 4";
    play(&[("own 4, front 3, host foreign", resumed)]);
    play(&[
        (
            "own 4, front 5, host foreign",
            "remember, take over, note, clear error, recheck, write 5",
        ),
        ("front 6", "write 6"),
    ]);
}

/// Linux goes from 3 to 4 by itself if the backend's state is 4, whether or not a backend runs.
#[test]
fn rings_that_no_predecessor_has_served_are_connected_whatever_their_guest_is_at() {
    let connected = "remember, take over, note, connect, offer 4, clear error, recheck";
    let resumed = format!("{connected}, read rings");
    play(&[("own 4, front 4, host other rings", &resumed), ("front 4", "read rings")]);
    play(&[("own 4, front 3, host other rings", &resumed), ("front 4", "read rings")]);
    // The predecessor had connected it, whatever the toolstack wants now.
    let hurried = format!("{connected}, hurry, read rings");
    play(&[
        ("own 4, front 4, unplug, host other rings", &hurried),
        ("front 6", "hurry, detach, unplugged, write 6"),
    ]);
    // At 5 the frontend may be at work, and does not wait for a 4.
    let closing = "remember, take over, note, connect, clear error, recheck";
    play(&[("own 5, front 5, host other rings", closing), ("front 6", "detach, write 6")]);
    // The phase stays until the connection has worked.
    play(&[
        ("own 4, front 4, host other rings and full", "remember, take over, note, connect, delay"),
        ("unplug", "take over, note, connect, delay"),
        ("host other rings", &hurried["remember, ".len()..]),
    ]);
    // A working guest is not told 5.
    let nonsense = "own 4, front 4, ring none, host other rings";
    play(&[(nonsense, "remember, take over, note, connect, give up")]);
}

#[test]
fn a_guest_is_served_from_its_image_and_from_no_other_wherever_it_stands() {
    for front in ["3", "4", "5"] {
        let row = format!("own 4, front {front}, host wrong image");
        play(&[(&row, "remember, take over, give up")]);
    }
}

#[test]
fn a_successor_of_one_that_had_nobody_connected_follows_from_the_states() {
    play(&[("own 2, front 1", "remember, offer 2, clear error, recheck"), ("front 3", CONNECTED)]);
    // The frontend has sized its requests by its predecessor's offer.
    play(&[("own 2, front 3", "remember, clear error, recheck, connect, clear error, offer 4")]);
    play(&[("own 6, front 6", "remember, clear error, recheck"), ("front 1", "offer 2")]);
    play(&[("own 6, front 1", "remember, clear error, recheck, offer 2")]);
    play(&[("own 5, front 6", "remember, clear error, recheck, write 6")]);
    play(&[("own 4, front 1", "remember, clear error, recheck, offer 2")]);
    play(&[("own 4, vanishes", "remember, clear error, recheck, write 6")]);
    // The disk was removed before its guest connected.
    play(&[("removed, front 4", "remember, offer 2, clear error, recheck, unplugged")]);
}

#[test]
fn what_no_flush_asked_for_is_saved_when_nobody_is_connected_and_the_size_is_looked_at_always() {
    let mut play = Play::new();
    play.happens("own 1, front 1");
    play.snapshot();
    let snapshot = play.snapshot;
    assert_eq!(play.xenbus.observe(snapshot), [Action::Save, Action::CheckSize]);
    play.happens("front 4");
    play.snapshot();
    let snapshot = play.snapshot;
    assert_eq!(play.xenbus.observe(snapshot), [Action::CheckSize]);
}

/// All combinations of states, with and without a connection.
#[test]
fn no_look_however_odd_breaks_a_rule() {
    let states: Vec<XenbusState> = (0..=8).map(|n| state(&n.to_string())).collect();
    let mut looks = 0;
    for (front, own) in states.iter().flat_map(|f| states.iter().map(move |o| (*f, *o))) {
        for bits in 0..1 << 7 {
            let bit = |n: u32| bits >> n & 1 == 1;
            let [frontend_changed, online, plugged, gone, dead, connected, refused] =
                std::array::from_fn(|n| bit(n as u32));
            let snapshot = Snapshot { front, frontend_changed, own, online, plugged, gone, dead };
            let mut xenbus = Xenbus::new();
            xenbus.phase = Phase::Following;
            xenbus.refused = refused;
            xenbus.connected = connected.then(|| rings(1));
            let actions = xenbus.observe(snapshot);
            let has = |action: &Action| actions.contains(action);
            let writes = |a: &Action| matches!(a, Action::Offer(_) | Action::Write(_));
            let unplugs = |a: &Action| matches!(a, Action::Unplug { .. });
            looks += 1;

            // A removed directory is not created again.
            assert!(!gone || !actions.iter().any(writes), "{snapshot:?}: {actions:?}");
            assert!(!gone || has(&Action::Unplug { announce: false }), "{snapshot:?}: {actions:?}");
            // The toolstack's 5 is not replaced by 6 before the image is closed.
            let ours = !snapshot.is_unwanted();
            assert!(ours || !has(&Action::Write(XenbusState::Closed)), "{snapshot:?}: {actions:?}");
            // States 5 and 6 are written as answers only (3.9).
            assert!(front == XenbusState::Closing || !has(&Action::Write(XenbusState::Closing)));
            assert!(!snapshot.is_held() || !has(&Action::Write(XenbusState::Closed)));
            // A disk that is in use does not end.
            let ends = actions.iter().any(unplugs);
            assert!(!ends || gone || !snapshot.is_held(), "{snapshot:?}: {actions:?}");
            assert!(
                !snapshot.is_held() || gone || !has(&Action::Detach),
                "{snapshot:?}: {actions:?}"
            );
            assert!(!has(&Action::Release) || has(&Action::Connect), "{snapshot:?}: {actions:?}");
            // The toolstack and its script come first.
            let allowed = online && plugged && !refused && !connected;
            let rings = matches!(front, XenbusState::Initialised | XenbusState::Connected);
            assert_eq!(
                has(&Action::Connect),
                allowed && rings && !gone,
                "{snapshot:?}: {actions:?}"
            );
            // An action that ends is the last one.
            assert!(!ends || actions.iter().position(unplugs) == Some(actions.len() - 1));
            assert!(!ends || !xenbus.is_connected(), "{snapshot:?}: {actions:?}");
        }
    }
    assert_eq!(looks, 9 * 9 * 128);
}
