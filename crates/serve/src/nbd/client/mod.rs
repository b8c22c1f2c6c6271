//! One client after its negotiation: a loop on its thread, over a path of its own.
//!
//! In a turn of the loop, requests go from the socket ([`input`]) to the path ([`steps`]). One
//! system call submits and waits, and answers go to the socket ([`output`]). Only that call waits.
//!
//! A request holds the path only while the disk works on it. With the path it holds the gate, and
//! keeps the disk from being parked. The path gets a request when all its data have arrived, and
//! its ticket is released before anything is sent. So a client that stalls in either direction
//! holds up only its own memory, thread and socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::Clock;
use ferrite_io::engine::{Completion, Engine, Op, Token};
use ferrite_io::reactor::Wait;
use ferrite_io::socket::RoomWatch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::contexts::DirtyContexts;
use super::handshake::Greeted;
use super::negotiation::{Agreed, Export};
use crate::path::shared::Shared;
use crate::path::{Admitted, FRONTEND_TOKENS, RequestPath, Ticket, largest_request};
use crate::trace::clients::ClientTrace;
use crate::trace::{Doing, Noticed, Span};
use crate::waker::Waker;

mod input;
mod output;
mod requests;
mod status;
mod steps;

use input::Input;
use output::{Output, Reply};
use requests::{REQUESTS, Requests, Slot};
use steps::{PART_BYTES, Part, Step};

/// Token of the operation that waits until the socket is readable.
const SOCKET: Token = FRONTEND_TOKENS;
/// Token of the operation that waits until the socket has room for more.
const ROOM: Token = FRONTEND_TOKENS + 1;
/// Token of the operation that waits until the server stops.
const STOP: Token = FRONTEND_TOKENS + 2;

/// Most parts in flight at once.
const ENTRIES: u32 = REQUESTS as u32;
/// After this long without a request, memory is given back.
const COLD: Duration = Duration::from_secs(5);

/// A client, on the thread that serves it.
pub(super) struct Client {
    /// Declared before the socket, so that it is dropped first: the path's operations wait on the
    /// socket's descriptor.
    path: RequestPath,
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    socket: UnixStream,
    room: RoomWatch,
    /// Kept open because an operation of the engine waits for it.
    _stop: Arc<Waker>,
    export: Export,
    /// The contexts of the export's dirty maps.
    dirty: DirtyContexts,
    agreed: Agreed,
    /// Size of the largest part in bytes.
    part_bytes: usize,
    input: Input,
    requests: Requests,
    /// A long read of a client without structured replies, which has one single answer. It runs
    /// alone: so its parts need no more memory than there is, and no other answer comes between
    /// them.
    exclusive: Option<Slot>,
    /// Steps that were not handed to the path completely.
    todo: VecDeque<Step>,
    parts: Vec<Part>,
    output: Output,
    /// The socket has no room, and an operation waits for room.
    full: bool,
    /// The connection cannot continue: nothing more is sent.
    broken: bool,
    /// How long a client that has ended its requests may take to read its last answers.
    goodbye_ns: u64,
    /// How long a client may take to read its last answers when the server stops.
    at_stop_ns: u64,
    /// Set once no more requests are read: when the wait for the last answers ends.
    ends_at_ns: Option<u64>,
    /// Writes that the client did not flush were flushed at its end.
    saved: bool,
    /// A slot or buffer came free that the input or a step waits for: do not sleep.
    again: bool,
    trace: Option<ClientTrace>,
    /// How the thread noticed the requests that it takes next, for the trace.
    noticed: Noticed,

    // Scratch space, kept to be used again.
    tickets: Vec<Ticket>,
    sent: Vec<Reply>,
}

