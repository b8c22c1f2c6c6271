//! The first stories of all kinds, of the formats that are served.

use std::sync::{Mutex, PoisonError};

use ferrite_sim::format::Format;
use ferrite_sim::images::{Images, Medium};
use ferrite_sim::plan::{Plan, Scenario};
use ferrite_sim::story::tell;
use ferrite_testkit::rounds;

/// A program that one test starts would, for a moment, hold the locks of another test's images.
static ALONE: Mutex<()> = Mutex::new(());

/// Tells the stories of the first so many seeds.
fn tell_all(format: &impl Format, seeds: u32) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for scenario in Scenario::ALL {
        for seed in 0..u64::from(seeds) {
            if let Err(found) = tell(format, &Plan::new(seed, scenario)) {
                panic!("{found}");
            }
        }
    }
}

#[test]
fn raw_keeps_its_promises() {
    tell_all(&Images::new(ferrite_disk::Format::Raw), rounds(10));
    tell_all(&Images::new(ferrite_disk::Format::Raw).on(Medium::Devices), rounds(4));
}

/// Stories that ended badly once.
#[test]
fn what_was_mended_stays_mended() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    use ferrite_disk::Format::{Qcow2, Raw, Vhd};
    // The sizes that blocks and clusters had then.
    let units = |format| if format == Vhd { 2 << 20 } else { 4 << 10 };
    for (format, scenario, seed) in [
        // A grow that was interrupted, and done again without a sync.
        (Raw, Scenario::Operations, 166),
        // Zeros that were left out where a discard had cleared bits in memory only.
        (Vhd, Scenario::Discards, 28),
        // A batmap that said full where a discard had cleared bits.
        (Vhd, Scenario::Discards, 83),
        // A temporary name that a power cut brought back, of a file that was finished.
        (Vhd, Scenario::Operations, 20),
        // A commit after a sync that failed, of clusters whose copied data was lost.
        (Qcow2, Scenario::FlushStorm, 58),
    ] {
        let plan = Plan::new(seed, scenario);
        if let Err(found) = tell(&Images::new(format).in_units(units(format)), &plan) {
            panic!("{found}");
        }
    }
}

/// A discard gave up the leaf's copy of what was in a parent's journal, which a power cut ends.
#[test]
fn what_is_read_above_a_parents_journal_after_a_discard_is_read_after_a_power_cut() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let plan = Plan::new(81_355_488_555_118, Scenario::Chains);
    if let Err(found) = tell(&Images::new(ferrite_disk::Format::Vhd), &plan) {
        panic!("{found}");
    }
}

/// With the clusters that the seed says.
#[test]
fn what_a_table_has_that_only_a_journal_refers_to_is_recovered_from_a_parent() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let plan = Plan::new(130, Scenario::Chains);
    if let Err(found) = tell(&Images::new(ferrite_disk::Format::Qcow2), &plan) {
        panic!("{found}");
    }
}

#[test]
fn vhd_keeps_its_promises() {
    tell_all(&Images::new(ferrite_disk::Format::Vhd), rounds(5));
    tell_all(&Images::new(ferrite_disk::Format::Vhd).on(Medium::Devices), rounds(3));
}

#[test]
fn qcow2_keeps_its_promises() {
    tell_all(&Images::new(ferrite_disk::Format::Qcow2), rounds(5));
    tell_all(&Images::new(ferrite_disk::Format::Qcow2).on(Medium::Devices), rounds(3));
}

/// Snapshots, and merges below the leaf, of a disk in use, with power cuts in each step.
#[test]
fn a_disk_that_is_changed_in_use_keeps_its_promises() {
    use ferrite_disk::Format::{Qcow2, Vhd};
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for seed in 1000..1000 + u64::from(rounds(60)) {
        for format in [Vhd, Qcow2] {
            if let Err(found) = tell(&Images::new(format), &Plan::new(seed, Scenario::Live)) {
                panic!("{found}");
            }
        }
    }
}

/// A write was answered behind a sync that failed for another, and the process died with the news.
#[test]
fn a_write_that_is_gone_with_a_failed_sync_is_known_to_be_so() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let plan = Plan::new(148_857_267_486_021, Scenario::Chains);
    if let Err(found) = tell(&Images::new(ferrite_disk::Format::Vhd), &plan) {
        panic!("{found}");
    }
}
