//! Frontends that publish invalid values (threats.md T11): refused with a reason, and without harm to a correct
//! frontend later.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use ferrite_loopback::front::{
    Buffer, FrontOptions, FrontQueue, Frontend, GuestSpace, Keys, QueueOptions, RingKeys,
};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::proc::status_kib;
use ferrite_testkit::rig::{Plan, Rig, offer};
use ferrite_xen::abi::Protocol;
use ferrite_xen::hypervisor::DomId;

/// Memory is measured for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn plan() -> Plan {
    Plan { bytes: 1 << 20, pool_bytes: 4 << 20, ..Plan::default() }
}

/// Peaks of address space and of memory, in KiB.
fn peaks() -> [u64; 2] {
    ["VmPeak", "VmHWM"].map(status_kib)
}

/// Offers keys changed by `edit`, and checks that the frontend is refused with a reason that contains `why`.
fn refused(
    rig: &mut Rig,
    front: &mut Frontend,
    options: &FrontOptions,
    why: &str,
    edit: impl FnOnce(&mut Keys),
) {
    front.set_state(1).unwrap();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    front.read_features().unwrap();
    front.offer_edited(options, edit).unwrap();
    let state = front.wait_for_backend(&[4, 5, 6], PATIENCE).unwrap();
    assert_eq!(state, 5, "{why}");
    let said = rig.wait_for_error();
    assert!(said.contains(why), "{said:?} does not say {why:?}");
    assert!(said.len() < 300, "{} bytes", said.len());
    let memory = front.space().memory();
    let held = (memory.grants().users(), memory.bound_ports());
    assert_eq!(held, (0, 0), "{why}: still held after the refusal");
    front.queues.drain(..).for_each(|queue| queue.release().unwrap());
    front.set_state(6).unwrap();
    front.wait_for_backend(&[6], PATIENCE).unwrap();
}

fn works(front: &mut Frontend) {
    front
        .connect(&FrontOptions { queues: 2, order: 1, ..FrontOptions::default() }, PATIENCE)
        .unwrap();
    let buffer = front.space().buffer(1).unwrap();
    front.queues[1].write(0, &buffer, 0, 4096).unwrap();
    assert!(front.queues[1].next_reply(PATIENCE).unwrap().is_ok());
    front.close(PATIENCE).unwrap();
}

/// Texts that are not valid numbers.
fn bad_numbers() -> Vec<Vec<u8>> {
    let mut bad: Vec<Vec<u8>> = [
        "-1",
        "64",
        "4294967297",
        "4294967295",
        "18446744073709551616",
        "0x10",
        "",
        " 1",
        "1 ",
        "+1",
        "1\n",
        "1.0",
        "1e9",
        "1000000000",
        "\u{661}",
        "00000000000001",
        "one",
        "-0",
    ]
    .iter()
    .map(|text| text.as_bytes().to_vec())
    .collect();
    bad.extend([vec![b'1'; 2000], vec![b'x'; 2000], b"1\0".to_vec(), b"\0".to_vec()]);
    bad.extend([vec![0xFF, 0xFE], vec![b'0'; 2000]]);
    bad
}

#[test]
fn numbers_that_are_none_are_refused_and_cost_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let mut rig = Rig::new(plan());
    let mut front = rig.frontend();
    works(&mut front);
    let before = peaks();
    let many = FrontOptions { queues: 2, order: 2, ..FrontOptions::default() };
    let windows = FrontOptions { always_num_queues: true, ..FrontOptions::default() };
    let pages = FrontOptions { order: 1, ring_keys: RingKeys::NumRingPages, ..windows };
    for bad in bad_numbers() {
        for (options, key) in [
            (&many, "ring-page-order"),
            (&windows, "multi-queue-num-queues"),
            (&pages, "num-ring-pages"),
        ] {
            refused(&mut rig, &mut front, options, key, |keys| keys.set_bytes(key, &bad));
        }
    }
    // References and ports may have any number, but must be valid.
    let zeros = vec![b'0'; 2000];
    for bad in bad_numbers().into_iter().filter(|b| *b != zeros) {
        let key = "queue-1/ring-ref3";
        refused(&mut rig, &mut front, &many, "", |keys| keys.set_bytes(key, &bad));
        let key = "queue-0/event-channel";
        refused(&mut rig, &mut front, &many, "", |keys| keys.set_bytes(key, &bad));
    }
    for (options, key, value) in [
        (&many, "multi-queue-num-queues", "0"),
        (&windows, "multi-queue-num-queues", "0"),
        (&many, "multi-queue-num-queues", "5"),
        (&many, "ring-page-order", "5"),
        (&pages, "num-ring-pages", "0"),
        (&pages, "num-ring-pages", "3"),
        (&pages, "num-ring-pages", "32"),
    ] {
        refused(&mut rig, &mut front, options, key, |keys| keys.set(key, value));
    }
    // A thread's malloc alone takes up to 128 MiB of addresses.
    let most = [1 << 20, 64 << 10];
    for ((before, after), most) in before.iter().zip(peaks()).zip(most) {
        assert!(after - before < most, "{before} KiB became {after} KiB");
    }
    works(&mut front);
}

