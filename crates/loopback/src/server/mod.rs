//! A small xenstored: one thread that serves xenstore's wire protocol from memory.
//!
//! It has the features that backends and frontends use: permissions, transactions that conflict, watches that fire once
//! when they are set and then for changes at or below their node, quotas for guests. It has no targets, no live update,
//! no logs.

mod connection;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
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
        let server = Server::new(shared.clone())
            .map_err(LoopbackError::system("wait for the store's connections"))?;
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

/// The number of the eventfd among the descriptors that are waited for. Connections have lower ones.
const WAKE: u64 = u64::MAX;
/// Most descriptors that are served before the next look.
const READY: usize = 256;

/// The state of the thread. A request costs the same on a host of a thousand connections: only those are looked at
/// that are ready, or have a watch of what was changed.
struct Server {
    shared: Arc<Shared>,
    tree: Tree,
    epoll: OwnedFd,
    /// By numbers that are not used again.
    connections: BTreeMap<u64, Connection>,
    next: u64,
    /// Connections with new events to send.
    told: BTreeSet<u64>,
}

impl Server {
    fn new(shared: Arc<Shared>) -> rustix::io::Result<Server> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &shared.wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let (connections, told) = (BTreeMap::new(), BTreeSet::new());
        Ok(Server { shared, tree: Tree::new(), epoll, connections, next: 0, told })
    }

    fn run(mut self) {
        while self.take_inbox() {
            self.send_events();
            let Ok(ready) = self.wait() else { return };
            for (number, flags) in ready {
                if self.serve(number, flags).is_err() {
                    self.close(number);
                }
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
        for (domid, socket, requests) in connections {
            let connection = Connection::new(domid, socket, requests);
            let (number, interest) = (self.next, connection.interest());
            let data = EventData::new_u64(number);
            if epoll::add(&self.epoll, connection.socket(), data, interest).is_ok() {
                self.connections.insert(number, connection);
                self.next += 1;
            }
        }
        for path in events {
            self.tell_all(&[Change { path: path.to_owned(), exact: false }]);
        }
        !stop
    }

    /// Waits for work; returns the ready connections, in their order.
    fn wait(&self) -> rustix::io::Result<Vec<(u64, EventFlags)>> {
        let mut events = Vec::with_capacity(READY);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e),
        }
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.wake, &mut count);
        let mut ready: Vec<_> = events.iter().map(|e| (e.data.u64(), e.flags)).collect();
        ready.retain(|(number, _)| *number != WAKE);
        ready.sort_by_key(|(number, _)| *number);
        Ok(ready)
    }

    fn serve(&mut self, number: u64, flags: EventFlags) -> Result<(), Closed> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        let gone = EventFlags::HUP | EventFlags::ERR;
        if flags.intersects(EventFlags::IN | gone) {
            let changes = connection.receive(&mut self.tree)?;
            self.tell_all(&changes);
        }
        self.send(number)
    }

    /// Sends what a connection has to send, and waits for room for the rest of it.
    fn send(&mut self, number: u64) -> Result<(), Closed> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        connection.send()?;
        let Some(interest) = connection.new_interest() else { return Ok(()) };
        let data = EventData::new_u64(number);
        epoll::modify(&self.epoll, connection.socket(), data, interest).map_err(|_| Closed)
    }

    fn send_events(&mut self) {
        for number in std::mem::take(&mut self.told) {
            if self.send(number).is_err() {
                self.close(number);
            }
        }
    }

    fn close(&mut self, number: u64) {
        if let Some(connection) = self.connections.remove(&number) {
            // A process that is being started may have a copy of the socket still.
            let _ = epoll::delete(&self.epoll, connection.socket());
        }
    }

    fn tell_all(&mut self, changes: &[Change]) {
        for (number, connection) in &mut self.connections {
            for change in changes {
                if connection.tell(&self.tree, change) {
                    self.told.insert(*number);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
