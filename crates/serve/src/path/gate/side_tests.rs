//! Two sides of one gate.

use super::*;

/// With two paths of the first side, and one of the second.
fn gate() -> Gate {
    let gate = Gate::new(3);
    let sides = [Side::First, Side::First, Side::Second];
    assert_eq!(sides.map(|side| gate.join(side)), [Some(0), Some(1), Some(2)]);
    gate
}

#[test]
fn a_side_takes_nothing_until_all_of_the_other_is_answered_and_then_the_other_waits() {
    let gate = gate();
    assert!(gate.enter(0) && gate.enter(1));
    assert!(!gate.enter(2));
    assert_eq!(gate.leave(2, false), None);
    assert!(!gate.enter(0), "the other side waits");
    assert_eq!(gate.leave(0, false), None);
    let handed_over = Wanted { holder: None, parker: false, side: true };
    assert_eq!(gate.leave(1, false), Some(handed_over));
    assert!(gate.enter(2) && !gate.enter(0));
    gate.leave(0, false);
    assert_eq!(gate.leave(2, false), Some(handed_over));
    assert!(gate.enter(1));
}

#[test]
fn a_request_that_waits_to_be_alone_keeps_the_turn_and_keeps_nobody_from_the_gate() {
    let gate = gate();
    assert!(gate.enter(0) && !gate.enter(2));
    gate.leave(2, false);
    assert_eq!(gate.leave(0, true), None);
    assert!(!gate.enter(2));
    gate.leave(2, false);
    assert!(gate.close(0) && gate.others_idle(0) && gate.others_idle(1));
    gate.open(0);
    assert!(gate.leave(0, false).unwrap().side && gate.enter(2));
}

#[test]
fn an_idle_side_and_one_that_is_gone_are_not_waited_for() {
    let gate = gate();
    assert!(gate.enter(0));
    gate.leave(0, false);
    assert!(gate.enter(2) && !gate.enter(1));
    gate.forfeit(2);
    assert!(gate.enter(1) && gate.enter(0));
}

#[test]
fn a_turn_that_is_kept_is_nobody_elses_until_it_is_shared() {
    let gate = gate();
    gate.keep_for(Side::Second);
    assert!(!gate.enter(0));
    gate.leave(0, false);
    assert!(gate.is_kept_for(Side::Second) && !gate.share(Side::First));
    assert!(gate.enter(2));
    assert_eq!(gate.leave(2, false), None);
    assert!(!gate.enter(0));
    gate.leave(0, false);
    assert!(gate.share(Side::Second) && !gate.share(Side::Second));
    assert!(gate.enter(0) && !gate.is_kept_for(Side::Second));
}

#[test]
fn who_was_refused_is_woken_if_nobody_is_left_who_would() {
    let gate = gate();
    assert!(gate.enter(0) && !gate.enter(2) && !gate.enter(1));
    assert_eq!([0, 2, 1].map(|member| gate.leave(member, false).is_some()), [false, false, true]);
    // Before its wish, the turn went there and back, and no queue wants it.
    assert!(gate.enter(2) && gate.leave(2, false).is_none() && gate.enter(0));
    assert!(gate.wish(1));
    // A busy queue hands over.
    assert!(!gate.wish(2) && !gate.wish(1));
    assert!(gate.leave(0, false).is_some_and(|wanted| wanted.side));
    // No queue is busy.
    assert!(gate.wish(1));
}
