//! The first stories of stores, and media that lie to them.

use ferrite_sim::images::Medium;
use ferrite_sim::model::After;
use ferrite_sim::plan::{Cut, Plan, Scenario, Violation};
use ferrite_sim::stores::{SCENARIOS, tell};
use ferrite_simio::Lie;
use ferrite_testkit::{is_night, rounds};

#[test]
fn stores_keep_their_promises() {
    for medium in [Medium::Files, Medium::Devices] {
        for scenario in SCENARIOS {
            for seed in 0..u64::from(rounds(4)) {
                if let Err(found) = tell(medium, &Plan::new(seed, scenario)) {
                    panic!("{found}");
                }
            }
        }
    }
}

/// Stories that ended badly once.
#[test]
fn what_was_mended_stays_mended() {
    for (medium, scenario, seed) in [
        // The check took a record in a pair that pages had left for one where pages are.
        (Medium::Files, Scenario::Mixed, 13),
    ] {
        if let Err(found) = tell(medium, &Plan::new(seed, scenario)) {
            panic!("{found}");
        }
    }
}

#[test]
fn a_story_and_its_cuts_are_told_again_by_the_seed() {
    let plan = |cut| Plan { cut, ..Plan::new(3, Scenario::Close) };
    let steps = |plan: &Plan| tell(Medium::Files, plan).unwrap_or_else(|found| panic!("{found}"));
    let whole = steps(&plan(None)).steps;
    assert_eq!(whole, steps(&plan(None)).steps);
    let mut rounds = 0;
    while let Some(round) =
        steps(&plan(Some(Cut { round: rounds, step: u64::MAX, after: After::Death }))).cut_round
    {
        let step = (round.start() + round.end()) / 2;
        for after in [After::Death, After::PowerCut] {
            let cut = steps(&plan(Some(Cut { round: rounds, step, after }))).cut_round.unwrap();
            assert_eq!((*cut.start(), *cut.end()), (*round.start(), step), "{rounds}");
        }
        rounds += 1;
    }
    assert!(rounds >= 4, "{rounds}");
}

/// The first of these stories on a medium that lies so in which that is found.
fn find_lie(
    medium: Medium,
    scenario: Scenario,
    lie: &Lie,
    seeds: impl IntoIterator<Item = u64>,
) -> Box<Violation> {
    let plan = |seed| Plan { lie: Some(lie.clone()), ..Plan::new(seed, scenario) };
    let found = seeds.into_iter().find_map(|seed| tell(medium, &plan(seed)).err());
    let found = found.unwrap_or_else(|| panic!("{lie:?} is not found on {medium:?}"));
    println!("{lie:?}: seed {}, {medium:?}: {}", found.plan.seed, found.what);
    found
}

/// The seeds below `end`, first those from `known` on, which finds it today.
fn from(known: u64, end: u64) -> impl Iterator<Item = u64> {
    (known..end).chain(0..known)
}

#[test]
fn a_medium_that_lies_to_a_store_is_found() {
    let media = [Medium::Files, Medium::Devices];
    for medium in media.into_iter().take(if is_night() { 2 } else { 1 }) {
        let find = |lie, known, end| {
            find_lie(medium, Scenario::FlushStorm, &lie, from(known, end));
        };
        find(Lie::Sync { of: 1, which: 0 }, 0, 50);
        for (which, known) in [(0, 94), (1, 30)] {
            find(Lie::Sync { of: 2, which }, known, 200);
        }
        find(Lie::Write { per_mille: 20 }, 0, 50);
        // The first home of the superblock is written ahead of the blocks that it leads to: a moment that few
        // stories end in, and of those mostly such as do everything.
        find_lie(medium, Scenario::Mixed, &Lie::SyncBefore(0..8192), from(26, 400));
    }
}
