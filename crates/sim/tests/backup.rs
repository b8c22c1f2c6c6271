//! Stories of backups of a disk that is in use.

use ferrite_disk::Format;
use ferrite_sim::backup::{Told, tell};
use ferrite_testkit::rounds;

fn tell_all(format: Format, seeds: u64) -> Told {
    let mut all = Told::default();
    for seed in 0..seeds {
        let told = tell(format, seed).unwrap_or_else(|e| panic!("{format:?}, seed {seed}: {e}"));
        all.cuts += told.cuts;
        all.deaths += told.deaths;
        all.cut_late += told.cut_late;
        all.complete += told.complete;
        all.continued += told.continued;
        all.incremental += told.incremental;
        all.merged += told.merged;
        all.interrupted += told.interrupted;
    }
    println!("{format:?}: {all:?}");
    all
}

fn tell_of(format: Format) {
    let seeds = u64::from(rounds(40));
    let all = tell_all(format, seeds);
    assert!(all.cuts > seeds / 2 && all.deaths > seeds / 2, "{all:?}");
    assert!(all.continued > 0 && all.merged > 0 && all.cut_late > 0, "{all:?}");
    assert!(all.incremental > seeds && all.interrupted > 0, "{all:?}");
}

#[test]
fn a_backup_that_is_cut_anywhere_loses_no_change_of_a_running_disk() {
    tell_of(Format::Vhd);
}

#[test]
fn a_backup_of_a_qcow2_disk_that_is_cut_anywhere_loses_no_change() {
    tell_of(Format::Qcow2);
}
