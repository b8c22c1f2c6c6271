//! The kernel's side of Linux AIO: its structures (linux/aio_abi.h), its four system calls, and
//! the ring of completions that it maps into the process.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// `IOCB_CMD_*` of linux/aio_abi.h.
pub(super) const PREAD: u16 = 0;
pub(super) const PWRITE: u16 = 1;
/// `fdatasync`; Linux 4.18 and newer.
pub(super) const FDSYNC: u16 = 3;
pub(super) const PREADV: u16 = 7;
pub(super) const PWRITEV: u16 = 8;

/// `IOCB_FLAG_RESFD`: a completion is added to the eventfd.
pub(super) const FLAG_RESFD: u32 = 1;

/// `struct iocb`, on little-endian machines.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Iocb {
    pub(super) data: u64,
    /// Written by the kernel while it takes the iocb.
    pub(super) key: u32,
    pub(super) rw_flags: i32,
    pub(super) opcode: u16,
    pub(super) priority: i16,
    pub(super) fd: u32,
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) offset: i64,
    pub(super) reserved: u64,
    pub(super) flags: u32,
    pub(super) eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Event {
    pub(super) data: u64,
    object: u64,
    /// The byte count or `-errno`.
    pub(super) result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<Iocb>() == 64 && size_of::<Event>() == 32);

/// `struct aio_ring` of the kernel's fs/aio.c, in 32-bit words; the events follow.
mod word {
    pub(super) const EVENTS: usize = 1;
    pub(super) const HEAD: usize = 2;
    pub(super) const TAIL: usize = 3;
    pub(super) const MAGIC: usize = 4;
    pub(super) const INCOMPATIBLE: usize = 6;
    pub(super) const HEADER_BYTES: usize = 7;
    pub(super) const COUNT: usize = 8;
}

const RING_MAGIC: u32 = 0xa10a_10a1;

/// Events that one call takes where the ring cannot be read.
const EVENTS_PER_CALL: usize = 64;

/// An AIO context: what `io_setup` gives, destroyed when dropped.
pub(super) struct Context {
    /// Where the kernel mapped the ring; it stays mapped until `io_destroy`.
    id: usize,
    /// Events in the ring; 0: its layout is unknown, so completions are asked for.
    events: u32,
}

/// The errno of a system call that returns -1 with one, or its result.
fn checked(result: libc::c_long) -> Result<usize, i32> {
    usize::try_from(result)
        .map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

impl Context {
    /// A context for at least `entries` operations at once.
    pub(super) fn new(entries: u32) -> Result<Context, i32> {
        let mut id = 0usize;
        // SAFETY: the kernel writes one word to `id`.
        checked(unsafe { libc::syscall(libc::SYS_io_setup, entries, &raw mut id) })?;
        let mut context = Context { id, events: 0 };
        let known = context.word(word::MAGIC).load(Ordering::Relaxed) == RING_MAGIC
            && context.word(word::INCOMPATIBLE).load(Ordering::Relaxed) == 0
            && context.word(word::HEADER_BYTES).load(Ordering::Relaxed) as usize
                == word::COUNT * size_of::<u32>();
        if known {
            context.events = context.word(word::EVENTS).load(Ordering::Relaxed);
        }
        Ok(context)
    }

    /// Completions are asked for by system call from now on, as where the ring is unknown.
    #[cfg(test)]
    pub(super) fn forget_ring(&mut self) {
        self.events = 0;
    }

    fn word(&self, n: usize) -> &AtomicU32 {
        assert!(n < word::COUNT);
        // SAFETY: the kernel maps at least one page of shared memory at `id` for as long as the
        // context lives, its header is that many aligned words, and all access to them is atomic.
        unsafe { AtomicU32::from_ptr((self.id as *mut u32).add(n)) }
    }

    /// Whether the ring can be read without a system call.
    pub(super) fn has_ring(&self) -> bool {
        self.events > 0
    }

    /// Whether the ring holds completions; false where it cannot be read.
    pub(super) fn ring_has_events(&self) -> bool {
        self.has_ring()
            && self.word(word::HEAD).load(Ordering::Relaxed)
                != self.word(word::TAIL).load(Ordering::Relaxed)
    }

    /// Hands the iocbs at these addresses to the kernel. Returns how many it took, or the errno
    /// of why it did not take the first.
    ///
    /// # Safety
    /// The addresses are those of living iocbs that nothing else uses meanwhile, and the vectors
    /// that they name live as long as this call. The memory that they have transferred, and their
    /// eventfd, must live until their completions.
    pub(super) unsafe fn submit(&self, iocbs: &[usize]) -> Result<usize, i32> {
        // SAFETY: as the caller promises.
        checked(unsafe { libc::syscall(libc::SYS_io_submit, self.id, iocbs.len(), iocbs.as_ptr()) })
    }

    /// Gives the completions that are there to `each`; how many there were.
    pub(super) fn take(&self, each: &mut dyn FnMut(Event)) -> usize {
        match self.has_ring() {
            true => self.take_from_ring(each),
            false => self.ask(0, each).unwrap_or(0),
        }
    }

    fn take_from_ring(&self, each: &mut dyn FnMut(Event)) -> usize {
        let (head, tail) = (self.word(word::HEAD), self.word(word::TAIL));
        let mut at = head.load(Ordering::Relaxed) % self.events;
        // Acquire: the events are read after the index that covers them.
        let end = tail.load(Ordering::Acquire) % self.events;
        let mut taken = 0;
        while at != end {
            // SAFETY: `at` is below the number of events that the kernel has mapped behind the
            // header, and between head and tail the kernel writes none.
            let event = unsafe {
                let events = (self.id as *const u32).add(word::COUNT).cast::<Event>();
                events.add(at as usize).read_volatile()
            };
            each(event);
            taken += 1;
            at = (at + 1) % self.events;
        }
        if taken > 0 {
            // Release: the kernel may write there once it sees this.
            head.store(at, Ordering::Release);
        }
        taken
    }

    /// Asks the kernel for completions and waits for `least` of them.
    pub(super) fn ask(&self, least: usize, each: &mut dyn FnMut(Event)) -> Result<usize, i32> {
        let mut events = [Event::default(); EVENTS_PER_CALL];
        let time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let limit = if least == 0 { &raw const time } else { std::ptr::null() };
        // SAFETY: the kernel writes at most that many events, and reads the time, if any.
        let result = unsafe {
            let (max, at) = (EVENTS_PER_CALL, events.as_mut_ptr());
            libc::syscall(libc::SYS_io_getevents, self.id, least, max, at, limit)
        };
        let n = checked(result)?;
        events.iter().take(n).for_each(|event| each(*event));
        Ok(n)
    }
}

impl Drop for Context {
    /// Waits for everything that was submitted.
    fn drop(&mut self) {
        // SAFETY: no reference into the ring outlives `self`.
        let destroyed = checked(unsafe { libc::syscall(libc::SYS_io_destroy, self.id) });
        if let Err(errno) = destroyed {
            tracing::error!("io_destroy: {}", io::Error::from_raw_os_error(errno));
        }
    }
}
