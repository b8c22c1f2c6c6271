//! Front ends and guests that do what they may not, by vhost-user. Each violation ends their connection or their queue;
//! the next front end is served as if nothing had been.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_testkit::vhost::{
    Ask, Driver, EVENT_INDEX, FrontEnd, GUEST_BASE, Guest, NEXT, PROTOCOL, Region, Served, TABLE,
    WRITE, kind, message, options,
};
use ferrite_testkit::wait_until;

const BYTES: u64 = 16 << 20;
const ENTRIES: u16 = 64;

fn set_up(served: &Served, without: u64) -> (FrontEnd, Driver) {
    let guest = Guest::new(Driver::memory_bytes(1, ENTRIES));
    let front = FrontEnd::connect(&served.socket);
    let features = front.agree(without);
    front.give(&guest);
    let driver = Driver::new(&guest, 0, ENTRIES, features);
    assert!(front.start(&driver, 0));
    (front, driver)
}

/// A guest that does nothing wrong is served.
fn is_served(served: &Served) {
    let (_front, mut driver) = set_up(served, 0);
    assert_eq!(driver.call(&Ask::write(1, &[5; 512])).0, 0);
    assert_eq!(driver.call(&Ask::read(1, 512)), (0, vec![5; 512]));
}

#[test]
fn memory_tables_that_overlap_wrap_or_are_not_there_end_the_connection() {
    let served = Served::new("raw", BYTES, options());
    let guest = Guest::new(1 << 20);
    let region = |guest: u64, len: u64, user: u64, offset: u64| Region { guest, len, user, offset };
    let half = 1 << 19;
    let tables: [Vec<Region>; 10] = [
        // Two that overlap for the guest, and for the front end.
        vec![region(0, half, 0, 0), region(half - 1, half, 1 << 30, half)],
        vec![region(0, half, 0, 0), region(1 << 30, half, half - 1, half)],
        vec![region(0, half, 0, 0), region(0, half, 0, 0)],
        // That wrap.
        vec![region(u64::MAX - 10, half, 0, 0)],
        vec![region(0, half, u64::MAX - 10, 0)],
        vec![region(0, half, 0, u64::MAX - 10)],
        // Empty, or larger than the file.
        vec![region(0, 0, 0, 0)],
        vec![region(0, (1 << 20) + 1, 0, 0)],
        vec![region(0, half, 0, 1 << 20)],
        vec![region(0, u64::MAX, 0, 0)],
    ];
    for table in tables {
        let front = FrontEnd::connect(&served.socket);
        front.agree(0);
        let files = vec![guest.file.as_fd(); table.len()];
        assert!(!front.set_memory(&table, &files), "{table:?}");
        assert!(front.is_closed());
    }
    // No memory at all, but a device that is always readable.
    let front = FrontEnd::connect(&served.socket);
    front.agree(0);
    let zero = std::fs::File::options().read(true).write(true).open("/dev/zero").unwrap();
    assert!(!front.set_memory(&[region(0, half, 0, 0)], &[zero.as_fd()]));
    is_served(&served);
}

#[test]
fn memory_that_shrinks_under_a_queue_ends_the_connection_and_not_the_process() {
    let served = Served::new("raw", BYTES, options());
    for data_only in [false, true] {
        let (front, mut driver) = set_up(&served, 0);
        assert_eq!(driver.call(&Ask::write(0, &[1; 4096])).0, 0);
        let head = driver.prepare(0, &Ask::write(0, &[2; 64 << 10]));
        // Either the data alone have gone, or the ring as well.
        let len = if data_only { driver.data_at(0) as u64 } else { 0 };
        if data_only {
            // The ring is in the first half; the data behind it go.
            driver.guest.file.set_len(len.next_multiple_of(4096)).unwrap();
            driver.offer(head);
        } else {
            driver.guest.file.set_len(0).unwrap();
            driver.kick();
        }
        assert!(front.is_closed());
        // Nothing of it was written.
        let (_front, mut driver) = set_up(&served, 0);
        assert_eq!(driver.call(&Ask::read(0, 4096)), (0, vec![1; 4096]));
    }
    is_served(&served);
}

