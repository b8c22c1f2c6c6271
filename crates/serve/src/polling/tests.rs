use super::*;

const WAKE_UP_NS: u64 = 20_000;

fn auto() -> Poller {
    Poller::new(PollWindow::Auto, WAKE_UP_NS, 2)
}

/// A poll that began at `from_ns` and took `took_ns`.
fn poll(from_ns: u64, took_ns: u64, hit: bool) -> Poll {
    Poll { from_ns, to_ns: from_ns + took_ns, stolen_ns: 0, hit }
}

/// One that has begun to poll.
fn polling() -> Poller {
    let mut p = auto();
    for _ in 0..SHORT_SLEEPS {
        p.slept(30_000);
    }
    assert_eq!(p.window_ns(0), 37_500);
    p
}

#[test]
fn a_queue_that_sleeps_long_never_looks() {
    let mut p = auto();
    for _ in 0..100 {
        p.slept(10_000_000);
        assert_eq!(p.window_ns(0), 0);
    }
}

#[test]
fn it_takes_several_short_sleeps_in_a_row_to_begin() {
    let mut p = auto();
    for _ in 0..10 {
        p.slept(30_000);
        p.slept(30_000);
        p.slept(10_000_000);
        assert_eq!(p.window_ns(0), 0);
    }
}

#[test]
fn the_window_grows_while_sleeps_are_short_up_to_a_limit() {
    let mut p = polling();
    p.slept(100_000);
    assert_eq!(p.window_ns(0), 125_000);
    p.slept(20_000);
    assert_eq!(p.window_ns(0), 125_000);
    p.slept(MAX_AUTO_NS);
    assert_eq!(p.window_ns(0), MAX_AUTO_NS);
}

#[test]
fn long_sleeps_close_the_window_step_by_step() {
    let mut p = polling();
    p.slept(100_000);
    let open = p.window_ns(0);
    p.slept(5_000_000);
    assert_eq!(p.window_ns(0), open / 2, "one long sleep is not the end");
    p.slept(5_000_000);
    p.slept(5_000_000);
    assert_eq!(p.window_ns(0), 0);
}

#[test]
fn polls_that_find_nothing_end_in_pauses_that_become_longer() {
    let mut p = polling();
    let mut now_ns = 0;
    let mut polled_ns = 0;
    let mut pauses = Vec::new();
    while pauses.len() < 12 {
        let window_ns = p.window_ns(now_ns);
        if window_ns > 0 {
            p.polled(poll(now_ns, window_ns, false));
            polled_ns += window_ns;
            now_ns += window_ns;
            if p.window_ns(now_ns) == 0 {
                pauses.push(p.paused_until_ns - now_ns);
            }
        }
        // Something comes soon after each poll: the sleeps alone would have it go on.
        p.slept(window_ns + 30_000);
        now_ns += 30_000;
    }
    assert!(pauses.windows(2).all(|w| w[1] >= w[0]));
    assert_eq!(pauses.last(), Some(&PAUSE_NS.1));
    assert!(polled_ns * 200 < now_ns, "polled for {polled_ns} of {now_ns} ns");
}

#[test]
fn hits_keep_it_going_and_forgive_earlier_pauses() {
    let mut p = polling();
    p.pause(0);
    p.pause(PAUSE_NS.0);
    assert!(p.pause_ns > PAUSE_NS.0);
    for i in 0..10 * u64::from(FORGIVEN_BY) {
        p.polled(poll(1_000_000_000 + i, 100, true));
    }
    assert_eq!(p.pause_ns, PAUSE_NS.0);
}

/// One that has begun to poll, and has been told at 0 how long its thread waited so far: not at
/// all. From the time that is returned on it polls.
fn polling_and_told() -> (Poller, u64) {
    let mut p = polling();
    assert!(p.asks_for_wait(0));
    p.waited(0, 0);
    assert!(!p.asks_for_wait(CHECK_NS - 1));
    assert_eq!(p.window_ns(0), 0, "nothing is known yet");
    p.waited(PAUSE_NS.0, 0);
    assert!(p.window_ns(PAUSE_NS.0) > 0);
    (p, PAUSE_NS.0)
}

#[test]
fn a_thread_that_waits_for_its_processor_stops_polling() {
    let (mut p, from_ns) = polling_and_told();
    let most = |now_ns| poll(now_ns, CHECK_NS / 4 * 3, true);
    p.polled(most(from_ns));
    let now_ns = from_ns + CHECK_NS;
    p.waited(now_ns, CHECK_NS / 10);
    assert!(p.window_ns(now_ns) > 0, "a tenth is no shortage");
    p.polled(most(now_ns));
    let now_ns = now_ns + CHECK_NS;
    p.waited(now_ns, CHECK_NS / 10 + CHECK_NS / 5);
    assert_eq!(p.window_ns(now_ns), 0);
}

