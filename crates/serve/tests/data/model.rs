//! Random requests of all kinds and shapes, many in flight on several queues. They are compared with a model of the
//! disk with the allowed results of each (threats.md T15).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_loopback::front::{Buffer, FrontOptions, Frontend};
use ferrite_loopback::{CopyWith, GuestOptions};
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, few_or_all, images};
use ferrite_xen::abi::{IndirectOp, PlainOp, Protocol, RawSegment};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Small, so that requests overlap.
const SECTORS: u64 = 1024;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    FlushThenWrite,
    Barrier,
    EmptyBarrier,
    Flush,
    Discard,
}

impl Kind {
    fn writes(self) -> bool {
        matches!(self, Kind::Write | Kind::FlushThenWrite | Kind::Barrier)
    }

    fn is_barrier(self) -> bool {
        matches!(self, Kind::Barrier | Kind::EmptyBarrier)
    }
}

/// One request: its place, and the shape of its data: first sector in the page and sectors, for each page.
#[derive(Clone, Debug)]
struct Ask {
    queue: usize,
    kind: Kind,
    sector: u64,
    pieces: Vec<(u8, u8)>,
}

impl Ask {
    fn sectors(&self) -> u64 {
        self.pieces.iter().map(|(_, n)| u64::from(*n)).sum()
    }

    fn covers(&self, sector: u64) -> bool {
        (self.sector..self.sector + self.sectors()).contains(&sector)
    }
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        8 => Just(Kind::Read),
        10 => Just(Kind::Write),
        1 => Just(Kind::FlushThenWrite),
        1 => Just(Kind::Barrier),
        1 => Just(Kind::EmptyBarrier),
        1 => Just(Kind::Flush),
        1 => Just(Kind::Discard),
    ]
}

fn pieces() -> impl Strategy<Value = Vec<(u8, u8)>> {
    let piece = (0u8..8).prop_flat_map(|first| (Just(first), 1..=8 - first));
    let whole = Just((0u8, 8u8));
    let any = prop_oneof![piece, whole];
    prop_oneof![
        4 => proptest::collection::vec(any.clone(), 1..=3),
        2 => proptest::collection::vec(any.clone(), 4..=11),
        1 => proptest::collection::vec(any, 12..=40),
    ]
}

fn ask() -> impl Strategy<Value = Ask> {
    // Mostly near each other; half of them at the edges of blocks of 4 KiB.
    let place = prop_oneof![0..64u64, 0..SECTORS, (0..8u64).prop_map(|b| b * 8)];
    (0..4usize, kind(), place, pieces()).prop_map(|(queue, kind, sector, mut pieces)| {
        if matches!(kind, Kind::FlushThenWrite | Kind::Barrier) {
            pieces.truncate(11);
        }
        let mut ask = Ask { queue, kind, sector, pieces };
        ask.sector = ask.sector.min(SECTORS - ask.sectors());
        ask
    })
}

/// A frontend's options, and batches of requests; those of each batch are in flight together.
#[derive(Clone, Debug)]
struct Session {
    options: FrontOptions,
    batches: Vec<Vec<Ask>>,
}

fn session() -> impl Strategy<Value = Session> {
    let protocol = prop_oneof![Just(Protocol::X86_64), Just(Protocol::X86_32)];
    let batches = proptest::collection::vec(proptest::collection::vec(ask(), 1..24), 1..12);
    (protocol, 1..=4u32, 0..=4u32, any::<bool>(), batches).prop_map(
        |(protocol, queues, order, windows, batches)| {
            let id_bits = if windows { 0xFFFF_FA80_1234_0000 } else { 0 };
            let options = FrontOptions {
                protocol,
                queues,
                order,
                id_bits,
                max_indirect: 64,
                ..FrontOptions::default()
            };
            Session { options, batches }
        },
    )
}

/// The writes that may have been the last of a sector, by number; 0 means zeros.
type Candidates = Vec<u32>;

