use super::*;

const SECOND_NS: u64 = 1_000_000_000;
const START_NS: u64 = 12_345_678_901;
const READ: Work = Work { action: Action::Read, sector: 0, sectors: 8 };

fn rate(per_s: u64) -> Option<Rate> {
    Some(Rate { per_s, burst: None })
}

fn limiter(limits: Limits) -> Limiter {
    let limiter = Limiter::default();
    limiter.set(&limits, START_NS);
    limiter
}

/// Takes the tokens of a request, as a path does in a turn.
fn take(limiter: &Limiter, work: &Work, now_ns: u64) {
    let mut path = Allowance::default();
    path.count(work, now_ns);
    path.settle(limiter);
}

/// A turn of a path that always has requests, at most 32. Gives those that begin, and when the next may. It gives back
/// what it has left only in its next turn, as if all paths had their turns at the same time.
fn turn(path: &mut Allowance, limiter: &Limiter, work: Work, now_ns: u64) -> (u64, Option<u64>) {
    let (counted, mut begun) = (Counted::of(work.action), 0);
    path.settle(limiter);
    while begun < 32 {
        if !path.allows(counted, limiter, now_ns) {
            path.settle(limiter);
            if let Some(at_ns) = limiter.begins_at(counted, now_ns) {
                return (begun, Some(at_ns));
            }
        }
        path.count(&work, now_ns);
        begun += 1;
    }
    (begun, None)
}

/// The requests that begin from `from_ns` on within `within_ns`, of some paths that always have one.
/// They are late by up to `late_ns` when they wait.
fn begun_on(
    paths: usize,
    limiter: &Limiter,
    work: Work,
    (from_ns, within_ns): (u64, u64),
    late_ns: u64,
) -> u64 {
    let mut paths: Vec<_> = (0..paths).map(|_| (from_ns, Allowance::default())).collect();
    let (mut begun, mut late) = (0, 0);
    while let Some((now_ns, path)) = paths.iter_mut().min_by_key(|(now_ns, _)| *now_ns)
        && *now_ns < from_ns + within_ns
    {
        let (some, next) = turn(path, limiter, work, *now_ns);
        begun += some;
        if let Some(at_ns) = next {
            assert!(at_ns > *now_ns);
            late = (late * 5 + 12_347) % (late_ns + 1);
            *now_ns = at_ns + late;
        }
    }
    paths.iter_mut().for_each(|(_, path)| path.settle(limiter));
    begun
}

fn begun(limiter: &Limiter, work: Work, from_ns: u64, within_ns: u64, late_ns: u64) -> u64 {
    begun_on(1, limiter, work, (from_ns, within_ns), late_ns)
}

/// Asserts that `n` is `expected`, with two percent of room.
fn is_near(n: u64, expected: u64) {
    assert!(n.abs_diff(expected) * 50 <= expected, "{n} instead of {expected}");
}

#[test]
fn each_limit_is_kept_to_two_percent_in_ten_seconds_also_by_a_client_that_wakes_late() {
    let write = |sectors| Work { action: Action::Write, sector: 0, sectors };
    let read = |sectors| Work { action: Action::Read, sector: 0, sectors };
    for late_ns in [0, 70_000, 30 * 1_000_000] {
        for (limits, work, per_s) in [
            (Limits { iops: rate(10), ..Limits::default() }, read(8), 10),
            (Limits { iops: rate(500), ..Limits::default() }, write(8), 500),
            (Limits { iops_read: rate(50_000), ..Limits::default() }, read(1), 50_000),
            (Limits { iops_write: rate(333_333), ..Limits::default() }, write(1), 333_333),
            (Limits { bytes: rate(64 << 20), ..Limits::default() }, read(8), 16 << 10),
            (Limits { bytes_write: rate(64 << 20), ..Limits::default() }, write(2048), 64),
            (Limits { bytes_read: rate(10 << 20), ..Limits::default() }, read(2048), 10),
            // The first of two limits that is reached.
            (Limits { iops: rate(100), bytes: rate(1 << 20), ..Limits::default() }, read(8), 100),
            (Limits { iops: rate(1000), bytes: rate(1 << 20), ..Limits::default() }, read(8), 256),
        ] {
            let limiter = limiter(limits);
            begun(&limiter, work, START_NS, SECOND_NS, late_ns);
            let n = begun(&limiter, work, START_NS + SECOND_NS, 10 * SECOND_NS, late_ns);
            // One request more or less is in the window.
            let n = if n.abs_diff(10 * per_s) <= 1 { 10 * per_s } else { n };
            is_near(n, 10 * per_s);
        }
    }
}

#[test]
fn paths_that_take_at_the_same_time_keep_to_the_limit_together() {
    let limits = Limits { iops: rate(500), bytes: rate(1 << 20), ..Limits::default() };
    for late_ns in [0, 30 * 1_000_000] {
        let limiter = limiter(limits);
        let seconds = |from: u64, count: u64| (START_NS + from * SECOND_NS, count * SECOND_NS);
        begun_on(8, &limiter, READ, seconds(0, 1), late_ns);
        is_near(begun_on(8, &limiter, READ, seconds(1, 10), late_ns), 2560);
    }
}

#[test]
fn after_a_rest_a_burst_passes_and_no_more() {
    let of =
        |burst| limiter(Limits { iops: Some(Rate { per_s: 1000, burst }), ..Limits::default() });
    for (burst, at_once) in [(None, 100), (Some(1), 1), (Some(5000), 5000)] {
        let limiter = of(burst);
        let mut now_ns = START_NS;
        for _ in 0..3 {
            let n = begun(&limiter, READ, now_ns, 1, 0);
            assert!((at_once..=at_once + 1).contains(&n), "{n} of {at_once}");
            now_ns += 3600 * SECOND_NS;
        }
    }
}