impl Client {
    /// Makes a client after its handshake, to be served on the calling thread.
    ///
    /// # Errors
    /// Fails if the engine does not accept the disk's files, or without free descriptors.
    pub(super) fn new(
        shared: Arc<Shared>,
        engine: Box<dyn Engine>,
        socket: UnixStream,
        (export, dirty): (Export, DirtyContexts),
        greeted: &Greeted,
        stop: Arc<Waker>,
        trace: Option<ClientTrace>,
    ) -> io::Result<Client> {
        let room = RoomWatch::new(socket.as_fd())?;
        let mut path = RequestPath::new(shared.clone(), 0, engine, ENTRIES)?;
        path.reactor().push(STOP, Op::Readable { fd: stop.fd().as_raw_fd() });
        Ok(Client {
            part_bytes: PART_BYTES.min(largest_request(path.disk())),
            path,
            clock: shared.device.clock.clone(),
            shared,
            socket,
            room,
            _stop: stop,
            export,
            dirty,
            agreed: greeted.agreed,
            input: Input::new(&greeted.input),
            requests: Requests::new(),
            exclusive: None,
            todo: VecDeque::with_capacity(REQUESTS),
            parts: vec![Part::NONE; ENTRIES as usize],
            output: Output::default(),
            full: false,
            broken: false,
            goodbye_ns: 0,
            at_stop_ns: 0,
            ends_at_ns: None,
            saved: false,
            again: false,
            trace,
            noticed: Noticed::default(),
            tickets: Vec::new(),
            sent: Vec::new(),
        })
    }

    /// Serves the client until it disconnects or the server stops. Requests that were taken are
    /// answered.
    ///
    /// # Errors
    /// Fails if the engine fails or the disk is gone.
    pub(super) fn run(mut self, goodbye: Duration, at_stop: Duration) -> io::Result<()> {
        self.goodbye_ns = goodbye.as_nanos() as u64;
        self.at_stop_ns = at_stop.as_nanos() as u64;
        let served = self.serve();
        if served.is_err() {
            self.drop_answers();
            self.path.abandon();
        }
        served
    }

    fn serve(&mut self) -> io::Result<()> {
        let mut completions = Vec::new();
        loop {
            self.path.follow()?;
            self.again = self.take_input();
            self.begin_to_end();
            self.admit();
            self.retry();
            self.path.order_buffers();
            let started = self.path.start();
            self.answer();
            self.send();
            if let Some(ticket) = self.path.take_alone() {
                self.path.alone_fetched(ticket, true, self.clock.now_ns());
            }
            if self.is_over() {
                return Ok(());
            }
            self.turn(started, &mut completions)?;
            self.path.collect_tasks(self.clock.now_ns());
            self.answer();
            self.send();
        }
    }

    /// Retries a request that waits for space. While one waits, the socket may not be read, so a
    /// client that hung up would not be noticed: this checks for it.
    fn retry(&mut self) {
        match self.path.retry() {
            None | Some(Admitted::Taken) => {}
            Some(Admitted::Fetch(_)) => unreachable!("a client's data are in its buffers"),
        }
        self.broken |= self.path.waits_for_space() && has_hung_up(&self.socket);
    }

    fn turn(&mut self, started: bool, completions: &mut Vec<Completion>) -> io::Result<()> {
        let wait = if started { Wait::No } else { self.next_wait() };
        let before_ns = self.clock.now_ns();
        self.path.turn(wait, completions)?;
        let now_ns = self.clock.now_ns();
        self.slept(wait != Wait::No, completions, before_ns, now_ns);
        self.path.throttle(now_ns);
        let cold = now_ns - before_ns >= COLD.as_nanos() as u64;
        if completions.is_empty() && cold && self.path.may_cool() {
            self.path.give_memory_back();
        }
        for completion in completions.drain(..) {
            match completion.token {
                SOCKET => {
                    self.input.armed = false;
                    self.input.readable = true;
                }
                ROOM => self.full = false,
                STOP => {
                    self.shared.stop();
                    self.end_input();
                    let end_ns = now_ns + self.at_stop_ns;
                    self.ends_at_ns = Some(self.ends_at_ns.unwrap_or(end_ns).min(end_ns));
                }
                _ => self.path.completed(completion, now_ns)?,
            }
        }
        Ok(())
    }

