//! Stories of a disk whose writes go to a second one, too.

use ferrite_disk::Format;
use ferrite_sim::mirror::{Told, tell};
use ferrite_testkit::rounds;

fn tell_all(kinds: [Format; 2], seeds: u64) -> Told {
    let mut all = Told::default();
    for seed in 0..seeds {
        let told = tell(kinds, seed).unwrap_or_else(|e| panic!("{kinds:?}, seed {seed}: {e}"));
        all.cuts += told.cuts;
        all.deaths += told.deaths;
        all.complete += told.complete;
        all.away += told.away;
        all.differing += told.differing;
        all.voids += told.voids;
        all.begun.0 += told.begun.0;
        all.begun.1 += told.begun.1;
    }
    println!("{kinds:?}: {all:?}");
    all
}

fn all_is_named(kinds: [Format; 2]) {
    let seeds = 2 * u64::from(rounds(40));
    let all = tell_all(kinds, seeds);
    assert!(all.cuts > seeds && all.deaths > seeds, "{all:?}");
    assert!(all.complete > seeds / 2 && all.away > seeds / 4, "{all:?}");
    assert!(all.differing > seeds && all.voids < all.cuts / 4, "{all:?}");
    // A power cut does not begin the copy anew.
    assert!(all.begun.0 < all.begun.1 * 3 / 4, "{all:?}");
}

#[test]
fn the_maps_of_a_mirror_name_all_in_which_the_disks_differ_after_any_end() {
    all_is_named([Format::Raw, Format::Raw]);
}

#[test]
#[ignore = "takes minutes"]
fn the_maps_of_a_mirror_of_formats_name_all_in_which_the_disks_differ_after_any_end() {
    all_is_named([Format::Raw, Format::Qcow2]);
    all_is_named([Format::Qcow2, Format::Raw]);
    all_is_named([Format::Vhd, Format::Vhd]);
}
