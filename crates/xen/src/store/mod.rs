//! A client for xenstore, and its wire protocol for both ends (blkif.md 3 and 6).
//!
//! [`Store`] speaks to any server over any stream: xenstored's socket, the kernel's
//! /dev/xen/xenbus, or the loopback's server. It waits for replies, and never for watch events:
//! those are asked for by [`Store::poll_event`] when [`Store::fd`] is readable.
//!
//! Nothing that comes in is trusted. A malformed message gives the connection up with an error
//! ([`StoreError::is_fatal`]); events are kept at most one a watch; every request has a deadline.

mod connection;
mod error;
#[cfg(test)]
mod tests;
mod transaction;
mod watches;
pub mod wire;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::{Clock, Random, SplitMix64, SystemClock};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

pub use error::StoreError;
pub use transaction::Transaction;
pub use watches::WatchEvent;
pub use wire::Permission;

use connection::Connection;
use error::What;
use transaction::{Session, check_path};
use wire::{MessageType, NO_TRANSACTION, nul_terminated};

/// xenstored's sockets, where it runs in this domain.
const SOCKETS: [&str; 2] = ["/run/xenstored/socket", "/var/run/xenstored/socket"];
/// The environment variable that names xenstored's socket for Xen's own programs.
const SOCKET_VARIABLE: &str = "XENSTORED_PATH";
/// The kernel's connection, in any domain.
const DEVICES: [&str; 2] = ["/dev/xen/xenbus", "/proc/xen/xenbus"];

/// How long a request waits for its reply.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Watches of one connection.
const WATCHES_MAX: usize = 16384;
/// How often a transaction is tried: guests can force conflicts by writing (XSA-206).
const TRANSACTION_ATTEMPTS: u32 = 64;
/// The longest sleep before the second attempt; it doubles with each, up to the maximum.
const BACKOFF_FIRST: Duration = Duration::from_micros(500);
/// The longest sleep before any attempt.
const BACKOFF_MAX: Duration = Duration::from_millis(128);

/// A connection to xenstore. Closing it, by dropping it, removes its watches.
pub struct Store {
    connection: Connection,
    random: Box<dyn Random>,
}

/// Why no way to xenstore works. Ways that do not exist need no names: they are only logged.
fn why_unreachable(tried: &[(&str, io::Error)]) -> String {
    let is_there = |e: &io::Error| e.kind() != io::ErrorKind::NotFound;
    for (path, e) in tried {
        tracing::debug!("no way to xenstore by {path}: {e}");
    }
    let there: Vec<String> =
        tried.iter().filter(|(_, e)| is_there(e)).map(|(path, e)| format!("{path}: {e}")).collect();
    match there.is_empty() {
        true => "neither a socket of xenstored nor a device of Xen is here; -v names them".into(),
        false => there.join(", "),
    }
}

impl Store {
    /// Connects: by xenstored's socket where it is, else by the kernel's device. As for Xen's own programs the
    /// environment variable `XENSTORED_PATH` names another socket, which is the only way then.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`].
    pub fn open() -> Result<Store, StoreError> {
        let mut tried = Vec::new();
        if let Some(path) = std::env::var_os(SOCKET_VARIABLE) {
            return Store::open_socket(Path::new(&path)).map_err(|e| StoreError::Unreachable {
                tried: format!("{SOCKET_VARIABLE}={}: {e}", path.display()),
            });
        }
        let sockets = SOCKETS.into_iter().map(|p| (p, true));
        for (path, is_socket) in sockets.chain(DEVICES.into_iter().map(|p| (p, false))) {
            let opened = if is_socket {
                Store::open_socket(Path::new(path))
            } else {
                Store::open_device(Path::new(path))
            };
            match opened {
                Ok(store) => return Ok(store),
                Err(e) => tried.push((path, e)),
            }
        }
        Err(StoreError::Unreachable { tried: why_unreachable(&tried) })
    }

