//! The memory of a disk's clients: one pool for all of them, in which each has a place.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk::Disk;
use ferrite_io::pool::{Pool, SLAB_BYTES};

/// The memory that clients share beside the 1 MiB that each has to itself. One client may have more.
const SHARED_BYTES: usize = 64 << 20;

/// The places of a disk's clients. The pool is made for the first of them.
pub(super) struct Seats {
    clients: usize,
    client_bytes: usize,
    hall: Mutex<Option<Arc<Hall>>>,
}

/// A pool, and its queues that no client has.
struct Hall {
    pool: Arc<Pool>,
    free: Mutex<Vec<usize>>,
}

/// A client's place in the pool.
pub(super) struct Seat {
    hall: Arc<Hall>,
    /// The client's queue of the pool.
    pub(super) queue: usize,
}

impl Seats {
    /// Places for this many clients, with at most `client_bytes` of data in flight each.
    pub(super) fn new(clients: usize, client_bytes: usize) -> Seats {
        Seats { clients, client_bytes: client_bytes.max(2 * SLAB_BYTES), hall: Mutex::default() }
    }

    /// A place for one more client.
    ///
    /// # Errors
    /// There is no memory for the pool, or no place is left.
    pub(super) fn take(&self) -> io::Result<Seat> {
        let hall = match &mut *self.hall() {
            Some(hall) => hall.clone(),
            none => none.insert(self.open()?).clone(),
        };
        let queue = hall.free().pop();
        let queue = queue.ok_or_else(|| io::Error::other("each place in the pool is taken"))?;
        Ok(Seat { hall, queue })
    }

    /// Has later clients use another pool. Buffers of a client that has failed may be lost to this
    /// one, which goes with its last client.
    pub(super) fn renew(&self, seat: &Seat) {
        let mut hall = self.hall();
        if hall.as_ref().is_some_and(|hall| Arc::ptr_eq(hall, &seat.hall)) {
            *hall = None;
        }
    }

    fn open(&self) -> io::Result<Arc<Hall>> {
        let each = self.client_bytes - SLAB_BYTES;
        let shared = each.saturating_mul(self.clients).min(SHARED_BYTES).max(each);
        let scratch = Disk::MAX_SCRATCH_BYTES;
        let pool = Pool::of_many(self.clients, self.client_bytes, shared, scratch)?;
        // The lowest one is taken first.
        let free = Mutex::new((0..self.clients).rev().collect());
        Ok(Arc::new(Hall { pool, free }))
    }

    fn hall(&self) -> MutexGuard<'_, Option<Arc<Hall>>> {
        self.hall.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hall {
    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.hall.pool
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.hall.free().push(self.queue);
    }
}
