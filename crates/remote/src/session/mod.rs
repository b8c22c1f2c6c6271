//! One thread's session of an export: one connection at a time, the requests under way, and one task.
//!
//! Requests wait in a list until the connection takes them. When it is lost, those without an answer go back to the
//! front of the list, and the task connects again. For the consequences for writes, see `reconnect.rs`.
//!
//! No memory is ever handed to the kernel for longer than a call. So a connection can be given up at any time, and a
//! reply says that the request's memory is not in use any more.

mod begin;
mod op;
mod receive;
mod reconnect;
mod send;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_io::arena::Arena;
use ferrite_io::reactor::Io;
use ferrite_nbd::client::{Broken, Event, MAX_REQUESTS, Replies};

use crate::disk::Shared;
use crate::link::Link;
use crate::signal::{Signal, first};
use op::Part;
use send::Outgoing;

/// Whether requests are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// They are sent, or wait for a connection.
    Takes,
    /// The server has been lost for too long. They fail until it is back.
    Refuses,
}

/// See the module text.
pub(crate) struct Session {
    disk: Arc<Shared>,
    number: u32,
    io: Io,
    memory: Arc<Arena>,
    inner: RefCell<Inner>,
    phase: Cell<Phase>,
    has_ended: Cell<bool>,
    /// A lost connection had changes without an answer, which its server may still execute.
    is_unsettled: Cell<bool>,
    /// It did not end the connection: it may have been stopped or cut off, and begin with old requests when it is back.
    was_silent: Cell<bool>,
    /// Why the last attempt to connect failed.
    last_refusal: RefCell<String>,
    /// There is something to send.
    to_send: Signal,
    /// There are requests without an answer.
    to_watch: Signal,
    /// The session is to end.
    to_end: Signal,
}

struct Inner {
    /// Not handed to the connection yet.
    waiting: VecDeque<Part>,
    /// Handed to the connection, by their place in `replies`.
    parts: Vec<Option<Part>>,
    replies: Replies,
    /// On their way into the socket.
    outgoing: VecDeque<Outgoing>,
    /// Memory for what the decoder reports.
    events: Vec<Event>,
}

/// Why a connection is over.
#[derive(Debug)]
enum Lost {
    /// The stream ended, or the kernel says so.
    Io(io::Error),
    /// The server breaks the protocol.
    Broken(Broken),
    /// A request was not answered in its time.
    Late,
    /// The server says that it is shutting down.
    ShutDown,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lost::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("the server closed the connection")
            }
            Lost::Io(e) => e.fmt(f),
            Lost::Broken(broken) => broken.fmt(f),
            Lost::Late => f.write_str("the server did not answer a request in time"),
            Lost::ShutDown => f.write_str("the server is shutting down"),
        }
    }
}

impl Lost {
    /// Whether the server was heard: it has ended the connection, or sent what it should not.
    fn was_heard(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match self {
            Lost::Io(e) => matches!(e.kind(), UnexpectedEof | ConnectionReset | BrokenPipe),
            Lost::Broken(_) | Lost::ShutDown => true,
            Lost::Late => false,
        }
    }
}

impl From<io::Error> for Lost {
    fn from(e: io::Error) -> Lost {
        Lost::Io(e)
    }
}

impl From<Broken> for Lost {
    fn from(broken: Broken) -> Lost {
        Lost::Broken(broken)
    }
}

impl Inner {
    fn new(replies: Replies) -> Inner {
        let parts = (0..MAX_REQUESTS).map(|_| None).collect();
        Inner {
            waiting: VecDeque::new(),
            parts,
            replies,
            outgoing: VecDeque::new(),
            events: Vec::new(),
        }
    }

    /// Takes back all requests without an answer, those that were handed over before the others and in their order.
    fn take_back(&mut self) {
        self.outgoing.clear();
        let mut parts: Vec<Part> = self.parts.iter_mut().filter_map(Option::take).collect();
        parts.sort_by_key(|part| std::cmp::Reverse(part.since));
        parts.into_iter().for_each(|part| self.waiting.push_front(part));
    }
}

impl Session {
    /// A session with its task on the reactor of `io`. Without a `link` it connects first.
    pub(crate) fn begin(
        disk: Arc<Shared>,
        number: u32,
        link: Option<Link>,
        io: Io,
        memory: Arc<Arena>,
    ) -> Rc<Session> {
        let session = Rc::new(Session {
            disk,
            number,
            io,
            memory,
            inner: RefCell::new(Inner::new(Replies::new(false, None))),
            phase: Cell::new(Phase::Takes),
            has_ended: Cell::new(false),
            is_unsettled: Cell::new(false),
            was_silent: Cell::new(false),
            last_refusal: RefCell::default(),
            to_send: Signal::default(),
            to_watch: Signal::default(),
            to_end: Signal::default(),
        });
        session.io.spawn(session.clone().run(link));
        session
    }

    /// The one task of the session, to its end.
    async fn run(self: Rc<Self>, mut link: Option<Link>) {
        let ended = async {
            self.to_end.wait().await;
        };
        let work = async {
            let (mut lost_at, mut is_first, mut pause) = (Instant::now(), true, Duration::ZERO);
            loop {
                let next = match link.take() {
                    Some(link) if !self.disk.drains_first => link,
                    _ => match self.connect(lost_at, is_first).await {
                        Some(link) => link,
                        None => return,
                    },
                };
                is_first = false;
                let begin = Instant::now();
                let why = self.use_link(&next).await;
                drop(next);
                lost_at = Instant::now();
                self.lost(&why);
                pause = reconnect::pause_after(lost_at.duration_since(begin), pause);
                // A failed sleep ends at once.
                let _ = self.io.sleep(pause).await;
            }
        };
        first(ended, work).await;
        self.fail_all(libc_eio());
    }

    /// Sends and receives until the connection is lost.
    async fn use_link(&self, link: &Link) -> Lost {
        let export = &link.export;
        self.inner.borrow_mut().replies = Replies::new(export.structured, export.allocation);
        self.phase.set(Phase::Takes);
        self.to_send.raise();
        let socket = link.socket.as_fd();
        let both = first(self.send_all(link), self.receive_all(socket));
        first(both, self.watch_deadlines()).await
    }

    /// Waits until a request is late.
    async fn watch_deadlines(&self) -> Lost {
        let deadline = self.disk.uri.deadline;
        let pause = (deadline / 4).min(Duration::from_secs(1));
        loop {
            let now = Instant::now();
            let oldest = {
                let inner = self.inner.borrow();
                inner.parts.iter().flatten().map(|part| part.since).min()
            };
            match oldest {
                None => self.to_watch.wait().await,
                Some(since) if now.duration_since(since) >= deadline => return Lost::Late,
                Some(_) => {
                    if let Err(e) = self.io.sleep(pause).await {
                        return Lost::Io(e);
                    }
                }
            }
        }
    }

    /// Fails all requests.
    fn fail_all(&self, errno: i32) {
        let parts = {
            let mut inner = self.inner.borrow_mut();
            inner.take_back();
            std::mem::take(&mut inner.waiting)
        };
        parts.into_iter().for_each(|part| part.ended(Some(errno)));
    }
}

/// The error of what a lost server should have done.
fn libc_eio() -> i32 {
    rustix::io::Errno::IO.raw_os_error()
}