    /// Connects to a server's Unix socket.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open_socket(path: &Path) -> io::Result<Store> {
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Store::from_fd(fd))
    }

    /// Connects by the kernel's device. There a message has at most 4096 bytes with its header.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open_device(path: &Path) -> io::Result<Store> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(Store::from_fd(rustix::fs::open(path, flags, Mode::empty())?))
    }

    /// Over a connected stream socket, or an open xenbus device. Makes it non-blocking.
    pub fn from_fd(fd: OwnedFd) -> Store {
        Store {
            connection: Connection::new(fd, TIMEOUT, SystemClock::shared()),
            random: Box::new(SplitMix64::from_system()),
        }
    }

    /// With this time and randomness instead of the system's.
    pub fn with_world(mut self, clock: Arc<dyn Clock>, random: Box<dyn Random>) -> Store {
        self.connection.clock = clock;
        self.random = random;
        self
    }

    /// With another time limit for each request than 30 s.
    pub fn with_timeout(mut self, timeout: Duration) -> Store {
        self.connection.timeout = timeout;
        self
    }

    /// Whether the connection is of no more use; see [`StoreError::is_fatal`].
    pub fn is_dead(&self) -> bool {
        self.connection.is_dead()
    }

    /// Requests that were made of xenstore by this connection, ever.
    pub fn requests(&self) -> u64 {
        self.connection.requests
    }

    fn session(&mut self) -> Session<'_> {
        Session { connection: &mut self.connection, transaction_id: NO_TRANSACTION }
    }

    /// The node's value; `None` if there is no such node.
    ///
    /// # Errors
    /// Any [`StoreError`], as for all requests.
    pub fn read(&mut self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.session().read(path)
    }

    /// The node's value as text; `None` if there is no such node.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if it is not UTF-8 or has a NUL.
    pub fn read_string(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        self.session().read_string(path)
    }

    /// Sets the node's value, and makes it and its parents where they are missing.
    ///
    /// # Errors
    /// Any [`StoreError`].
    pub fn write(&mut self, path: &str, value: &[u8]) -> Result<(), StoreError> {
        self.session().write(path, value)
    }

    /// Removes the node and all below it; one that is not there is removed already.
    ///
    /// # Errors
    /// Any [`StoreError`].
    pub fn remove(&mut self, path: &str) -> Result<(), StoreError> {
        self.session().remove(path)
    }

    /// Makes the node, and its parents, where they are missing.
    ///
    /// # Errors
    /// Any [`StoreError`].
    pub fn mkdir(&mut self, path: &str) -> Result<(), StoreError> {
        self.session().mkdir(path)
    }

    /// The names of the node's children.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] if there is no such node.
    pub fn list(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        self.session().list(path)
    }

    /// The node's permissions, its owner first.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] if there is no such node.
    pub fn get_permissions(&mut self, path: &str) -> Result<Vec<Permission>, StoreError> {
        self.session().get_permissions(path)
    }

    /// Replaces the node's permissions: first its owner with the letter for domains that are not
    /// listed, then other domains with theirs (blkif.md 3.2).
    ///
    /// # Errors
    /// [`StoreError::NotFound`] if there is no such node.
    pub fn set_permissions(
        &mut self,
        path: &str,
        permissions: &[Permission],
    ) -> Result<(), StoreError> {
        self.session().set_permissions(path, permissions)
    }

    /// Runs `f` in a transaction and commits it. When others changed what it read, all of it is
    /// done again, `f` too, a bounded number of times with growing, random pauses. When `f` fails,
    /// nothing of it is seen.
    ///
    /// # Errors
    /// `f`'s own; [`StoreError::Again`] when every attempt conflicted.
    pub fn transaction<T>(
        &mut self,
        mut f: impl FnMut(&mut Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut pause = BACKOFF_FIRST;
        for attempt in 0..TRANSACTION_ATTEMPTS {
            if attempt > 0 {
                let ns = self.random.below(pause.as_nanos() as u64 + 1);
                self.connection.clock.sleep(Duration::from_nanos(ns));
                pause = (pause * 2).min(BACKOFF_MAX);
            }
            let result = Transaction::start(&mut self.connection).and_then(|mut transaction| {
                let value = f(&mut transaction)?;
                transaction.commit().map(|()| value)
            });
            match result {
                Err(StoreError::Again { .. }) => {}
                other => return other,
            }
        }
        Err(StoreError::Again { attempts: TRANSACTION_ATTEMPTS })
    }

    /// Asks for events about `path` and everything below it. The first comes at once, whether
    /// anything changed or not. `token` says which watch an event is of; it must not be in use.
    /// Watching the same path with the same token twice is one watch.
    ///
    /// # Errors
    /// [`StoreError::Quota`] where xenstored allows this domain no more.
    pub fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.watch_nodes(path, token, 1)
    }

    /// As [`watch`](Self::watch), with an event for each node that changes, as long as at most `most`
    /// of them wait for their reader. More become one event of the watched path.
    ///
    /// # Errors
    /// As [`watch`](Self::watch).
    pub fn watch_nodes(&mut self, path: &str, token: &str, most: usize) -> Result<(), StoreError> {
        let what = What { verb: "watch", path };
        check_path(what)?;
        if token.contains('\0') {
            return Err(StoreError::invalid(what, "the token has a NUL"));
        }
        let watches = &mut self.connection.watches;
        if watches.is_on(path, token) {
            return Ok(());
        }
        if watches.contains(token) {
            return Err(StoreError::invalid(what, "the token is another watch's"));
        }
        if watches.len() >= WATCHES_MAX {
            return Err(StoreError::invalid(what, "there are too many watches already"));
        }
        // Before the request: its first event may come before its reply.
        watches.add(path, token, most);
        let payload = nul_terminated(&[path, token]);
        let done = self.connection.request(what, MessageType::Watch, NO_TRANSACTION, &payload);
        match done {
            Ok(_) => Ok(()),
            Err(e) => {
                self.connection.watches.remove(token);
                match e {
                    // One that timed out earlier was set after all, and has fired already.
                    StoreError::Refused { name, .. } if name == "EEXIST" => {
                        self.connection.watches.add(path, token, most);
                        self.connection.watches.fired(path, token);
                        Ok(())
                    }
                    e => Err(e),
                }
            }
        }
    }

    /// Ends a watch; its pending event is dropped. One that is not there is ended already.
    ///
    /// # Errors
    /// Any [`StoreError`]; no more events of it come all the same.
    pub fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let what = What { verb: "unwatch", path };
        check_path(what)?;
        if !self.connection.watches.is_on(path, token) {
            return Ok(());
        }
        self.connection.watches.remove(token);
        let payload = nul_terminated(&[path, token]);
        match self.connection.request(what, MessageType::Unwatch, NO_TRANSACTION, &payload) {
            Err(StoreError::NotFound { .. }) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Readable when there may be watch events; hung up when the server is gone. Level-triggered.
    /// Not readable for events that arrived with a reply: call [`poll_event`](Self::poll_event)
    /// until it gives `None` before waiting for this.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.connection.fd()
    }

    /// The next watch event, if there is one; never waits. Changes that came since the last event
    /// of the same watch was taken are one event, or as many as its reader has asked for (XSA-349).
    ///
    /// # Errors
    /// [`StoreError::is_fatal`] ones only. Events that had arrived are given first.
    pub fn poll_event(&mut self) -> Result<Option<WatchEvent>, StoreError> {
        if let Some(event) = self.connection.watches.take() {
            return Ok(Some(event));
        }
        let received = self.connection.receive_events(What { verb: "wait for events", path: "" });
        match self.connection.watches.take() {
            Some(event) => Ok(Some(event)),
            None => received.map(|()| None),
        }
    }
}
