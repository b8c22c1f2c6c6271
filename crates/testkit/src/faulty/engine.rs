//! An engine around another one, whose operations fail as the [`Faults`] say.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::arena::Span;
use ferrite_io::computing::Work;
use ferrite_io::engine::{Completion, Engine, FileId, MAX_VECTORED, Op, Token, Transfer};

use super::Faults;
use super::rules::{Asked, Fault, Kind};

/// Marks the timers of delayed operations.
const LATE: Token = 1 << 62;

/// A delayed operation.
enum Waiting {
    One(Op),
    Vectored(Transfer, FileId, u64, Vec<Span>),
    Stream(Transfer, Arc<OwnedFd>, Vec<Span>),
}

/// See the module text. Pinning, draining and putting are not supported, as the trait allows: each event is an
/// operation that rules can see.
pub(super) struct Faulty {
    inner: Box<dyn Engine>,
    faults: Faults,
    done: Vec<Completion>,
    /// Operations on storage by token, and whether they must be alone.
    under_way: HashMap<Token, bool>,
    late: HashMap<Token, Waiting>,
    random: SplitMix64,
}

impl Faulty {
    pub(super) fn new(inner: Box<dyn Engine>, faults: Faults) -> Faulty {
        Faulty {
            inner,
            faults,
            done: Vec::new(),
            under_way: HashMap::new(),
            late: HashMap::new(),
            random: SplitMix64::new(3),
        }
    }

    /// Begins an operation; returns its fault.
    fn begin(&mut self, token: Token, op: &Op, bytes: Option<u64>) -> Fault {
        let asked = Asked::op(op, bytes);
        if asked.kind.is_storage() {
            self.under_way.insert(token, self.faults.begin(&asked));
        }
        self.faults.decide(&asked, Some(op))
    }

    /// The number of bytes to transfer of so many; `None`: all.
    fn short(&mut self, fault: Fault, bytes: usize) -> Option<usize> {
        match fault {
            Fault::Short(n) => Some(n.min(bytes)),
            Fault::Half => Some(bytes / 2),
            Fault::Part if bytes > 512 => {
                Some(512 + self.random.below(bytes as u64 - 512) as usize)
            }
            _ => None,
        }
    }

    fn delay(&mut self, fault: Fault) -> Option<Duration> {
        match fault {
            Fault::Late(after) => Some(after),
            Fault::LateBelow(most) => {
                Some(Duration::from_nanos(self.random.below(most.as_nanos() as u64)))
            }
            _ => None,
        }
    }

    fn push_late(&mut self, token: Token, waiting: Waiting, after: Duration) {
        self.late.insert(token, waiting);
        self.inner.push(token | LATE, Op::Timer { after });
    }

    fn check(&self, kind: Kind) -> io::Result<()> {
        if self.faults.is_broken() {
            return Err(io::Error::other("the engine is broken"));
        }
        self.faults.check(kind)
    }
}

/// The first `n` bytes of `bufs`.
fn shortened(bufs: &[Span], n: usize) -> Vec<Span> {
    let mut left = n;
    let mut cut = |buf: &Span| {
        let buf = buf.slice(0, left.min(buf.len()));
        left -= buf.len();
        buf
    };
    bufs.iter().map(&mut cut).filter(|buf| !buf.is_empty()).collect()
}

impl Engine for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        self.faults.check(Kind::AddFile)?;
        self.inner.add_file(file)
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.inner.clear_files()
    }

    fn push(&mut self, token: Token, op: Op) {
        let fault = self.begin(token, &op, None);
        match fault {
            Fault::Errno(errno) => return self.done.push(Completion { token, raw: -errno }),
            Fault::Nothing => return self.done.push(Completion { token, raw: 0 }),
            _ => {}
        }
        if let Some(after) = self.delay(fault) {
            return self.push_late(token, Waiting::One(op), after);
        }
        let op = match op {
            Op::Read { file, offset, buf } => {
                let n = self.short(fault, buf.len()).unwrap_or(buf.len());
                Op::Read { file, offset, buf: buf.slice(0, n) }
            }
            Op::Write { file, offset, buf } => {
                let n = self.short(fault, buf.len()).unwrap_or(buf.len());
                Op::Write { file, offset, buf: buf.slice(0, n) }
            }
            op => op,
        };
        self.inner.push(token, op);
    }

    fn push_vectored(
        &mut self,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        assert!(bufs.len() <= MAX_VECTORED);
        let (buf, bytes) = (bufs[0], bufs.iter().map(Span::len).sum::<usize>());
        let op = match transfer {
            Transfer::Read => Op::Read { file, offset, buf },
            Transfer::Write => Op::Write { file, offset, buf },
        };
        let fault = self.begin(token, &op, Some(bytes as u64));
        match fault {
            Fault::Errno(errno) => return self.done.push(Completion { token, raw: -errno }),
            Fault::Nothing => return self.done.push(Completion { token, raw: 0 }),
            _ => {}
        }
        if let Some(after) = self.delay(fault) {
            let waiting = Waiting::Vectored(transfer, file, offset, bufs.to_vec());
            return self.push_late(token, waiting, after);
        }
        match self.short(fault, bytes) {
            Some(n) => {
                let bufs = shortened(bufs, n);
                self.inner.push_vectored(token, transfer, file, offset, &bufs);
            }
            None => self.inner.push_vectored(token, transfer, file, offset, bufs),
        }
    }

    fn push_stream(
        &mut self,
        token: Token,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    ) {
        let bytes = bufs.iter().map(Span::len).sum::<usize>();
        let fault = self.faults.decide(&Asked::stream(transfer, bytes as u64), None);
        match fault {
            Fault::Errno(errno) => return self.done.push(Completion { token, raw: -errno }),
            Fault::Nothing => return self.done.push(Completion { token, raw: 0 }),
            _ => {}
        }
        if let Some(after) = self.delay(fault) {
            return self.push_late(
                token,
                Waiting::Stream(transfer, socket.clone(), bufs.to_vec()),
                after,
            );
        }
        match self.short(fault, bytes) {
            Some(n) => self.inner.push_stream(token, transfer, socket, &shortened(bufs, n)),
            None => self.inner.push_stream(token, transfer, socket, bufs),
        }
    }

    fn compute(&mut self, token: Token, work: Work) {
        self.inner.compute(token, work);
    }

    fn cancel(&mut self, token: Token) {
        self.inner.cancel(token);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.check(Kind::Submit)?;
        self.inner.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.check(Kind::Wait)?;
        match self.done.is_empty() {
            true => self.inner.wait(timeout),
            false => self.inner.submit(),
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        let mut done = std::mem::take(&mut self.done);
        self.inner.reap(&mut done);
        for completion in done {
            let token = completion.token & !LATE;
            if token != completion.token {
                match self.late.remove(&token).expect("a timer belongs to an operation") {
                    Waiting::One(op) => self.inner.push(token, op),
                    Waiting::Vectored(transfer, file, offset, bufs) => {
                        self.inner.push_vectored(token, transfer, file, offset, &bufs);
                    }
                    Waiting::Stream(transfer, socket, bufs) => {
                        self.inner.push_stream(token, transfer, &socket, &bufs);
                    }
                }
                continue;
            }
            if let Some(alone) = self.under_way.remove(&token) {
                self.faults.end(alone);
            }
            out.push(completion);
        }
    }

    fn may_reap(&mut self) -> bool {
        !self.done.is_empty() || self.inner.may_reap()
    }

    fn in_flight(&self) -> usize {
        self.done.len() + self.inner.in_flight()
    }
}
