//! Leaks after failed writes.

use ferrite_simio::{Fault, On};

use super::trouble::{EIO, Machine, on_parent};
use super::*;

/// Without a parent, places for writes are given out ahead.
fn alone(cluster_bytes: u32) -> impl FnOnce(&Path) {
    move |path| create(path, &NewImage { cluster_bytes, ..NewImage::new(8 << 20) })
}

fn fail_now_and_then(machine: &Machine, per_mille: u64) {
    let fault = |on| Fault { on, range: 0..u64::MAX, per_mille, errno: EIO, times: u64::MAX };
    machine.world.set_faults(vec![fault(On::Write), fault(On::Change)]);
}

/// One of several operations of a guest.
fn use_it(machine: &mut Machine, i: u64) -> std::io::Result<()> {
    let at = machine.world.below(8 << 11) * 512;
    let len = (512 << machine.world.below(8)).min((8 << 20) - at);
    match i % 8 {
        0 => machine.session.flush(),
        1 => machine.session.write_zeroes(at, len),
        2 => machine.session.discard(at, len),
        _ => machine.session.write(at, &vec![i as u8 + 1; len as usize]),
    }
}

#[test]
fn writes_that_failed_leave_no_leak_in_an_image_that_was_closed() {
    let mut failed = 0;
    for (seed, cluster_bytes) in (0..24).zip([512, 4096, 65536].into_iter().cycle()) {
        let mut machine = match seed % 2 {
            0 => Machine::new(seed, on_parent(cluster_bytes)),
            _ => Machine::new(seed, alone(cluster_bytes)),
        };
        for i in 0..64 {
            fail_now_and_then(&machine, 100);
            failed += u32::from(use_it(&mut machine, i).is_err());
        }
        machine.world.set_faults(Vec::new());
        let Machine { dir, session, .. } = machine;
        session.close().unwrap();
        let path = dir.path().join("a.qcow2");
        let report = check(&medium(&path)).unwrap();
        assert!(report.is_clean(), "seed {seed}, {cluster_bytes}: {report:?}");
        same_as_qemu(&path, &report);
    }
    assert!(failed > 100, "{failed} have failed");
}
