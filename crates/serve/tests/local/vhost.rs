//! vhost-user as a front end and its guest see it: the handshake, the results of requests, several queues, growth.

use ferrite_testkit::vhost::{
    Ask, Driver, EVENT_INDEX, FLUSH, FrontEnd, Guest, INDIRECT, LOG_ALL, PACKED, PROTOCOL, Served,
    kind, message, options,
};

const MIB: u64 = 1 << 20;
const BYTES: u64 = 64 * MIB;
const ENTRIES: u16 = 64;

/// A front end with its queues, as most tests want it.
fn set_up(served: &Served, queues: u16, without: u64) -> (FrontEnd, Vec<Driver>) {
    let guest = Guest::new(Driver::memory_bytes(queues, ENTRIES));
    let front = FrontEnd::connect(&served.socket);
    let features = front.agree(without);
    front.give(&guest);
    let drivers: Vec<_> =
        (0..queues).map(|number| Driver::new(&guest, number, ENTRIES, features)).collect();
    drivers.iter().for_each(|driver| assert!(front.start(driver, 0)));
    (front, drivers)
}

#[test]
fn a_front_end_is_told_of_the_disk_and_of_nothing_that_is_not_there() {
    let served = Served::new("raw", BYTES, options());
    let front = FrontEnd::connect(&served.socket);
    let features = front.ask(message::GET_FEATURES, &[]).number();
    let offered = FLUSH | INDIRECT | EVENT_INDEX | PROTOCOL;
    assert_eq!(features & (offered | PACKED | LOG_ALL), offered);
    assert_eq!(front.ask(message::GET_QUEUE_NUM, &[]).number(), 4);
    let config = |offset: u32, size: u32| {
        let mut body = [offset, size, 0].map(u32::to_le_bytes).concat();
        body.extend(vec![0; size as usize]);
        front.ask(message::GET_CONFIG, &body).body
    };
    let space = config(0, 60);
    assert_eq!(space[12..20], (BYTES / 512).to_le_bytes());
    assert_eq!(space[12 + 34..12 + 36], [4, 0]);
    assert_eq!(config(34, 2)[12..], [4, 0]);
    // An answer without bytes is an error.
    assert_eq!(config(250, 60).len(), 12);
    assert!(front.is_alive());
}

#[test]
fn what_a_guest_has_written_it_reads_again_by_descriptors_and_by_tables() {
    for (format, without) in [("raw", 0), ("qcow2", EVENT_INDEX), ("vhd", 0)] {
        let served = Served::new(format, BYTES, options());
        let (_front, mut drivers) = set_up(&served, 1, without);
        let driver = &mut drivers[0];
        for (turn, indirect) in [false, true, false].into_iter().enumerate() {
            driver.indirect = indirect;
            let fill = turn as u8 + 1;
            // One that has a part only, and one that has several.
            let (small, large) = (vec![fill; 512], vec![fill + 100; 1280 << 10]);
            assert_eq!(driver.call(&Ask::write(7, &small)).0, 0, "{format}");
            assert_eq!(driver.call(&Ask::write(8, &large)).0, 0);
            assert_eq!(driver.call(&Ask::flush()).0, 0);
            let (status, read) = driver.call(&Ask::read(7, 512 + (1280 << 10)));
            assert_eq!((status, read), (0, [small, large].concat()), "{format}");
            assert!(driver.call(&Ask::read(BYTES / 512 - 8, 4096)).1.iter().all(|b| *b == 0));
        }
    }
}

#[test]
fn requests_that_make_no_sense_fail_alone_and_the_name_is_told() {
    let served = Served::new("raw", BYTES, options());
    let (_front, mut drivers) = set_up(&served, 1, 0);
    let driver = &mut drivers[0];
    let last = BYTES / 512;
    for (ask, status) in [
        (Ask::read(last, 512), 1),
        (Ask::read(u64::MAX, 512), 1),
        (Ask::write(last - 1, &[1; 1024]), 1),
        (Ask::read(0, 511), 1),
        (Ask::ranges(kind::DISCARD, &[(last, 1, 0)]), 1),
        (Ask::ranges(kind::DISCARD, &[(u64::MAX, u32::MAX, 0)]), 1),
        (Ask::ranges(kind::DISCARD, &[(0, 8, 1)]), 2),
        (Ask::ranges(kind::WRITE_ZEROES, &[(0, 8, 2)]), 2),
        (Ask::ranges(kind::WRITE_ZEROES, &[]), 1),
        (Ask { kind: 99, ..Ask::flush() }, 2),
        (Ask { kind: kind::GET_ID, room: 19, ..Ask::flush() }, 1),
        (Ask::read(0, 0), 0),
    ] {
        assert_eq!(driver.call(&ask).0, status, "{ask:?}");
    }
    let (status, name) = driver.call(&Ask { kind: kind::GET_ID, room: 20, ..Ask::flush() });
    assert_eq!((status, &name[..]), (0, &b"the disk's own name\0"[..]));
}

