//! A queue of a character device `/dev/ublkcN`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use rustix::io::{pread, pwrite, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::wire::{
    COMMIT_AND_FETCH, DESCRIPTION_BYTES, Description, FETCH, data_at, descriptions_at, tag_bytes,
};
use super::{Channel, Ended};
use crate::arena::{Arena, Span};

/// Bytes of a page. To ask the kernel takes a call that a worker without rights does not have.
const PAGE_BYTES: usize = 4096;

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A queue. It is made and used on one thread: the driver takes commands of no other.
pub struct Queue {
    ring: IoUring,
    file: Arc<OwnedFd>,
    descriptions: Descriptions,
    number: u16,
    depth: u16,
}

impl Queue {
    /// The queue of this number, of a device whose queues have this many tags.
    ///
    /// # Errors
    /// The memory of the descriptions cannot be mapped, or there is no ring.
    pub fn new(file: Arc<OwnedFd>, number: u16, depth: u16) -> io::Result<Queue> {
        let ring = IoUring::builder().dontfork().build(u32::from(depth).max(1))?;
        let descriptions = Descriptions::map(&file, number, depth)?;
        Ok(Queue { ring, file, descriptions, number, depth })
    }

    fn push(&mut self, op: u32, tag: u16, result: i32) {
        assert!(tag < self.depth, "tag {tag} of {}", self.depth);
        let fd = Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd16::new(fd, op).cmd(tag_bytes(self.number, tag, result));
        let entry = entry.build().user_data(tag.into());
        // SAFETY: the entry names no memory, and the file lives as long as the ring. The ring has room for one command
        // of each tag.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "two commands of one tag");
    }

    /// The largest offset is below 2^57.
    fn at(&self, tag: u16, at: u64) -> u64 {
        data_at(self.number, tag, at)
    }
}

impl Channel for Queue {
    fn depth(&self) -> u16 {
        self.depth
    }

    fn fetch(&mut self, tag: u16) {
        self.push(FETCH, tag, 0);
    }

    fn commit(&mut self, tag: u16, result: i32) {
        self.push(COMMIT_AND_FETCH, tag, result);
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<Ended>) {
        let ended = |cqe: io_uring::cqueue::Entry| Ended {
            tag: cqe.user_data() as u16,
            result: cqe.result(),
        };
        out.extend(self.ring.completion().map(ended));
    }

    fn fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    fn describe(&self, tag: u16) -> Description {
        self.descriptions.get(tag)
    }

    fn copy_in(&self, tag: u16, at: u64, arena: &Arena, to: Span) -> io::Result<()> {
        let mut done = 0;
        while done < to.len() {
            let part = to.slice(done, to.len() - done);
            let from = self.at(tag, at + done as u64);
            // SAFETY: the span is inside the arena, which lives, and belongs to this request alone.
            let part =
                unsafe { std::slice::from_raw_parts_mut(arena.ptr(part).as_ptr(), part.len()) };
            done += some(retry_on_intr(|| pread(&self.file, &mut *part, from))?)?;
        }
        Ok(())
    }

    fn copy_out(&self, tag: u16, at: u64, arena: &Arena, from: Span) -> io::Result<()> {
        let mut done = 0;
        while done < from.len() {
            let part = from.slice(done, from.len() - done);
            // SAFETY: as above; it is only read.
            let part = unsafe { std::slice::from_raw_parts(arena.ptr(part).as_ptr(), part.len()) };
            let to = self.at(tag, at + done as u64);
            done += some(retry_on_intr(|| pwrite(&self.file, part, to))?)?;
        }
        Ok(())
    }

    fn zero(&self, tag: u16, at: u64, bytes: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes {
            let len = (bytes - done).min(ZEROS.len() as u64) as usize;
            let to = self.at(tag, at + done);
            done += some(retry_on_intr(|| pwrite(&self.file, &ZEROS[..len], to))?)? as u64;
        }
        Ok(())
    }
}

fn some(bytes: usize) -> io::Result<usize> {
    match bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        bytes => Ok(bytes),
    }
}

/// The descriptions of the requests of a queue, which the driver writes before it ends a command.
struct Descriptions {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this object alone, and is only read.
unsafe impl Send for Descriptions {}

impl Descriptions {
    fn map(file: &OwnedFd, queue: u16, depth: u16) -> io::Result<Descriptions> {
        // The driver takes no other size.
        let bytes = (usize::from(depth) * DESCRIPTION_BYTES).next_multiple_of(PAGE_BYTES);
        let at = descriptions_at(queue, PAGE_BYTES);
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ, flags, file.as_fd(), at) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Descriptions { base, bytes })
    }

    fn get(&self, tag: u16) -> Description {
        let at = usize::from(tag) * DESCRIPTION_BYTES;
        assert!(at + DESCRIPTION_BYTES <= self.bytes, "tag {tag}");
        // SAFETY: inside the mapping, checked above. The driver has written it before the command ended, and does not
        // change it until the request is answered; a volatile copy is of what is there in any case.
        let bytes: [u8; DESCRIPTION_BYTES] =
            unsafe { self.base.as_ptr().add(at).cast::<[u8; DESCRIPTION_BYTES]>().read_volatile() };
        Description::of(&bytes)
    }
}

impl Drop for Descriptions {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`, to which nothing refers any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