#[test]
fn directions_have_limits_of_their_own_and_flushes_have_none() {
    let work = |action| Work { action, sector: 0, sectors: 2048 };
    let reads = limiter(Limits { iops_read: rate(1), ..Limits::default() });
    take(&reads, &work(Action::Read), START_NS);
    take(&reads, &work(Action::Status), START_NS);
    assert!(reads.begins_at(Counted::Read, START_NS).is_some());
    assert_eq!(reads.begins_at(Counted::Write, START_NS), None);
    assert_eq!(reads.begins_at(Counted::Not, START_NS), None);
    let writes = limiter(Limits { iops_write: rate(10), ..Limits::default() });
    for action in [Action::Discard, Action::Zero, Action::FlushThenWrite, Action::Barrier] {
        assert_eq!(Counted::of(action), Counted::Write);
        take(&writes, &work(action), START_NS);
    }
    // Three tenths of a second are owed beyond the burst.
    let at_ns = writes.begins_at(Counted::Write, START_NS).unwrap();
    assert_eq!((at_ns - START_NS) / 1_000_000, 301);
    take(&writes, &work(Action::Flush), START_NS);
    assert_eq!(writes.begins_at(Counted::Write, START_NS), Some(at_ns));
    assert_eq!(writes.begins_at(Counted::Read, START_NS), None);
    // A request that moves no bytes needs none.
    let bytes = limiter(Limits { bytes: rate(1 << 20), ..Limits::default() });
    for action in [Action::Discard, Action::Zero, Action::Flush, Action::Status] {
        take(&bytes, &work(action), START_NS);
    }
    assert_eq!(bytes.begins_at(Counted::Write, START_NS), None);
    take(&bytes, &work(Action::Write), START_NS);
    assert!(bytes.begins_at(Counted::Read, START_NS).is_some());
}

#[test]
fn another_limit_holds_from_now_on_and_the_same_one_forgives_nothing() {
    let slow = Limits { iops: rate(1), bytes: rate(1 << 30), ..Limits::default() };
    let limiter = limiter(slow);
    (0..100).for_each(|_| take(&limiter, &READ, START_NS));
    let at_ns = limiter.begins_at(Counted::Read, START_NS);
    assert!(at_ns.unwrap() > START_NS + 99 * SECOND_NS);
    limiter.set(&slow, START_NS);
    assert_eq!(limiter.begins_at(Counted::Read, START_NS), at_ns);
    limiter.set(&Limits { iops: rate(2), ..slow }, START_NS);
    assert_eq!(limiter.begins_at(Counted::Read, START_NS), None);
    is_near(begun(&limiter, READ, START_NS + SECOND_NS, 100 * SECOND_NS, 0), 200);
    limiter.set(&Limits::default(), START_NS);
    assert!(!limiter.is_on());
    assert_eq!(limiter.begins_at(Counted::Read, START_NS), None);
}

#[test]
fn a_disk_that_is_to_go_has_no_limit_for_a_second_and_not_again_soon() {
    let limiter = limiter(Limits { iops: rate(1), ..Limits::default() });
    (0..1000).for_each(|_| take(&limiter, &READ, START_NS));
    let is_held = |after_ns| limiter.begins_at(Counted::Read, START_NS + after_ns).is_some();
    assert!(is_held(0));
    limiter.lift(START_NS);
    assert!(!is_held(0) && !is_held(FAREWELL_NS - 1) && is_held(FAREWELL_NS));
    limiter.lift(START_NS + 2 * SECOND_NS);
    assert!(is_held(2 * SECOND_NS));
    limiter.lift(START_NS + 61 * SECOND_NS);
    assert!(!is_held(61 * SECOND_NS));
}

#[test]
fn limits_have_bounds_and_are_said_in_one_line() {
    let bytes = |per_s| Limits { bytes_write: rate(per_s), ..Limits::default() };
    assert!(bytes(LEAST_BYTES).check().is_ok());
    let e = bytes(LEAST_BYTES - 1).check().unwrap_err();
    assert_eq!(e, "bytes_write is 65535 a second; it takes 65536 to 1099511627776");
    assert!(bytes(MOST + 1).check().is_err());
    let iops = |per_s, burst| Limits { iops: Some(Rate { per_s, burst }), ..Limits::default() };
    assert!(iops(1, None).check().is_ok() && iops(0, None).check().is_err());
    for (burst, ok) in [(0, false), (1, true), (36_000, true), (36_001, false)] {
        assert_eq!(iops(10, Some(burst)).check().is_ok(), ok, "{burst}");
    }
    assert_eq!(Limits::default().to_string(), "none");
    let both = Limits { bytes_write: rate(1 << 20), ..iops(500, Some(900)) };
    assert_eq!(both.to_string(), "iops=500:900,bytes_write=1048576");
    for limits in [Limits::default(), both] {
        assert_eq!(limits.to_string().parse(), Ok(limits));
    }
    for wrong in
        ["", "iops", "iops=", "iops=0", "iops=1:", "iops=1:x", "iop=1", "bytes=1", "iops=1,"]
    {
        assert!(wrong.parse::<Limits>().is_err(), "{wrong}");
    }
    let text = serde_json::to_string(&both).unwrap();
    assert_eq!(text, r#"{"iops":{"per_s":500,"burst":900},"bytes_write":{"per_s":1048576}}"#);
    assert_eq!(serde_json::from_str::<Limits>(&text).unwrap(), both);
}
