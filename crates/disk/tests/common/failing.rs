//! An engine of which some operations fail.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ferrite_io::arena::Span;
use ferrite_io::engine::{Completion, Engine, FileId, Op, Token, Transfer};

/// Says with which error number an operation fails; none: it is done.
pub(crate) type Decide = Box<dyn FnMut(&Op) -> Option<i32>>;

/// An engine around another one.
pub(crate) struct Failing {
    inner: Box<dyn Engine>,
    decide: Decide,
    failed: Vec<Completion>,
}

impl Failing {
    pub(crate) fn new(inner: Box<dyn Engine>, decide: Decide) -> Failing {
        Failing { inner, decide, failed: Vec::new() }
    }
}

impl Engine for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        self.inner.add_file(file)
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.inner.clear_files()
    }

    fn push(&mut self, token: Token, op: Op) {
        match (self.decide)(&op) {
            None => self.inner.push(token, op),
            Some(errno) => self.failed.push(Completion { token, raw: -errno }),
        }
    }

    fn push_vectored(&mut self, _: Token, t: Transfer, _: FileId, _: u64, _: &[Span]) {
        panic!("a vectored {t:?}")
    }

    fn cancel(&mut self, token: Token) {
        self.inner.cancel(token);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.inner.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        match self.failed.is_empty() {
            true => self.inner.wait(timeout),
            false => self.inner.submit(),
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.failed);
        self.inner.reap(out);
    }

    fn may_reap(&mut self) -> bool {
        !self.failed.is_empty() || self.inner.may_reap()
    }

    fn in_flight(&self) -> usize {
        self.failed.len() + self.inner.in_flight()
    }
}
