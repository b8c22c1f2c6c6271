//! Histories of disks on several servers, with everything that may go wrong, and what is wrong in their answers.
//!
//! One seed makes one history. A rule that is left out has to be found.

mod check;
mod luns;
mod random;
mod world;

use ferrite_pool::{Rule, Wanted};
use world::{Act, FIRST, Plan, Without, World, directed};

fn histories(without: Without, seeds: impl IntoIterator<Item = u64>) -> Option<(u64, String)> {
    for seed in seeds {
        if let Err(why) = World::run(&Plan::of_seed(seed), without) {
            return Some((seed, why));
        }
    }
    None
}

/// The histories of which all reads have to be right: 20,000 by `nightly --only pool`.
fn count() -> u64 {
    std::env::var("FERRITE_POOL_HISTORIES").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
}

#[test]
fn all_reads_of_all_histories_are_right() {
    if let Some((seed, why)) = histories(Without::default(), 0..count()) {
        panic!("seed {seed}: {why}");
    }
}

/// The same with a copy that another one replaces meanwhile.
#[test]
fn all_reads_are_right_while_a_copy_is_replaced() {
    for seed in 0..count() {
        let plan = Plan { replaces: true, ..Plan::of_seed(seed) };
        World::run(&plan, Without::default()).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
}

fn without(rule: Rule) -> Without {
    Without(Some(world::Rule::Pool(rule)))
}

/// Seeds among which one shows that a rule is left out.
const WITHIN: u64 = 10_000;

/// A rule that is left out is found. The search begins at a seed that shows it today, or a little before.
fn is_found(rule: Rule, from: u64) {
    let found = histories(without(rule), (from..WITHIN).chain(0..from));
    let (seed, why) = found.unwrap_or_else(|| panic!("{rule:?} is not found in {WITHIN} seeds"));
    println!("{rule:?}: seed {seed}: {why}");
}

macro_rules! left_out {
    ($($name:ident: $rule:ident $from:literal,)*) => {$(
        #[test]
        fn $name() {
            is_found(Rule::$rule, $from);
        }
    )*};
}

left_out! {
    a_member_without_a_fence_is_found: Fence 0,
    a_member_that_does_not_drain_is_found: Drain 50,
    late_packets_of_an_earlier_connection_are_found: LateConnection 40,
    an_answer_before_the_drop_is_found: DropFirst 0,
    data_before_their_bits_are_found: BitsFirst 3600,
    bits_cleared_early_are_found: ClearLate 20,
    reads_of_unequal_regions_are_found: EqualFirst 20,
    a_return_without_a_copy_is_found: Copy 0,
    a_return_without_its_own_bits_is_found: OwnBits 1480,
    requests_without_order_are_found: Order 0,
    a_restarted_member_that_is_a_source_is_found: Incomplete 0,
    an_unknown_outcome_that_is_read_is_found: Settle 770,
    an_incomplete_member_that_forgets_it_is_found: StaysIncomplete 15,
}

/// An act every few milliseconds.
fn often(from: u64, to: u64, act: Act) -> impl Iterator<Item = (u64, Act)> {
    (from..to).step_by(7).map(move |time| (time, act))
}

/// The rules keep a history right that goes wrong without one of them.
fn needs(rule: Rule, servers: usize, acts: &[(u64, Act)]) {
    needs_of(world::Rule::Pool(rule), &vec![None; servers], acts);
}

/// The rules keep a history with copies on LUNs ([`Plan::luns`]) right, and it goes wrong without one of them.
fn needs_of(rule: world::Rule, luns: &[Option<usize>], acts: &[(u64, Act)]) {
    directed(luns, Without::default(), acts).unwrap_or_else(|why| panic!("by all rules: {why}"));
    let found = directed(luns, Without(Some(rule)), acts);
    println!("{rule:?}: {}", found.expect_err("not found"));
}

/// The process that had the disk lives, and neither hears of its end nor reaches the record. It had answers of both members
/// just before. The new one reaches the first member alone.
fn old_owner_beside_a_new_one(writes: (u64, u64), reads: (u64, u64)) -> Vec<(u64, Act)> {
    let late = 5_000;
    let mut acts = vec![
        (0, Act::Start),
        (500, Act::Ask(0, Wanted::Write(FIRST))),
        (1_000, Act::Cut { host: 0, member: 0, until: late }),
        (1_000, Act::CutRecord { host: 0, until: late }),
        (1_000, Act::Cut { host: 1, member: 1, until: late }),
        (1_000, Act::Start),
    ];
    acts.extend(often(writes.0, writes.1, Act::Ask(1, Wanted::Write(FIRST))));
    acts.extend(often(reads.0, reads.1, Act::Ask(0, Wanted::Read(FIRST))));
    acts.sort_by_key(|(time, _)| *time);
    acts
}

#[test]
fn a_take_over_that_does_not_wait_is_found() {
    needs(Rule::Wait, 2, &old_owner_beside_a_new_one((1_200, 1_380), (1_280, 1_390)));
}

#[test]
fn reads_without_a_proof_are_found() {
    needs(Rule::Proof, 2, &old_owner_beside_a_new_one((1_750, 1_900), (1_800, 2_000)));
}

/// An owner has dropped a member and does not know it yet. The member is there again for it, and the next owner, which has the
/// record without it, does not reach it.
#[test]
fn reads_from_a_member_that_may_have_left_are_found() {
    let late = 5_000;
    let mut acts = vec![
        (0, Act::Start),
        (500, Act::Ask(0, Wanted::Write(FIRST))),
        (1_000, Act::Cut { host: 0, member: 1, until: 1_660 }),
        (1_000, Act::HideOutcome { host: 0, until: late }),
        (1_700, Act::Start),
        (1_700, Act::Cut { host: 1, member: 1, until: late }),
    ];
    acts.extend(often(1_720, 2_000, Act::Ask(1, Wanted::Write(FIRST))));
    acts.extend(often(1_730, 2_100, Act::Ask(0, Wanted::Read(FIRST))));
    acts.sort_by_key(|(time, _)| *time);
    needs(Rule::ReadSettled, 2, &acts);
}

/// One member after the other is out: the one that comes back first is the only source of the next one.
#[test]
fn a_return_that_does_not_take_up_the_others_bits_is_found() {
    let mut acts = vec![
        (0, Act::Start),
        (300, Act::Stop(1)),
        (300, Act::Stop(2)),
        (1_000, Act::Ask(0, Wanted::Write(FIRST))),
        (1_200, Act::Restart(2)),
        (2_000, Act::Stop(0)),
        (2_800, Act::Restart(1)),
    ];
    acts.extend(often(3_600, 3_800, Act::Ask(0, Wanted::Read(FIRST))));
    needs(Rule::Union, 3, &acts);
}