    /// Records in the trace whether the thread slept, and whether the client woke it.
    fn slept(&mut self, slept: bool, completions: &[Completion], from_ns: u64, to_ns: u64) {
        let woken = slept && completions.iter().any(|completion| completion.token == SOCKET);
        self.noticed = if woken { Noticed::Event } else { Noticed::Working };
        if let (true, Some(trace)) = (slept, &mut self.trace) {
            let doing = if woken { Doing::WokenByEvent } else { Doing::Slept };
            trace.span(&Span { doing, from_ns, to_ns });
        }
    }

    /// Returns how long the next turn may wait, and starts the operation that wakes it.
    fn next_wait(&mut self) -> Wait {
        if self.again || self.path.is_pending() || self.path.has_yielded() {
            return Wait::No;
        }
        if (self.input.ended || self.broken) && self.ends_at_ns.is_none() {
            return Wait::No;
        }
        let input = &mut self.input;
        if !input.ended && !input.blocked && !input.armed {
            input.armed = true;
            let fd = self.socket.as_raw_fd();
            self.path.reactor().push(SOCKET, Op::Readable { fd });
        }
        let now_ns = self.clock.now_ns();
        let end = self
            .ends_at_ns
            .map(|end_ns| Duration::from_nanos(end_ns.saturating_sub(now_ns).max(1_000_000)));
        let limited = self.path.throttled_for(now_ns);
        let first = end.into_iter().chain(limited).min();
        Wait::Until(first.or(self.path.may_cool().then_some(COLD)))
    }

    /// Sends as many answers as the socket has room for.
    fn send(&mut self) {
        if self.broken {
            self.drop_answers();
        }
        if self.full || self.output.is_empty() {
            return;
        }
        let mut sent = std::mem::take(&mut self.sent);
        let arena = self.shared.pool.arena();
        match self.output.send(self.socket.as_fd(), arena, &mut sent) {
            Ok(true) => {}
            Ok(false) => {
                self.full = true;
                let fd = self.room.fd().as_raw_fd();
                self.path.reactor().push(ROOM, Op::Readable { fd });
            }
            Err(_) => self.broken = true,
        }
        self.again |= !sent.is_empty() && (self.input.blocked || !self.todo.is_empty());
        sent.drain(..).for_each(|reply| self.forget(reply));
        self.sent = sent;
    }

    /// Releases the buffer and the slot of an answer that was sent or dropped.
    fn forget(&mut self, reply: Reply) {
        if let Some((buf, _)) = reply.data {
            self.path.free(buf);
        }
        if let Some(slot) = reply.ends {
            self.free_slot(slot);
        }
    }

    /// Drops all answers and steps of a broken connection. Only the disk's work is still waited
    /// for.
    fn drop_answers(&mut self) {
        self.broken = true;
        if !self.input.ended {
            self.end_input();
        }
        let replies: Vec<_> = self.output.drain().collect();
        replies.into_iter().for_each(|reply| self.forget(reply));
        for step in self.todo.drain(..) {
            if let Some((buf, _)) = step.filled {
                self.path.free(buf);
            }
        }
    }

    /// Ends the connection step by step once its input has ended or it is broken.
    fn begin_to_end(&mut self) {
        if !self.input.ended && !self.broken {
            return;
        }
        // A client that disconnects and a server that stops do not wait for space.
        self.path.give_up_waiting();
        let now_ns = self.clock.now_ns();
        let end_ns = *self.ends_at_ns.get_or_insert(now_ns + self.goodbye_ns);
        if now_ns >= end_ns || self.broken {
            self.drop_answers();
        }
        let answered = self.todo.is_empty() && self.path.is_idle();
        if answered && !std::mem::replace(&mut self.saved, answered) && self.path.disk().is_dirty()
        {
            // Otherwise the thread of a path would flush two seconds later, and there may be none
            // by then.
            self.todo.push_back(Step::flush(None));
        }
    }

    fn is_over(&self) -> bool {
        let answered = self.output.is_empty() || self.broken;
        self.saved && answered && self.todo.is_empty() && self.path.is_idle()
    }
}

fn has_hung_up(socket: &UnixStream) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0 && fds[0].revents().contains(PollFlags::HUP))
}
