//! Pages that are lent to a pool: who has them, and for how long.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use ferrite_io::arena::{Arena, Lender, Span};
use ferrite_io::pool::{LENT_PAGES, Others, PAGE_BYTES, Pool, QueuePool, SLAB_BYTES};
use rustix::fs::{MemfdFlags, memfd_create};

/// Pages that a queue has at first.
const FIRST: usize = 16;

/// A device of so many pages, each with its number from 1 on as its name.
struct Device {
    file: File,
    /// Free ones.
    free: Mutex<Vec<u32>>,
}

impl Device {
    fn new(pages: usize) -> Arc<Device> {
        let file = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).unwrap());
        file.set_len((pages * PAGE_BYTES) as u64).unwrap();
        Arc::new(Device { file, free: Mutex::new((1..=pages as u32).rev().collect()) })
    }

    fn free(&self) -> usize {
        self.free.lock().unwrap().len()
    }
}

struct Lends(Arc<Device>);

fn pages(of: Span) -> impl Iterator<Item = Span> {
    (0..of.len()).step_by(PAGE_BYTES).map(move |at| of.slice(at, PAGE_BYTES))
}

impl Lender for Lends {
    fn lend(&self, arena: &Arena, wanted: Span) {
        for at in pages(wanted) {
            let Some(name) = self.0.free.lock().unwrap().pop() else { return };
            let offset = (name as usize - 1) * PAGE_BYTES;
            arena.put(at, self.0.file.as_fd(), offset as u64, &[name]).unwrap();
        }
    }

    fn take_back(&self, arena: &Arena, wanted: Span) {
        for at in pages(wanted) {
            if let Some(name) = arena.name(at.offset()) {
                arena.take_out(at);
                self.0.free.lock().unwrap().push(name);
            }
        }
    }
}

fn pool(device: &Arc<Device>, queues: usize) -> Arc<Pool> {
    let lender = Box::new(Lends(device.clone()));
    let others = Others { lender: Some(lender), growth: None };
    Pool::with_others(8 * SLAB_BYTES, queues, 0, others).unwrap()
}

/// Whether this memory can be lent any: not that of the kernel's reserve of huge pages.
fn can_borrow(pool: &Pool) -> bool {
    pool.arena().kind() != "2 MiB pages"
}

/// Bytes in use at once, and again none.
fn fill(queue: &mut QueuePool, bytes: usize) -> Span {
    let buf = queue.alloc(bytes).unwrap();
    let span = buf.span();
    queue.free(buf);
    span
}

#[test]
fn a_warm_queue_has_lent_pages_first_and_a_cold_one_none() {
    let device = Device::new(1000);
    let pool = pool(&device, 4);
    if !can_borrow(&pool) {
        return;
    }
    let mut queues: Vec<_> = (0..4).map(|i| pool.queue(i)).collect();
    assert_eq!(device.free(), 1000);
    for (i, queue) in queues.iter_mut().enumerate() {
        let _ = queue.warm();
        let _ = queue.warm();
        assert_eq!(device.free(), 1000 - (i + 1) * FIRST);
    }
    let all = queues[2].alloc(FIRST * PAGE_BYTES).unwrap();
    assert!(pages(all.span()).all(|page| pool.arena().name(page.offset()).is_some()));
    let more = queues[2].alloc(PAGE_BYTES).unwrap();
    assert_eq!(pool.arena().name(more.span().offset()), None);

    queues[2].cool();
    assert_eq!(device.free(), 1000 - 4 * FIRST, "it uses them");
    queues[2].free(all);
    queues[2].free(more);
    for (i, queue) in queues.iter_mut().enumerate() {
        queue.cool();
        assert_eq!(device.free(), 1000 - (3 - i) * FIRST);
    }
    let _ = queues[0].warm();
    assert_eq!(device.free(), 1000 - FIRST);
    queues.clear();
    assert_eq!(device.free(), 1000);
    let all = pool.arena().span(0, pool.arena().len());
    assert!(pool.arena().is_zero(all));
}