/// The scheduler now and then wakes a thread on a processor that is taken although another is
/// free, so what a thread waited for that slept tells nothing of one that polls.
#[test]
fn waiting_after_sleeps_keeps_nobody_from_polling() {
    let (mut p, from_ns) = polling_and_told();
    for ms in 1..100 {
        let now_ns = from_ns + ms * CHECK_NS;
        p.polled(poll(now_ns - CHECK_NS, CHECK_NS / 4, true));
        p.waited(now_ns, ms * CHECK_NS / 2);
        assert!(p.window_ns(now_ns) > 0);
    }
}

/// Somebody else works where this sleeps: polling would take from them.
#[test]
fn waiting_for_a_whole_slice_ends_polling_whatever_was_done_meanwhile() {
    let (mut p, from_ns) = polling_and_told();
    let now_ns = from_ns + 5 * CHECK_NS;
    p.waited(now_ns, SLICE_NS - 1);
    assert!(p.window_ns(now_ns) > 0);
    let now_ns = now_ns + 5 * CHECK_NS;
    p.waited(now_ns, 2 * SLICE_NS - 1);
    assert_eq!(p.window_ns(now_ns), 0);
}

#[test]
fn where_slices_are_waited_for_again_and_again_polling_never_begins() {
    let mut p = polling();
    for i in 0..1000 {
        let now_ns = i * (PAUSE_NS.0 - CHECK_NS);
        p.waited(now_ns, i * SLICE_NS);
        for _ in 0..SHORT_SLEEPS {
            p.slept(30_000);
        }
        assert_eq!(p.window_ns(now_ns), 0);
        assert_eq!(p.window_ns(now_ns + PAUSE_NS.0 - CHECK_NS), 0);
    }
}

#[test]
fn an_interrupt_now_and_then_keeps_nobody_from_polling() {
    let mut p = polling();
    for i in 0..1000 {
        let from_ns = i * 100_000;
        let gap_ns = if i % 10 == 0 { stolen_ns(45_000) } else { 0 };
        p.polled(Poll { stolen_ns: gap_ns, ..poll(from_ns, 50_000, true) });
        assert!(p.window_ns(from_ns + 50_000) > 0, "poll {i}");
    }
}

#[test]
fn gaps_in_most_polls_stop_it() {
    let mut p = polling();
    let stopped = (0..20).find(|i| {
        let from_ns = i * 100_000;
        p.polled(Poll { stolen_ns: stolen_ns(40_000), ..poll(from_ns, 80_000, true) });
        p.window_ns(from_ns + 80_000) == 0
    });
    assert!(stopped.is_some());
}

#[test]
fn a_thread_that_was_put_aside_while_it_polled_stops() {
    let mut p = polling();
    p.polled(Poll { stolen_ns: stolen_ns(3_000_000), ..poll(0, 3_010_000, true) });
    assert_eq!(p.window_ns(3_010_000), 0);
    assert_eq!(stolen_ns(1_000), 0, "one turn of the loop is no gap");
}

#[test]
fn a_fixed_window_is_what_was_asked_for() {
    let mut p = Poller::new(PollWindow::Fixed(70), WAKE_UP_NS, 1);
    for i in 0..20 {
        assert_eq!(p.window_ns(i), 70_000);
        p.polled(poll(i, 70_000, false));
        p.slept(10_000_000);
    }
    assert!(!p.asks_for_wait(u64::MAX));
    assert_eq!(Poller::new(PollWindow::Fixed(0), WAKE_UP_NS, 2).window_ns(5), 0);
}

#[test]
fn windows_are_written_as_they_are_read() {
    for text in ["auto", "0", "50", "10000"] {
        assert_eq!(text.parse::<PollWindow>().unwrap().to_string(), text);
    }
    for bad in ["", "-1", "10001", "often", "1.5"] {
        assert!(bad.parse::<PollWindow>().is_err(), "{bad}");
    }
}

#[test]
fn nobody_polls_on_the_only_processor() {
    let mut p = Poller::new(PollWindow::Auto, WAKE_UP_NS, 1);
    for _ in 0..100 {
        p.slept(30_000);
        assert_eq!(p.window_ns(0), 0);
    }
}
