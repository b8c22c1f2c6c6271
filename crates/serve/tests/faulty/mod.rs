//! A storage engine that fails as it is told, around the real one.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferrite_io::arena::Span;
use ferrite_io::engine::{Completion, Engine, FileId, Op, Token, Transfer};
use ferrite_serve::blkif::lifecycle::EngineFactory;

pub const EINTR: i32 = 4;
pub const EIO: i32 = 5;
pub const EAGAIN: i32 = 11;
pub const ENOMEM: i32 = 12;
pub const ENOSPC: i32 = 28;
pub const EOPNOTSUPP: i32 = 95;

/// What becomes of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The kernel does it.
    None,
    /// It fails with this error number.
    Errno(i32),
    /// The kernel does so many bytes of it, from its first.
    Short(usize),
    /// It ends without having done anything, and without an error.
    Nothing,
    /// Its thread waits until the test lets go of [`Faults::gate`]; then the kernel does it, or it
    /// fails with this error number.
    Held(Option<i32>),
}

/// Tells operations apart.
type OfOp = fn(&Op) -> bool;

type Decide = Box<dyn FnMut(&Op) -> Fault + Send>;

/// What is under way in all engines together.
#[derive(Default)]
pub struct Traffic {
    /// Operations on storage.
    under_way: AtomicUsize,
    /// One of them that has to be alone.
    alone: AtomicBool,
    /// Operations that had to be alone and were begun.
    pub begun_alone: AtomicUsize,
    /// Operations that were beside one that had to be alone.
    pub beside: AtomicUsize,
}

impl Traffic {
    fn begin(&self, alone: bool) {
        if alone {
            self.alone.store(true, SeqCst);
            self.begun_alone.fetch_add(1, SeqCst);
            self.beside.fetch_add(self.under_way.load(SeqCst), SeqCst);
        } else {
            self.under_way.fetch_add(1, SeqCst);
            self.beside.fetch_add(usize::from(self.alone.load(SeqCst)), SeqCst);
        }
    }

    fn end(&self, alone: bool) {
        if alone {
            self.alone.store(false, SeqCst);
        } else {
            self.under_way.fetch_sub(1, SeqCst);
        }
    }
}

/// Decides what fails, for all engines of a disk. Shared with the test.
#[derive(Clone)]
pub struct Faults {
    decide: Arc<Mutex<Decide>>,
    /// Which operations have to be alone.
    alone: Arc<Mutex<OfOp>>,
    /// What was seen of that.
    pub traffic: Arc<Traffic>,
    /// For [`Fault::Held`].
    pub gate: Arc<Mutex<()>>,
    /// The engine of the thread with this name refuses to go on.
    broken: Arc<Mutex<Option<String>>>,
}

impl Faults {
    /// Nothing fails.
    pub fn none() -> Faults {
        let decide: Decide = Box::new(|_| Fault::None);
        Faults {
            decide: Arc::new(Mutex::new(decide)),
            alone: Arc::new(Mutex::new(|_| false)),
            traffic: Arc::default(),
            gate: Arc::default(),
            broken: Arc::default(),
        }
    }

    /// From now on this decides.
    pub fn set(&self, decide: impl FnMut(&Op) -> Fault + Send + 'static) {
        *self.decide.lock().unwrap() = Box::new(decide);
    }

    /// The next data operation or sync for which `of` holds fails so; all others succeed.
    pub fn once(&self, of: OfOp, fault: Fault) {
        let mut left = Some(fault);
        self.set(move |op| match of(op) {
            true => left.take().unwrap_or(Fault::None),
            false => Fault::None,
        });
    }

    /// Watches whether these operations are alone on the disk.
    pub fn watch_alone(&self, alone: OfOp) {
        *self.alone.lock().unwrap() = alone;
    }

    /// The engine of this queue fails as a whole.
    pub fn break_engine(&self, thread: &str) {
        *self.broken.lock().unwrap() = Some(thread.to_owned());
    }

    /// Engines as a [`Plan`](super::rig::Plan) takes them.
    pub fn factory(&self) -> EngineFactory {
        let (faults, engines) = (self.clone(), super::rig::engines());
        Arc::new(move |arena, entries| {
            let inner = engines(arena, entries)?;
            let (done, under_way) = (Vec::new(), HashMap::new());
            Ok(Box::new(Faulty { inner, faults: faults.clone(), done, under_way }))
        })
    }
}