#[test]
fn a_queue_is_lent_what_its_buffers_fill_at_once() {
    let device = Device::new(1000);
    let pool = pool(&device, 4);
    if !can_borrow(&pool) {
        return;
    }
    let mut queue = pool.queue(1);
    let _ = queue.warm();
    assert!(!queue.wants_more());
    fill(&mut queue, FIRST * PAGE_BYTES);
    assert!(!queue.wants_more());
    fill(&mut queue, (FIRST + 4) * PAGE_BYTES);
    assert!(queue.wants_more());
    let buf = queue.alloc(1).unwrap();
    queue.borrow_more();
    assert_eq!(device.free(), 1000 - FIRST, "a buffer is in use");
    queue.free(buf);
    queue.borrow_more();
    assert_eq!(device.free(), 1000 - 2 * FIRST);
    assert!(!queue.wants_more());
    let span = fill(&mut queue, 2 * FIRST * PAGE_BYTES);
    assert!(pages(span).all(|page| pool.arena().name(page.offset()).is_some()));

    // The next time it has them from the beginning, and those that it did not use then no more.
    queue.cool();
    assert_eq!(device.free(), 1000);
    let _ = queue.warm();
    assert_eq!(device.free(), 1000 - 2 * FIRST);
    queue.cool();
    let _ = queue.warm();
    assert_eq!(device.free(), 1000 - FIRST);
}

#[test]
fn queues_of_a_disk_share_what_a_disk_may_have() {
    let device = Device::new(1000);
    let pool = pool(&device, 4);
    if !can_borrow(&pool) {
        return;
    }
    let mut queues: Vec<_> = (0..3).map(|i| pool.queue(i)).collect();
    let most = LENT_PAGES as usize;
    for (queue, left) in queues.iter_mut().zip([256, 0, 0]) {
        let _ = queue.warm();
        fill(queue, SLAB_BYTES);
        queue.borrow_more();
        assert_eq!(device.free(), 1000 - most + left);
        assert!(!queue.wants_more(), "it asks no second time");
    }
    queues[0].cool();
    assert_eq!(device.free(), 1000 - most + 256);
    queues[2].cool();
    let _ = queues[2].warm();
    assert_eq!(device.free(), 1000 - most);
    queues.clear();
    assert_eq!(device.free(), 1000);
}

#[test]
fn one_queue_is_lent_no_more_than_its_own_slab() {
    let device = Device::new(1000);
    let pool = pool(&device, 1);
    if !can_borrow(&pool) {
        return;
    }
    let mut queue = pool.queue(0);
    let _ = queue.warm();
    let bufs = [(); 3].map(|()| queue.alloc(SLAB_BYTES).unwrap());
    bufs.into_iter().for_each(|buf| queue.free(buf));
    queue.borrow_more();
    assert_eq!(device.free(), 1000 - SLAB_BYTES / PAGE_BYTES);
    assert_eq!(pool.arena().name(SLAB_BYTES), None);
    assert_eq!(pool.arena().name(pool.zero_page().offset()), None);
}

#[test]
fn a_device_without_enough_leaves_the_rest_as_it_was() {
    let device = Device::new(3);
    let (first, second) = (pool(&device, 2), pool(&device, 2));
    if !can_borrow(&first) {
        return;
    }
    let (mut a, mut b) = (first.queue(1), second.queue(0));
    let (_, _) = (a.warm(), b.warm());
    let bufs = [a.alloc(5 * PAGE_BYTES), b.alloc(SLAB_BYTES)].map(Option::unwrap);
    let named = |pool: &Pool, span: Span| {
        pages(span).filter(|page| pool.arena().name(page.offset()).is_some()).count()
    };
    assert_eq!((named(&first, bufs[0].span()), named(&second, bufs[1].span())), (3, 0));
    for (pool, buf) in [(&first, &bufs[0]), (&second, &bufs[1])] {
        pool.arena().fill(buf.span(), 7);
    }
    let [of_a, of_b] = bufs;
    a.free(of_a);
    b.free(of_b);
    // The pages that one queue has given back go to the other one.
    drop(a);
    b.cool();
    let _ = b.warm();
    let again = b.alloc(SLAB_BYTES).unwrap();
    assert_eq!(named(&second, again.span()), 3);
    b.free(again);
}
