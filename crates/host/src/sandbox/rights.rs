//! The rights of a process: user, capabilities, limits, and the part of the host that it sees.

use std::ffi::{CString, c_int, c_ulong};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Capabilities, in two words each (`linux/capability.h`, version 3).
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// More than any kernel has.
const CAPABILITIES: c_ulong = 64;

/// Some of these rights are a thread's own.
pub(super) fn one_thread() -> io::Result<()> {
    match std::fs::read_dir("/proc/self/task")?.count() {
        1 => Ok(()),
        n => Err(io::Error::other(format!("it has {n} threads: only one can be locked down"))),
    }
}

/// The C library has one heap for all threads. A second one is given back by a look into a file, and
/// their number follows from another file.
pub(super) fn one_arena() {
    // SAFETY: no argument is memory.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Memory that rings use is locked. Root may do that at will, and others have a limit.
pub(super) fn lock_memory_at_will(lacking: &mut Vec<String>) -> io::Result<()> {
    let set = |most: libc::rlim_t| {
        let all = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: the kernel reads this structure, which outlives the call.
        check(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const all) })
    };
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes this structure, which outlives the call.
    check(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut now) })?;
    match set(libc::RLIM_INFINITY) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            lacking.push(format!("no more than {} bytes of locked memory", now.rlim_max));
            set(now.rlim_max)
        }
        done => done,
    }
}

/// Leaves the networks of the host for one without anything, where io_uring may make sockets.
pub(super) fn leave_networks(lacking: &mut Vec<String>) -> io::Result<()> {
    // SAFETY: no argument is memory.
    match check(unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWIPC) }) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSPC)) => {
            lacking.push(format!("no network namespace of its own ({e})"));
            Ok(())
        }
        done => done,
    }
}

/// Leaves the files of the host for an empty folder.
pub(super) fn leave_files(root: &Path) -> io::Result<()> {
    if std::fs::read_dir(root)?.next().is_some() {
        let text = format!("{} is not empty", root.display());
        return Err(io::Error::new(io::ErrorKind::DirectoryNotEmpty, text));
    }
    let root = CString::new(root.as_os_str().as_bytes())?;
    // SAFETY: a string with its end, which outlives the call.
    check(unsafe { libc::chroot(root.as_ptr()) })?;
    // SAFETY: as above.
    check(unsafe { libc::chdir(c"/".as_ptr()) })
}

/// Becomes that user, without any capability now or later. Only root may look into the process then.
pub(super) fn leave_user(user: u32) -> io::Result<()> {
    let parent = rustix::process::getppid();
    let mut end_signal: c_int = 0;
    // SAFETY: the kernel writes one number, which outlives the call.
    check(unsafe { libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut end_signal) })?;
    bound_capabilities()?;
    // SAFETY: no groups, so no memory.
    check(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: no argument is memory.
    check(unsafe { libc::setresgid(user, user, user) })?;
    // SAFETY: as above.
    check(unsafe { libc::setresuid(user, user, user) })?;
    drop_capabilities()?;
    no_new_rights()?;
    // Another user's process may be dumped again, and does not end with its parent.
    set(libc::PR_SET_DUMPABLE, 0)?;
    set(libc::PR_SET_PDEATHSIG, end_signal as c_ulong)?;
    match rustix::process::getppid() == parent {
        true => Ok(()),
        false => Err(io::Error::other("its parent has ended meanwhile")),
    }
}

/// No capability now or later, of whatever user.
pub(super) fn leave_capabilities() -> io::Result<()> {
    bound_capabilities()?;
    drop_capabilities()
}

/// No program that this one becomes has a capability.
fn bound_capabilities() -> io::Result<()> {
    for capability in 0..CAPABILITIES {
        // SAFETY: no argument is memory. EINVAL: there are no more.
        match check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) }) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => break,
            done => done?,
        }
    }
    Ok(())
}

/// Becomes that user with all threads, without a group or a capability. The C library has each thread do it.
pub(super) fn leave_root(user: u32) -> io::Result<()> {
    let no_groups = std::ptr::null();
    // SAFETY: no groups, so no memory.
    let done = unsafe { libc::setgroups(0, no_groups) };
    check(done)?;
    // SAFETY: no argument is memory.
    let done = unsafe { libc::setresgid(user, user, user) };
    check(done)?;
    // SAFETY: as above. The kernel takes a thread's capabilities when none of its users is root any more.
    let done = unsafe { libc::setresuid(user, user, user) };
    check(done)
}

/// No program that this one becomes has more rights. The filters demand it of those who are not root.
pub(super) fn no_new_rights() -> io::Result<()> {
    set(libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// Those that a thread has, may have, and hands on.
fn drop_capabilities() -> io::Result<()> {
    let header = [CAPABILITY_VERSION, 0];
    let none = [0u32; 6];
    // SAFETY: the kernel reads a header and two sets of three words, which outlive the call.
    let done = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    check(done as c_int)
}

fn set(what: c_int, value: c_ulong) -> io::Result<()> {
    // SAFETY: these take numbers, and no memory.
    check(unsafe { libc::prctl(what, value, 0, 0, 0) })
}

fn check(done: c_int) -> io::Result<()> {
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
