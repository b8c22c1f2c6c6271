//! Pools that get more memory while storage is slow.

use std::path::Path;
use std::sync::Arc;

use ferrite_io::pool::{Buf, Growth, HostMemory, Others, Pool, QueuePool, SLAB_BYTES, STEP_BYTES};

/// Eight slabs, which is one step: it doubles at first by that.
const OWN: usize = 8 * SLAB_BYTES;
const MS: u64 = 1_000_000;

fn host(dir: &Path, steps: usize) -> Arc<HostMemory> {
    HostMemory::open(&dir.join("memory"), (steps * STEP_BYTES) as u64).unwrap()
}

fn pool(host: &Arc<HostMemory>, most_bytes: usize) -> Arc<Pool> {
    let growth = Some(Growth { most_bytes, host: host.clone() });
    Pool::with_others(OWN, 1, 64 << 10, Others { lender: None, growth }).unwrap()
}

/// Largest requests that find a buffer at once.
fn fill(queue: &mut QueuePool) -> Vec<Buf> {
    std::iter::from_fn(|| queue.alloc(SLAB_BYTES)).collect()
}

fn room(queue: &mut QueuePool) -> usize {
    let all = fill(queue);
    let room = all.len();
    all.into_iter().for_each(|buf| queue.free(buf));
    room
}

#[test]
fn slow_storage_gets_twice_as_much_memory_again_and_again_until_the_rings_are_full() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(dir.path(), 100);
    let pool = pool(&host, 60 << 20);
    let mut queue = pool.queue(0);
    let pinned = queue.warm();
    let before = room(&mut queue);
    let mut found = Vec::new();
    for i in 0..5 {
        pool.grow(i * 100 * MS, i * 100 * MS + 20 * MS);
        found.push((room(&mut queue) - before, host.claimed_bytes() / STEP_BYTES));
    }
    // 60 MiB, rounded up to steps.
    assert_eq!(found, [(8, 1), (24, 3), (56, 7), (56, 7), (56, 7)]);
    // The memory to pin is the same as before: the new memory is not pinned.
    assert_eq!(queue.warm(), pinned);
    assert!(pinned.len() < OWN + STEP_BYTES, "{pinned:?}");
    let all = fill(&mut queue);
    let mut places: Vec<usize> = all.iter().map(|buf| buf.span().offset()).collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|two| two[0] + SLAB_BYTES <= two[1]));
    let scratch = pool.scratch(0);
    let inside = |at: &usize| (scratch.offset()..scratch.offset() + scratch.len()).contains(at);
    assert!(!places.iter().any(|at| inside(at) || inside(&(at + SLAB_BYTES - 1))));
    all.into_iter().for_each(|buf| queue.free(buf));
}

#[test]
fn storage_that_is_fast_or_has_enough_to_do_gets_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(dir.path(), 100);
    let pool = pool(&host, 1 << 30);
    let steps = || host.claimed_bytes() / STEP_BYTES;
    pool.grow(0, 4 * MS);
    assert_eq!(steps(), 0, "fast");
    pool.grow(0, 20 * MS);
    assert_eq!(steps(), 1);
    pool.grow(10 * MS, 30 * MS);
    pool.grow(39 * MS, 59 * MS);
    assert_eq!(steps(), 1, "they began before the new memory was used for long");
    pool.grow(40 * MS, 80 * MS);
    assert_eq!(steps(), 1, "with twice the requests under way each takes twice as long");
    pool.grow(100 * MS, 129 * MS);
    assert_eq!(steps(), 3, "it takes about as long as before");
}

#[test]
fn all_memory_goes_back_when_the_queues_rest_and_what_was_in_it_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(dir.path(), 100);
    let pool = pool(&host, 1 << 30);
    let mut queue = pool.queue(0);
    for _ in 0..2 {
        let _ = queue.warm();
        let before = room(&mut queue);
        pool.grow(0, 20 * MS);
        let all = fill(&mut queue);
        assert_eq!((all.len(), host.claimed_bytes()), (before + 8, STEP_BYTES));
        let last = all.iter().map(Buf::span).max_by_key(|span| span.offset()).unwrap();
        pool.arena().fill(last, 0xa5);
        queue.cool();
        assert_eq!(host.claimed_bytes(), STEP_BYTES, "buffers are in use");
        all.into_iter().for_each(|buf| queue.free(buf));
        queue.cool();
        assert_eq!(host.claimed_bytes(), 0);
        assert!(pool.arena().is_zero(last));
        assert_eq!(room(&mut queue), before);
    }
}

#[test]
fn pools_of_a_host_share_what_it_has_and_each_keeps_its_own() {
    let dir = tempfile::tempdir().unwrap();
    // As two processes.
    let hosts = [(); 2].map(|()| host(dir.path(), 3));
    let pools = hosts.each_ref().map(|host| pool(host, 1 << 30));
    let steps = || hosts.each_ref().map(|host| host.claimed_bytes() / STEP_BYTES);
    pools[0].grow(0, 20 * MS);
    pools[0].grow(100 * MS, 120 * MS);
    assert_eq!(steps(), [3, 0], "as much as there is");
    pools[1].grow(0, 20 * MS);
    assert_eq!(steps(), [3, 0]);
    assert!(room(&mut pools[1].queue(0)) >= 7);
    let [first, second] = pools;
    drop(first);
    assert_eq!(steps(), [0, 0]);
    second.grow(100 * MS, 120 * MS);
    second.grow(200 * MS, 220 * MS);
    assert_eq!(steps(), [0, 3]);
}
