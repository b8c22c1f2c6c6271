//! Histories of disks on several servers, with everything that may go wrong, and what is wrong in their answers.
//!
//! One seed makes one history. A rule that is left out has to be found.

mod check;
mod random;
mod world;

use ferrite_pool::{Rule, Rules};
use world::{Plan, World};

fn histories(rules: Rules, seeds: std::ops::Range<u64>) -> Option<(u64, String)> {
    for seed in seeds {
        if let Err(why) = World::run(&Plan::of_seed(seed), rules) {
            return Some((seed, why));
        }
    }
    None
}

#[test]
fn all_reads_of_all_histories_are_right() {
    let count = std::env::var("FERRITE_POOL_HISTORIES").ok().and_then(|n| n.parse().ok());
    if let Some((seed, why)) = histories(Rules::default(), 0..count.unwrap_or(1000)) {
        panic!("seed {seed}: {why}");
    }
}

/// A rule that is left out, and the seeds among which one shows it.
fn is_found(rule: Rule, within: u64) {
    let found = histories(Rules::without(rule), 0..within);
    let (seed, why) = found.unwrap_or_else(|| panic!("{rule:?} is not found in {within} seeds"));
    println!("{rule:?}: seed {seed}: {why}");
}

macro_rules! left_out {
    ($($name:ident: $rule:ident,)*) => {$(
        #[test]
        fn $name() {
            is_found(Rule::$rule, 10_000);
        }
    )*};
}

left_out! {
    a_member_without_a_fence_is_found: Fence,
    a_member_that_does_not_drain_is_found: Drain,
    late_packets_of_an_earlier_connection_are_found: LateConnection,
    an_answer_before_the_drop_is_found: DropFirst,
    data_before_their_bits_are_found: BitsFirst,
    bits_cleared_early_are_found: ClearLate,
    reads_of_unequal_regions_are_found: EqualFirst,
    a_return_without_a_copy_is_found: Copy,
    a_return_without_its_own_bits_is_found: OwnBits,
    requests_without_order_are_found: Order,
    a_restarted_member_that_is_a_source_is_found: Incomplete,
    an_unknown_outcome_that_is_read_is_found: Settle,
    an_incomplete_member_that_forgets_it_is_found: StaysIncomplete,
}
