//! Clients that come by TLS. A main thread accepts them and has the socket to the starter; each client has a thread.
//!
//! Messages, in text, both ways on one socket (`ferrite_host::frames::TUNNEL`):
//!
//! * `listen` with a listening socket, from the starter.
//! * `files N`: client N needs the files of certificates as they are now. The answer has the same words, a letter for
//!   each file, and the files. Without any they cannot be opened.
//! * `link N`: client N has spoken TLS and needs a stream to the server. The answer has the same words, and the stream
//!   if there is one.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::frames::{Frame, TUNNEL};
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_host::tunnel::{Files, Inward};
use ferrite_nbd::restriction::Restriction;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketAddrAny, SocketFlags, acceptfrom_with, shutdown};
use rustls::{Connection, ServerConfig, ServerConnection};

use crate::credentials::{self, Contents};
use crate::faults::{Peer, fault};
use crate::greeting::{in_clear, join, restrict, until_tls};
use crate::plain::pass;
use crate::pump::{Pump, bound, handshake};
use crate::stream::{GREETING, Timed, timespec};
use crate::{End, Fault};

/// Most clients with a stream to the server. More are turned away.
const MAX_CLIENTS: usize = 64;
/// Most clients in their handshake. The oldest makes room for one more, so strangers keep no client out.
const MAX_GREETED: usize = 64;
/// The pause before the next look for room.
const FULL_PAUSE: Duration = Duration::from_millis(100);
/// Address space for a client's stack.
const STACK_BYTES: usize = 512 << 10;

/// The letters and descriptors of an answer.
type Answer = (String, Vec<OwnedFd>);
/// Threads that wait for an answer of the starter, by what they have asked.
type Waiting = HashMap<String, SyncSender<Answer>>;

/// The state that all clients' threads share.
struct Shared {
    starter: OwnedFd,
    how: Inward,
    /// The rights of each client, which the tunnel sends to the server.
    restriction: Option<Restriction>,
    /// The hosts of which a client's certificate has to be one. Empty: any.
    peers: Vec<String>,
    /// Threads that wait for an answer of the starter, by what they have asked.
    waiting: Mutex<Waiting>,
    current: Mutex<Option<Current>>,
    /// Clients with a stream to the server.
    linked: AtomicUsize,
    refusals: SharedLogLimit,
    own_faults: SharedLogLimit,
}

/// The certificates that clients get.
struct Current {
    contents: Contents,
    config: Arc<ServerConfig>,
}

/// A client's thread.
struct Client {
    thread: JoinHandle<()>,
    /// Its connection, which is closed when the thread ends.
    socket: Weak<OwnedFd>,
    /// Whether its handshake is over.
    linked: Arc<AtomicBool>,
}

/// Serves clients until the starter ends. The server is told of each what it may do, if there is a `restriction`. With
/// `peers`, a client needs a certificate of one of these hosts.
///
/// # Errors
/// The starter has ended, or its socket fails.
pub fn inward(
    starter: OwnedFd,
    how: Inward,
    restriction: Option<Restriction>,
    peers: Vec<String>,
) -> io::Result<Infallible> {
    let shared = Arc::new(Shared {
        starter,
        how,
        restriction,
        peers,
        waiting: Mutex::default(),
        current: Mutex::default(),
        linked: AtomicUsize::new(0),
        refusals: SharedLogLimit::default(),
        own_faults: SharedLogLimit::default(),
    });
    let (mut listeners, mut clients, mut number) = (Vec::new(), Vec::<Client>::new(), 0u64);
    loop {
        clients.retain(|client| !client.thread.is_finished());
        let is_full = clients.len() >= MAX_CLIENTS + MAX_GREETED;
        let (said, connecting) = wait(&shared.starter, &listeners, is_full)?;
        if said && let Some(frame) = TUNNEL.try_receive(&shared.starter)? {
            listeners.extend(shared.handle(frame));
        }
        for i in connecting {
            number += 1;
            match acceptfrom_with(&listeners[i], SocketFlags::CLOEXEC) {
                Ok((socket, peer)) => {
                    make_room(&clients);
                    clients.extend(shared.admit(number, socket, peer));
                }
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
                Err(e) => {
                    let now_ns = SystemClock.now_ns();
                    limited!(warn, shared.own_faults, now_ns, "no client can be accepted now: {e}");
                    std::thread::sleep(FULL_PAUSE);
                }
            }
        }
    }
}

