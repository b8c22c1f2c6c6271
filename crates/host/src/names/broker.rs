//! The asking end.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::wire::{Answer, MAX_BYTES, MAX_FILES, OWN_DESCRIPTORS, Request, What};

/// This thread, whose place the keeper cannot know by that name.
const THIS_THREAD: &str = "/proc/thread-self/";

/// A socket to a keeper that opens files. Any thread may ask; one asks at a time.
#[derive(Debug)]
pub struct Broker {
    socket: Mutex<Numbered>,
}

/// With the number of the last request. An answer that nobody has waited for, since that was cut off
/// by an error, is never the next one's.
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
        send(&asked.socket, &request.to_bytes(asked.last)?, &files)?;
        loop {
            match receive(&asked.socket)? {
                (number, answer) if number == asked.last => return answer,
                _ => {}
            }
        }
    }
}

fn send(socket: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::INVAL);
    }
    let bytes = [IoSlice::new(bytes)];
    retry_on_intr(|| sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL)).map(drop)
}

fn receive(socket: &OwnedFd) -> rustix::io::Result<(u32, rustix::io::Result<Answer>)> {
    let mut bytes = [0; MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let len = {
        let mut into = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        retry_on_intr(|| recvmsg(socket, &mut into, &mut ancillary, flags))?.bytes
    };
    let mut files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let file = files.by_ref().flatten().next();
    if len == 0 {
        return Err(Errno::PIPE);
    }
    Answer::parse(&bytes[..len], file).ok_or(Errno::PROTO)
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