#[test]
fn messages_that_make_no_sense_end_the_connection() {
    let served = Served::new("raw", BYTES, options());
    let guest = Guest::new(1 << 20);
    let encode = FrontEnd::encode;
    let number = |value: u64| value.to_le_bytes().to_vec();
    let state = |queue: u32, value: u32| [queue, value].map(u32::to_le_bytes).concat();
    let mut bad_version = encode(message::GET_FEATURES, &[]);
    bad_version[4] = 2;
    let mut too_long = encode(message::GET_FEATURES, &[]);
    too_long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let none = 0;
    for (bytes, files) in [
        (bad_version, none),
        (too_long, none),
        (encode(999, &[]), none),
        // A log of dirty pages was not agreed on.
        (encode(message::SET_LOG_BASE, &[0; 16]), 1),
        (encode(message::GET_FEATURES, &[0; 8]), none),
        (encode(message::GET_FEATURES, &[]), 1),
        (encode(message::SET_FEATURES, &number(u64::MAX)), none),
        (encode(message::SET_PROTOCOL_FEATURES, &number(u64::MAX)), none),
        // Queues that are not there.
        (encode(message::SET_VRING_NUM, &state(4, 64)), none),
        (encode(message::SET_VRING_NUM, &state(1 << 16, 64)), none),
        (encode(message::SET_VRING_ENABLE, &state(u32::MAX, 1)), none),
        (encode(message::GET_VRING_BASE, &state(99, 0)), none),
        (encode(message::SET_VRING_KICK, &number(1 << 20)), 1),
        // Sizes that no queue has.
        (encode(message::SET_VRING_NUM, &state(0, 0)), none),
        (encode(message::SET_VRING_NUM, &state(0, 63)), none),
        (encode(message::SET_VRING_NUM, &state(0, 1 << 16)), none),
        (encode(message::SET_VRING_BASE, &state(0, 1 << 16)), none),
        // Too few and too many descriptors, and no event descriptor.
        (encode(message::SET_VRING_KICK, &number(0)), 0),
        (encode(message::SET_VRING_KICK, &number(0)), 2),
        (encode(message::SET_VRING_KICK, &number(0)), 30),
        (encode(message::SET_VRING_KICK, &number(0)), 1),
        (encode(message::SET_VRING_KICK, &number(1 << 8)), 0),
        (encode(message::SET_MEM_TABLE, &state(9, 0)), 0),
        (encode(message::SET_MEM_TABLE, &state(1, 0)), 1),
        (encode(message::SET_MEM_TABLE, &[1]), 0),
        (encode(message::GET_CONFIG, &[0; 4]), none),
        (encode(message::GET_CONFIG, &[[0; 4], 300u32.to_le_bytes(), [0; 4]].concat()), none),
    ] {
        let front = FrontEnd::connect(&served.socket);
        front.send(&bytes, &vec![guest.file.as_fd(); files]);
        assert!(front.is_closed(), "{bytes:?} with {files} descriptors");
    }
    is_served(&served);
}

#[test]
fn a_front_end_that_stops_in_the_middle_of_a_message_keeps_nobody_from_stopping() {
    let mut served = Served::new("raw", BYTES, options());
    for len in [1, 11, 12, 15] {
        let front = FrontEnd::connect(&served.socket);
        let bytes = FrontEnd::encode(message::SET_FEATURES, &[0; 8]);
        front.send(&bytes[..len], &[]);
    }
    let front = FrontEnd::connect(&served.socket);
    front.send(&FrontEnd::encode(message::SET_FEATURES, &[0; 8])[..14], &[]);
    served.stop().unwrap();
    drop(front);
}

#[test]
fn rings_outside_of_the_memory_or_not_aligned_end_the_connection() {
    let served = Served::new("raw", BYTES, options());
    let guest = Guest::new(Driver::memory_bytes(1, ENTRIES));
    let end = guest.user(guest.memory.len() as u64 - 1) + 1;
    let good = guest.user(0);
    for (desc, used, avail) in [
        (0, good, good),
        (good, 0, good),
        (good, good, 0),
        (end - 16, good, good),
        (good, end - 8, good),
        (good, good, end - 2),
        (good + 8, good, good),
        (good, good + 2, good),
        (good, good, good + 1),
        (u64::MAX - 15, good, good),
        (good, u64::MAX - 3, good),
    ] {
        let front = FrontEnd::connect(&served.socket);
        let features = front.agree(0);
        front.give(&guest);
        let driver = Driver::new(&guest, 0, ENTRIES, features);
        let zero = 0u64.to_le_bytes();
        assert!(front.set_state(message::SET_VRING_NUM, 0, ENTRIES.into()));
        let mut body = [0u32, 0].map(u32::to_le_bytes).concat();
        body.extend([desc, used, avail, 0].map(u64::to_le_bytes).concat());
        assert!(front.order(message::SET_VRING_ADDR, &body, &[]));
        assert!(front.order(message::SET_VRING_KICK, &zero, &[driver.kick.as_fd()]));
        assert!(!front.set_state(message::SET_VRING_ENABLE, 0, 1), "{desc:x} {used:x} {avail:x}");
        assert!(front.is_closed());
    }
    is_served(&served);
}