#[test]
fn references_that_mean_nothing_are_refused() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let mut rig = Rig::new(plan());
    let mut front = rig.frontend();
    let many = FrontOptions { queues: 2, order: 2, ..FrontOptions::default() };
    let missing = [
        "queue-0/ring-ref0",
        "queue-1/ring-ref3",
        "queue-1/event-channel",
        "queue-0/event-channel",
        "ring-page-order",
    ];
    for key in missing {
        refused(&mut rig, &mut front, &many, "missing", |keys| keys.remove(key));
    }
    for key in ["ring-ref", "event-channel"] {
        let one = FrontOptions::default();
        refused(&mut rig, &mut front, &one, "missing", |keys| keys.remove(key));
    }
    let copy = |keys: &mut Keys, from: &str, to: &str| {
        let value = keys.get(from).unwrap().to_owned();
        keys.set(to, value);
    };
    for (from, to) in [
        ("queue-0/ring-ref0", "queue-0/ring-ref1"),
        ("queue-0/ring-ref0", "queue-1/ring-ref2"),
        ("queue-0/ring-ref3", "queue-1/ring-ref3"),
    ] {
        refused(&mut rig, &mut front, &many, "twice", |keys| copy(keys, from, to));
    }
    let port = "event-channel";
    refused(&mut rig, &mut front, &many, "two queues", |keys| {
        copy(keys, &format!("queue-0/{port}"), &format!("queue-1/{port}"));
    });
    // Not granted, granted for reading only, granted to another domain, out of range.
    let pages = front.space().buffer(3).unwrap();
    pages.revoke(0).unwrap();
    pages.grant(1, true);
    let table = front.space().memory().grants();
    table.grant(pages.gref(2), DomId(9), pages.frame(2), false);
    let bad = [0, 1, pages.gref(0).0, pages.gref(1).0, pages.gref(2).0, 1 << 30, u32::MAX];
    for gref in bad {
        let key = "queue-1/ring-ref2";
        refused(&mut rig, &mut front, &many, "ring reference", |keys| keys.set(key, gref));
    }
    // A channel that is not bound, and numbers that no channel has.
    for port in [63, 64, 1 << 20, u32::MAX] {
        let key = "queue-1/event-channel";
        refused(&mut rig, &mut front, &many, "event channel", |keys| keys.set(key, port));
    }
    for protocol in ["arm-abi", "x86_64", "X86_64-abi", "", "x86_64-abi ", "x86_64-abi\0"] {
        refused(&mut rig, &mut front, &many, "protocol", |keys| keys.set("protocol", protocol));
    }
    let long = "x86_32-abi".repeat(200);
    refused(&mut rig, &mut front, &many, "protocol", |keys| keys.set("protocol", &long));
    works(&mut front);
}

/// A page that looks like a ring with this producer of requests.
fn ring_page(space: &Arc<GuestSpace>, req_prod: u32) -> Buffer {
    let page = space.buffer(1).unwrap();
    page.fill(0, 4096, 0);
    page.write(0, &req_prod.to_le_bytes());
    page
}

#[test]
fn a_ring_in_an_impossible_state_is_refused() {
    let mut rig = Rig::new(plan());
    let mut front = rig.frontend();
    for req_prod in [33, 1 << 31, u32::MAX] {
        front.set_state(1).unwrap();
        front.wait_for_backend(&[2], PATIENCE).unwrap();
        front.read_features().unwrap();
        // Written after the ring was made and before it is announced.
        let space = front.space().clone();
        let ring = ring_page(&space, req_prod);
        front
            .offer_edited(&FrontOptions::default(), |keys| {
                keys.set("ring-ref", ring.gref(0).0);
            })
            .unwrap();
        assert_eq!(front.wait_for_backend(&[4, 5, 6], PATIENCE).unwrap(), 5);
        let said = rig.wait_for_error();
        assert!(said.contains("impossible"), "{said}");
        front.queues.drain(..).for_each(|queue| queue.release().unwrap());
        front.set_state(6).unwrap();
        front.wait_for_backend(&[6], PATIENCE).unwrap();
    }
    works(&mut front);
}