struct Model {
    sectors: Vec<Candidates>,
    writes: u32,
}

impl Model {
    fn new() -> Model {
        Model { sectors: vec![vec![0]; SECTORS as usize], writes: 0 }
    }

    fn check(&self, data: &[u8], sector: u64, allowed: &[u32], what: &str) {
        // Mostly all words are equal.
        let words = if data[8..] == data[..data.len() - 8] { &data[..8] } else { data };
        for word in words.chunks_exact(8) {
            let value = u64::from_le_bytes(word.try_into().unwrap());
            let known = allowed.iter().any(|w| value == value_of(*w, sector));
            assert!(known, "{what}: sector {sector} holds {value:#x}, not one of {allowed:?}");
        }
    }

    /// Whether `a` is over before `b` begins: one is a barrier of their own queue, or there is one between them.
    fn precedes(batch: &[Ask], a: usize, b: usize) -> bool {
        a < b
            && batch[a].queue == batch[b].queue
            && (a..=b).any(|i| batch[i].queue == batch[a].queue && batch[i].kind.is_barrier())
    }

    /// Returns the writes that request `read` of the batch may find in a sector.
    fn visible(&self, batch: &[Ask], numbers: &[u32], read: usize, sector: u64) -> Candidates {
        let before = |i: usize| Self::precedes(batch, i, read);
        self.left(batch, numbers, sector, |i| !Self::precedes(batch, read, i), before)
    }

    /// Returns the possible values of a sector after the writers that `counts` selects. `surely` selects writers that
    /// certainly came before the time in question.
    fn left(
        &self,
        batch: &[Ask],
        numbers: &[u32],
        sector: u64,
        counts: impl Fn(usize) -> bool,
        surely: impl Fn(usize) -> bool,
    ) -> Candidates {
        let touches = |i: &usize| batch[*i].covers(sector) && counts(*i);
        let writers: Vec<usize> =
            (0..batch.len()).filter(touches).filter(|i| batch[*i].kind.writes()).collect();
        let discards = (0..batch.len()).filter(touches).any(|i| batch[i].kind == Kind::Discard);
        // A write is covered if another came certainly after it and certainly before that time.
        let covered =
            |w: usize| writers.iter().any(|&x| x != w && surely(x) && Self::precedes(batch, w, x));
        let mut all: Candidates =
            writers.iter().filter(|&&w| !covered(w)).map(|&w| numbers[w]).collect();
        if !writers.iter().any(|&w| surely(w)) {
            all.extend(&self.sectors[sector as usize]);
        }
        if discards {
            all.push(0);
        }
        all
    }

    /// Ends the batch.
    fn answer(&mut self, batch: &[Ask], numbers: &[u32]) {
        let left: Vec<Candidates> = (0..SECTORS)
            .map(|sector| self.left(batch, numbers, sector, |_| true, |_| true))
            .collect();
        self.sectors = left;
    }
}

fn value_of(write: u32, sector: u64) -> u64 {
    if write == 0 { 0 } else { u64::from(write) << 32 | sector }
}

