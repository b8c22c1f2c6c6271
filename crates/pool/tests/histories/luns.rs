//! Histories of disks with copies on LUNs, beside servers, and alone.

use ferrite_pool::{Blocks, Rule as PoolRule, Wanted};

use crate::random::Random;
use crate::world::{Act, FIRST, LunRule, Plan, Rule, Without, World, directed};
use crate::{WITHIN, count, often};

/// Which copies are on which LUNs: all, some beside servers, or two on the same one.
fn plan(seed: u64) -> Plan {
    let mut random = Random::new(seed ^ 0x6f6e_206c);
    let mut plan = Plan::of_seed(seed);
    plan.luns = match random.below(6) {
        0 => vec![Some(0)],
        1 => vec![Some(0), Some(1)],
        2 => vec![Some(0), Some(0)],
        3 => vec![None, Some(0)],
        4 => vec![Some(0), None, Some(1)],
        _ => vec![None, None, Some(0)],
    };
    plan.servers = plan.luns.len() as u8;
    plan
}

fn histories(without: Without, count: u64, replaces: bool) -> Option<(u64, String)> {
    (0..count).find_map(|seed| {
        let plan = Plan { replaces, ..plan(seed) };
        World::run(&plan, without).err().map(|why| (seed, why))
    })
}

#[test]
fn all_reads_of_all_histories_with_luns_are_right() {
    if let Some((seed, why)) = histories(Without::default(), count(), false) {
        panic!("seed {seed}: {why}");
    }
}

#[test]
fn all_reads_with_luns_are_right_while_a_copy_is_replaced() {
    if let Some((seed, why)) = histories(Without::default(), count(), true) {
        panic!("seed {seed}: {why}");
    }
}

fn is_found(rule: Rule) {
    let found = histories(Without(Some(rule)), WITHIN, false);
    let (seed, why) = found.unwrap_or_else(|| panic!("{rule:?} is not found in {WITHIN} seeds"));
    println!("{rule:?}: seed {seed}: {why}");
}

macro_rules! left_out {
    ($($name:ident: $rule:expr,)*) => {$(
        #[test]
        fn $name() {
            is_found($rule);
        }
    )*};
}

left_out! {
    a_lun_that_is_not_reserved_is_found: Rule::Lun(LunRule::Reserve),
    two_processes_of_a_machine_on_one_lun_are_found: Rule::Lun(LunRule::Alone),
    answers_before_the_medium_are_found: Rule::Lun(LunRule::Durable),
}

/// A rule keeps all these histories right. Without it one of them at least goes wrong: they differ in their times.
fn needs(rule: Rule, luns: &[Option<usize>], variants: impl Fn(u64) -> Vec<(u64, Act)>) {
    let mut found = None;
    for late in 0..100 {
        let mut acts = variants(late);
        acts.sort_by_key(|(time, _)| *time);
        directed(luns, Without::default(), &acts)
            .unwrap_or_else(|why| panic!("by all rules, {late} later: {why}"));
        found = found.or_else(|| Some((late, directed(luns, Without(Some(rule)), &acts).err()?)));
    }
    let (late, why) = found.expect("not found");
    println!("{rule:?}: {late} later: {why}");
}

const WRITE: Wanted = Wanted::Write(FIRST);
const READ: Wanted = Wanted::Read(FIRST);
/// No host comes back from what is cut so.
const NEVER: u64 = 5_900;

/// An owner is heard by two copies of three no more, and its write goes to the first one, on a LUN, alone. An owner before it
/// reads from that, and the next one takes another copy for the right one.
fn read_beside_a_new_owner(new: Vec<(u64, Act)>, last: usize, from: u64) -> Vec<(u64, Act)> {
    let mut acts = vec![
        (0, Act::Start),
        (600, Act::Ask(0, WRITE)),
        (900, Act::CutRecord { host: 0, until: NEVER }),
    ];
    let new_from = new[0].0;
    acts.extend(new);
    for member in 1..3 {
        acts.push((new_from, Act::Cut { host: 0, member, until: NEVER }));
        // The messages after the opening.
        acts.push((from, Act::Hold { host: last, member, until: NEVER }));
    }
    acts.push((from, Act::Ask(last, WRITE)));
    acts.extend(often(from, from + 80, Act::Ask(0, READ)));
    acts.push((from + 100, Act::Kill(last)));
    acts.push((from + 110, Act::Start));
    acts.extend(often(from + 700, from + 900, Act::Ask(last + 1, READ)));
    acts
}

#[test]
fn a_lun_that_is_taken_without_a_wait_is_found() {
    needs(Rule::Pool(PoolRule::LunWait), &[Some(0), None, None], |late| {
        read_beside_a_new_owner(vec![(960 + late, Act::Start)], 1, 1_010 + late)
    });
}

#[test]
fn a_lun_that_was_only_reserved_before_is_found() {
    needs(Rule::Pool(PoolRule::LunLastOwner), &[Some(0), None, None], |late| {
        // The owner before hears late that the LUN was its: then it does not ask again so soon.
        let hears_late = Act::HoldBack { host: 0, member: 0, until: 1_150 + late };
        let new = vec![
            (990 + late, Act::StartOn(1)),
            (1_000 + late, hears_late),
            (1_020 + late, Act::Kill(1)),
            (1_020 + late, Act::StartOn(1)),
        ];
        read_beside_a_new_owner(new, 2, 1_070 + late)
    });
}