/// A guest's change of a good request in slot 0, whose descriptors are 0, 1 and 2.
type Harm = fn(&Driver);

#[test]
fn descriptors_that_make_no_sense_break_their_queue_until_the_driver_starts_again() {
    let served = Served::new("raw", BYTES, options());
    let harms: [(&str, Harm); 17] = [
        ("a loop", |d| d.put_desc(d.desc_at() + 16, GUEST_BASE, 8, NEXT, 0)),
        ("a loop of one", |d| d.put_desc(d.desc_at(), GUEST_BASE, 16, NEXT, 0)),
        ("behind the last", |d| d.put_desc(d.desc_at(), GUEST_BASE, 16, NEXT, ENTRIES)),
        ("empty", |d| d.put_desc(d.desc_at() + 16, GUEST_BASE, 0, NEXT, 2)),
        ("outside", |d| d.put_desc(d.desc_at() + 16, 16, 512, NEXT, 2)),
        ("over the end", |d| {
            let end = GUEST_BASE + d.guest.memory.len() as u64;
            d.put_desc(d.desc_at() + 16, end - 8, 512, NEXT, 2);
        }),
        ("wraps", |d| d.put_desc(d.desc_at() + 16, u64::MAX - 8, 512, NEXT, 2)),
        ("lengths", |d| d.put_desc(d.desc_at() + 16, GUEST_BASE, usize::MAX, NEXT, 2)),
        ("status read-only", |d| d.put_desc(d.desc_at() + 32, GUEST_BASE, 1, 0, 0)),
        ("no status", |d| d.put_desc(d.desc_at() + 16, GUEST_BASE, 512, 0, 0)),
        ("short header", |d| {
            d.put_desc(d.desc_at(), GUEST_BASE, 15, NEXT, 2);
        }),
        ("order", |d| {
            d.put_desc(d.desc_at(), GUEST_BASE + d.header_at(0) as u64 + 32, 16, NEXT | WRITE, 1);
        }),
        ("table and more", |d| d.put_desc(d.desc_at(), GUEST_BASE, 32, TABLE | NEXT, 1)),
        // It is a request but for that flag.
        ("table in a table", |d| {
            let (header, table) = (d.header_at(0), d.header_at(0) + 64);
            let guest = |at: usize| GUEST_BASE + at as u64;
            d.put_desc(table, guest(header), 16, NEXT, 1);
            d.put_desc(table + 16, guest(d.data_at(0)), 512, NEXT | TABLE, 2);
            d.put_desc(table + 32, guest(header + 32), 1, WRITE, 0);
            d.put_desc(d.desc_at(), guest(table), 48, TABLE, 0);
        }),
        ("table of half a descriptor", |d| d.put_desc(d.desc_at(), GUEST_BASE, 24, TABLE, 0)),
        ("table of millions", |d| d.put_desc(d.desc_at(), GUEST_BASE, 16 << 20, TABLE, 0)),
        ("loop in a table", |d| {
            let table = d.header_at(0) + 64;
            (0..2).for_each(|i| d.put_desc(table + 16 * i, GUEST_BASE, 8, NEXT, 0));
            d.put_desc(d.desc_at(), GUEST_BASE + table as u64, 32, TABLE, 0);
        }),
    ];
    let (front, mut driver) = set_up(&served, 0);
    for (name, harm) in harms {
        let good = driver.prepare(1, &Ask::write(9, &[9; 512]));
        driver.offer(good);
        assert_eq!(driver.wait_used().0, good, "{name}");
        let head = driver.prepare(0, &Ask::write(3, &[3; 512]));
        harm(&driver);
        driver.offer(head);
        wait_until(&format!("{name}: a broken queue"), || driver.is_broken());
        assert_eq!(driver.next_used(), None, "{name}");
        assert!(front.is_alive(), "{name}");
        // The driver starts again, behind the bad request.
        front.stop(0);
        assert!(front.start(&driver, driver.avail), "{name}");
    }
    // Nothing of them was written.
    assert_eq!(driver.call(&Ask::read(3, 512)), (0, vec![0; 512]));
    drop(front);
    is_served(&served);
}