/// The backend's ports are connected to this guest: a channel of another guest cannot be named. Its number is an
/// unopened channel of this one.
#[test]
fn a_channel_of_another_guest_is_not_reached() {
    let mut rig = Rig::without_backend(plan());
    let other = rig.machine.add_guest(Default::default()).unwrap();
    let other = GuestSpace::attach(&rig.machine.guest(other).unwrap()).unwrap();
    let options = QueueOptions {
        protocol: Protocol::X86_64,
        order: 0,
        max_indirect: 0,
        id_bits: 0,
        regrant: false,
        check_release: true,
        persistent: false,
    };
    let queues: Vec<_> = (0..4).map(|_| FrontQueue::new(&other, options).unwrap()).collect();
    rig.start();
    let mut front = rig.frontend();
    let theirs = queues[3].port();
    let one = FrontOptions::default();
    refused(&mut rig, &mut front, &one, "event channel", |keys| keys.set("event-channel", theirs));
    assert_eq!(other.memory().bound_ports(), 0);
    works(&mut front);
}

#[test]
fn what_was_offered_is_the_limit_of_what_may_be_asked() {
    let offer = Offer { max_queues: 2, max_ring_order: 1, max_indirect_segments: 0, ..offer() };
    let mut rig = Rig::new(Plan { offer, ..plan() });
    let mut front = rig.frontend();
    let linux = FrontOptions { exceed_offer: true, ..FrontOptions::default() };
    let order = FrontOptions { order: 2, ..linux };
    refused(&mut rig, &mut front, &order, "ring-page-order", |_| {});
    let queues = FrontOptions { queues: 3, ..linux };
    refused(&mut rig, &mut front, &queues, "multi-queue-num-queues", |_| {});
    works(&mut front);
}

/// A guest that only changes its state, as fast as it can, is followed, and one that stops is served.
#[test]
fn a_frontend_may_toggle_its_state_as_it_likes() {
    let rig = Rig::new(plan());
    let mut front = rig.frontend();
    let end = Instant::now() + std::time::Duration::from_millis(800) * ferrite_testkit::scale();
    let mut i = 0usize;
    while Instant::now() < end {
        let state = [1, 3, 4, 5, 6, 3, 2, 7, 8, 99, 4, 1, 0][i % 13];
        i += 1 + i % 3;
        match state {
            0 => front.remove_key("state").unwrap(),
            3 => {
                let options = FrontOptions { queues: 1 + i as u32 % 2, ..FrontOptions::default() };
                front.offer(&options).unwrap();
            }
            state => front.set_state(state).unwrap(),
        }
    }
    println!("{i} steps");
    front.queues.drain(..).for_each(FrontQueue::abandon);
    front.set_state(6).unwrap();
    front.wait_for_backend(&[2, 6], PATIENCE).unwrap();
    let end = Instant::now() + PATIENCE;
    let memory = front.space().memory();
    while memory.bound_ports() > 0 || memory.grants().users() > 0 {
        assert!(Instant::now() < end, "the last connection was not let go of");
    }
    works(&mut front);
}

/// Firmware, a system, another system: Linux writes these keys only for more than one queue or page, and never removes
/// them.
#[test]
fn a_driver_with_one_queue_is_connected_after_one_with_more_that_has_left_its_keys() {
    let rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.frontend();
    let one = FrontOptions { keep_keys: true, ..FrontOptions::default() };
    for (queues, order, ring_keys) in
        [(2, 0, RingKeys::Linux), (1, 2, RingKeys::Linux), (2, 1, RingKeys::Both)]
    {
        for closes in [true, false] {
            let more = FrontOptions { queues, order, ring_keys, ..one };
            for options in [more, one] {
                front.connect(&options, PATIENCE).unwrap();
                assert_eq!(front.queues.len(), options.queues as usize);
                let buffer = front.space().buffer(1).unwrap();
                for queue in &mut front.queues {
                    queue.write(8, &buffer, 0, 4096).unwrap();
                    assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "{options:?}");
                }
                if closes {
                    front.close(PATIENCE).unwrap();
                }
            }
        }
    }
    front.close(PATIENCE).unwrap();
}
