//! The follower's end of a line whose worker is part of the test.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use ferrite_host::frames;
use ferrite_xen::abi::Protocol;
use ferrite_xen::hypervisor::GrantRef;
use rustix::net::{SendFlags, send};

use super::super::messages::{Failure, OpenFailure, Order, Reply, Report, Rings};
use super::super::tune::Tune;
use super::super::worker_handle::WorkerHandle;
use super::line::Line;
use super::wire::{LINE, Message, Request, RequestKind, receive_message, send_message};
use super::work::receive_request;
use crate::blkif::negotiate::{QueueKeys, Wanted};
use crate::waker::{Waker, wait_for};

fn line() -> (OwnedFd, OwnedFd) {
    frames::pair().unwrap()
}

/// Receives the next request.
fn asked(worker: &OwnedFd) -> Request {
    loop {
        if let Some(ask) = receive_message(worker.as_fd()).unwrap() {
            return ask;
        }
        wait_for([worker.as_fd()], None).unwrap();
    }
}

fn answer(worker: &OwnedFd, number: u64, result: Result<Reply, Failure>) {
    send_message(worker.as_fd(), &Message::Reply { number, result }, true).unwrap();
}

/// The result of an order with this worker.
fn ordered(work: impl FnOnce(&OwnedFd, u64) + Send) -> Result<Reply, Failure> {
    let (follower, worker) = line();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let Request { number, what } = asked(&worker);
            assert_eq!(what, RequestKind::Order(Order::Save));
            work(&worker, number);
        });
        let stop = Waker::new().unwrap();
        // The line ends with this closure, and the worker's writes fail then.
        let follower = follower;
        Line::new(follower.as_fd(), &stop).carry_out(Order::Save)
    })
}

fn is_lost(result: &Result<Reply, Failure>) -> bool {
    matches!(result, Err(Failure::Lost(_)))
}

#[test]
fn the_largest_order_fits_into_a_message_and_is_read_as_it_was_written() {
    let grants = || (0..16).map(|i| GrantRef(u32::MAX - i)).collect();
    let wanted = Wanted {
        protocol: Protocol::X86_64,
        ring_order: 4,
        queues: (0..64).map(|_| QueueKeys { ring: grants(), port: u32::MAX }).collect(),
        persistent: true,
    };
    let guest = "g".repeat(4096);
    let rings = Rings { wanted, guest, max_indirect_segments: 256, discard: true };
    let order = Order::TakeOver { rings, told_sectors: Some(u64::MAX) };
    let ask = Request { number: u64::MAX, what: RequestKind::Order(order) };
    assert!(serde_json::to_vec(&ask).unwrap().len() <= LINE.max_bytes / 2);
    let (follower, worker) = line();
    send_message(follower.as_fd(), &ask, false).unwrap();
    assert_eq!(asked(&worker), ask);
}

#[test]
fn an_answer_is_that_of_the_order_and_not_one_that_another_follower_has_left() {
    let answered = ordered(|worker, number| {
        answer(worker, number.wrapping_sub(1), Err(Failure::Refused("old".to_owned())));
        answer(worker, number, Ok(Reply::Done));
    });
    assert_eq!(answered, Ok(Reply::Done));
}

#[test]
fn two_followers_do_not_number_alike() {
    let (follower, worker) = line();
    let stop = Waker::new().unwrap();
    stop.wake();
    let number = || {
        let left = Line::new(follower.as_fd(), &stop).carry_out(Order::Save);
        assert_eq!(left, Err(Failure::Left));
        asked(&worker).number
    };
    assert_ne!(number(), number());
}

#[test]
fn who_is_asked_to_stop_does_not_wait_for_a_worker_that_is_at_an_order_or_takes_none() {
    let (follower, worker) = line();
    let stop = Waker::new().unwrap();
    let mut end = Line::new(follower.as_fd(), &stop);
    stop.wake();
    assert_eq!(end.carry_out(Order::Save), Err(Failure::Left));
    while send_message(follower.as_fd(), &0, false).is_ok() {}
    assert_eq!(end.carry_out(Order::Save), Err(Failure::Left));
    drop(worker);
}

#[test]
fn a_worker_that_has_ended_is_lost_at_an_order_and_between_orders() {
    assert!(is_lost(&ordered(|_, _| {})));
    let (follower, worker) = line();
    let stop = Waker::new().unwrap();
    let mut end = Line::new(follower.as_fd(), &stop);
    drop(worker);
    assert_eq!(wait_for([end.reports_fd()], None).unwrap(), [true]);
    assert!(matches!(end.clear_reports(), Err(Failure::Lost(_))));
    assert!(is_lost(&end.carry_out(Order::Save)));
}