/// Of another region than the first block.
const OTHER: Wanted = Wanted::Write(Blocks { start: 2, end: 3 });
const READ_OTHER: Wanted = Wanted::Read(Blocks { start: 2, end: 3 });

/// A new owner has looked at the state, and its order to reserve the LUN comes late. The one before writes meanwhile.
#[test]
fn a_state_that_is_read_before_the_reservation_is_found() {
    needs(Rule::Pool(PoolRule::LunLookBehind), &[Some(0), None], |late| {
        let held = 1_005 + late;
        let mut acts = vec![
            (0, Act::Start),
            (600, Act::Ask(0, WRITE)),
            (900, Act::CutRecord { host: 0, until: NEVER }),
            (990, Act::Cut { host: 0, member: 1, until: NEVER }),
            (1_000, Act::Start),
            (held, Act::Hold { host: 1, member: 0, until: held + 60 }),
            (held + 5, Act::Ask(0, OTHER)),
        ];
        acts.extend(often(1_700, 1_800, Act::Ask(1, READ_OTHER)));
        acts
    });
}

/// A write of the owner before is at the LUN, or on the way there, for a long time. Two owners have had the disk when it is
/// executed.
fn late_write(late: u64, delayed: [(u64, Act); 2], then: Vec<(u64, Act)>) -> Vec<(u64, Act)> {
    let mut acts = vec![
        (0, Act::Start),
        // Its region is dirty from now on.
        (600, Act::Ask(0, OTHER)),
        (900, Act::CutRecord { host: 0, until: NEVER }),
        (980, Act::Cut { host: 0, member: 1, until: NEVER }),
        (985, Act::Ask(0, OTHER)),
        (1_000 + late, Act::Start),
        (1_600 + late, Act::Ask(1, Wanted::Flush)),
    ];
    acts.extend(delayed);
    acts.extend(then);
    acts
}

#[test]
fn orders_that_are_not_aborted_are_found() {
    let busy = [
        (980, Act::Busy { member: 0, until: 1_900 }),
        // Later orders are executed at once.
        (996, Act::Busy { member: 0, until: 0 }),
    ];
    needs(Rule::Lun(LunRule::Abort), &[Some(0), None], |late| late_write(late, busy, vec![]));
}

/// The write is on its way while no machine has the LUN reserved.
fn arrives_late(late: u64, then: Vec<(u64, Act)>) -> Vec<(u64, Act)> {
    let held = Act::Cut { host: 0, member: 0, until: 2_500 };
    late_write(late, [(984, held), (1_750, Act::Kill(1))], then)
}

#[test]
fn a_reservation_that_is_given_back_is_found() {
    needs(Rule::Lun(LunRule::Keep), &[Some(0), None], |late| arrives_late(late, vec![]));
}

#[test]
fn a_target_that_forgets_the_reservation_is_found() {
    let restart = vec![(1_800, Act::RestartLun(0))];
    needs(Rule::Lun(LunRule::Persist), &[Some(0), None], |late| {
        arrives_late(late, restart.clone())
    });
}

/// The owner before only reads, and does not hear of its end. A write of the present one is on one LUN, and not on the other.
#[test]
fn a_session_that_the_lun_does_not_confirm_is_found() {
    needs(Rule::Lun(LunRule::Ask), &[Some(0), Some(1), Some(2)], |late| {
        let mut acts = vec![
            (0, Act::Start),
            (600, Act::Ask(0, WRITE)),
            (900, Act::CutRecord { host: 0, until: NEVER }),
            (1_000 + late, Act::Start),
            (2_000, Act::Hold { host: 1, member: 1, until: 2_200 }),
            (2_000, Act::Hold { host: 1, member: 2, until: 2_200 }),
            (2_001, Act::Ask(1, WRITE)),
        ];
        acts.extend(often(2_002, 2_190, Act::Ask(0, READ)));
        acts
    });
}

/// Two copies are on one LUN, and an order of one of them fails: that one never comes back while the other has the LUN.
#[test]
fn copies_that_keep_a_failed_lun_are_found() {
    needs(Rule::Lun(LunRule::LetGo), &[Some(0), Some(0)], |late| {
        let time = 7_000 + late;
        vec![
            (0, Act::Start),
            (time, Act::Ask(1, WRITE)),
            (time + 2, Act::FailLun { host: 1, member: 0 }),
        ]
    });
}

/// An owner of the past does not hear of the present one until that has the disk, and then opens its LUN again.
#[test]
fn an_owner_of_the_past_that_takes_a_lun_is_found() {
    needs(Rule::Pool(PoolRule::LunLookBefore), &[Some(0)], |late| {
        vec![
            (0, Act::Start),
            (600, Act::Ask(0, WRITE)),
            (900, Act::CutRecord { host: 0, until: NEVER }),
            (990, Act::Cut { host: 0, member: 0, until: 1_700 }),
            (1_000 + late, Act::Start),
            (1_760, Act::Ask(1, WRITE)),
            (1_960, Act::Idle(1)),
        ]
    });
}

/// The owner before does not hear of its end but from the LUN, and opens that again while the present one waits.
#[test]
fn owners_that_take_a_lun_from_each_other_are_found() {
    needs(Rule::Pool(PoolRule::LunClaim), &[Some(0)], |late| {
        vec![
            (0, Act::Start),
            (600, Act::Ask(0, WRITE)),
            (900, Act::CutRecord { host: 0, until: NEVER }),
            (1_000 + late, Act::Start),
            (1_200, Act::Ask(1, WRITE)),
            (1_600, Act::Idle(1)),
        ]
    });
}
