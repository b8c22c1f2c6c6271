//! A small xenstored: one thread that serves xenstore's wire protocol from memory.
//!
//! It has the features that backends and frontends use: permissions, transactions that conflict, watches that fire once
//! when they are set and then for changes at or below their node, quotas for guests. It has no targets, no live update,
//! no logs.

mod connection;
mod tree;

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use self::connection::{Closed, Connection};
use self::tree::{Change, Tree};
use super::LoopbackError;
use super::guest::raised;
use ferrite_xen::hypervisor::DomId;

pub use self::connection::home;

/// Requests of other threads to the server's thread.
#[derive(Default)]
struct Inbox {
    connections: Vec<(DomId, OwnedFd, Arc<AtomicU64>)>,
    events: Vec<&'static str>,
    stop: bool,
}

struct Shared {
    inbox: Mutex<Inbox>,
    wake: OwnedFd,
}

impl Shared {
    fn ask(&self, f: impl FnOnce(&mut Inbox)) {
        f(&mut self.inbox.lock().unwrap_or_else(PoisonError::into_inner));
        // A full counter wakes as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The server; dropping it ends it, and every connection with it.
pub struct StoreServer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl StoreServer {
    /// Starts a server with an empty tree.
    ///
    /// # Errors
    /// The kernel gives no descriptor or no thread.
    pub fn start() -> Result<StoreServer, LoopbackError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LoopbackError::system("create the store's eventfd"))?;
        let shared = Arc::new(Shared { inbox: Mutex::default(), wake });
        let server = Server { shared: shared.clone(), tree: Tree::new(), connections: Vec::new() };
        let thread = std::thread::Builder::new()
            .name("loopback-store".into())
            .spawn(move || server.run())
            .map_err(LoopbackError::system("start the store's thread"))?;
        Ok(StoreServer { shared, thread: Some(thread) })
    }

    /// A new connection that acts for `domid`, for [`Store::from_fd`](ferrite_xen::store::Store).
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn connect(&self, domid: DomId) -> Result<OwnedFd, LoopbackError> {
        self.connect_counted(domid).map(|(socket, _)| socket)
    }

    /// A new connection with a counter of its requests.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn connect_counted(
        &self,
        domid: DomId,
    ) -> Result<(OwnedFd, Arc<AtomicU64>), LoopbackError> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .and_then(|(ours, theirs)| Ok((ours, raised(theirs)?)))
        .map_err(LoopbackError::system("connect to the store"))?;
        Ok((theirs, self.serve(domid, ours)))
    }

    /// Serves the other end of a stream socket that does not block. Returns the counter of its requests.
    pub fn serve(&self, domid: DomId, socket: OwnedFd) -> Arc<AtomicU64> {
        let requests = Arc::new(AtomicU64::new(0));
        self.shared.ask(|inbox| inbox.connections.push((domid, socket, requests.clone())));
        requests
    }

    /// Fires watches of `@introduceDomain`: a domain was created.
    pub fn announce_introduced(&self) {
        self.shared.ask(|inbox| inbox.events.push("@introduceDomain"));
    }

    /// Fires watches of `@releaseDomain`: a domain has ended.
    pub fn announce_released(&self) {
        self.shared.ask(|inbox| inbox.events.push("@releaseDomain"));
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.shared.ask(|inbox| inbox.stop = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The state of the thread.
struct Server {
    shared: Arc<Shared>,
    tree: Tree,
    connections: Vec<Connection>,
}

impl Server {
    fn run(mut self) {
        while self.take_inbox() {
            let Ok(ready) = self.wait() else { return };
            let mut closed = Vec::new();
            for (i, flags) in ready {
                if self.serve(i, flags).is_err() {
                    closed.push(i);
                }
            }
            for i in closed.into_iter().rev() {
                self.connections.swap_remove(i);
            }
        }
    }

    /// Handles requests of other threads. `false`: the server ends.
    fn take_inbox(&mut self) -> bool {
        let mut inbox = self.shared.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = std::mem::take(&mut inbox.connections);
        let events = std::mem::take(&mut inbox.events);
        let stop = inbox.stop;
        drop(inbox);
        let connections = connections.into_iter();
        self.connections.extend(connections.map(|(d, fd, n)| Connection::new(d, fd, n)));
        for path in events {
            self.tell_all(&[Change { path: path.to_owned(), exact: false }]);
        }
        !stop
    }

    /// Waits for work; returns the ready connections, in their order.
    fn wait(&self) -> rustix::io::Result<Vec<(usize, PollFlags)>> {
        let mut fds = Vec::with_capacity(self.connections.len() + 1);
        fds.push(PollFd::new(&self.shared.wake, PollFlags::IN));
        for c in &self.connections {
            let input = if c.wants_input() { PollFlags::IN } else { PollFlags::empty() };
            let output = if c.has_output() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::from_borrowed_fd(c.socket(), input | output));
        }
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e),
        }
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.wake, &mut count);
        let ready = fds[1..].iter().enumerate().map(|(i, fd)| (i, fd.revents()));
        Ok(ready.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    fn serve(&mut self, i: usize, flags: PollFlags) -> Result<(), Closed> {
        let connection = &mut self.connections[i];
        let gone = PollFlags::HUP | PollFlags::ERR;
        if flags.intersects(PollFlags::IN | gone) {
            let changes = connection.receive(&mut self.tree)?;
            self.tell_all(&changes);
        }
        self.connections[i].send()
    }

    fn tell_all(&mut self, changes: &[Change]) {
        for connection in &mut self.connections {
            changes.iter().for_each(|change| connection.tell(&self.tree, change));
        }
    }
}

#[cfg(test)]
mod tests;