#[test]
fn what_nobody_understands_is_the_end_of_the_worker_only() {
    for odd in [
        "",
        "{",
        "null",
        "{\"Answer\":{}}",
        "{\"Answer\":{\"number\":1,\"result\":{\"Err\":\"Left\"}}}",
    ] {
        let answered = ordered(|worker, _| {
            send(worker, odd.as_bytes(), SendFlags::NOSIGNAL).unwrap();
        });
        assert!(is_lost(&answered), "{odd}: {answered:?}");
    }
    let long = ordered(|worker, _| {
        send(worker, &vec![b' '; LINE.max_bytes + 1], SendFlags::NOSIGNAL).unwrap();
    });
    assert!(is_lost(&long), "{long:?}");
}

#[test]
fn a_worker_that_says_more_than_it_was_asked_for_is_not_heard_to_the_end() {
    let flood =
        ordered(|worker, _| while send_message(worker.as_fd(), &Message::Recheck, true).is_ok() {});
    assert!(is_lost(&flood), "{flood:?}");
}

#[test]
fn what_a_worker_says_is_one_line_of_bounded_length_and_asks_for_no_haste() {
    let why = format!("a\nb{}", "ö".repeat(20_000));
    let Err(Failure::Refused(said)) =
        ordered(|worker, number| answer(worker, number, Err(Failure::Refused(why))))
    else {
        panic!("not refused")
    };
    assert!(said.starts_with("a b") && said.len() <= 1024, "{}", said.len());
    let size = Reply::Size { grown: None, ask_again: Some(Duration::ZERO) };
    let Ok(Reply::Size { ask_again: Some(ask_again), .. }) =
        ordered(|worker, number| answer(worker, number, Ok(size)))
    else {
        panic!("no size")
    };
    assert!(ask_again >= Duration::from_millis(500));
}

#[test]
fn no_time_of_a_workers_is_too_long_for_a_clock() {
    let size = Reply::Size { grown: None, ask_again: Some(Duration::MAX) };
    let Ok(Reply::Size { ask_again: Some(ask_again), .. }) =
        ordered(|worker, number| answer(worker, number, Ok(size)))
    else {
        panic!("no size")
    };
    assert!(ask_again <= Duration::from_secs(60));
}

#[test]
fn a_worker_whose_queue_has_failed_is_lost_whether_or_not_it_ends() {
    let (follower, worker) = line();
    let stop = Waker::new().unwrap();
    let mut end = Line::new(follower.as_fd(), &stop);
    let why = "no\nmemory".to_owned();
    let failed = Report::Failed(Failure::Host { what: "turn".to_owned(), why });
    send_message(worker.as_fd(), &Message::Report(failed), true).unwrap();
    end.clear_reports().unwrap();
    let Some(Report::Failed(Failure::Lost(why))) = end.report() else { panic!("not lost") };
    assert!(why.contains("no memory"), "{why}");
}

/// A newer daemon may send an unknown request, and has to be able to request the end.
#[test]
fn what_a_worker_does_not_know_is_answered_and_it_goes_on() {
    let (follower, worker) = line();
    for what in ["\"Dance\"", "{\"Order\":\"Sing\"}"] {
        let odd = format!("{{\"number\":7,\"what\":{what}}}");
        send(&follower, odd.as_bytes(), SendFlags::NOSIGNAL).unwrap();
        assert_eq!(receive_request(worker.as_fd()).unwrap(), None);
        let Ok(Some(Message::Reply { number: 7, result: Err(Failure::Host { .. }) })) =
            receive_message(follower.as_fd())
        else {
            panic!("no answer to {odd}")
        };
    }
    send_message(follower.as_fd(), &Request { number: u64::MAX, what: RequestKind::Retire }, true)
        .unwrap();
    let ask = receive_request(worker.as_fd()).unwrap();
    assert_eq!(ask, Some(Request { number: u64::MAX, what: RequestKind::Retire }));
    assert_eq!(receive_request(worker.as_fd()).unwrap(), None);
    send(&follower, b"{\"what\":\"Retire\"}", SendFlags::NOSIGNAL).unwrap();
    assert_eq!(
        receive_request(worker.as_fd()).unwrap_err().kind(),
        std::io::ErrorKind::InvalidData
    );
}

