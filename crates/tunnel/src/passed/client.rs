//! The source's side of storage motion: one connection to the target, for all queues of a worker.
//!
//! Each request of a queue gets a number of its own on the connection, and its reply finds the queue by that. The first
//! error of the connection ends this process, and the worker's mirror has failed then: writes may be lost with a
//! connection, so there is never a second one.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_nbd::old_style::{GREETING_BYTES, Greeting};
use ferrite_nbd::wire::{
    FIXED_NEWSTYLE, Head, NO_ZEROES, OPTION_MAGIC, REQUEST_BYTES, REQUEST_MAGIC, RawRequest,
    SERVER_MAGIC, SIMPLE_REPLY_MAGIC, can, command, error, info, option, push_option_reply, reply,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{Shutdown, SocketFlags, acceptfrom_with, shutdown};

use super::PEER;
use crate::stream::{GREETING, Timed, timespec};
use crate::{End, Fault};

/// The longest data of a request.
const MAX_BYTES: u64 = 32 << 20;
/// The most connections of the worker.
const MAX_QUEUES: usize = 64;
/// The most requests under way.
const MAX_REQUESTS: usize = 1 << 16;
/// The time for a message whose beginning is there.
const MESSAGE: Duration = Duration::from_secs(30);
/// The end of a wait without a limit.
const NEVER: Duration = Duration::from_secs(10 << 25);
/// How long the connection is kept without a worker.
const IDLE: Duration = Duration::from_secs(30 * 60);
/// How often that is looked at.
const LOOK: Duration = Duration::from_secs(60);
/// The most options of a handshake, and the longest one.
const MAX_OPTIONS: usize = 64;
const MAX_OPTION_BYTES: u32 = 8192;
const SIMPLE_REPLY_BYTES: usize = 16;

/// A queue of the worker.
struct Queue {
    socket: OwnedFd,
    /// Held while a reply is written.
    writing: Mutex<()>,
}

impl Queue {
    fn timed(&self, within: Duration) -> Timed<'_> {
        Timed { socket: &self.socket, end: Instant::now() + within, whom: "client" }
    }

    /// Sends a reply. A queue that does not take it is ended.
    fn send(&self, parts: [&[u8]; 2]) {
        let _one = lock(&self.writing);
        let timed = self.timed(MESSAGE);
        if parts.into_iter().any(|part| timed.write_all(part).is_err()) {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }
}

/// A request that the target has not answered.
struct Request {
    queue: Arc<Queue>,
    /// The queue's number for it.
    cookie: u64,
    /// Bytes that a good reply has.
    reads: usize,
}

struct Shared {
    target: OwnedFd,
    greeting: Greeting,
    /// Held while a request is written.
    writing: Mutex<()>,
    requests: Mutex<(u64, BTreeMap<u64, Request>)>,
    queues: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves the target behind `target` to clients that come by `listener`, until the connection ends.
///
/// # Errors
/// The target's handshake is wrong or takes more than 10 s, or it answers nonsense.
pub fn passed_client(target: OwnedFd, listener: OwnedFd) -> Result<(), Fault> {
    let fault = |why: &str| Fault::new(PEER, why, "look at the other host; then begin it anew");
    let mut bytes = [0; GREETING_BYTES];
    let timed = Timed { socket: &target, end: Instant::now() + GREETING, whom: "server" };
    match timed.read_exact(&mut bytes) {
        Ok(()) => {}
        Err(End::Left) => return Err(fault("the target has left before its greeting")),
        Err(End::Refused(fault)) => return Err(fault),
    }
    let greeting = Greeting::parse(&bytes).map_err(|why| fault(&why))?;
    let shared = Arc::new(Shared {
        target,
        greeting,
        writing: Mutex::default(),
        requests: Mutex::default(),
        queues: AtomicUsize::new(0),
    });
    let accepting = shared.clone();
    let thread = std::thread::Builder::new().name("queues".to_owned());
    let started = thread.spawn(move || accept(&accepting, &listener));
    started.map_err(|e| fault(&format!("no thread can be started: {e}")))?;
    loop {
        match shared.answer() {
            Ok(()) => {}
            Err(End::Left) => return Err(fault("the target has closed the connection")),
            Err(End::Refused(fault)) => return Err(fault),
        }
    }
}

/// Accepts queues. Without any for a long time the process ends.
fn accept(shared: &Arc<Shared>, listener: &OwnedFd) {
    let mut since = Instant::now();
    loop {
        if shared.queues.load(Ordering::Acquire) > 0 {
            since = Instant::now();
        } else if since.elapsed() > IDLE {
            tracing::warn!("{PEER}: it has no queue, and it is closed");
            std::process::exit(0);
        }
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        if !matches!(poll(&mut fds, Some(&timespec(LOOK))), Ok(ready) if ready > 0) {
            continue;
        }
        let Ok((socket, _)) = acceptfrom_with(listener, SocketFlags::CLOEXEC) else {
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if shared.queues.fetch_add(1, Ordering::AcqRel) >= MAX_QUEUES {
            shared.queues.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let theirs = shared.clone();
        let thread = std::thread::Builder::new().name("queue".to_owned());
        let body = move || {
            let queue = Arc::new(Queue { socket, writing: Mutex::default() });
            // A request that the worker has not sent whole is not sent to the target.
            let _ = theirs.serve(&queue);
            let _ = shutdown(&queue.socket, Shutdown::Both);
            theirs.queues.fetch_sub(1, Ordering::AcqRel);
        };
        if thread.spawn(body).is_err() {
            shared.queues.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Shared {
    /// Serves a queue until it ends.
    fn serve(&self, queue: &Arc<Queue>) -> Result<(), End> {
        self.greet(queue)?;
        let mut data = Vec::new();
        loop {
            let bytes: [u8; REQUEST_BYTES] = queue.timed(NEVER).read()?;
            let request = RawRequest::parse(&bytes).ok_or(End::Left)?;
            data.clear();
            if request.command == command::WRITE {
                if request.len > MAX_BYTES {
                    return Err(End::Left);
                }
                // All of it first: a worker that dies must not leave a part on the connection.
                data.resize(request.len as usize, 0);
                queue.timed(MESSAGE).read_exact(&mut data)?;
            }
            let can = |flag: u16| self.greeting.flags & flag != 0;
            let is_known = match request.command {
                command::DISCONNECT => return Ok(()),
                command::READ => request.len <= MAX_BYTES,
                command::WRITE => true,
                command::FLUSH => can(can::FLUSH),
                command::TRIM => can(can::TRIM),
                command::WRITE_ZEROES => can(can::WRITE_ZEROES),
                _ => false,
            };
            match is_known {
                true => self.pass_on(queue, &request, &data)?,
                false => queue.send([Head::simple(request.cookie, error::INVALID).bytes(), &[]]),
            }
        }
    }

    /// Sends a request to the target.
    fn pass_on(&self, queue: &Arc<Queue>, request: &RawRequest, data: &[u8]) -> Result<(), End> {
        let reads = if request.command == command::READ { request.len as usize } else { 0 };
        let number = {
            let mut requests = lock(&self.requests);
            if requests.1.len() >= MAX_REQUESTS {
                return Err(End::Left);
            }
            requests.0 += 1;
            let number = requests.0;
            let entry = Request { queue: queue.clone(), cookie: request.cookie, reads };
            requests.1.insert(number, entry);
            number
        };
        let mut head = Vec::with_capacity(REQUEST_BYTES);
        head.extend(REQUEST_MAGIC.to_be_bytes());
        head.extend(request.flags.to_be_bytes());
        head.extend(request.command.to_be_bytes());
        head.extend(number.to_be_bytes());
        head.extend(request.offset.to_be_bytes());
        head.extend((request.len as u32).to_be_bytes());
        let _one = lock(&self.writing);
        let target = Timed { socket: &self.target, end: Instant::now() + MESSAGE, whom: "server" };
        if target.write_all(&head).and_then(|()| target.write_all(data)).is_err() {
            tracing::warn!("{PEER}: the target takes no requests any more");
            std::process::exit(1);
        }
        Ok(())
    }

    /// Passes one reply of the target on.
    fn answer(&self) -> Result<(), End> {
        let target =
            |within| Timed { socket: &self.target, end: Instant::now() + within, whom: "server" };
        let nonsense = |why: &str| End::Refused(Fault::new(PEER, why, "look at the target's log"));
        let bytes: [u8; SIMPLE_REPLY_BYTES] = target(NEVER).read()?;
        let mut fields = ferrite_nbd::wire::Fields(&bytes);
        if fields.u32() != Some(SIMPLE_REPLY_MAGIC) {
            return Err(nonsense("the target's reply is none"));
        }
        let (status, number) = (fields.u32().unwrap_or(error::IO), fields.u64());
        let request = number.and_then(|number| lock(&self.requests).1.remove(&number));
        let Some(Request { queue, cookie, reads }) = request else {
            return Err(nonsense("the target answers a request that was not sent"));
        };
        let mut data = vec![0; if status == 0 { reads } else { 0 }];
        target(MESSAGE).read_exact(&mut data)?;
        queue.send([Head::simple(cookie, status).bytes(), &data]);
        Ok(())
    }

    /// Does the handshake with a queue, as a server with options.
    fn greet(&self, queue: &Queue) -> Result<(), End> {
        let timed = queue.timed(GREETING);
        let Greeting { bytes, flags } = self.greeting;
        // All queues are one connection to the target, so each sees what the others have written.
        let flags = flags | can::HAS_FLAGS | can::MULTI_CONN;
        let ours = FIXED_NEWSTYLE | NO_ZEROES;
        let mut out = [SERVER_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat();
        out.extend(ours.to_be_bytes());
        timed.write_all(&out)?;
        let theirs = u32::from_be_bytes(timed.read()?);
        for _ in 0..MAX_OPTIONS {
            let magic = u64::from_be_bytes(timed.read()?);
            let [asked, len] = [timed.read()?, timed.read()?].map(u32::from_be_bytes);
            if magic != OPTION_MAGIC || len > MAX_OPTION_BYTES {
                return Err(End::Left);
            }
            timed.skip(len as usize)?;
            out.clear();
            match asked {
                option::EXPORT_NAME => {
                    out.extend(bytes.to_be_bytes());
                    out.extend(flags.to_be_bytes());
                    if theirs & u32::from(NO_ZEROES) == 0 {
                        out.extend([0; 124]);
                    }
                }
                option::GO => {
                    let (kind, size) = (info::EXPORT.to_be_bytes(), bytes.to_be_bytes());
                    let data = [&kind[..], &size, &flags.to_be_bytes()];
                    push_option_reply(&mut out, asked, reply::INFO, &data);
                    let sizes = [512, 4096, MAX_BYTES as u32].map(u32::to_be_bytes).concat();
                    let data = [&info::BLOCK_SIZE.to_be_bytes()[..], &sizes];
                    push_option_reply(&mut out, asked, reply::INFO, &data);
                    push_option_reply(&mut out, asked, reply::ACK, &[]);
                }
                option::ABORT => push_option_reply(&mut out, asked, reply::ACK, &[]),
                _ => push_option_reply(&mut out, asked, reply::UNSUPPORTED, &[]),
            }
            timed.write_all(&out)?;
            match asked {
                option::EXPORT_NAME | option::GO => return Ok(()),
                option::ABORT => return Err(End::Left),
                _ => {}
            }
        }
        Err(End::Left)
    }
}
