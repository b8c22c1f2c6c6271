//! The Windows driver differs from Linux: it resumes by closing, and keeps the features of its last host where the new
//! one does not name them.

use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_testkit::PATIENCE;
use ferrite_testkit::rig::{Plan, Rig};

fn plan() -> Plan {
    Plan { bytes: 1 << 20, pool_bytes: 4 << 20, ..Plan::default() }
}

/// Writes and reads one page, on each queue.
fn works(front: &mut Frontend, byte: u8) {
    let buffer = front.space().buffer(1).unwrap();
    for queue in &mut front.queues {
        buffer.fill(0, 4096, byte);
        queue.write(8, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        buffer.fill(0, 4096, 0);
        queue.read(8, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(buffer.to_vec(0, 4096), vec![byte; 4096]);
    }
}

/// Resumes, connects and works.
fn resumes(front: &mut Frontend, byte: u8) {
    front.resume_as_windows(PATIENCE).unwrap();
    front.connect(&FrontOptions::windows(), PATIENCE).unwrap();
    works(front, byte);
}

/// On a new host the guest closes a backend that has never had rings.
#[test]
fn a_resume_closes_a_backend_that_waits_for_its_first_rings() {
    let rig = Rig::new(plan());
    let mut front = rig.frontend();
    for byte in 1..4 {
        resumes(&mut front, byte);
    }
    front.resume_as_windows(PATIENCE).unwrap();
    // Twice without rings between.
    resumes(&mut front, 9);
    front.close(PATIENCE).unwrap();
}

/// A save that fails leaves the guest on its old host, where its rings are.
#[test]
fn a_resume_closes_the_backend_that_it_was_connected_to() {
    let mut rig = Rig::new(plan());
    let mut front = rig.connect(&FrontOptions::windows());
    works(&mut front, 1);
    resumes(&mut front, 2);
    // The next process of the backend is in the same states.
    rig.stop().unwrap();
    rig.start();
    resumes(&mut front, 3);
    front.close(PATIENCE).unwrap();
}

/// A key that is missing on a new host keeps the value of the old one.
#[test]
fn every_key_that_the_driver_reads_is_written_zeros_too() {
    let mut rig = Rig::new(plan());
    rig.change_offer(ferrite_serve::blkif::negotiate::Offer {
        max_indirect_segments: 0,
        ..ferrite_testkit::rig::offer()
    });
    rig.stop().unwrap();
    rig.start();
    let mut front = rig.connect(&FrontOptions::windows());
    for key in [
        "removable",
        "feature-max-indirect-segments",
        "feature-persistent",
        "max-ring-page-order",
        "multi-queue-max-queues",
        "info",
        "sector-size",
        "physical-sector-size",
        "sectors",
        "feature-barrier",
        "feature-flush-cache",
        "feature-discard",
        "discard-secure",
        "discard-alignment",
        "discard-granularity",
    ] {
        let value = front.backend_key(key).unwrap().unwrap_or_else(|| panic!("{key} is missing"));
        assert!(value.parse::<u64>().is_ok(), "{key} is {value:?}");
    }
    assert_eq!(front.backend_key("feature-max-indirect-segments").unwrap().unwrap(), "0");
    assert_eq!(front.backend_key("sector-size").unwrap().unwrap(), "512");
    front.close(PATIENCE).unwrap();
}