/// Either end may be newer, and send fields that the other does not know.
#[test]
fn fields_that_are_not_known_are_left_alone_on_both_ends() {
    let (follower, worker) = line();
    let ask = r#"{"number":7,"what":{"Open":{"read_only":true,"more":[1]}},"more":{}}"#;
    send(&follower, ask.as_bytes(), SendFlags::NOSIGNAL).unwrap();
    let open = RequestKind::Open { read_only: true, keeps_all: false, defers: false, version: 1 };
    let asked_for = Request { number: 7, what: open };
    assert_eq!(receive_request(worker.as_fd()).unwrap(), Some(asked_for));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let number = asked(&worker).number;
            let opened = r#"{"Opened":{"version":2,"program":"9","more":1}}"#;
            let said = format!(
                r#"{{"Answer":{{"number":{number},"result":{{"Ok":{opened}}},"more":2}}}}"#
            );
            send(&worker, said.as_bytes(), SendFlags::NOSIGNAL).unwrap();
        });
        let stop = Waker::new().unwrap();
        Line::new(follower.as_fd(), &stop).open(false, false, false).unwrap();
    });
}

/// A worker that was installed two releases ago, or two later, is no lost one: its guest is served.
#[test]
fn a_worker_of_a_version_too_far_away_is_not_followed_and_the_text_says_both_versions() {
    let (follower, worker) = line();
    let opened = std::thread::scope(|scope| {
        scope.spawn(|| {
            let number = asked(&worker).number;
            let program = "9".to_owned();
            answer(&worker, number, Ok(Reply::Opened { version: 4, program }));
        });
        let stop = Waker::new().unwrap();
        Line::new(follower.as_fd(), &stop).open(false, false, false)
    });
    let Err(Failure::Open(OpenFailure { what, why, help, .. })) = opened else {
        panic!("{opened:?}")
    };
    assert_eq!(what, "cannot follow the worker");
    assert_eq!(why, "the other process speaks version 4 of the line, and this one 1 and 2");
    assert!(help.contains("ferrite upgrade"), "{help}");
}

/// The bytes of commit 348c3451, whose processes may run while the package is upgraded.
#[test]
fn a_follower_that_says_no_version_speaks_the_first_one() {
    let (follower, worker) = line();
    let ask = r#"{"number":7,"what":{"Open":{"read_only":true,"keeps_all":false}}}"#;
    send(&follower, ask.as_bytes(), SendFlags::NOSIGNAL).unwrap();
    let open = RequestKind::Open { read_only: true, keeps_all: false, defers: false, version: 1 };
    let asked_for = Request { number: 7, what: open };
    assert_eq!(receive_request(worker.as_fd()).unwrap(), Some(asked_for));
}

#[test]
fn what_comes_beside_an_answer_is_heard_after_it() {
    let (follower, worker) = line();
    let stop = Waker::new().unwrap();
    let mut end = Line::new(follower.as_fd(), &stop);
    let violation = Report::Violation { queue: 1, why: "bad".to_owned() };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let number = asked(&worker).number;
            send_message(worker.as_fd(), &Message::Report(violation.clone()), true).unwrap();
            answer(&worker, number, Ok(Reply::Done));
        });
        assert_eq!(end.carry_out(Order::Save), Ok(Reply::Done));
    });
    assert!(end.has_pending_events());
    end.clear_reports().unwrap();
    assert_eq!((end.report(), end.report()), (Some(violation), None));
    assert!(!end.has_pending_events());
    send_message(worker.as_fd(), &Message::Recheck, true).unwrap();
    assert_eq!(wait_for([end.reports_fd()], None).unwrap(), [true]);
}

#[test]
fn settings_go_to_a_worker_that_knows_them_and_for_an_older_one_there_is_an_upgrade() {
    let tune = Tune { cpu: Some(50), ..Tune::default() };
    let given = |version| {
        let (follower, worker) = line();
        std::thread::scope(|scope| {
            let orders = scope.spawn(move || {
                let opened = Reply::Opened { version, program: "0.1.0".to_owned() };
                answer(&worker, asked(&worker).number, Ok(opened));
                let mut orders = Vec::new();
                while orders.last() != Some(&RequestKind::Order(Order::Save)) {
                    let Request { number, what } = asked(&worker);
                    orders.push(what);
                    answer(&worker, number, Ok(Reply::Done));
                }
                orders.len()
            });
            let stop = Waker::new().unwrap();
            let mut line = Line::new(follower.as_fd(), &stop);
            let opened = line.open(false, false, false);
            let taken = line.tune(&tune).map(|taken| taken.map_err(|e| e.to_string()));
            // Settings of which none is made are not sent.
            let nothing = line.tune(&Tune::default()).map(|taken| taken.is_ok());
            let saved = line.carry_out(Order::Save);
            assert_eq!((opened, nothing, saved), (Ok(()), Ok(true), Ok(Reply::Done)));
            (taken, orders.join().unwrap())
        })
    };
    assert_eq!(given(2), (Ok(Ok(())), 2));
    let (taken, orders) = given(1);
    let why = taken.unwrap().unwrap_err();
    assert!(why.contains("its worker is of an older ferrite") && why.contains("ferrite upgrade"));
    assert_eq!(orders, 1);
}
