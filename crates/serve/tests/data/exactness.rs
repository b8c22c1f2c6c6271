//! Exact answers: padding (threats.md T2), read-only disks and bounds (T10), the checks of a hardened frontend (T14),
//! discards of any shape (T20).

use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend};
use ferrite_testkit::PATIENCE;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_xen::abi::{
    IndirectOp, Message, OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE, PlainOp, Protocol, RawSegment,
    STATUS_ERROR, STATUS_NOT_SUPPORTED, STATUS_OKAY, Slot,
};
use ferrite_xen::hypervisor::GrantRef;

const BYTES: u64 = 4 << 20;
const SECTORS: u64 = BYTES / 512;

fn small() -> Plan {
    Plan { bytes: BYTES, ..Plan::default() }
}

/// The content of a sector is its number.
fn pattern(sector: u64, bytes: usize) -> Vec<u8> {
    (sector..sector + bytes as u64 / 512).flat_map(|s| s.to_le_bytes().repeat(64)).collect()
}

fn fill_medium(rig: &Rig) {
    std::fs::write(&rig.image, pattern(0, BYTES as usize)).unwrap();
}

fn status(queue: &mut FrontQueue) -> i16 {
    queue.next_reply(PATIENCE).unwrap().status
}

/// A front's queue and two good pages.
fn connected(rig: &Rig, options: &FrontOptions) -> (Frontend, Buffer) {
    let front = rig.connect(options);
    let buffer = front.space().buffer(64).unwrap();
    (front, buffer)
}

#[test]
fn the_padding_of_responses_tells_nothing() {
    let rig = Rig::new(small());
    for protocol in [Protocol::X86_64, Protocol::X86_32] {
        let (mut front, _buffer) =
            connected(&rig, &FrontOptions { protocol, ..FrontOptions::default() });
        let queue = &mut front.queues[0];
        let ring = queue.ring();
        ring.poke(64, &vec![0xA5; ring.len() - 64]);
        // Operation, count or flag: answered OKAY, ERROR and NOT_SUPPORTED.
        let heads = [[OP_FLUSH, 0], [OP_READ, 0xA5], [OP_WRITE, 0], [0xA5, 0], [6, 0], [6, 1]];
        for (i, head) in heads.into_iter().cycle().take(100).enumerate() {
            let mut slot = Slot([0xA5; 112]);
            slot.0[..2].copy_from_slice(&head);
            queue.raw_request(&slot);
            queue.push().unwrap();
            let (response, raw) = loop {
                match queue.take_raw().unwrap() {
                    Some(taken) => break taken,
                    None => assert!(queue.wait(PATIENCE).unwrap()),
                }
            };
            assert_eq!(response.id, 0xA5A5_A5A5_A5A5_A5A5);
            let padding = [raw[9], raw[12], raw[13], raw[14], raw[15]];
            assert!(padding.iter().all(|b| [0, 0xA5].contains(b)), "{padding:x?} {protocol:?}");
            let mut rest = vec![0; protocol.slot_bytes() - 16];
            ring.peek(ring.slot_at(i as u32) + 16, &mut rest);
            assert!(rest.iter().all(|b| *b == 0xA5), "bytes behind the response changed");
        }
        front.queues.drain(..).for_each(FrontQueue::abandon);
        front.close(PATIENCE).unwrap();
    }
}

#[test]
fn nothing_that_is_sent_changes_a_read_only_disk() {
    let mut rig = Rig::without_backend(Plan { read_only: true, ..small() });
    fill_medium(&rig);
    rig.start();
    let (mut front, buffer) = connected(&rig, &FrontOptions::windows());
    assert_eq!(front.features().info, 4);
    assert!(!front.features().discard);
    buffer.fill(0, buffer.len(), 0xBB);
    let queue = &mut front.queues[0];
    let eleven: Vec<_> = (0..11).map(|page| buffer.segment(page, 0, 7)).collect();
    let many: Vec<_> = (0..64).map(|page| buffer.segment(page, 0, 7)).collect();
    for op in [PlainOp::Write, PlainOp::Barrier, PlainOp::Flush] {
        queue.plain(op, 0, &eleven).unwrap();
        assert_eq!(status(queue), STATUS_ERROR, "{op:?}");
    }
    queue.plain(PlainOp::Barrier, 0, &[]).unwrap();
    assert_eq!(status(queue), STATUS_ERROR);
    for secure in [false, true] {
        queue.discard(0, SECTORS, secure).unwrap();
        assert_eq!(status(queue), STATUS_ERROR);
    }
    queue.indirect(IndirectOp::Write, 0, &many).unwrap();
    assert_eq!(status(queue), STATUS_ERROR);
    queue.indirect(IndirectOp::Read, 8, &many).unwrap();
    assert_eq!(status(queue), STATUS_OKAY);
    assert_eq!(buffer.to_vec(0, buffer.len()), pattern(8, buffer.len()));
    queue.flush().unwrap();
    assert_eq!(status(queue), STATUS_OKAY);
    assert!(rig.medium() == pattern(0, BYTES as usize), "the medium changed");
}

