//! A guest that changes a slot right after it was read (security.md T1): a real disk on loopback, and
//! the change exactly in the window that a second thread of the guest's would have to hit.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_xen::abi::{
    IndirectOp, Message, OP_WRITE, PlainOp, Protocol, RawSegment, Request, STATUS_OKAY,
};
use ferrite_xen::hypervisor::GrantRef;
use ferrite_xen::loopback::front::FrontOptions;

#[path = "../../tests/rig/mod.rs"]
mod rig;

use rig::{PATIENCE, Plan, Rig};

type Hook = Box<dyn FnMut() + Send>;

static HOOK: Mutex<Option<Hook>> = Mutex::new(None);

fn hook() -> impl std::ops::DerefMut<Target = Option<Hook>> {
    HOOK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called by the queue when it has its copy of a slot and has looked at nothing of it.
pub(super) fn slot_was_read() {
    if let Some(change) = hook().as_mut() {
        change();
    }
}

/// What a slot becomes: other places and pages, another shape, more segments than there are, another
/// operation, none.
fn lies(other: RawSegment) -> [Message; 6] {
    let segments = [other; 11];
    let (sector, pages) = (1000, [GrantRef(other.gref); 8]);
    [
        Message::Plain { op: PlainOp::Write, nr_segments: 1, sector, segments },
        Message::Plain { op: PlainOp::Write, nr_segments: 11, sector, segments },
        Message::Plain { op: PlainOp::Read, nr_segments: 255, sector, segments },
        Message::Indirect { op: IndirectOp::Write, nr_segments: 64, sector, pages },
        Message::Discard { sector: 0, nr_sectors: 4096, flag: 0 },
        Message::Unknown,
    ]
}

#[test]
fn a_slot_that_changes_after_it_was_read_is_what_it_was() {
    const BYTES: usize = 4 << 20;
    let rig = Rig::new(Plan { bytes: BYTES as u64, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(2).unwrap();
    buffer.fill(4096, 4096, 0x33);
    let lies = lies(buffer.segment(1, 0, 7));
    let (ring, changed) = (front.queues[0].ring(), Arc::new(AtomicU32::new(0)));
    let counted = changed.clone();
    *hook() = Some(Box::new(move || {
        let index = counted.fetch_add(1, Ordering::SeqCst);
        let message = lies[index as usize % lies.len()];
        let lie = Request { id: 0xBAD, response_op: OP_WRITE, message };
        ring.put_slot(index, &lie.encode(Protocol::X86_64));
    }));
    let queue = &mut front.queues[0];
    for round in 0..120u8 {
        let sector = u64::from(round) * 8;
        buffer.fill(0, 4096, 1 + round);
        let tag = queue.write(sector, &buffer, 0, 4096).unwrap();
        let reply = queue.next_reply(PATIENCE).unwrap();
        assert_eq!((reply.tag, reply.status), (tag, STATUS_OKAY), "round {round}");
    }
    *hook() = None;
    assert_eq!(changed.load(Ordering::SeqCst), 120, "not every slot was changed");
    let medium = rig.sectors(0, BYTES);
    for (page, bytes) in medium.chunks(4096).enumerate() {
        let expected = if page < 120 { 1 + page as u8 } else { 0 };
        assert!(bytes.iter().all(|byte| *byte == expected), "page {page}");
    }
    assert_eq!(buffer.to_vec(4096, 4096), vec![0x33; 4096]);
    front.close(PATIENCE).unwrap();
}
