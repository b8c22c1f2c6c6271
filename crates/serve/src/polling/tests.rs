use super::*;

const WAKE_UP_NS: u64 = 20_000;

fn auto() -> Poller {
    Poller::new(PollWindow::Auto, WAKE_UP_NS, 2, false)
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
    assert!(p.is_wait_check_due(0));
    p.waited(0, 0);
    assert!(!p.is_wait_check_due(CHECK_NS - 1));
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

/// Another task runs on the processor where this thread sleeps: polling would take from it.
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
    let mut p = Poller::new(PollWindow::Fixed(70), WAKE_UP_NS, 1, false);
    for i in 0..20 {
        assert_eq!(p.window_ns(i), 70_000);
        p.polled(poll(i, 70_000, false));
        p.slept(10_000_000);
    }
    assert!(!p.is_wait_check_due(u64::MAX));
    assert_eq!(Poller::new(PollWindow::Fixed(0), WAKE_UP_NS, 2, false).window_ns(5), 0);
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
    let mut p = Poller::new(PollWindow::Auto, WAKE_UP_NS, 1, false);
    for _ in 0..100 {
        p.slept(30_000);
        assert_eq!(p.window_ns(0), 0);
    }
}

/// A poller with one processor in its domain, on a host whose processors are in demand.
fn listening() -> Poller {
    Poller::new(PollWindow::Auto, WAKE_UP_NS, 1, true)
}

/// A history of 100 ms each: processors of the host, how many of them were idle in thousandths, and
/// gaps in all polls or not.
type History<'a> = &'a [(u32, u32, bool)];

/// Plays it to a queue at depth 1: each 50 us something comes. The time of each 100 ms in which it
/// polled, in ms.
fn play(p: &mut Poller, history: History<'_>) -> Vec<u64> {
    play_from(p, &mut 1_000_000_000, history)
}

fn play_from(p: &mut Poller, at_ns: &mut u64, history: History<'_>) -> Vec<u64> {
    let mut now_ns = *at_ns;
    let mut polled = Vec::new();
    for (cpus, idle_milli, gaps) in history {
        let end_ns = now_ns + 100_000_000;
        let mut polled_ns = 0;
        while now_ns < end_ns {
            if p.is_host_check_due(now_ns) {
                let host = HostLoad { cpus: *cpus, idle_milli: *idle_milli };
                p.observe_host(now_ns, (*cpus > 0).then_some(host));
            }
            if p.is_wait_check_due(now_ns) {
                p.waited(now_ns, 0);
            }
            if p.window_ns(now_ns) >= 50_000 {
                let stolen_ns = if *gaps { stolen_ns(40_000) } else { 0 };
                p.polled(Poll { stolen_ns, ..poll(now_ns, 50_000, true) });
                polled_ns += 50_000;
            } else {
                p.slept(50_000);
            }
            now_ns += 50_000 + 10_000;
        }
        polled.push(polled_ns / 1_000_000);
    }
    *at_ns = now_ns;
    polled
}

#[test]
fn the_only_processor_of_its_domain_polls_while_the_host_has_idle_ones() {
    let all = play(&mut listening(), &[(8, 7200, false), (8, 6000, true), (8, 400, true)]);
    // The first ten milliseconds are for finding out.
    assert!(all.iter().all(|ms| *ms > 70), "{all:?}");
}

#[test]
fn it_does_not_begin_where_the_host_has_none() {
    for busy in [(8, 0), (8, BEGINS_MILLI - 1), (2, 0), (1, 900)] {
        let history = [(busy.0, busy.1, false); 20];
        assert_eq!(play(&mut listening(), &history), vec![0; 20], "{busy:?}");
    }
}

#[test]
fn it_does_not_poll_when_nobody_says_what_the_host_has() {
    let mut p = listening();
    assert_eq!(play(&mut p, &[(0, 0, false); 3]), [0; 3]);
    assert!(p.wants_host_load(), "it asks for the host's load");
    let all = play(&mut listening(), &[(8, 7000, false), (0, 0, false)]);
    assert!(all[0] > 70 && all[1] == 0, "{all:?}");
}

#[test]
fn it_ends_when_the_last_idle_processor_is_taken_and_then_tries_ever_less() {
    let taken = (4, GOES_ON_MILLI - 1, false);
    let mut p = listening();
    let all = play(&mut p, &[(4, 2000, false), (4, GOES_ON_MILLI, false), taken, taken]);
    assert!(all[0] > 70 && all[1] > 70 && all[2..] == [0, 0], "{all:?}");
}

/// As a host of two has it, where guest and backend take turns on one and others have the other.
#[test]
fn where_its_own_polling_takes_the_last_one_it_tries_ever_less() {
    let (mut p, mut now_ns) = (listening(), 1_000_000_000);
    let (mut polled_ms, mut idle_milli) = (Vec::new(), 900);
    for _ in 0..200 {
        let ms = play_from(&mut p, &mut now_ns, &[(2, idle_milli, false)])[0];
        idle_milli = if ms > 20 { 0 } else { 900 };
        polled_ms.push(ms);
    }
    let sum = |range: std::ops::Range<usize>| polled_ms[range].iter().sum::<u64>();
    assert!(sum(0..10) > 0 && sum(100..200) < 500, "{polled_ms:?}");
}

#[test]
fn of_two_disks_the_second_begins_while_there_is_a_processor_for_it() {
    // The idle time that the first disk leaves.
    assert_eq!(play(&mut listening(), &[(4, 500, false)]), [0]);
    assert!(play(&mut listening(), &[(4, 1500, false)])[0] > 70);
}

#[test]
fn with_several_processors_and_nobody_who_says_it_judges_by_itself() {
    let mut p = Poller::new(PollWindow::Auto, WAKE_UP_NS, 4, true);
    let all = play(&mut p, &[(0, 0, false), (0, 0, true), (0, 0, true)]);
    assert!(all[0] > 70 && all[2] < 10, "{all:?}");
    let mut p = Poller::new(PollWindow::Auto, WAKE_UP_NS, 4, true);
    assert_eq!(play(&mut p, &[(16, 100, false); 2]), [0; 2]);
}

#[test]
fn who_does_not_judge_does_not_listen() {
    assert!(
        !Poller::new(PollWindow::Fixed(50), WAKE_UP_NS, 1, true).is_host_check_due(u64::MAX - 1)
    );
    assert!(!auto().is_host_check_due(u64::MAX - 1));
    assert!(!Poller::new(PollWindow::Auto, WAKE_UP_NS, 1, true).is_wait_check_due(1));
}
