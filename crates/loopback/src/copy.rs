//! Grant copies: memcpy through a mapping of the guest, or process_vm_readv and process_vm_writev into the frontend's
//! process. Both do real work; neither is a hypercall, and every figure names the one used.

use std::fmt;
use std::io;
use std::str::FromStr;

use ferrite_io::arena::Arena;

use super::BACKEND_DOMID;
use super::grants::Access;
use super::memory::GuestMemory;
use ferrite_xen::hypervisor::{CopySegment, Direction, GNTST_GENERAL_ERROR, GNTST_OKAY, PAGE_SIZE};
use ferrite_xen::mover::move_bytes;

/// The copy method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyWith {
    /// The processor, through a mapping of the whole guest.
    Memcpy,
    /// The kernel, from one address space to the other.
    ProcessVm,
}

impl fmt::Display for CopyWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CopyWith::Memcpy => "memcpy",
            CopyWith::ProcessVm => "process-vm",
        })
    }
}

impl FromStr for CopyWith {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "memcpy" => Ok(CopyWith::Memcpy),
            "process-vm" => Ok(CopyWith::ProcessVm),
            _ => Err(format!("{s:?} is not a way to copy; use memcpy or process-vm")),
        }
    }
}

/// The most pieces of one process_vm call: the kernel's `UIO_MAXIOV`.
const VM_BATCH: usize = 1024;

/// The copy method of one connection.
pub(super) enum Copier {
    Memcpy,
    ProcessVm(Box<ProcessVm>),
}

impl Copier {
    pub(super) fn new(with: CopyWith, memory: &GuestMemory) -> Copier {
        match with {
            CopyWith::Memcpy => Copier::Memcpy,
            CopyWith::ProcessVm => Copier::ProcessVm(Box::new(ProcessVm::new(memory))),
        }
    }

    pub(super) fn copy(
        &mut self,
        memory: &GuestMemory,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        match self {
            Copier::Memcpy => {
                for segment in segments {
                    memcpy_one(memory, arena, direction, segment);
                }
                Ok(())
            }
            Copier::ProcessVm(vm) => segments
                .chunks_mut(VM_BATCH)
                .try_for_each(|batch| vm.batch(memory, arena, direction, batch)),
        }
    }
}

fn pin(memory: &GuestMemory, direction: Direction, segment: &CopySegment) -> Result<u32, i16> {
    let access = match direction {
        Direction::FromGuest => Access::Read,
        Direction::ToGuest => Access::Write,
    };
    memory.grants().pin(segment.gref(), BACKEND_DOMID, access, memory.layout().frames)
}

fn memcpy_one(
    memory: &GuestMemory,
    arena: &Arena,
    direction: Direction,
    segment: &mut CopySegment,
) {
    let frame = match pin(memory, direction, segment) {
        Ok(frame) => frame,
        Err(status) => {
            segment.status = status;
            return;
        }
    };
    // SAFETY: `frame` bounds-checks the frame, which is mapped whole as long as `memory`; see
    // memory.rs for the accesses.
    unsafe { move_bytes(memory.frame(frame), arena, direction, segment) };
    memory.grants().unpin(segment.gref());
    segment.status = GNTST_OKAY;
}

/// The frontend's address space, and room for one call's arguments.
pub(super) struct ProcessVm {
    pid: libc::pid_t,
    /// The address of frame 0 in that process.
    base: u64,
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    /// The segment of the batch for each pair of iovecs.
    index: Vec<usize>,
}

// SAFETY: the pointers in the iovecs are only used during `batch`, which fills them anew.
unsafe impl Send for ProcessVm {}

impl ProcessVm {
    fn new(memory: &GuestMemory) -> ProcessVm {
        let (pid, base) = memory.frontend();
        ProcessVm {
            pid: pid as libc::pid_t,
            base,
            local: Vec::with_capacity(VM_BATCH),
            remote: Vec::with_capacity(VM_BATCH),
            index: Vec::with_capacity(VM_BATCH),
        }
    }

    fn batch(
        &mut self,
        memory: &GuestMemory,
        arena: &Arena,
        direction: Direction,
        batch: &mut [CopySegment],
    ) -> io::Result<()> {
        self.local.clear();
        self.remote.clear();
        self.index.clear();
        for (i, segment) in batch.iter_mut().enumerate() {
            match pin(memory, direction, segment) {
                Ok(frame) => self.add(arena, i, segment, frame),
                Err(status) => segment.status = status,
            }
        }
        let outcome = self.transfer(direction, batch);
        for i in &self.index {
            memory.grants().unpin(batch[*i].gref());
        }
        outcome
    }

    fn add(&mut self, arena: &Arena, index: usize, segment: &CopySegment, frame: u32) {
        let iov_len = usize::from(segment.len());
        let at = frame as u64 * PAGE_SIZE as u64 + u64::from(segment.offset());
        let there = self.base.wrapping_add(at) as usize;
        self.local
            .push(libc::iovec { iov_base: arena.ptr(segment.local()).as_ptr().cast(), iov_len });
        self.remote
            .push(libc::iovec { iov_base: std::ptr::without_provenance_mut(there), iov_len });
        self.index.push(index);
    }

    /// Transfers a batch. It continues after a piece that could not be transferred, so that each gets its own status.
    fn transfer(&self, direction: Direction, batch: &mut [CopySegment]) -> io::Result<()> {
        let mut from = 0;
        while from < self.index.len() {
            let done = match self.call(direction, from) {
                Ok(bytes) => self.whole_pieces(from, bytes),
                Err(e) => match e.raw_os_error() {
                    Some(libc::EFAULT) => 0,
                    Some(libc::EINTR) => continue,
                    // The guest has ended: as for a domain that has died, every piece fails.
                    Some(libc::ESRCH) => {
                        let rest = &self.index[from..];
                        rest.iter().for_each(|i| batch[*i].status = GNTST_GENERAL_ERROR);
                        return Ok(());
                    }
                    _ => return Err(e),
                },
            };
            let (okay, rest) = self.index[from..].split_at(done);
            okay.iter().for_each(|i| batch[*i].status = GNTST_OKAY);
            from += done;
            if let Some(failed) = rest.first() {
                batch[*failed].status = GNTST_GENERAL_ERROR;
                from += 1;
            }
        }
        Ok(())
    }

    /// The number of complete pieces from `from` on in `bytes` transferred bytes; a partial piece has failed.
    fn whole_pieces(&self, from: usize, bytes: usize) -> usize {
        let mut left = bytes;
        let fits = |piece: &&libc::iovec| match left.checked_sub(piece.iov_len) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        };
        self.local[from..].iter().take_while(fits).count()
    }

    fn call(&self, direction: Direction, from: usize) -> io::Result<usize> {
        let (local, remote) = (&self.local[from..], &self.remote[from..]);
        let count = local.len() as libc::c_ulong;
        // SAFETY: the local pieces are inside the arena (Arena::ptr), which the caller keeps
        // alive; the kernel checks the remote ones against the other process.
        let done = unsafe {
            let (l, r) = (local.as_ptr(), remote.as_ptr());
            match direction {
                Direction::FromGuest => libc::process_vm_readv(self.pid, l, count, r, count, 0),
                Direction::ToGuest => libc::process_vm_writev(self.pid, l, count, r, count, 0),
            }
        };
        usize::try_from(done).map_err(|_| io::Error::last_os_error())
    }
}