#[test]
fn heads_and_indexes_that_make_no_sense_break_the_queue() {
    let served = Served::new("raw", BYTES, options());
    for harm in 0..3 {
        let (front, mut driver) = set_up(&served, EVENT_INDEX);
        match harm {
            // A head that is none.
            0 => driver.offer(ENTRIES),
            // More requests than the queue has.
            1 => {
                let memory = &driver.guest.memory;
                memory.store_u16(driver.avail_at() + 2, ENTRIES + 1).unwrap();
                driver.kick();
            }
            // The same request twice, while it is in flight: as both are taken in one turn.
            _ => {
                let head = driver.prepare(0, &Ask::read(0, 1 << 20));
                let memory = &driver.guest.memory;
                for slot in 0..2 {
                    memory.store_u16(driver.avail_at() + 4 + 2 * slot, head).unwrap();
                }
                memory.store_u16(driver.avail_at() + 2, 2).unwrap();
                driver.kick();
            }
        }
        wait_until("a broken queue", || driver.is_broken());
        assert!(front.is_alive());
    }
    is_served(&served);
}

#[test]
fn queues_of_a_front_end_without_protocol_features_run_at_once() {
    let served = Served::new("raw", BYTES, options());
    let guest = Guest::new(Driver::memory_bytes(1, ENTRIES));
    let front = FrontEnd::connect(&served.socket);
    let features = front.ask(message::GET_FEATURES, &[]).number() & !PROTOCOL;
    front.tell(message::SET_FEATURES, &features.to_le_bytes(), &[]);
    let table = guest.table();
    let mut body = [table.len() as u32, 0].map(u32::to_le_bytes).concat();
    for region in &table {
        let words = [region.guest, region.len, region.user, region.offset];
        body.extend(words.map(u64::to_le_bytes).concat());
    }
    front.tell(message::SET_MEM_TABLE, &body, &[guest.file.as_fd(); 2]);
    let mut driver = Driver::new(&guest, 0, ENTRIES, features);
    let state = |value: u32| [0, value].map(u32::to_le_bytes).concat();
    front.tell(message::SET_VRING_NUM, &state(ENTRIES.into()), &[]);
    front.tell(message::SET_VRING_ADDR, &driver.addresses(), &[]);
    let zero = 0u64.to_le_bytes();
    front.tell(message::SET_VRING_CALL, &zero, &[driver.call.as_fd()]);
    front.tell(message::SET_VRING_KICK, &zero, &[driver.kick.as_fd()]);
    assert_eq!(driver.call(&Ask { kind: kind::FLUSH, ..Ask::flush() }).0, 0);
}

/// Ends the other thread of a test, also when this one fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Each byte is read once, or from a copy, so the checked value is the one that is used.
#[test]
fn a_guest_that_changes_its_requests_while_they_are_read_stays_on_its_disk() {
    let served = Served::new("raw", BYTES, options());
    let (front, mut driver) = set_up(&served, 0);
    assert_eq!(driver.call(&Ask::write(0, &[7; 4096])).0, 0);
    let (guest, header) = (driver.guest.clone(), driver.header_at(0));
    let len_at = driver.desc_at() + 16 + 8;
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let last = BYTES / 512;
            for turn in 0u64.. {
                // A number that is half written is none that would break the queue, and no sector below 8.
                let sector = [8, last + 9, (1 << 40) + 8, u64::MAX][turn as usize % 4];
                guest.memory.copy_in(header + 8, &sector.to_le_bytes()).unwrap();
                let len = [512u32, 511, 0x8200][turn as usize % 3];
                guest.memory.copy_in(len_at, &len.to_le_bytes()).unwrap();
                if ended.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let mut statuses = [0; 2];
        let _end = End(&ended);
        for turn in 0..2000 {
            let ask = match turn % 2 {
                0 => Ask::write(8, &[turn as u8; 64 << 10]),
                _ => Ask::read(8, 64 << 10),
            };
            let head = driver.prepare(0, &ask);
            driver.offer(head);
            assert_eq!(driver.wait_used().0, head);
            statuses[usize::from(driver.status(0))] += 1;
        }
        assert!(statuses[0] > 0 && statuses[1] > 0, "{statuses:?}");
    });
    assert_eq!(driver.call(&Ask::read(0, 4096)), (0, vec![7; 4096]));
    assert_eq!(std::fs::metadata(&served.image).unwrap().len(), BYTES);
    assert!(front.is_alive());
}
