//! Checkpoints on storage that refuses some places.

use super::*;

/// All writes of these blocks fail.
pub(super) fn unwritable(blocks: std::ops::Range<u64>) -> Fault {
    let bytes = BLOCK_BYTES as u64;
    let range = blocks.start * bytes..blocks.end * bytes;
    Fault { on: On::Write, range, per_mille: 1000, errno: ENOSPC, times: u64::MAX }
}

/// A place for good, and its neighbours not.
#[test]
fn a_page_whose_place_or_copy_cannot_be_written_goes_elsewhere() {
    for (page, is_copy) in (0..).flat_map(|page| [(page, false), (page, true)]) {
        let (machine, model) = with_something();
        let mut process = machine.open().unwrap();
        process.model = model;
        process.create();
        process.write(0, 7, 7).unwrap();
        process.freeze(2);
        let (place, copy) = {
            let core = &mut *lock(&process.core);
            core.give_places().unwrap();
            let Some(place) = core.under_way.as_mut().unwrap().places().nth(page) else {
                assert!(page > 6, "leaves, inner pages, and pages of tables");
                return;
            };
            (place.unwrap(), core.layout.copy_of(place.unwrap()).unwrap())
        };
        let refused = if is_copy { copy } else { place };
        machine
            .machine
            .world
            .set_faults(vec![Fault { errno: EIO, ..unwritable(refused..refused + 1) }]);
        process.write_checkpoint().unwrap();
        let model = process.model.clone();
        let is_taken = |process: &Process| lock(&process.core).space.is_taken(place).unwrap();
        assert!(is_taken(&process));
        process.create();
        process.freeze(3);
        process.write_checkpoint().unwrap();
        assert!(!is_taken(&process), "it may be written some day");
        drop(process);
        machine.machine.world.cut_power().unwrap();
        let mut process = machine.open().unwrap();
        let found = process.contents().unwrap();
        assert!(model.iter().all(|(volume, leaves)| found[volume] == *leaves), "page {page}");
    }
}

/// Each try would take other places, until none are left.
#[test]
fn while_storage_refuses_all_writes_few_pages_get_other_places() {
    let (machine, model) = with_something();
    let mut process = machine.open().unwrap();
    process.model = model;
    process.create();
    process.freeze(2);
    let refused = Fault { errno: EIO, ..unwritable(0..BYTES / BLOCK_BYTES as u64) };
    machine.machine.world.set_faults(vec![refused]);
    let used = |process: &Process| lock(&process.core).space.used(crate::space::Kind::Metadata);
    let before = used(&process);
    for _ in 0..100 {
        assert_eq!(process.write_checkpoint().unwrap_err().raw_os_error(), Some(EIO));
    }
    assert!(used(&process) <= before + 2 * (MOST_MOVED + 10) as u64, "{}", used(&process));
    machine.machine.world.set_faults(Vec::new());
    process.write_checkpoint().unwrap();
    let model = process.model.clone();
    drop(process);
    machine.machine.world.cut_power().unwrap();
    assert!(machine.open().unwrap().contents().unwrap() == model);
}