#[test]
fn nothing_beyond_the_disk_is_reached() {
    let rig = Rig::new(small());
    fill_medium(&rig);
    let (mut front, buffer) =
        connected(&rig, &FrontOptions { max_indirect: 64, ..FrontOptions::default() });
    let queue = &mut front.queues[0];
    let page = [buffer.segment(0, 0, 7)];
    let many: Vec<_> = (0..64).map(|page| buffer.segment(page, 0, 7)).collect();
    let beyond = [
        SECTORS - 1,
        SECTORS - 7,
        SECTORS,
        SECTORS + 1,
        1 << 32,
        1 << 55,
        u64::MAX / 512,
        i64::MAX as u64,
        u64::MAX - 8,
        u64::MAX - 7,
        u64::MAX,
    ];
    for sector in beyond {
        for op in [PlainOp::Read, PlainOp::Write, PlainOp::Barrier, PlainOp::Flush] {
            queue.plain(op, sector, &page).unwrap();
            assert_eq!(status(queue), STATUS_ERROR, "{op:?} at {sector:#x}");
        }
        for op in [IndirectOp::Read, IndirectOp::Write] {
            queue.indirect(op, sector, &many).unwrap();
            assert_eq!(status(queue), STATUS_ERROR, "indirect {op:?} at {sector:#x}");
        }
        for n in [8, u64::MAX, u64::MAX - sector + 1] {
            queue.discard(sector, n, false).unwrap();
            assert_eq!(status(queue), STATUS_ERROR, "discard {sector:#x} {n:#x}");
        }
    }
    for (sector, n) in [(0, u64::MAX), (1, u64::MAX), (1, SECTORS), (0, SECTORS + 1), (0, 1 << 55)]
    {
        queue.discard(sector, n, false).unwrap();
        assert_eq!(status(queue), STATUS_ERROR, "discard {sector:#x} {n:#x}");
    }
    queue.indirect(IndirectOp::Write, SECTORS - 511, &many).unwrap();
    assert_eq!(status(queue), STATUS_ERROR);
    queue.indirect(IndirectOp::Read, SECTORS - 512, &many).unwrap();
    assert_eq!(status(queue), STATUS_OKAY);
    assert!(rig.medium() == pattern(0, BYTES as usize), "the medium changed");
    assert_eq!(std::fs::metadata(&rig.image).unwrap().len(), BYTES);
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_read_touches_the_bytes_that_it_was_told_and_no_others() {
    for protocol in [Protocol::X86_64, Protocol::X86_32] {
        let rig = Rig::new(small());
        fill_medium(&rig);
        let options = FrontOptions { protocol, max_indirect: 64, ..FrontOptions::default() };
        let (mut front, buffer) = connected(&rig, &options);
        let queue = &mut front.queues[0];
        let shapes = (0..8u8).flat_map(|first| (first..8).map(move |last| (first, last)));
        for (i, (first, last)) in shapes.enumerate() {
            // The shape under test between two others; once direct, once indirect.
            let shapes = [(3, 4), (first, last), (0, 0)];
            for indirect in [false, true] {
                let pages = if indirect { 33 } else { 3 };
                buffer.fill(0, buffer.len(), 0xEE);
                let shape = |page: usize| shapes[page % 3];
                let segments: Vec<_> =
                    (0..pages).map(|p| buffer.segment(p, shape(p).0, shape(p).1)).collect();
                let sector = i as u64 * 13;
                match indirect {
                    true => queue.indirect(IndirectOp::Read, sector, &segments).unwrap(),
                    false => queue.plain(PlainOp::Read, sector, &segments).unwrap(),
                };
                assert_eq!(status(queue), STATUS_OKAY);
                let mut at = sector;
                for page in 0..buffer.pages() {
                    let mut expected = vec![0xEE; 4096];
                    if page < pages {
                        let (first, last) = shape(page);
                        let (from, n) = (usize::from(first) * 512, usize::from(last - first) + 1);
                        expected[from..from + n * 512].copy_from_slice(&pattern(at, n * 512));
                        at += n as u64;
                    }
                    assert!(
                        buffer.to_vec(page * 4096, 4096) == expected,
                        "{first}..{last}, {page}"
                    );
                }
            }
        }
        front.close(PATIENCE).unwrap();
    }
}

/// The frontend's own checks cover operation, id, one response each, and released grants.
#[test]
fn a_frontend_that_checks_everything_finds_no_fault() {
    let rig = Rig::new(small());
    let linux = FrontOptions { regrant: true, persistent: false, ..FrontOptions::default() };
    for options in [
        linux,
        FrontOptions { regrant: true, ..FrontOptions::windows() },
        FrontOptions { regrant: true, queues: 3, order: 2, ..FrontOptions::x86_32() },
    ] {
        let (mut front, _) = connected(&rig, &options);
        let buffer = front.space().buffer(256).unwrap();
        for queue in &mut front.queues {
            for round in 0..8 {
                let len = [4096, 11 * 4096, 12 * 4096, 32 * 4096][round % 4];
                let mut n = 0;
                while queue.free_slots() > 0 {
                    match n % 3 {
                        0 => drop(queue.read(n, &buffer, 0, len).unwrap()),
                        1 => drop(queue.write(n, &buffer, 0, len).unwrap()),
                        _ => drop(queue.flush().unwrap()),
                    }
                    n += 1;
                }
                assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
            }
        }
        front.close(PATIENCE).unwrap();
    }
}

#[test]
fn only_unknown_operations_are_called_not_supported() {
    let rig = Rig::new(small());
    let (mut front, buffer) = connected(&rig, &FrontOptions::windows());
    let queue = &mut front.queues[0];
    for op in (0..=255).filter(|op| ![0, 1, 2, 3, 5, 6].contains(op)) {
        queue.message(op, Message::Unknown).unwrap();
        assert_eq!(status(queue), STATUS_NOT_SUPPORTED, "operation {op}");
    }
    let good = [buffer.segment(0, 0, 7); 11];
    let shapes = [(5, 4), (0, 8), (8, 8), (255, 255), (7, 0), (0, 255)];
    for op in [PlainOp::Read, PlainOp::Write] {
        let echo = if op == PlainOp::Read { OP_READ } else { OP_WRITE };
        for nr_segments in [0, 12, 128, 255] {
            let message = Message::Plain { op, nr_segments, sector: 0, segments: good };
            queue.message(echo, message).unwrap();
            assert_eq!(status(queue), STATUS_ERROR, "{op:?} of {nr_segments} segments");
        }
        for (first_sect, last_sect) in shapes {
            let bad = RawSegment { gref: good[0].gref, first_sect, last_sect };
            queue.plain(op, 0, &[good[0], bad]).unwrap();
            assert_eq!(status(queue), STATUS_ERROR, "{op:?} of {first_sect}..{last_sect}");
        }
    }
    let pages = [GrantRef(good[0].gref); 8];
    for op in [IndirectOp::Read, IndirectOp::Write] {
        for nr_segments in [0, 257, 4096, 4097, u16::MAX] {
            queue
                .message(op.byte(), Message::Indirect { op, nr_segments, sector: 0, pages })
                .unwrap();
            assert_eq!(status(queue), STATUS_ERROR, "indirect {op:?} of {nr_segments} segments");
        }
        for (first_sect, last_sect) in shapes {
            let mut segments = vec![good[0]; 20];
            segments[13] = RawSegment { gref: good[0].gref, first_sect, last_sect };
            queue.indirect(op, 0, &segments).unwrap();
            assert_eq!(status(queue), STATUS_ERROR, "{op:?} of {first_sect}..{last_sect}");
        }
    }
    for byte in 2..=255 {
        let op = IndirectOp::Other(byte);
        queue.message(byte, Message::Indirect { op, nr_segments: 20, sector: 0, pages }).unwrap();
        assert_eq!(status(queue), STATUS_ERROR, "indirect operation {byte}");
    }
    assert!(are_all(&rig.medium(), 0), "the medium changed");
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_discard_takes_what_it_names_and_nothing_beside_it() {
    let rig = Rig::new(small());
    fill_medium(&rig);
    let (mut front, _) = connected(&rig, &FrontOptions::default());
    assert!(front.features().discard && !front.features().discard_secure);
    let mut expected = pattern(0, BYTES as usize);
    let queue = &mut front.queues[0];
    let ranges = [(1, 1), (8, 8), (17, 30), (100, 8191 - 100), (8191, 1), (4095, 3)];
    for (i, (sector, nr_sectors)) in ranges.into_iter().enumerate() {
        // Secure or not, or any other value: without discard-secure the flag has no meaning.
        let flag = [0, 1, 0xFF][i % 3];
        queue.message(OP_DISCARD, Message::Discard { sector, nr_sectors, flag }).unwrap();
        assert_eq!(status(queue), STATUS_OKAY);
        let range = sector as usize * 512..(sector + nr_sectors) as usize * 512;
        let medium = rig.medium();
        // Inside: the old data, or zeros, sector by sector.
        for (sector, now) in range.clone().step_by(512).zip(medium[range.clone()].chunks(512)) {
            let before = &expected[sector..sector + 512];
            assert!(now == before || now.iter().all(|b| *b == 0), "sector {}", sector / 512);
        }
        expected[range.clone()].copy_from_slice(&medium[range]);
        assert!(medium == expected, "bytes outside of {sector}+{nr_sectors} changed");
    }
    queue.discard(5, 0, false).unwrap();
    assert_eq!(status(queue), STATUS_OKAY);
    assert!(rig.medium() == expected);
    front.close(PATIENCE).unwrap();
}