pub fn is_read(op: &Op) -> bool {
    matches!(op, Op::Read { .. })
}

pub fn is_write(op: &Op) -> bool {
    matches!(op, Op::Write { .. })
}

pub fn is_sync(op: &Op) -> bool {
    matches!(op, Op::Sync { .. })
}

struct Faulty {
    inner: Box<dyn Engine>,
    faults: Faults,
    done: Vec<Completion>,
    /// Operations on storage by token, and whether they have to be alone.
    under_way: HashMap<Token, bool>,
}

impl Faulty {
    fn check(&self) -> io::Result<()> {
        let broken = self.faults.broken.lock().unwrap();
        match std::thread::current().name() == broken.as_deref() && broken.is_some() {
            true => Err(io::Error::other("the engine is broken")),
            false => Ok(()),
        }
    }

    /// An operation on storage begins; what is to become of it.
    fn begin(&mut self, token: Token, op: &Op) -> Fault {
        let is_alone = *self.faults.alone.lock().unwrap();
        let alone = is_alone(op);
        self.faults.traffic.begin(alone);
        self.under_way.insert(token, alone);
        let fault = (self.faults.decide.lock().unwrap())(op);
        let Fault::Held(errno) = fault else { return fault };
        drop(self.faults.gate.lock().unwrap());
        errno.map_or(Fault::None, Fault::Errno)
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
        self.inner.add_file(file)
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.inner.clear_files()
    }

    fn push(&mut self, token: Token, op: Op) {
        let fault = match op {
            Op::Readable { .. } | Op::Timer { .. } => Fault::None,
            _ => self.begin(token, &op),
        };
        match (fault, op) {
            (Fault::None, op) => self.inner.push(token, op),
            (Fault::Errno(errno), _) => self.done.push(Completion { token, raw: -errno }),
            (Fault::Nothing, _) => self.done.push(Completion { token, raw: 0 }),
            (Fault::Short(n), Op::Read { file, offset, buf }) => {
                let buf = buf.slice(0, n.min(buf.len()));
                self.inner.push(token, Op::Read { file, offset, buf });
            }
            (Fault::Short(n), Op::Write { file, offset, buf }) => {
                let buf = buf.slice(0, n.min(buf.len()));
                self.inner.push(token, Op::Write { file, offset, buf });
            }
            (Fault::Short(_), op) => panic!("{op:?} cannot be short"),
            (Fault::Held(_), _) => unreachable!("the wait is over"),
        }
    }

    /// The decision is made on an operation with the first of the spans.
    fn push_vectored(
        &mut self,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        let buf = bufs[0];
        let op = match transfer {
            Transfer::Read => Op::Read { file, offset, buf },
            Transfer::Write => Op::Write { file, offset, buf },
        };
        match self.begin(token, &op) {
            Fault::None => self.inner.push_vectored(token, transfer, file, offset, bufs),
            Fault::Errno(errno) => self.done.push(Completion { token, raw: -errno }),
            Fault::Nothing => self.done.push(Completion { token, raw: 0 }),
            Fault::Held(_) => unreachable!("the wait is over"),
            Fault::Short(n) => {
                let bufs = shortened(bufs, n);
                self.inner.push_vectored(token, transfer, file, offset, &bufs);
            }
        }
    }

    fn cancel(&mut self, token: Token) {
        self.inner.cancel(token);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.check()?;
        self.inner.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.check()?;
        match self.done.is_empty() {
            true => self.inner.wait(timeout),
            false => self.inner.submit(),
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        let first = out.len();
        out.append(&mut self.done);
        self.inner.reap(out);
        for completion in &out[first..] {
            if let Some(alone) = self.under_way.remove(&completion.token) {
                self.faults.traffic.end(alone);
            }
        }
    }

    fn may_reap(&mut self) -> bool {
        !self.done.is_empty() || self.inner.may_reap()
    }

    fn in_flight(&self) -> usize {
        self.done.len() + self.inner.in_flight()
    }
}
