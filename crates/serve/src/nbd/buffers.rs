//! The memory of a server's clients: one pool, of which each client has a queue.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk::Disk;
use ferrite_io::pool::{Pool, SLAB_BYTES};

/// The memory that clients share beside the 1 MiB that each has to itself. One client may have more.
const SHARED_BYTES: usize = 64 << 20;

/// The pool of a server's clients. It is made for the first of them.
pub(super) struct ClientPool {
    clients: usize,
    client_bytes: usize,
    open: Mutex<Option<Arc<OpenPool>>>,
}

/// A pool, and its queues that no client has.
struct OpenPool {
    pool: Arc<Pool>,
    free: Mutex<Vec<usize>>,
}

/// A client's part of the pool.
pub(super) struct ClientQueue {
    open: Arc<OpenPool>,
    /// Its number in the pool.
    pub(super) index: usize,
}

impl ClientPool {
    /// A pool for this many clients, with at most `client_bytes` of data in flight each.
    pub(super) fn new(clients: usize, client_bytes: usize) -> ClientPool {
        ClientPool {
            clients,
            client_bytes: client_bytes.max(2 * SLAB_BYTES),
            open: Mutex::default(),
        }
    }

    /// The part of one more client.
    ///
    /// # Errors
    /// There is no memory for the pool, or all parts are taken.
    pub(super) fn take(&self) -> io::Result<ClientQueue> {
        let open = match &mut *self.current() {
            Some(open) => open.clone(),
            none => none.insert(self.make()?).clone(),
        };
        let index = open.free().pop();
        let index = index.ok_or_else(|| io::Error::other("each queue of the pool is taken"))?;
        Ok(ClientQueue { open, index })
    }

    /// Has later clients use another pool. Buffers of a client that has failed may be lost to this
    /// one, which goes with its last client.
    pub(super) fn renew(&self, failed: &ClientQueue) {
        let mut open = self.current();
        if open.as_ref().is_some_and(|open| Arc::ptr_eq(open, &failed.open)) {
            *open = None;
        }
    }

    fn make(&self) -> io::Result<Arc<OpenPool>> {
        let each = self.client_bytes - SLAB_BYTES;
        let shared = each.saturating_mul(self.clients).min(SHARED_BYTES).max(each);
        let scratch = Disk::MAX_SCRATCH_BYTES;
        let pool = Pool::of_many(self.clients, self.client_bytes, shared, scratch)?;
        // The lowest one is taken first.
        let free = Mutex::new((0..self.clients).rev().collect());
        Ok(Arc::new(OpenPool { pool, free }))
    }

    fn current(&self) -> MutexGuard<'_, Option<Arc<OpenPool>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenPool {
    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientQueue {
    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.open.pool
    }
}

impl Drop for ClientQueue {
    fn drop(&mut self) {
        self.open.free().push(self.index);
    }
}
