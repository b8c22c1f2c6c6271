//! The pool against a model, and the promises that it makes to queues.

use std::sync::Arc;

use ferrite_io::engine::Engine;
use ferrite_io::pool::{Buf, PAGE_BYTES, Pool, QueuePool, SLAB_BYTES};
use ferrite_io::uring::Uring;
use proptest::prelude::*;

/// One step of one queue.
#[derive(Clone, Debug)]
enum Step {
    Alloc { queue: usize, bytes: usize },
    Free { queue: usize, which: usize },
    Reconnect { queue: usize },
}

fn step(queues: usize) -> impl Strategy<Value = Step> {
    let pages = SLAB_BYTES / PAGE_BYTES;
    let bytes = prop_oneof![
        4 => 1..=PAGE_BYTES,
        2 => 1..=16 * PAGE_BYTES,
        1 => 1..=SLAB_BYTES,
        1 => (1..=pages).prop_map(|n| n * PAGE_BYTES),
    ];
    prop_oneof![
        5 => (0..queues, bytes).prop_map(|(queue, bytes)| Step::Alloc { queue, bytes }),
        4 => (0..queues, any::<usize>()).prop_map(|(queue, which)| Step::Free { queue, which }),
        1 => (0..queues).prop_map(|queue| Step::Reconnect { queue }),
    ]
}

/// The pool next to a plain list of who has which page.
struct Model {
    pool: Arc<Pool>,
    queues: Vec<(Option<QueuePool>, Vec<Buf>)>,
    used: Vec<bool>,
}

impl Model {
    fn new(slabs: usize, queues: usize) -> Model {
        let pool = Pool::new(slabs * SLAB_BYTES, queues).unwrap();
        let used = vec![false; pool.arena().len() / PAGE_BYTES];
        let queues = (0..queues).map(|i| (Some(pool.queue(i)), Vec::new())).collect();
        Model { pool, queues, used }
    }

    fn mark(&mut self, buf: &Buf, used: bool) {
        let (offset, len) = (buf.span().offset(), buf.span().len());
        assert!(offset % PAGE_BYTES == 0 && len % PAGE_BYTES == 0 && len > 0);
        assert_eq!(offset / SLAB_BYTES, (offset + len - 1) / SLAB_BYTES, "crosses a slab");
        for page in &mut self.used[offset / PAGE_BYTES..(offset + len) / PAGE_BYTES] {
            assert_ne!(*page, used, "a page was handed out twice");
            *page = used;
        }
        let zeros = self.pool.zero_page().offset() / PAGE_BYTES;
        assert!(!self.used[zeros], "the page of zeros was handed out");
    }

    fn alloc(&mut self, queue: usize, bytes: usize) {
        let (pool, held) = &mut self.queues[queue];
        match pool.as_mut().unwrap().alloc(bytes) {
            Some(buf) => {
                assert_eq!(buf.span().len(), bytes.next_multiple_of(PAGE_BYTES));
                self.mark(&buf, true);
                self.queues[queue].1.push(buf);
            }
            None => assert!(!held.is_empty(), "an idle queue got no buffer of {bytes}"),
        }
    }

    fn free(&mut self, queue: usize, which: usize) {
        let held = &mut self.queues[queue].1;
        if !held.is_empty() {
            let buf = held.swap_remove(which % held.len());
            self.mark(&buf, false);
            self.queues[queue].0.as_mut().unwrap().free(buf);
        }
    }

    fn reconnect(&mut self, queue: usize) {
        while !self.queues[queue].1.is_empty() {
            self.free(queue, 0);
        }
        self.queues[queue].0 = None;
        self.queues[queue].0 = Some(self.pool.queue(queue));
    }

