//! Storage without a medium: every operation succeeds at once, and does nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ferrite_io::arena::Span;
use ferrite_io::computing::Work;
use ferrite_io::engine::{Completion, Engine, FileId, Op, Token, Transfer};

/// See the module text.
#[derive(Default)]
pub struct Null {
    files: u32,
    done: Vec<Completion>,
}

impl Engine for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn add_file(&mut self, _: Arc<OwnedFd>) -> io::Result<FileId> {
        self.files += 1;
        Ok(FileId(self.files - 1))
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.files = 0;
        Ok(())
    }

    fn push(&mut self, token: Token, op: Op) {
        let raw = match op {
            Op::Read { buf, .. } | Op::Write { buf, .. } => buf.len() as i32,
            Op::Readable { .. } | Op::Writable { .. } | Op::Timer { .. } => {
                panic!("nothing comes to pass here: {op:?}")
            }
            _ => 0,
        };
        self.done.push(Completion { token, raw });
    }

    fn push_vectored(&mut self, token: Token, _: Transfer, _: FileId, _: u64, bufs: &[Span]) {
        let bytes: usize = bufs.iter().map(Span::len).sum();
        self.done.push(Completion { token, raw: bytes as i32 });
    }

    fn push_stream(&mut self, token: Token, _: Transfer, _: &Arc<OwnedFd>, bufs: &[Span]) {
        let bytes: usize = bufs.iter().map(Span::len).sum();
        self.done.push(Completion { token, raw: bytes as i32 });
    }

    fn compute(&mut self, token: Token, work: Work) {
        self.done.push(Completion { token, raw: work.run() });
    }

    fn cancel(&mut self, _: Token) {}

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self, _: Option<Duration>) -> io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }

    fn may_reap(&mut self) -> bool {
        !self.done.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}
