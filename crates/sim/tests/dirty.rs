//! Stories of the maps of what has changed on a disk.

use ferrite_disk::Format;
use ferrite_sim::dirty::{Told, tell};
use ferrite_testkit::few_or_all;

fn tell_all(format: Format, seeds: u64) -> Told {
    let mut all = Told::default();
    for seed in 0..seeds {
        let told = tell(format, seed).unwrap_or_else(|e| panic!("{format:?}, seed {seed}: {e}"));
        all.cuts += told.cuts;
        all.deaths += told.deaths;
        all.interrupted += told.interrupted;
        all.differing += told.differing;
        all.named += told.named;
        all.voids += told.voids;
        all.kept.0 += told.kept.0;
        all.kept.1 += told.kept.1;
    }
    println!("{format:?}: {all:?}");
    all
}

#[test]
fn a_map_names_all_that_differs_from_the_last_backup_after_any_end() {
    for format in [Format::Raw, Format::Vhd, Format::Qcow2] {
        let seeds = u64::from(few_or_all(12, 200));
        let all = tell_all(format, seeds);
        assert!(all.cuts > seeds && all.deaths > seeds / 2, "{all:?}");
        assert!(all.interrupted > seeds / 4 && all.differing > 10 * seeds, "{all:?}");
        assert!(all.voids < all.cuts / 4, "{all:?}");
    }
}

#[test]
fn without_a_power_cut_a_map_names_blocks_and_not_whole_regions() {
    let all = tell_all(Format::Raw, few_or_all(12, 200).into());
    let (differing, named) = all.kept;
    // A request ends within its last block, and may write what was there.
    assert!(named < 3 * differing, "{differing} blocks differ, {named} are named");
}