    fn check(&self) {
        for (pool, held) in &self.queues {
            let bytes: usize = held.iter().map(|b| b.span().len()).sum();
            assert_eq!(pool.as_ref().unwrap().in_use(), bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn buffers_never_overlap_and_everything_comes_back(
        slabs in 1usize..6,
        steps in prop::collection::vec(step(2), 1..200),
    ) {
        let mut model = Model::new(slabs, 2);
        for step in steps {
            match step {
                Step::Alloc { queue, bytes } => model.alloc(queue, bytes),
                Step::Free { queue, which } => model.free(queue, which),
                Step::Reconnect { queue } => model.reconnect(queue),
            }
            model.check();
        }
        (0..2).for_each(|queue| model.reconnect(queue));
        prop_assert!(model.used.iter().all(|used| !used));
        // One queue alone gets every page but the one of zeros.
        let pages = model.used.len() - 1;
        (0..pages - SLAB_BYTES / PAGE_BYTES).for_each(|_| model.alloc(0, 1));
        let left = model.queues[0].0.as_mut().unwrap().alloc(1);
        prop_assert!(left.is_none());
    }
}

#[test]
fn a_maximal_request_fits_however_much_the_others_take() {
    let pool = Pool::new(4 * SLAB_BYTES, 2).unwrap();
    let (mut a, mut b) = (pool.queue(0), pool.queue(1));
    let all: Vec<Buf> = std::iter::from_fn(|| a.alloc(PAGE_BYTES)).collect();
    assert_eq!(all.len(), 3 * 256 - 1);
    let full = b.alloc(SLAB_BYTES).unwrap();
    assert!(b.alloc(1).is_none());
    b.free(full);
    all.into_iter().for_each(|buf| a.free(buf));
    assert_eq!((a.in_use(), b.in_use()), (0, 0));
}

#[test]
fn the_page_of_zeros_is_zero_and_the_memory_is_no_more_than_asked_for() {
    let pool = Pool::new(8 * SLAB_BYTES, 4).unwrap();
    assert_eq!(pool.arena().len(), 8 * SLAB_BYTES);
    let mut bytes = [1u8; PAGE_BYTES];
    pool.arena().copy_out(pool.zero_page(), &mut bytes);
    assert!(bytes.iter().all(|b| *b == 0));
    // Too little for the queues is made enough for them.
    assert_eq!(Pool::new(1, 3).unwrap().arena().len(), 4 * SLAB_BYTES);
}

#[test]
fn a_queue_that_cools_or_ends_leaves_the_others_scratch_memory_alone() {
    const BYTES: usize = 256 << 10;
    let pool = Pool::with_scratch(SLAB_BYTES, 2, BYTES).unwrap();
    let (arena, own, other) = (pool.arena(), pool.scratch(0), pool.scratch(1));
    // Queue 1 never had data, so it is not warm; its tasks' metadata is here.
    let _other = pool.queue(1);
    for ends in [false, true] {
        arena.fill(own, 0xa5);
        arena.fill(other, 0x5a);
        let mut queue = pool.queue(0);
        let _ = queue.warm();
        if !ends {
            queue.cool();
        }
        drop(queue);
        let mut found = vec![0; BYTES];
        arena.copy_out(other, &mut found);
        assert!(found.iter().all(|b| *b == 0x5a), "zeroed under its user");
        assert!(arena.is_zero(own), "its own is given back");
    }
}

#[test]
fn pages_that_were_not_freed_stay_taken_in_the_queues_next_life() {
    let pool = Pool::new(1, 1).unwrap();
    let mut queue = pool.queue(0);
    let lost = queue.alloc(3 * PAGE_BYTES).unwrap().span();
    drop(queue);
    let mut queue = pool.queue(0);
    assert_eq!(queue.in_use(), 3 * PAGE_BYTES);
    let rest: Vec<Buf> = std::iter::from_fn(|| queue.alloc(1)).collect();
    let taken = lost.offset()..lost.offset() + lost.len();
    assert!(rest.iter().all(|b| !taken.contains(&b.span().offset())));
}

#[test]
fn no_buffer_has_the_zero_page() {
    for queues in 1..=9 {
        for scratch in [0, 256 << 10, 700 << 10] {
            let pool = Pool::with_scratch(1, queues, scratch).unwrap();
            let mut all: Vec<QueuePool> = (0..queues).map(|i| pool.queue(i)).collect();
            for queue in &mut all {
                while let Some(buf) = queue.alloc(SLAB_BYTES).or_else(|| queue.alloc(1)) {
                    pool.arena().fill(buf.span(), 1);
                }
            }
            assert!(pool.arena().is_zero(pool.zero_page()), "{queues} queues, {scratch} bytes");
        }
    }
}

#[test]
#[should_panic(expected = "in use")]
fn a_queue_has_one_owner() {
    let pool = Pool::new(1, 1).unwrap();
    let _first = pool.queue(0);
    let _second = pool.queue(0);
}

#[test]
fn queues_on_threads_share_what_is_left() {
    let pool = Pool::new(8 * SLAB_BYTES, 4).unwrap();
    std::thread::scope(|s| {
        for i in 0..4usize {
            let pool = &pool;
            s.spawn(move || {
                let mut queue = pool.queue(i);
                let stamp = i as u8 + 1;
                for round in 0..200usize {
                    let bytes = 1 + (round * 7919 * (i + 1)) % (2 * SLAB_BYTES / 3);
                    let bufs: Vec<Buf> = (0..3).filter_map(|_| queue.alloc(bytes)).collect();
                    for buf in &bufs {
                        let first = buf.span().slice(0, 64);
                        pool.arena().fill(first, stamp);
                        let mut back = [0u8; 64];
                        pool.arena().copy_out(first, &mut back);
                        assert!(back.iter().all(|b| *b == stamp));
                    }
                    bufs.into_iter().for_each(|buf| queue.free(buf));
                }
            });
        }
    });
    let mut queue = pool.queue(0);
    let all: Vec<Buf> = std::iter::from_fn(|| queue.alloc(SLAB_BYTES)).collect();
    assert_eq!(all.len(), 4, "its own slab, and the three whole shared ones");
}

/// Bytes of the memory that are resident.
fn resident(pool: &Pool) -> usize {
    let start = pool.arena().ptr(pool.arena().span(0, 0)).as_ptr().addr();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut kib) = (false, 0);
    for line in maps.lines() {
        if let Some((range, _)) = line.split_once(' ')
            && let Some((from, to)) = range.split_once('-')
            && let (Ok(from), Ok(_)) =
                (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
        {
            inside = (start..start + pool.arena().len()).contains(&from);
        } else if inside && let Some(rss) = line.strip_prefix("Rss:") {
            kib += rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
        }
    }
    kib << 10
}

#[test]
fn a_queue_that_rests_leaves_no_memory_that_an_engine_made_resident() {
    let pool = Pool::with_scratch(8 * SLAB_BYTES, 4, 256 << 10).unwrap();
    if pool.arena().kind() == "2 MiB pages" {
        return; // The kernel's reserve of huge pages does not count as resident.
    }
    // The others have no data, so they are never warm.
    let mut queues: Vec<_> = (0..4).map(|i| pool.queue(i)).collect();
    let mut engine = Uring::new(pool.arena().clone(), 16).unwrap();
    engine.pin(queues[0].warm());
    let features = engine.features();
    assert!(resident(&pool) >= 8 * SLAB_BYTES, "the engine pins nothing: {features}");
    assert!(engine.unpin());
    queues[0].cool();
    assert_eq!(resident(&pool), 0);
}

#[test]
fn of_many_queues_each_gives_its_memory_back_by_itself() {
    let pool = Pool::of_many(64, 4 * SLAB_BYTES, 8 * SLAB_BYTES, PAGE_BYTES).unwrap();
    let mut queues: Vec<_> = (0..3).map(|i| pool.queue(i)).collect();
    for (i, queue) in queues.iter_mut().enumerate() {
        let pinned = queue.warm();
        assert_eq!((pinned.offset(), pinned.len()), (i * SLAB_BYTES, SLAB_BYTES / 4));
        let buf = queue.alloc(SLAB_BYTES).unwrap();
        pool.arena().fill(buf.span(), 1);
        // The next one is a shared slab.
        let shared = queue.alloc(PAGE_BYTES).unwrap();
        pool.arena().fill(shared.span(), 1);
        queue.free(buf);
        queue.free(shared);
        // From then on all that it has used is pinned.
        assert!(queue.wants_more());
        queue.borrow_more();
        assert_eq!((queue.warm().len(), queue.wants_more()), (SLAB_BYTES, false));
    }
    assert!(resident(&pool) >= 3 * SLAB_BYTES);
    queues[0].cool();
    queues[1].cool();
    let left = resident(&pool);
    assert!((SLAB_BYTES..SLAB_BYTES * 5 / 4).contains(&left), "{left} bytes for one queue");
}

#[test]
fn of_many_queues_none_has_more_than_it_may() {
    let pool = Pool::of_many(2, 3 * SLAB_BYTES, 64 * SLAB_BYTES, 0).unwrap();
    let mut queue = pool.queue(0);
    let all: Vec<_> = std::iter::from_fn(|| queue.alloc(SLAB_BYTES)).collect();
    assert_eq!(all.len(), 3);
    let mut other = pool.queue(1);
    let buf = other.alloc(SLAB_BYTES).expect("it has one to itself");
    other.free(buf);
    all.into_iter().for_each(|buf| queue.free(buf));
}