/// Sends a batch, waits for it, and checks the read data.
fn run_batch(front: &mut Frontend, model: &mut Model, batch: &[Ask], buffers: &[Buffer]) {
    let queues = front.queues.len();
    let mut numbers = Vec::new();
    for (i, ask) in batch.iter().enumerate() {
        model.writes += u32::from(ask.kind.writes());
        numbers.push(model.writes);
        let buffer = &buffers[i];
        buffer.fill(0, ask.pieces.len() * 4096, 0xEE);
        let mut sector = ask.sector;
        let mut segments: Vec<RawSegment> = Vec::new();
        for (page, (first, n)) in ask.pieces.iter().enumerate() {
            for s in *first..first + n {
                if ask.kind.writes() {
                    let word = value_of(model.writes, sector).to_le_bytes();
                    buffer.write(page * 4096 + usize::from(s) * 512, &word.repeat(64));
                }
                sector += 1;
            }
            segments.push(buffer.segment(page, *first, first + n - 1));
        }
        let queue = &mut front.queues[ask.queue % queues];
        let direct = segments.len() <= 11;
        match ask.kind {
            Kind::Read if direct => queue.plain(PlainOp::Read, ask.sector, &segments),
            Kind::Write if direct => queue.plain(PlainOp::Write, ask.sector, &segments),
            Kind::Read => queue.indirect(IndirectOp::Read, ask.sector, &segments),
            Kind::Write => queue.indirect(IndirectOp::Write, ask.sector, &segments),
            Kind::FlushThenWrite => queue.plain(PlainOp::Flush, ask.sector, &segments),
            Kind::Barrier => queue.plain(PlainOp::Barrier, ask.sector, &segments),
            Kind::EmptyBarrier => queue.plain(PlainOp::Barrier, 0, &[]),
            Kind::Flush => queue.flush(),
            Kind::Discard => queue.discard(ask.sector, ask.sectors(), false),
        }
        .unwrap();
        // Some are in flight while others are still being made.
        if i % 3 == 0 {
            queue.push().unwrap();
        }
    }
    for queue in &mut front.queues {
        queue.push().unwrap();
    }
    for queue in &mut front.queues {
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
    }
    // The actual queue of each.
    let batch: Vec<Ask> =
        batch.iter().map(|a| Ask { queue: a.queue % queues, ..a.clone() }).collect();
    for (i, ask) in batch.iter().enumerate().filter(|(_, a)| a.kind == Kind::Read) {
        let mut sector = ask.sector;
        for (page, (first, n)) in ask.pieces.iter().enumerate() {
            let data = buffers[i].to_vec(page * 4096, 4096);
            for (s, data) in data.chunks(512).enumerate() {
                if !(usize::from(*first)..usize::from(first + n)).contains(&s) {
                    assert!(are_all(data, 0xEE), "bytes beside a segment changed");
                    continue;
                }
                let allowed = model.visible(&batch, &numbers, i, sector);
                model.check(data, sector, &allowed, "read");
                sector += 1;
            }
        }
    }
    model.answer(&batch, &numbers);
}

/// Random sessions on one image, one after the other.
fn against_the_model(image: PathBuf, copy_with: CopyWith, cases: u32) {
    let guest = GuestOptions { frames: 16 << 10, ..GuestOptions::default() };
    let plan = Plan { guest, copy_with, image: Some(image.clone()), ..Plan::default() };
    let rig = Rig::new(plan);
    let mut front = rig.frontend();
    let buffers: Vec<Buffer> = (0..24).map(|_| front.space().buffer(40).unwrap()).collect();
    let state = std::cell::RefCell::new((&mut front, Model::new()));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    // Sessions depend on earlier ones, so a smaller one would not fail in the same way: no shrinking.
    let config = Config { max_shrink_iters: 0, ..config };
    TestRunner::new(config)
        .run(&session(), |session| {
            let (front, model) = &mut *state.borrow_mut();
            front.connect(&session.options, PATIENCE).unwrap();
            for batch in &session.batches {
                run_batch(front, model, batch, &buffers);
            }
            front.close(PATIENCE).unwrap();
            Ok(())
        })
        .unwrap();
    let model = state.into_inner().1;
    assert!(model.writes > 0);
    drop(front);
    drop(rig);
    let medium = images::contents(&image);
    for (sector, data) in medium.chunks(512).take(SECTORS as usize).enumerate() {
        model.check(data, sector as u64, &model.sectors[sector], "medium");
    }
}

fn image_in(dir: &Path) -> PathBuf {
    let path = dir.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(SECTORS * 512).unwrap();
    path
}

#[test]
fn a_disk_in_memory_does_what_the_model_does() {
    let dir = dir_in_memory();
    against_the_model(image_in(dir.path()), CopyWith::Memcpy, few_or_all(20, 200));
}

