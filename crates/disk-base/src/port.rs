//! The services of a thread that a disk's steps use.

use std::rc::Rc;
use std::sync::Arc;

use ferrite_io::arena::Arena;
use ferrite_io::engine::FileId;
use ferrite_io::reactor::Io;
use ferrite_io::scratch::Scratch;

/// Scratch memory in bytes that each thread of a disk with metadata needs.
pub const SCRATCH_BYTES: usize = 256 << 10;

/// One thread's access to a disk's data: the `async fn`s of `Disk` run on it.
#[derive(Clone)]
pub struct Port {
    /// The thread's reactor.
    pub io: Io,
    /// `Disk::backings`, registered with the reactor, in that order.
    pub files: Rc<[FileId]>,
    /// Memory for metadata, of the engine's arena.
    pub scratch: Scratch,
}

impl Port {
    /// The arena of the data.
    #[inline]
    pub fn memory(&self) -> &Arc<Arena> {
        self.scratch.arena()
    }
}
