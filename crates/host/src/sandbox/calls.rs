//! The system calls of a worker. Found by tracing the tests on both engines and with all movers; each
//! line says who needs what is not obvious.
//!
//! Numbers and flags can be compared here, names cannot: so nothing that takes a name is in the list,
//! but for those that only tell of a file, and `statx` is one of them. In an empty root they tell
//! nothing.

use std::collections::BTreeMap;

use libc::{c_int, c_long};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{BackendError, SeccompCondition, SeccompRule};

/// Rules for the arguments by call; without one, all are allowed.
pub(super) type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// The means that only some workers need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Means {
    /// Commands to the NVMe namespace that is its disk.
    pub nvme: bool,
    /// The memory of guests that are processes: the loopback's, in tests.
    pub processes: bool,
    /// Nothing but the sockets that it has: of a process that has no files, and makes none.
    pub sockets_only: bool,
    /// Besides these, clients that it accepts and a thread for each: of the process that speaks TLS.
    pub accepts: bool,
}

/// Calls that are allowed whatever is asked for.
const ALWAYS: &[c_long] = &[
    // Files that are open.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    // Of no file: a worker owns none. It is the answer that counts.
    libc::SYS_fchmod,
    libc::SYS_name_to_handle_at,
    // The sockets that it was given.
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    // Waiting.
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_signalfd4,
    libc::SYS_pipe2,
    // A watch is added by the keeper, since that takes a name.
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    // The engines.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_setup,
    libc::SYS_io_destroy,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_cancel,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_membarrier,
    // Threads and their ends.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // Calls that only ask.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_uname,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
];

/// All that a process needs which passes on what comes by its sockets.
const OF_SOCKETS: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_close,
    libc::SYS_ppoll,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// Further calls for clients that it accepts, with a thread for each. None of them opens or connects anything: a socket
/// comes of one that listens already.
const OF_ACCEPTING: &[c_long] = &[
    libc::SYS_accept4,
    // The end of a client's connection is told to it before the socket is closed.
    libc::SYS_shutdown,
    // The C library's start of a thread, and its question for the size of its stack.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    // A pause where there is no descriptor for a client.
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
];

/// The older forms of some of these.
#[cfg(target_arch = "x86_64")]
const OLDER: &[c_long] =
    &[libc::SYS_poll, libc::SYS_epoll_wait, libc::SYS_time, libc::SYS_eventfd, libc::SYS_pipe];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[c_long] = &[];

/// The requests to devices and other descriptors.
const IOCTLS: &[u32] = &[
    // /dev/xen/gntdev: map, unmap, copy.
    0x0018_4700,
    0x0010_4701,
    0x0010_4708,
    // /dev/xen/gntalloc: make, give back.
    0x0018_4705,
    0x0010_4706,
    // /dev/xen/evtchn: bind, unbind, notify, reset, restrict.
    0x0008_4501,
    0x0004_4503,
    0x0004_4504,
    0x0000_4505,
    0x0002_4506,
    // Block devices: BLKSSZGET, BLKPBSZGET, BLKDISCARD.
    0x1268,
    0x127b,
    0x1277,
    // A file system's UUID.
    0x8011_1500,
    // FIONBIO, and TCGETS for whether the log is a terminal.
    0x5421,
    0x5401,
];

/// An NVMe namespace: its number, an admin command.
const NVME_IOCTLS: &[u32] = &[0x4e40, 0xc048_4e41];

const FCNTLS: &[c_int] = &[
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
];

/// PR_SET_NAME, PR_GET_NAME, and a name for memory (PR_SET_VMA, of newer C libraries).
const PRCTLS: &[u32] = &[15, 16, 0x5356_4d41];

/// All of them.
pub(super) fn allowed(means: &Means) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    // Signals to itself: an abort.
    rules.insert(libc::SYS_tgkill, vec![one_of(0, std::process::id())?]);
    // No memory is ever made executable.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![none_of(2, libc::PROT_EXEC as u64)?]);
    }
    if means.sockets_only {
        rules.extend(OF_SOCKETS.iter().map(|call| (*call, Vec::new())));
        // The standard library asks for it before it closes anything, where it looks for bugs.
        rules.insert(libc::SYS_fcntl, vec![one_of(1, libc::F_GETFD.cast_unsigned())?]);
        if means.accepts {
            rules.extend(OF_ACCEPTING.iter().map(|call| (*call, Vec::new())));
            allow_threads(&mut rules)?;
        }
        return Ok(rules);
    }
    rules.extend(ALWAYS.iter().chain(OLDER).map(|call| (*call, Vec::new())));
    let nvme = if means.nvme { NVME_IOCTLS } else { &[] };
    let ioctls = IOCTLS.iter().chain(nvme).map(|number| one_of(1, *number));
    rules.insert(libc::SYS_ioctl, ioctls.collect::<Result<_, _>>()?);
    let fcntls = FCNTLS.iter().map(|number| one_of(1, number.cast_unsigned()));
    rules.insert(libc::SYS_fcntl, fcntls.collect::<Result<_, _>>()?);
    allow_threads(&mut rules)?;
    // Limits are read, and not set.
    let reads = SeccompCondition::new(2, Qword, Eq, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![reads])?]);
    if means.processes {
        rules.insert(libc::SYS_process_vm_readv, Vec::new());
        rules.insert(libc::SYS_process_vm_writev, Vec::new());
    }
    Ok(rules)
}

/// Threads with names, and never a process. `clone3` has its flags in memory: see `filter`.
fn allow_threads(rules: &mut Rules) -> Result<(), BackendError> {
    let prctls = PRCTLS.iter().map(|number| one_of(0, *number));
    rules.insert(libc::SYS_prctl, prctls.collect::<Result<_, _>>()?);
    let thread = libc::CLONE_THREAD as u64;
    let is_thread = SeccompCondition::new(0, Qword, MaskedEq(thread), thread)?;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![is_thread])?]);
    Ok(())
}

/// An argument of 32 bits has this value.
fn one_of(argument: u8, value: u32) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, Dword, Eq, value.into())?])
}

/// An argument has none of these bits.
fn none_of(argument: u8, bits: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, Qword, MaskedEq(bits), 0)?])
}