#[test]
fn a_disk_in_memory_does_what_the_model_does_with_copies_by_the_kernel() {
    let dir = dir_in_memory();
    against_the_model(image_in(dir.path()), CopyWith::ProcessVm, few_or_all(20, 200));
}

#[test]
fn a_file_past_the_page_cache_does_what_the_model_does() {
    let dir = ferrite_testkit::places::dir_on_disk();
    against_the_model(image_in(dir.path()), CopyWith::Memcpy, few_or_all(8, 60));
}

#[test]
fn images_do_what_the_model_does() {
    for format in images::FORMATS {
        let dir = dir_in_memory();
        let image = images::make(dir.path(), format, SECTORS * 512);
        against_the_model(image, CopyWith::Memcpy, few_or_all(10, 100));
    }
}

/// Partial blocks are read, changed and written back, alone on the disk: no write of adjacent sectors may be lost.
#[test]
fn a_medium_with_blocks_of_4096_bytes_does_what_the_model_does() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image_in(dir.path()), 4096) else { return };
    against_the_model(device.0.clone(), CopyWith::Memcpy, few_or_all(20, 200));
}

/// One queue repeatedly changes a sector of a block, the other writes the whole block. The second queue's data must not
/// be replaced by older data from the first queue's read.
#[test]
fn a_neighbours_write_is_not_undone_by_a_partial_one() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image_in(dir.path()), 4096) else { return };
    let rig = Rig::new(Plan { image: Some(device.0.clone()), ..Plan::default() });
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(64).unwrap();
    let mut partial = front.queues.pop().unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let thread = std::thread::spawn({
        let (done, buffer) = (done.clone(), front.space().buffer(8).unwrap());
        move || {
            while !done.load(Ordering::Relaxed) {
                for i in 0..8 {
                    let segment = [buffer.segment(i, 0, 0)];
                    partial.plain(PlainOp::Write, i as u64 * 8 + 3, &segment).unwrap();
                }
                assert!(partial.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
            }
            partial
        }
    });
    for round in 0..few_or_all(150, 2000) {
        let stamp = round as u8 | 1;
        buffer.fill(0, 8 * 4096, stamp);
        let queue = &mut front.queues[0];
        for i in 0..8 {
            queue.write(i as u64 * 8, &buffer, i * 4096, 4096).unwrap();
        }
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
        queue.read(0, &buffer, 32 * 4096, 8 * 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        let back = buffer.to_vec(32 * 4096, 8 * 4096);
        for (sector, data) in back.chunks(512).enumerate().filter(|(s, _)| s % 8 != 3) {
            assert!(are_all(data, stamp), "round {round}, sector {sector} is undone");
        }
    }
    done.store(true, Ordering::Relaxed);
    front.queues.push(thread.join().unwrap());
    front.close(PATIENCE).unwrap();
}

/// The range of a large write is known only after its page of descriptors was fetched. A later barrier has to wait for
/// that, too, if both need the disk alone.
#[test]
fn a_barrier_does_not_overtake_a_large_write_of_partial_blocks() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image_in(dir.path()), 4096) else { return };
    let rig = Rig::new(Plan { image: Some(device.0.clone()), ..Plan::default() });
    let mut front = rig.connect(&FrontOptions { max_indirect: 64, ..FrontOptions::default() });
    let (early, late) = (front.space().buffer(20).unwrap(), front.space().buffer(20).unwrap());
    early.fill(0, early.len(), 1);
    late.fill(0, late.len(), 2);
    let queue = &mut front.queues[0];
    for _ in 0..20 {
        queue.write(1, &early, 0, 20 * 4096).unwrap();
        queue.plain(PlainOp::Barrier, 3, &[late.segment(0, 0, 7)]).unwrap();
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
        queue.read(3, &late, 4096, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(late.to_vec(4096, 4096), vec![2; 4096]);
    }
    front.close(PATIENCE).unwrap();
}
