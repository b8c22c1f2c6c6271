//! A guest that changes a slot right after it was read (threats.md T1): a real disk on loopback, and
//! the change exactly in the window that a second thread of the guest's would have to hit. And what the
//! table of `inflight.rs` says while a queue answers (T23): in which order, a kill would tell by chance.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_loopback::front::{FrontOptions, RingWord};
use ferrite_testkit::PATIENCE;
use ferrite_xen::abi::{
    IndirectOp, Message, OP_WRITE, PlainOp, Protocol, RawSegment, Request, STATUS_OKAY,
};
use ferrite_xen::hypervisor::GrantRef;

#[path = "../../../../testkit/src/rig.rs"]
mod rig;

use rig::{Plan, Rig};

/// Hooks for a test in the middle of a queue's work.
struct Hooks {
    /// The queue has its copy of a slot and has looked at nothing of it.
    slot_was_read: Box<dyn FnMut() + Send>,
    /// The table says so of the response with this index.
    is_answering: Box<dyn FnMut(u32) + Send>,
    is_free: Box<dyn FnMut(u32) + Send>,
}

impl Default for Hooks {
    fn default() -> Hooks {
        Hooks {
            slot_was_read: Box::new(|| {}),
            is_answering: Box::new(|_| {}),
            is_free: Box::new(|_| {}),
        }
    }
}

static HOOKS: Mutex<Option<Hooks>> = Mutex::new(None);

fn hooks() -> impl std::ops::DerefMut<Target = Option<Hooks>> {
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One test at a time: there is one set of hooks, for all queues.
fn alone() -> impl Drop {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Other tests use tables, too, without a queue.
fn of_queue(call: impl FnOnce(&mut Hooks)) {
    if std::thread::current().name() == Some("queue-0")
        && let Some(hooks) = hooks().as_mut()
    {
        call(hooks);
    }
}

pub(super) fn slot_was_read() {
    of_queue(|hooks| (hooks.slot_was_read)());
}

pub(crate) fn is_answering(rsp_index: u32) {
    of_queue(|hooks| (hooks.is_answering)(rsp_index));
}

pub(crate) fn is_free(rsp_index: u32) {
    of_queue(|hooks| (hooks.is_free)(rsp_index));
}

/// The later contents of a slot: other places and pages, another shape, more segments than there are, another
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
    let _alone = alone();
    let rig = Rig::new(Plan { bytes: BYTES as u64, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(2).unwrap();
    buffer.fill(4096, 4096, 0x33);
    let lies = lies(buffer.segment(1, 0, 7));
    let (ring, changed) = (front.queues[0].ring(), Arc::new(AtomicU32::new(0)));
    let counted = changed.clone();
    let slot_was_read = Box::new(move || {
        let index = counted.fetch_add(1, Ordering::SeqCst);
        let message = lies[index as usize % lies.len()];
        let lie = Request { id: 0xBAD, response_op: OP_WRITE, message };
        ring.put_slot(index, &lie.encode(Protocol::X86_64).0);
    });
    *hooks() = Some(Hooks { slot_was_read, ..Hooks::default() });
    let queue = &mut front.queues[0];
    for round in 0..120u8 {
        let sector = u64::from(round) * 8;
        buffer.fill(0, 4096, 1 + round);
        let tag = queue.write(sector, &buffer, 0, 4096).unwrap();
        let reply = queue.next_reply(PATIENCE).unwrap();
        assert_eq!((reply.tag, reply.status), (tag, STATUS_OKAY), "round {round}");
    }
    *hooks() = None;
    assert_eq!(changed.load(Ordering::SeqCst), 120, "not every slot was changed");
    let medium = rig.sectors(0, BYTES);
    for (page, bytes) in medium.chunks(4096).enumerate() {
        let expected = if page < 120 { 1 + page as u8 } else { 0 };
        assert!(bytes.iter().all(|byte| *byte == expected), "page {page}");
    }
    assert_eq!(buffer.to_vec(4096, 4096), vec![0x33; 4096]);
    front.close(PATIENCE).unwrap();
}

/// The table says "being answered" before the guest can see the answer, and "free" only after: killed
/// at any point between, each request is answered once.
#[test]
fn the_table_is_ahead_of_the_ring_when_an_answer_begins_and_behind_it_when_it_ends() {
    const ROUNDS: u32 = 20;
    let _alone = alone();
    let rig = Rig::new(Plan { bytes: 4 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let batch = front.queues[0].entries();
    // A page each: an answer gives back what its own request has granted.
    let buffer = front.space().buffer(batch as usize).unwrap();
    // Told to the test's thread, which alone may fail.
    let wrong = Arc::new(AtomicU32::new(0));
    let seen = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
    let look = |which: usize, is_right: fn(i32) -> bool| {
        let (ring, wrong, seen) = (front.queues[0].ring(), wrong.clone(), seen.clone());
        Box::new(move |rsp_index: u32| {
            let ahead = rsp_index.wrapping_sub(ring.load(RingWord::RspProd)) as i32;
            wrong.fetch_add(u32::from(!is_right(ahead)), Ordering::SeqCst);
            seen[which].fetch_add(1, Ordering::SeqCst);
        })
    };
    let (is_answering, is_free) = (look(0, |ahead| ahead >= 0), look(1, |ahead| ahead < 0));
    *hooks() = Some(Hooks { is_answering, is_free, ..Hooks::default() });
    for _ in 0..ROUNDS {
        for page in 0..batch as usize {
            front.queues[0].read(0, &buffer, page * 4096, 4096).unwrap();
        }
        assert!(front.queues[0].drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
    }
    // They hold the ring.
    *hooks() = None;
    front.close(PATIENCE).unwrap();
    let all = ROUNDS * batch;
    assert_eq!(seen.each_ref().map(|n| n.load(Ordering::SeqCst)), [all, all]);
    assert_eq!(wrong.load(Ordering::SeqCst), 0, "of {all} answers");
}
