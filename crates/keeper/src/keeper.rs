//! The keeper's process: one thread that waits for its worker's end, and for who asks.
//!
//! It has few pages of memory of its own, since there is one for each disk. It never waits for anybody:
//! not for a worker whose storage is stuck, and not for who asks and does not listen.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::Duration;

use ferrite_io::process::{
    Fork, Program, become_in_place, environment_without, fork, io_priority, receive_with,
    send_with, set_io_priority_of_group, take_given,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{chdir, getpid, setsid};

use crate::keep::{Keep, State, VARIABLE};
use crate::public;
use crate::relay::Relay;
use crate::socket::{Place, remove};
use crate::tell;
use crate::wire::{Answer, MAX_BYTES, Request};
use crate::worker::{Worker, remove_alive};

/// Most who may ask at once: a daemon, its successor, and a look at it by hand.
const CLIENTS: usize = 8;
/// How often it is looked whether somebody has given the keeper another priority for its I/O. The
/// kernel tells nobody.
const LOOK_AT_PRIORITY: Duration = Duration::from_secs(2);
/// The worker cannot be started: how often that is told.
const TELL_AGAIN: u32 = 100;
/// What cannot be done for want of descriptors stays to be done, and `poll` says so at once.
const REST: Duration = Duration::from_millis(50);

/// A keeper: the process that [`Keep::start`] has started. Descriptors with the numbers `also`, which
/// this process was started with, are handed on to each worker.
///
/// # Errors
/// It cannot begin: there is nothing to keep, or a keeper of this disk lives.
pub fn run(also: &[RawFd]) -> io::Result<Infallible> {
    let text = std::env::var(VARIABLE).map_err(|_| {
        io::Error::other("a keeper is started by ferrite itself, when it serves a disk")
    })?;
    let State { keep, start, before, public, relay } = serde_json::from_str(&text)?;
    // By what it is, not by its name: a worker is what this one was, also when that was replaced.
    let binary = OwnedFd::from(File::open("/proc/self/exe")?);
    let listen = || public::listen(&keep.run_dir);
    let (place, public, asker) = match before {
        Some([lock, listener, asker]) => {
            let place = Place { lock: take_given(lock)?, listener: take_given(listener)? };
            (place, public.map_or_else(listen, take_given)?, Some(take_given(asker)?))
        }
        None => {
            let place = Place::take(&keep.socket)?;
            let public = listen()?;
            // Who has started us waits for this, and is not our parent.
            if fork()? == Fork::Parent {
                std::process::exit(0);
            }
            setsid()?;
            (place, public, None)
        }
    };
    // It may outlive the folder, and the file system, that it was started in.
    if keep.socket.is_absolute() && keep.run_dir.is_absolute() {
        chdir("/")?;
    }
    if let Some(asker) = &asker {
        answer(asker, &Answer::Done, None);
    }
    let disk = keep.run_dir.file_name().unwrap_or_default().to_string_lossy();
    // Fails where another keeper runs in this process: a test's.
    let _ = crate::DISK.set(disk.into_owned());
    let clients = asker.into_iter().collect();
    let (worker, relay) = (Worker::new(start)?, Relay::take(relay)?);
    Process {
        keep,
        binary,
        place,
        public,
        worker,
        relay,
        clients,
        follower: None,
        also: also.to_vec(),
        failures: 0,
    }
    .run()
}

/// What there is to do.
#[derive(Default)]
struct Ready {
    /// Somebody has come who wants to ask.
    came: bool,
    /// Who has asked.
    asked: Vec<usize>,
    /// The worker asks for a name.
    names: bool,
    /// A client of NBD has come.
    client: bool,
    /// The relay of such clients wants something.
    relay: bool,
}

struct Process {
    keep: Keep,
    binary: OwnedFd,
    place: Place,
    /// Where clients of NBD come.
    public: OwnedFd,
    worker: Worker,
    relay: Relay,
    clients: Vec<OwnedFd>,
    /// Which of them has asked for the line last.
    follower: Option<RawFd>,
    also: Vec<RawFd>,
    /// How often the worker could not be started.
    failures: u32,
}

impl Process {
    fn run(mut self) -> ! {
        let mut priority = io_priority();
        loop {
            if let Err(e) = self.worker.go_on(&self.keep, &self.binary, &self.also) {
                if self.failures.is_multiple_of(TELL_AGAIN) {
                    tell(&format!("cannot start the worker: {e}"));
                }
                self.failures = self.failures.wrapping_add(1);
                std::thread::sleep(REST);
            }
            let now = io_priority();
            // What fails is tried when it is changed again: nothing but speed depends on it.
            if now != priority && now >= 0 {
                let _ = set_io_priority_of_group(now);
                priority = now;
            }
            let ready = self.wait();
            self.relay.reap();
            if ready.relay {
                self.relay.answer(&self.worker);
            }
            if ready.names
                && let Err(e) = self.worker.answer()
            {
                tell(&format!("cannot end the worker: {e}"));
                std::thread::sleep(REST);
            }
            // From the last on, since who has gone is removed.
            for i in ready.asked.into_iter().rev() {
                self.hear(i);
            }
            if ready.came {
                self.accept();
            }
            if ready.client {
                self.admit();
            }
        }
    }

    /// Waits for something to do.
    fn wait(&self) -> Ready {
        let mut fds = vec![
            PollFd::new(&self.place.listener, PollFlags::IN),
            PollFd::new(&self.public, PollFlags::IN),
        ];
        let first = fds.len();
        fds.extend(self.clients.iter().map(|client| PollFd::new(client, PollFlags::IN)));
        if self.worker.lives() {
            fds.push(PollFd::new(self.worker.line(), PollFlags::RDHUP));
        }
        let at = self.worker.names().map(|names| {
            fds.push(PollFd::from_borrowed_fd(names, PollFlags::IN));
            fds.len() - 1
        });
        let relay = self.relay.fd().map(|relay| {
            fds.push(PollFd::from_borrowed_fd(relay, PollFlags::IN));
            fds.len() - 1
        });
        let due = self.worker.due().into_iter().chain(self.relay.due()).min();
        let timeout = due.unwrap_or(LOOK_AT_PRIORITY).min(LOOK_AT_PRIORITY);
        let timeout =
            Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        if poll(&mut fds, Some(&timeout)).is_err() {
            std::thread::sleep(REST);
            return Ready::default();
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let clients = &fds[first..first + self.clients.len()];
        let asked = clients.iter().enumerate().filter(|(_, fd)| is_ready(fd)).map(|(i, _)| i);
        let names = at.is_some_and(|at| is_ready(&fds[at]));
        let relay = relay.is_some_and(|at| is_ready(&fds[at]));
        let (came, client) = (is_ready(&fds[0]), is_ready(&fds[1]));
        Ready { came, asked: asked.collect(), names, client, relay }
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let client = match accept_with(&self.place.listener, flags) {
            Ok(client) => client,
            // Who has come is gone.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return,
            Err(_) => return std::thread::sleep(REST),
        };
        // The oldest has been quiet for longest, or is not heard any more. Not so who follows: it has
        // nothing to ask while all is well.
        if self.clients.len() >= CLIENTS {
            let quiet = |client: &OwnedFd| Some(client.as_raw_fd()) != self.follower;
            let oldest = self.clients.iter().position(quiet).unwrap_or_default();
            self.clients.remove(oldest);
        }
        self.clients.push(client);
    }

    /// Hands a client on. It is turned away where that cannot be.
    fn admit(&mut self) {
        match public::accept(&self.public) {
            Ok(Some(client)) => {
                let Process { relay, keep, binary, worker, .. } = self;
                drop(relay.admit(client.as_fd(), keep, binary, worker));
            }
            Ok(None) => {}
            Err(_) => std::thread::sleep(REST),
        }
    }

    fn hear(&mut self, i: usize) {
        let heard = receive_with(&self.clients[i], MAX_BYTES, false);
        let bytes = match heard {
            Ok((bytes, _)) if !bytes.is_empty() => bytes,
            Err(e) if e.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => return,
            _ => {
                let gone = self.clients.remove(i);
                self.follower = self.follower.filter(|follower| *follower != gone.as_raw_fd());
                return;
            }
        };
        let client = &self.clients[i];
        match serde_json::from_slice(&bytes) {
            Ok(Request::Line { lost }) => {
                if lost == Some(self.worker.start())
                    && let Err(e) = self.worker.end()
                {
                    return answer(client, &Answer::No(e.to_string()), None);
                }
                answer(client, &self.line(), Some(self.worker.line().as_fd()));
                self.follower = Some(client.as_raw_fd());
            }
            Ok(Request::SecondLine) => {
                // Who asks may have seen the end of a worker before us.
                if let Err(e) = self.worker.look() {
                    return answer(client, &Answer::No(e.to_string()), None);
                }
                answer(client, &self.line(), Some(self.worker.second_line().as_fd()));
            }
            Ok(Request::Keep) => answer(client, &Answer::Keep(self.keep.clone()), None),
            Ok(Request::End) => self.end(i),
            Ok(Request::Upgrade { binary }) => {
                let why = self.upgrade(i, &binary);
                answer(&self.clients[i], &Answer::No(why.to_string()), None);
            }
            Err(e) => answer(client, &Answer::No(format!("that is no request: {e}")), None),
        }
    }

    fn line(&self) -> Answer {
        let keeper = getpid().as_raw_nonzero().get();
        Answer::Line { start: self.worker.start(), keeper }
    }

    /// Ends the worker, and this process.
    fn end(&mut self, asker: usize) {
        if let Err(e) = self.end_worker() {
            return answer(&self.clients[asker], &Answer::No(e.to_string()), None);
        }
        self.relay.end();
        public::remove(&self.keep.run_dir);
        // The lock stays with what cannot be removed: a daemon that starts looks for it.
        let removed = match remove_alive(&self.keep.run_dir) {
            Ok(()) => self.place.remove(&self.keep.socket),
            Err(_) => remove(&self.keep.socket),
        };
        let answered = match removed {
            Ok(()) => Answer::Done,
            Err(e) => Answer::No(e.to_string()),
        };
        answer(&self.clients[asker], &answered, None);
        std::process::exit(0);
    }

    /// Kills the worker, and looks for a while whether it has ended. One whose storage is stuck ends
    /// later: it does nothing more, and its lock keeps the next one away until then.
    fn end_worker(&mut self) -> io::Result<()> {
        self.worker.end()?;
        for _ in 0..LOOKS_AT_THE_END {
            if self.worker.has_ended() {
                break;
            }
            std::thread::sleep(self.worker.due().unwrap_or_default());
        }
        Ok(())
    }

    /// Becomes another binary. Only its failure returns, and nothing has changed then but the worker.
    fn upgrade(&mut self, asker: usize, binary: &Path) -> io::Error {
        self.try_upgrade(asker, binary).err().unwrap_or_else(|| io::ErrorKind::Other.into())
    }

    fn try_upgrade(&mut self, asker: usize, binary: &Path) -> io::Result<()> {
        let file = File::open(binary)?;
        self.end_worker()?;
        // Of whom the next binary knows nothing.
        if !self.worker.has_ended() {
            return Err(io::Error::other("the worker's storage is stuck, and it does not end"));
        }
        let Place { lock, listener } = &self.place;
        let asker = &self.clients[asker];
        let before = Some([lock, listener, asker].map(AsRawFd::as_raw_fd));
        let public = Some(self.public.as_raw_fd());
        let (keep, start) = (self.keep.clone(), self.worker.start() + 1);
        let state = State { keep, start, before, public, relay: self.relay.hand_on() };
        let mut kept = [lock, listener, asker, &self.public].map(AsFd::as_fd).to_vec();
        kept.extend(self.relay.fd());
        let state = CString::new(format!("{VARIABLE}={}", serde_json::to_string(&state)?))?;
        let mut environment = environment_without(VARIABLE);
        environment.push(state);
        let arguments = std::env::args_os().map(|argument| CString::new(argument.into_vec()));
        let arguments = arguments.collect::<Result<_, _>>()?;
        let program = Program { file: file.as_fd(), arguments, environment };
        Err(become_in_place(&program, &kept))
    }
}

/// How often it is looked whether the worker has ended, before that is not waited for any more.
const LOOKS_AT_THE_END: u32 = 50;

/// Who does not listen misses it.
fn answer(client: &OwnedFd, answer: &Answer, file: Option<BorrowedFd<'_>>) {
    if let Ok(bytes) = serde_json::to_vec(answer) {
        let _ = send_with(client, &bytes, file);
    }
}
