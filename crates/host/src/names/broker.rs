//! The asking end.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::wire::{Answer, NAMES, OWN_DESCRIPTORS, Request, What};
use crate::frames::Frame;

/// This thread, whose place the keeper cannot know by that name.
const THIS_THREAD: &str = "/proc/thread-self/";

/// A socket to a keeper that opens files. Any thread may ask; one asks at a time.
#[derive(Debug)]
pub struct Broker {
    socket: Mutex<Numbered>,
}

/// With the number of the last request. An error may cut off the wait for an answer: that answer is
/// never taken for the next request's.
#[derive(Debug)]
struct Numbered {
    socket: OwnedFd,
    last: u32,
}

impl Broker {
    /// By a socket of the kind `SEQPACKET`.
    pub fn new(socket: OwnedFd) -> Broker {
        Broker { socket: Mutex::new(Numbered { socket, last: 0 }) }
    }

    /// Opens a file; see [`super::open`].
    ///
    /// # Errors
    /// The keeper's.
    pub fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
        let request =
            Request { flags: flags.bits(), mode: mode.bits(), ..Request::of(What::Open, path) };
        self.ask(&request, &[])?.file()
    }

    /// Asks, and waits for the answer. `files` go along.
    ///
    /// # Errors
    /// The keeper's; `PIPE` if it is gone, `PROTO` if it does not answer as it should.
    pub fn ask(
        &self,
        request: &Request<'_>,
        files: &[BorrowedFd<'_>],
    ) -> rustix::io::Result<Answer> {
        let own = own_descriptor(request.first);
        let this_thread = of_this_thread(request.first);
        let request = match (&own, &this_thread) {
            (Some(_), _) => Request { first: &[], ..*request },
            (_, Some(name)) => Request { first: name.as_bytes(), ..*request },
            _ => *request,
        };
        let files: Vec<BorrowedFd<'_>> = own.into_iter().chain(files.iter().copied()).collect();
        let mut asked = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        asked.last = asked.last.wrapping_add(1);
        let request = request.to_bytes(asked.last)?;
        NAMES.send(&asked.socket, &request, &files).map_err(|e| failed(&e))?;
        loop {
            match receive(&asked.socket)? {
                (number, answer) if number == asked.last => return answer,
                _ => {}
            }
        }
    }
}

fn receive(socket: &OwnedFd) -> rustix::io::Result<(u32, rustix::io::Result<Answer>)> {
    let Frame { bytes, files } = NAMES.receive(socket).map_err(|e| failed(&e))?;
    Answer::parse(&bytes, files.into_iter().next()).ok_or(Errno::PROTO)
}

fn failed(e: &io::Error) -> Errno {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => Errno::PIPE,
        io::ErrorKind::InvalidInput => Errno::INVAL,
        _ => Errno::from_io_error(e).unwrap_or(Errno::PROTO),
    }
}

/// The descriptor of this process that a name is, as long as it is open.
fn own_descriptor(name: &[u8]) -> Option<BorrowedFd<'static>> {
    let number = name.strip_prefix(OWN_DESCRIPTORS.as_bytes())?;
    let number: i32 = std::str::from_utf8(number).ok()?.parse().ok().filter(|n| *n >= 0)?;
    // SAFETY: it is used for one call of sendmsg, in which a number that is not open is an error of
    // the kernel's. Nothing is read, written or closed by it.
    Some(unsafe { BorrowedFd::borrow_raw(number) })
}

fn of_this_thread(name: &[u8]) -> Option<String> {
    let rest = std::str::from_utf8(name.strip_prefix(THIS_THREAD.as_bytes())?).ok()?;
    let thread = rustix::thread::gettid().as_raw_nonzero();
    let path = PathBuf::from(format!("/proc/{}/task/{thread}", std::process::id())).join(rest);
    path.into_os_string().into_string().ok()
}
