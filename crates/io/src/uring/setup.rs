//! Getting a ring out of the kernel that there is, and saying what it can do.

use std::fmt;
use std::io;

use io_uring::register::{Probe, Restriction};
use io_uring::{IoUring, cqueue, opcode, squeue};

use crate::arena::{Arena, HUGE_PAGE_BYTES};
use crate::engine::Engine;
use crate::pool::SLAB_BYTES;

/// Why there is no io_uring to be had.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// `ENOSYS`.
    #[error(
        "this kernel has no io_uring: it is too old or built without it; \
         use Linux 5.11 or newer with CONFIG_IO_URING"
    )]
    Missing,
    /// `EPERM`.
    #[error(
        "io_uring is forbidden here: set the sysctl kernel.io_uring_disabled to 0, \
         or allow io_uring in the container's seccomp policy"
    )]
    Forbidden,
    /// A feature that cannot be done without.
    #[error("io_uring of this kernel lacks {0}: use Linux 5.11 or newer")]
    TooOld(&'static str),
    /// `ENOMEM`.
    #[error("no memory for an io_uring of {0} entries: raise the memlock limit (ulimit -l)")]
    NoMemory(u32),
    /// Anything else.
    #[error("setting up an io_uring of {entries} entries failed: {source}")]
    Other {
        /// As asked for.
        entries: u32,
        /// The kernel's error.
        source: io::Error,
    },
}

impl From<SetupError> for io::Error {
    fn from(e: SetupError) -> io::Error {
        let kind = match &e {
            SetupError::Missing | SetupError::TooOld(_) => io::ErrorKind::Unsupported,
            SetupError::Forbidden => io::ErrorKind::PermissionDenied,
            SetupError::NoMemory(_) => io::ErrorKind::OutOfMemory,
            SetupError::Other { source, .. } => source.kind(),
        };
        io::Error::new(kind, e)
    }
}

/// The features that a ring got from the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UringFeatures {
    /// `IORING_SETUP_SINGLE_ISSUER` (Linux 6.0): no locking against other submitters.
    pub single_issuer: bool,
    /// `IORING_SETUP_DEFER_TASKRUN` (6.1): completions are worked off when they are asked for.
    pub defer_taskrun: bool,
    /// `IORING_SETUP_COOP_TASKRUN` (5.19): no interrupts for completions.
    pub coop_taskrun: bool,
    /// `IORING_SETUP_SUBMIT_ALL` (5.18): one bad entry does not end a batch.
    pub submit_all: bool,
    /// Entries in the submission queue.
    pub sq_entries: u32,
    /// Entries in the completion queue.
    pub cq_entries: u32,
    /// Places in the table of fixed files; 0: files are used by descriptor.
    pub fixed_files: u32,
    /// Whether a region of the arena could be registered, so that transfers from and to it do not
    /// have to look its pages up; known once it was tried ([`Engine::pin`]).
    pub fixed_buffers: bool,
    /// Why it is not: an errno; `ENOMEM` and `EPERM` mean the memlock limit.
    pub fixed_buffers_errno: Option<i32>,
    /// Operations that Ferrite uses and this kernel lacks.
    pub missing_ops: Vec<&'static str>,
}

impl fmt::Display for UringFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{} entries", self.sq_entries, self.cq_entries)?;
        let flags = [
            (self.single_issuer, "single issuer"),
            (self.defer_taskrun, "deferred task work"),
            (self.coop_taskrun, "cooperative task work"),
            (self.submit_all, "whole batches"),
            (self.fixed_files > 0, "fixed files"),
            (self.fixed_buffers, "fixed buffers"),
        ];
        for (_, name) in flags.iter().filter(|(on, _)| *on) {
            write!(f, ", {name}")?;
        }
        if let Some(errno) = self.fixed_buffers_errno {
            let why = io::Error::from_raw_os_error(errno);
            write!(f, "; no fixed buffers: {why}")?;
            if errno == libc::ENOMEM || errno == libc::EPERM {
                write!(f, " (raise the memlock limit, ulimit -l)")?;
            }
        }
        if !self.missing_ops.is_empty() {
            write!(f, "; missing: {}", self.missing_ops.join(", "))?;
        }
        Ok(())
    }
}

/// Sets up a small ring, without memory that is pinned for it: whether there is a usable io_uring.
///
/// # Errors
/// A [`SetupError`] inside, if there is none.
pub(crate) fn try_out() -> io::Result<()> {
    super::Uring::new(Arena::new(HUGE_PAGE_BYTES)?, 8).map(drop)
}

/// Sets up a small ring with a small arena and says what it got.
///
/// # Errors
/// A [`SetupError`] inside, if this kernel has no usable io_uring.
pub fn probe() -> io::Result<UringFeatures> {
    let arena = Arena::new(HUGE_PAGE_BYTES)?;
    let mut uring = super::Uring::new(arena.clone(), 8)?;
    uring.pin(arena.span(0, SLAB_BYTES));
    Ok(uring.features())
}

/// The steps down from what the newest kernels have, each with what it adds to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Plain,
    SubmitAll,
    CoopTaskrun,
    SingleIssuer,
    DeferTaskrun,
}

/// All of them, in the order in which they are tried.
pub(super) const STEPS: [Step; 5] =
    [Step::DeferTaskrun, Step::SingleIssuer, Step::CoopTaskrun, Step::SubmitAll, Step::Plain];

