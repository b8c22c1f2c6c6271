//! A remote for tests: a store in memory that threads serve, each connection a socket pair.
//!
//! The [`Store`] is the other side, and the factory of sessions. A test holds its replies, has it fail, cuts its
//! connections, and looks at its bytes.

mod server;
mod session;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use ferrite_io::reactor::Io;
use ferrite_io::remote::{Remote, RemoteFactory};
use ferrite_io::scratch::Scratch;

use crate::{PATIENCE, wait_until};
use session::Session;

/// A request on the wire: its operation, its number, its offset and its length, of 8 bytes each.
const REQUEST_BYTES: usize = 32;
/// A reply on the wire: its number, the errno, and a count, of 8 bytes each; data of a read follow.
const REPLY_BYTES: usize = 24;

/// The operations on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum Code {
    Read,
    Write,
    Sync,
    Zero,
    Allocation,
}

impl Code {
    const ALL: [Code; 5] = [Code::Read, Code::Write, Code::Sync, Code::Zero, Code::Allocation];
}

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    /// Replies are held.
    held: bool,
    /// Requests get this error, and have no effect.
    errno: Option<i32>,
    /// The most bytes of a transfer; 0: any number.
    most: usize,
    /// Requests that came, ever.
    received: usize,
    /// Operations that were done, ever, the last one last.
    done: Vec<Code>,
    connections: Vec<UnixStream>,
    /// Threads that serve.
    threads: usize,
}

/// See the module text.
#[derive(Default)]
pub struct Store {
    state: Mutex<State>,
    changed: Condvar,
}

impl Store {
    /// A store of so many zeros.
    pub fn new(bytes: usize) -> Arc<Store> {
        let store = Store::default();
        store.state().bytes = vec![0; bytes];
        Arc::new(store)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state());
        self.changed.notify_all();
        changed
    }

    /// Holds all requests that come from now on, until [`release`](Self::release).
    pub fn hold(&self) {
        self.change(|state| state.held = true);
    }

    /// Does the requests that were held, the last first, and all others as they come.
    pub fn release(&self) {
        self.change(|state| state.held = false);
    }

    /// All requests fail with this error number; `None`: they succeed.
    pub fn fail(&self, errno: Option<i32>) {
        self.change(|state| state.errno = errno);
    }

    /// Transfers move at most so many bytes.
    pub fn shorten(&self, most: usize) {
        self.change(|state| state.most = most);
    }

    /// Requests that came, ever.
    pub fn received(&self) -> usize {
        self.state().received
    }

    /// Waits until so many requests came, ever.
    pub fn wait_for_received(&self, requests: usize) {
        let (state, waited) = self
            .changed
            .wait_timeout_while(self.state(), PATIENCE, |state| state.received < requests)
            .unwrap();
        assert!(!waited.timed_out(), "{} of {requests} requests came", state.received);
    }

    /// Syncs that were done, ever.
    pub fn syncs(&self) -> usize {
        self.state().done.iter().filter(|code| **code == Code::Sync).count()
    }

    /// Bytes of the store.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.state().bytes[offset..offset + len].to_vec()
    }

    /// Ends all connections, in the middle of what they do.
    pub fn cut(&self) {
        for connection in std::mem::take(&mut self.state().connections) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Connections whose client has not closed them.
    pub fn connections(&self) -> usize {
        self.state().threads
    }

    /// Waits until no connection is left.
    pub fn wait_for_the_end(&self) {
        wait_until("the end of all connections", || self.connections() == 0);
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

/// The factory of sessions with a store.
#[derive(Debug)]
pub struct Sessions(pub Arc<Store>);

impl RemoteFactory for Sessions {
    fn connect(&self, io: Io, scratch: Scratch) -> io::Result<Rc<dyn Remote>> {
        let (ours, theirs) = UnixStream::pair()?;
        server::serve(&self.0, theirs)?;
        Ok(Session::begin(Arc::new(OwnedFd::from(ours)), io, scratch))
    }
}
