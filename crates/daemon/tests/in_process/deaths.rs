//! Daemons that are killed: at each step, and under load. The next daemon goes on.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Child;
use std::time::Duration;

use ferrite_daemon::Step;
use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::{PATIENCE, scale, wait_until};

use crate::host::{Host, STEPS, works};
use crate::load::Load;

const MIB: u64 = 1 << 20;

fn attach(host: &Host, domid: u16) -> DiskPaths {
    let image = host.make_image(&format!("{domid}.img"), 4 * MIB);
    host.attach(domid, 0, &format!("aio:{}", image.display()))
}

fn kill(mut daemon: Child) {
    daemon.kill().unwrap();
    assert_eq!(daemon.wait().unwrap().signal(), Some(9));
}

#[test]
fn a_daemon_killed_at_a_step_of_an_attachment_is_followed_by_one_that_does_the_rest() {
    for step in [Step::StateWritten, Step::Kept, Step::Served] {
        let host = Host::new(2);
        let disks = [attach(&host, 1), attach(&host, 2)];
        // The second daemon finds the files of the first.
        for _ in 0..2 {
            let mut daemon = host.spawn(Some(step));
            assert_eq!(daemon.wait().unwrap().signal(), Some(9), "{step:?}");
        }
        assert!(!host.leftovers().is_empty(), "{step:?}");
        let daemon = host.spawn(None);
        for disk in &disks {
            let mut front = host.connect(disk);
            works(&mut front, 5);
            front.close(PATIENCE).unwrap();
            host.detach(disk);
        }
        host.wait_for_no_disks();
        kill(daemon);
    }
}

#[test]
fn a_daemon_killed_at_the_end_of_a_disk_leaves_nothing_that_the_next_one_does_not_remove() {
    let host = Host::new(1);
    let disk = attach(&host, 1);
    let mut daemon = host.spawn(Some(Step::Forgotten));
    let mut front = host.connect(&disk);
    works(&mut front, 5);
    front.close(PATIENCE).unwrap();
    host.detach(&disk);
    assert_eq!(daemon.wait().unwrap().signal(), Some(9));
    assert!(!host.leftovers().is_empty());
    let daemon = host.spawn(None);
    wait_until("an answer", || host.status().is_ok_and(|status| status.xen));
    host.wait_for_no_disks();
    kill(daemon);
    assert_eq!(STEPS.len(), 5, "each step is tried here, but that of a pause (pauses.rs)");
}

#[test]
fn daemons_killed_under_load_are_pauses_for_all_their_guests() {
    let host = Host::new(4);
    let disks: Vec<DiskPaths> = (1..=4).map(|domid| attach(&host, domid)).collect();
    let mut daemon = host.spawn(None);
    let loads: Vec<Load> = disks.iter().map(|disk| Load::start(&host, disk)).collect();
    let mut random = SplitMix64::new(1);
    for _ in 0..5 * scale() {
        loads.iter().for_each(Load::wait_for_progress);
        std::thread::sleep(Duration::from_micros(random.below(20_000)));
        kill(daemon);
        daemon = host.spawn(None);
    }
    for (load, disk) in loads.into_iter().zip(&disks) {
        load.end();
        host.detach(disk);
    }
    host.wait_for_no_disks();
    kill(daemon);
}