/// A disabled ring with the best flags that the kernel takes among those of `steps`. `polled`: it
/// asks devices for their completions, rather than being told (`IORING_SETUP_IOPOLL`).
pub(super) fn build(
    steps: &[Step],
    entries: u32,
    polled: bool,
) -> Result<(IoUring, UringFeatures), SetupError> {
    let entries = entries.max(1);
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for step in steps.iter().copied() {
        match build_at(step, entries, polled) {
            Ok(ring) => return check(ring, step),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = e,
            Err(e) => {
                last = e;
                break;
            }
        }
    }
    Err(match last.raw_os_error() {
        Some(libc::ENOSYS) => SetupError::Missing,
        Some(libc::EPERM | libc::EACCES) => SetupError::Forbidden,
        Some(libc::ENOMEM) => SetupError::NoMemory(entries),
        _ => SetupError::Other { entries, source: last },
    })
}

fn build_at(step: Step, entries: u32, polled: bool) -> io::Result<IoUring> {
    let mut b = IoUring::builder();
    // Started disabled, the ring binds to the thread that enables it, not to the one that built
    // it: engines are made before the threads that use them.
    b.setup_r_disabled().setup_clamp().dontfork();
    // More operations than the submission queue holds are in flight at once.
    b.setup_cqsize(entries.saturating_mul(4));
    if polled {
        b.setup_iopoll();
    }
    if step >= Step::SubmitAll {
        b.setup_submit_all();
    }
    if step >= Step::CoopTaskrun {
        // With the flag, a look at the ring tells whether the kernel has completions to work
        // off; without it, polling would need a system call each time.
        b.setup_taskrun_flag();
        if step < Step::DeferTaskrun {
            b.setup_coop_taskrun();
        }
    }
    if step >= Step::SingleIssuer {
        b.setup_single_issuer();
    }
    if step >= Step::DeferTaskrun {
        b.setup_defer_taskrun();
    }
    b.build(entries)
}

fn check(ring: IoUring, step: Step) -> Result<(IoUring, UringFeatures), SetupError> {
    let p = ring.params();
    let needed = [
        (p.is_feature_nodrop(), "IORING_FEAT_NODROP"),
        (p.is_feature_submit_stable(), "IORING_FEAT_SUBMIT_STABLE"),
        (p.is_feature_ext_arg(), "IORING_FEAT_EXT_ARG"),
    ];
    if let Some((_, name)) = needed.iter().find(|(there, _)| !there) {
        return Err(SetupError::TooOld(name));
    }
    let features = UringFeatures {
        single_issuer: step >= Step::SingleIssuer,
        defer_taskrun: step >= Step::DeferTaskrun,
        coop_taskrun: step >= Step::CoopTaskrun && step < Step::DeferTaskrun,
        submit_all: step >= Step::SubmitAll,
        sq_entries: p.sq_entries(),
        cq_entries: p.cq_entries(),
        missing_ops: missing_ops(&ring),
        ..UringFeatures::default()
    };
    let entries = p.sq_entries();
    restrict(&ring, USED.iter().map(|(code, _)| *code))
        .map_err(|source| SetupError::Other { entries, source })?;
    Ok((ring, features))
}

/// Has the kernel refuse all operations and registrations but those that are used (Linux 5.10), once
/// the ring is enabled: a worker's rings open nothing and make no sockets (threats.md T27).
pub(super) fn restrict<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    ring: &IoUring<S, C>,
    ops: impl Iterator<Item = u8>,
) -> io::Result<()> {
    // Buffers, files, updates of files, and that it is enabled.
    const REGISTRATIONS: [u8; 6] = [0, 1, 2, 3, 6, 12];
    let flags = squeue::Flags::FIXED_FILE | squeue::Flags::SKIP_SUCCESS;
    let mut all: Vec<_> = ops.map(Restriction::sqe_op).collect();
    all.extend(REGISTRATIONS.map(Restriction::register_op));
    all.push(Restriction::sqe_flags_allowed(flags.bits()));
    ring.submitter().register_restrictions(&mut all)
}

/// The operations that are used.
const USED: [(u8, &str); 12] = [
    (opcode::Read::CODE, "READ"),
    (opcode::ReadFixed::CODE, "READ_FIXED"),
    (opcode::Write::CODE, "WRITE"),
    (opcode::WriteFixed::CODE, "WRITE_FIXED"),
    (opcode::Readv::CODE, "READV"),
    (opcode::Writev::CODE, "WRITEV"),
    (opcode::Fsync::CODE, "FSYNC"),
    (opcode::Fallocate::CODE, "FALLOCATE"),
    (opcode::PollAdd::CODE, "POLL_ADD"),
    (opcode::SendMsg::CODE, "SENDMSG"),
    (opcode::Timeout::CODE, "TIMEOUT"),
    (opcode::AsyncCancel::CODE, "ASYNC_CANCEL"),
];

fn missing_ops(ring: &IoUring) -> Vec<&'static str> {
    let mut probe = Probe::new();
    if ring.submitter().register_probe(&mut probe).is_err() {
        return Vec::new();
    }
    USED.iter().filter(|(code, _)| !probe.is_supported(*code)).map(|(_, name)| *name).collect()
}
