//! The session of one reactor: a task that sends, and one that receives.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use ferrite_io::arena::Span;
use ferrite_io::executor::LocalSignal;
use ferrite_io::reactor::{Io, Reply};
use ferrite_io::remote::{Allocation, Remote, Request};
use ferrite_io::scratch::Scratch;
use rustix::net::{Shutdown, shutdown};

use super::{Code, REPLY_BYTES, REQUEST_BYTES};
use crate::errno::EIO;

/// A request on its way.
struct Asked {
    code: Code,
    offset: u64,
    len: u64,
    bufs: Vec<Span>,
    reply: Reply,
}

pub(super) struct Session {
    socket: Arc<OwnedFd>,
    io: Io,
    scratch: Scratch,
    /// Raised when there is something to send, or at the end.
    signal: LocalSignal,
    unsent: RefCell<VecDeque<Asked>>,
    /// Requests that were sent, or are being sent, by number.
    sent: RefCell<HashMap<u64, Asked>>,
    ended: Cell<bool>,
    /// Raised when the sender has ended.
    nothing_is_sent: LocalSignal,
}

impl Session {
    pub(super) fn begin(socket: Arc<OwnedFd>, io: Io, scratch: Scratch) -> Rc<Session> {
        let session = Rc::new(Session {
            socket,
            io,
            scratch,
            signal: LocalSignal::new(),
            unsent: RefCell::default(),
            sent: RefCell::default(),
            ended: Cell::new(false),
            nothing_is_sent: LocalSignal::new(),
        });
        let (sender, receiver) = (session.clone(), session.clone());
        session.io.spawn(async move {
            if sender.send_all().await.is_err() {
                sender.close();
            }
            sender.nothing_is_sent.raise();
        });
        session.io.spawn(async move {
            // Nothing of a connection that has ended is received any more: its requests have failed.
            let _ = receiver.receive_all().await;
            receiver.close();
            // The kernel reads the memory of a request that is being sent.
            receiver.nothing_is_sent.wait().await;
            receiver.unsent.take();
            receiver.sent.take();
        });
        session
    }

    /// Ends what the two tasks wait for.
    fn close(&self) {
        self.ended.set(true);
        let _ = shutdown(&*self.socket, Shutdown::Both);
        self.signal.raise();
    }

    async fn send_all(&self) -> io::Result<()> {
        let header = self.scratch.take(REQUEST_BYTES).await;
        for number in 0.. {
            let asked = loop {
                if self.ended.get() {
                    return Ok(());
                }
                if let Some(asked) = self.unsent.borrow_mut().pop_front() {
                    break asked;
                }
                self.signal.lower();
                self.signal.wait().await;
            };
            let words = [asked.code as u64, number, asked.offset, asked.len];
            header.copy_in(&words.map(u64::to_le_bytes).concat());
            let mut bufs = vec![header.span()];
            if asked.code == Code::Write {
                bufs.extend(&asked.bufs);
            }
            self.sent.borrow_mut().insert(number, asked);
            self.io.send(&self.socket, &bufs).await?;
        }
        Ok(())
    }

    async fn receive_all(&self) -> io::Result<()> {
        let header = self.scratch.take(REPLY_BYTES).await;
        loop {
            self.io.receive_exact(&self.socket, &[header.span()]).await?;
            let mut bytes = [0; REPLY_BYTES];
            header.copy_out(&mut bytes);
            let word = |i: usize| u64::from_le_bytes(bytes[i * 8..][..8].try_into().unwrap());
            let (number, errno, count) = (word(0), word(1), word(2));
            let Some(asked) = self.sent.borrow_mut().remove(&number) else {
                panic!("a reply to what was not asked");
            };
            match asked.code {
                _ if errno != 0 => asked.reply.errno(errno as i32),
                Code::Allocation => {
                    let found = Allocation { len: count / 2, zeros: count % 2 == 1 };
                    asked.reply.allocation(found);
                }
                Code::Read if count > 0 => {
                    let bufs = shortened(&asked.bufs, count as usize);
                    self.io.receive_exact(&self.socket, &bufs).await?;
                    asked.reply.done(count as u32);
                }
                Code::Read | Code::Write => asked.reply.done(count as u32),
                Code::Sync | Code::Zero => asked.reply.done(0),
            }
        }
    }
}

/// The first `n` bytes of `bufs`.
fn shortened(bufs: &[Span], mut n: usize) -> Vec<Span> {
    let mut first = |buf: &Span| {
        let buf = buf.slice(0, n.min(buf.len()));
        n -= buf.len();
        buf
    };
    bufs.iter().map(&mut first).filter(|buf| !buf.is_empty()).collect()
}

impl Remote for Session {
    fn begin(&self, request: Request<'_>, reply: Reply) {
        if self.ended.get() {
            return reply.errno(EIO);
        }
        let bytes = |bufs: &[Span]| bufs.iter().map(|buf| buf.len() as u64).sum();
        let (code, offset, len, bufs) = match request {
            Request::Read { offset, bufs } => (Code::Read, offset, bytes(bufs), bufs),
            Request::Write { offset, bufs } => (Code::Write, offset, bytes(bufs), bufs),
            Request::Sync => (Code::Sync, 0, 0, &[][..]),
            Request::PunchHole { offset, len }
            | Request::ZeroRange { offset, len }
            | Request::Discard { offset, len } => (Code::Zero, offset, len, &[][..]),
            Request::Allocation { offset, len } => (Code::Allocation, offset, len, &[][..]),
        };
        let asked = Asked { code, offset, len, bufs: bufs.to_vec(), reply };
        self.unsent.borrow_mut().push_back(asked);
        self.signal.raise();
    }

    fn end(&self) {
        self.close();
    }
}