#[test]
fn zeros_and_discards_leave_zeros_and_the_rest_as_it_was() {
    let served = Served::new("qcow2", BYTES, options());
    let (_front, mut drivers) = set_up(&served, 1, 0);
    let driver = &mut drivers[0];
    assert_eq!(driver.call(&Ask::write(0, &[7; 512 << 10])).0, 0);
    let zero = |from, len, unmap| Ask::ranges(kind::WRITE_ZEROES, &[(from, len, unmap)]);
    assert_eq!(driver.call(&zero(1, 300, 1)).0, 0);
    assert_eq!(driver.call(&zero(400, 8, 0)).0, 0);
    let discard = Ask::ranges(kind::DISCARD, &[(512, 128, 0), (768, 128, 0)]);
    assert_eq!(driver.call(&discard).0, 0);
    let (_, read) = driver.call(&Ask::read(0, 512 << 10));
    let fill = |sector: usize| {
        let sector = &read[512 * sector..][..512];
        assert!(sector.iter().all(|byte| *byte == sector[0]));
        sector[0]
    };
    for (sectors, expected) in [(0..1, 7), (1..301, 0), (301..400, 7), (400..408, 0), (408..512, 7)]
    {
        assert!(sectors.clone().all(|sector| fill(sector) == expected), "{sectors:?}");
    }
    assert!((512..640).chain(768..896).all(|sector| fill(sector) == 0));
    assert!((640..768).all(|sector| fill(sector) == 7));
}

#[test]
fn a_read_only_disk_takes_no_writes() {
    let served =
        Served::new("raw", BYTES, ferrite_serve::vhost::Options { read_only: true, ..options() });
    let (_front, mut drivers) = set_up(&served, 1, 0);
    assert_eq!(drivers[0].call(&Ask::write(0, &[1; 512])).0, 1);
    assert_ne!(drivers[0].call(&Ask::ranges(kind::WRITE_ZEROES, &[(0, 8, 0)])).0, 0);
    assert_eq!(drivers[0].call(&Ask::read(0, 512)), (0, vec![0; 512]));
}

#[test]
fn queues_are_busy_side_by_side_and_each_answer_is_its_own() {
    let served = Served::new("qcow2", BYTES, options());
    let (_front, drivers) = set_up(&served, 4, 0);
    std::thread::scope(|scope| {
        for mut driver in drivers {
            scope.spawn(move || {
                let part = BYTES / 512 / 4;
                let first = u64::from(driver.number) * part;
                let slots = driver.slots();
                for round in 0..8u8 {
                    driver.indirect = round % 2 == 1;
                    // All slots at once: first they write, then they read.
                    for write in [true, false] {
                        for slot in 0..slots {
                            let sector = first + (slot as u64) * 64;
                            let ask = match write {
                                true => Ask::write(sector, &[round + slot as u8 + 1; 32 << 10]),
                                false => Ask::read(sector, 32 << 10),
                            };
                            let head = driver.prepare(slot, &ask);
                            driver.offer(head);
                        }
                        let mut seen = vec![false; slots];
                        for _ in 0..slots {
                            let (head, _) = driver.wait_used();
                            let slot = driver.slot_of(head);
                            assert!(!std::mem::replace(&mut seen[slot], true));
                            assert_eq!(driver.status(slot), 0);
                            let fill = round + slot as u8 + 1;
                            assert!(driver.data(slot, 32 << 10).iter().all(|b| *b == fill));
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn a_queue_that_was_stopped_goes_on_where_it_was_also_with_other_memory() {
    let served = Served::new("raw", BYTES, options());
    let (front, mut drivers) = set_up(&served, 2, 0);
    let driver = &mut drivers[1];
    for turn in 1..10u8 {
        assert_eq!(driver.call(&Ask::write(turn.into(), &[turn; 512])).0, 0);
        match turn % 3 {
            0 => {
                let next = front.stop(1);
                assert_eq!(next, driver.avail);
                assert!(front.start(driver, next));
            }
            1 => assert!(front.set_memory(
                &driver.guest.table(),
                &[std::os::fd::AsFd::as_fd(&driver.guest.file); 2]
            )),
            _ => assert!(front.start(driver, driver.avail)),
        }
    }
    assert_eq!(driver.call(&Ask::read(9, 512)), (0, vec![9; 512]));
    assert!(front.is_alive());
}

#[test]
fn a_front_end_that_goes_makes_room_for_the_next_one() {
    let mut served = Served::new("qcow2", BYTES, options());
    for turn in 0..3u8 {
        let (_front, mut drivers) = set_up(&served, 4, 0);
        let read = drivers[1].call(&Ask::read(0, 4096));
        assert_eq!(read, (0, vec![turn; 4096]));
        assert_eq!(drivers[2].call(&Ask::write(0, &[turn + 1; 4096])).0, 0);
    }
    served.stop().unwrap();
}