/// Ends the oldest handshake if there are too many. Its thread sees the end of its connection.
fn make_room(clients: &[Client]) {
    let mut greeted = clients.iter().filter(|client| !client.linked.load(Ordering::Relaxed));
    let oldest = greeted.next();
    if greeted.count() + 1 >= MAX_GREETED
        && let Some(oldest) = oldest.and_then(|oldest| oldest.socket.upgrade())
    {
        // It may have left by itself.
        let _ = shutdown(&*oldest, Shutdown::Both);
    }
}

/// Waits for the starter and, unless it `is_full`, for clients. Returns whether the starter has said something, and
/// the listeners that have a client.
fn wait(starter: &OwnedFd, listeners: &[OwnedFd], is_full: bool) -> io::Result<(bool, Vec<usize>)> {
    let listeners = if is_full { &[] } else { listeners };
    let all = std::iter::once(starter).chain(listeners);
    let mut fds: Vec<_> =
        all.map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
    match poll(&mut fds, is_full.then(|| timespec(FULL_PAUSE)).as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
    let said = ready.next().unwrap_or(false);
    Ok((said, ready.enumerate().filter(|(_, ready)| *ready).map(|(i, _)| i).collect()))
}

impl Shared {
    /// Handles a message of the starter. Returns a listening socket that came with it.
    fn handle(&self, frame: Frame) -> Option<OwnedFd> {
        let text = String::from_utf8(frame.bytes).unwrap_or_default();
        if text == "listen" {
            return frame.files.into_iter().next();
        }
        // The request, and for files the letters behind it.
        let mut words = text.splitn(3, ' ');
        let asked = format!("{} {}", words.next()?, words.next()?);
        let letters = words.next().unwrap_or_default().to_owned();
        let waiter = self.waiting().remove(&asked)?;
        // Its thread may have given up.
        let _ = waiter.try_send((letters, frame.files));
        None
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the starter. Returns the letters and descriptors of its answer.
    fn ask(&self, what: &str, number: u64, end: Instant) -> Result<Answer, End> {
        let question = format!("{what} {number}");
        let (sender, answer) = sync_channel(1);
        self.waiting().insert(question.clone(), sender);
        let asked = TUNNEL.try_send(&self.starter, question.as_bytes(), &[]);
        let left = end.saturating_duration_since(Instant::now());
        let answered = asked.ok().and_then(|()| answer.recv_timeout(left).ok());
        self.waiting().remove(&question);
        answered.ok_or_else(|| {
            let what = "ferrite does not answer its tunnel";
            Fault::new(what, "it is busy", "connect again, and see its log").into()
        })
    }

    /// Serves a client on a thread of its own.
    fn admit(
        self: &Arc<Shared>,
        number: u64,
        socket: OwnedFd,
        peer: Option<SocketAddrAny>,
    ) -> Option<Client> {
        let (socket, linked) = (Arc::new(socket), Arc::new(AtomicBool::new(false)));
        let (shared, flag, weak) = (self.clone(), linked.clone(), Arc::downgrade(&socket));
        let peer = peer.map_or_else(String::new, address);
        let thread = std::thread::Builder::new().name("tls-client".to_owned());
        let thread = thread.stack_size(STACK_BYTES).spawn(move || {
            let ended = shared.serve(number, &socket, &flag);
            drop(socket);
            let now_ns = SystemClock.now_ns();
            match ended {
                Err(End::Refused(fault)) => {
                    limited!(warn, shared.refusals, now_ns, "client {peer}: {fault}");
                }
                Err(End::Left) | Ok(()) => tracing::debug!("client {peer} has gone"),
            }
        });
        match thread {
            Ok(thread) => Some(Client { thread, socket: weak, linked }),
            Err(e) => {
                let now_ns = SystemClock.now_ns();
                limited!(warn, self.own_faults, now_ns, "a client was turned away: no thread: {e}");
                None
            }
        }
    }

    fn serve(&self, number: u64, socket: &OwnedFd, linked: &AtomicBool) -> Result<(), End> {
        let end = Instant::now() + GREETING;
        if self.how == Inward::Plain {
            let outside = Timed { socket, end, whom: "client" };
            let flags = in_clear(&outside)?;
            let _place = self.take_place()?;
            let inside = self.link(number, end, flags, linked)?;
            pass(socket, &inside);
            return Ok(());
        }
        let (flags, mut tls) = secure(socket, end, || self.config(number, end))?;
        credentials::check_peer(tls.peer_certificates(), &self.peers)?;
        let _place = self.take_place()?;
        let inside = self.link(number, end, flags, linked)?;
        Pump::new(&mut tls, Peer::Client, socket, &inside).run()
    }

    /// A stream to the server, which has heard the client's flags and what it may do.
    fn link(
        &self,
        number: u64,
        end: Instant,
        flags: u32,
        linked: &AtomicBool,
    ) -> Result<OwnedFd, End> {
        linked.store(true, Ordering::Relaxed);
        let (_, link) = self.ask("link", number, end)?;
        let Some(inside) = link.into_iter().next() else {
            let what = "a client was turned away";
            return Err(Fault::new(what, "the disk takes no more", "end another client").into());
        };
        let server = Timed { socket: &inside, end, whom: "disk" };
        join(&server, flags)?;
        if let Some(restriction) = &self.restriction {
            restrict(&server, restriction)?;
        }
        Ok(inside)
    }

    /// A place among the clients with a stream to the server.
    fn take_place(&self) -> Result<Place<'_>, End> {
        let place = Place(&self.linked);
        if self.linked.fetch_add(1, Ordering::Relaxed) < MAX_CLIENTS {
            return Ok(place);
        }
        let why = format!("there are {MAX_CLIENTS}");
        Err(Fault::new("a client was turned away", why, "end another client").into())
    }

    /// The certificates as the files have them now. Files that are unfit, as in the middle of a renewal, leave those
    /// that were read before.
    fn config(&self, number: u64, end: Instant) -> Result<Arc<ServerConfig>, End> {
        let (letters, files) = self.ask("files", number, end)?;
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let read = self.read(&letters, files, current.as_ref());
        match (read, &*current) {
            (Ok(read), _) => Ok(current.insert(read).config.clone()),
            (Err(None), Some(before)) => Ok(before.config.clone()),
            (Err(Some(fault)), Some(before)) => {
                let now_ns = SystemClock.now_ns();
                let kept = "clients get the certificate before it";
                limited!(warn, self.own_faults, now_ns, "{fault}; {kept}");
                Ok(before.config.clone())
            }
            (Err(fault), None) => Err(fault.unwrap_or_else(unreadable).into()),
        }
    }

    /// Reads the files. `None` as the error: there is nothing new.
    fn read(
        &self,
        letters: &str,
        files: Vec<OwnedFd>,
        current: Option<&Current>,
    ) -> Result<Current, Option<Fault>> {
        let files = Files::from_letters(letters, files).filter(|files| files.iter().count() > 0);
        let contents = Contents::read(&files.ok_or_else(|| Some(unreadable()))?)?;
        if current.is_some_and(|current| current.contents == contents) {
            return Err(None);
        }
        let config = credentials::server(&contents, self.how == Inward::Tls { verifies: true })?;
        Ok(Current { contents, config })
    }
}

/// Does a client's handshakes: that of NBD until STARTTLS, and that of TLS. Returns its flags.
fn secure(
    socket: &OwnedFd,
    end: Instant,
    config: impl FnOnce() -> Result<Arc<ServerConfig>, End>,
) -> Result<(u32, Connection), End> {
    let outside = Timed { socket, end, whom: "client" };
    let flags = until_tls(&outside)?;
    let connection = ServerConnection::new(config()?).map_err(|e| fault(&e, Peer::Client))?;
    let mut tls = Connection::Server(connection);
    bound(&mut tls);
    handshake(&mut tls, &outside, Peer::Client)?;
    Ok((flags, tls))
}

/// Does the handshakes of a client that has to have a certificate, and no more: for tests of any bytes.
///
/// # Errors
/// Why there is no TLS; `None`: the client has left.
pub fn greet_client(socket: &OwnedFd, files: &Files) -> Result<(), Option<Fault>> {
    let contents = Contents::read(files)?;
    let config = credentials::server(&contents, true)?;
    match secure(socket, Instant::now() + GREETING, || Ok(config)) {
        Ok(_) => Ok(()),
        Err(End::Refused(fault)) => Err(Some(fault)),
        Err(End::Left) => Err(None),
    }
}

/// The starter logs which file it is.
fn unreadable() -> Fault {
    let help = "see the line before, and put the file there";
    Fault::new("the files for TLS", "they cannot be opened now", help)
}

/// Counts one client less when it is dropped.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An address for people.
fn address(peer: SocketAddrAny) -> String {
    std::net::SocketAddr::try_from(peer).map_or_else(|_| String::new(), |peer| peer.to_string())
}
