//! Storage with a delay and without data, which counts system calls.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferrite_io::arena::Span;
use ferrite_io::computing::Work;
use ferrite_io::engine::{Completion, Engine, FileId, Op, Token, Transfer};
use ferrite_io::engines::test_engine;

use crate::faulty::EngineFactory;

/// The duration of a transfer.
const TAKES: Duration = Duration::from_millis(1);

/// An engine whose transfers are timers of the tests' engine.
struct Late {
    inner: Box<dyn Engine>,
    /// The bytes of transfers, by token.
    bytes: HashMap<Token, i32>,
    /// An operation is queued.
    queued: bool,
    calls: Arc<AtomicU64>,
    before_wait: BeforeWait,
}

/// Called when everything is prepared for a wait, before the system call.
pub type BeforeWait = Arc<dyn Fn() + Send + Sync>;

/// Builds such engines; they count the calls that submit, wait, or both.
pub fn factory(calls: &Arc<AtomicU64>) -> EngineFactory {
    factory_with(calls, Arc::new(|| ()))
}

/// Builds such engines, with a call before each wait.
pub fn factory_with(calls: &Arc<AtomicU64>, before_wait: BeforeWait) -> EngineFactory {
    let calls = calls.clone();
    Arc::new(move |arena, entries| {
        let inner = test_engine().open(arena, entries)?;
        let (bytes, calls, before_wait) = (HashMap::new(), calls.clone(), before_wait.clone());
        Ok(Box::new(Late { inner, bytes, queued: false, calls, before_wait }))
    })
}

impl Late {
    fn transfer(&mut self, token: Token, bytes: usize) {
        self.bytes.insert(token, bytes as i32);
        self.inner.push(token, Op::Timer { after: TAKES });
    }
}

impl Engine for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        self.inner.add_file(file)
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.inner.clear_files()
    }

    fn drain(&mut self, token: Token, fd: i32, bytes: u32) -> bool {
        self.queued = true;
        self.inner.drain(token, fd, bytes)
    }

    fn put(&mut self, token: Token, fd: i32, word: u32) -> bool {
        self.queued = true;
        self.inner.put(token, fd, word)
    }

    fn push(&mut self, token: Token, op: Op) {
        self.queued = true;
        match op {
            Op::Read { buf, .. } | Op::Write { buf, .. } => self.transfer(token, buf.len()),
            op => self.inner.push(token, op),
        }
    }

    fn push_vectored(&mut self, token: Token, _: Transfer, _: FileId, _: u64, bufs: &[Span]) {
        self.queued = true;
        self.transfer(token, bufs.iter().map(Span::len).sum());
    }

    fn push_stream(
        &mut self,
        token: Token,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    ) {
        self.queued = true;
        self.inner.push_stream(token, transfer, socket, bufs);
    }

    fn compute(&mut self, token: Token, work: Work) {
        self.inner.compute(token, work);
    }

    fn cancel(&mut self, token: Token) {
        self.queued = true;
        self.inner.cancel(token);
    }

    fn submit(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.queued) || self.inner.may_reap() {
            self.calls.fetch_add(1, Ordering::Relaxed);
        }
        self.inner.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.queued = false;
        self.calls.fetch_add(1, Ordering::Relaxed);
        (self.before_wait)();
        self.inner.wait(timeout)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        let first = out.len();
        self.inner.reap(out);
        for completion in &mut out[first..] {
            if let Some(bytes) = self.bytes.remove(&completion.token) {
                completion.raw = if completion.raw == 0 { bytes } else { completion.raw };
            }
        }
    }

    fn may_reap(&mut self) -> bool {
        self.inner.may_reap()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}
