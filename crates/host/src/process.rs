//! Processes that serve one another: how one is started with chosen descriptors, and what it gets from
//! its parent.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::ptr;

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// The number that the first descriptor has in a process that is started here.
pub const FIRST_GIVEN: RawFd = 3;

/// Most descriptors that a process is given.
const GIVEN_MAX: usize = 8;

/// A program to be run: the file, not its name, so that it stays the same when that is replaced.
pub struct Program<'a> {
    /// The executable.
    pub file: BorrowedFd<'a>,
    /// Its arguments, with its own name first.
    pub arguments: Vec<CString>,
    /// Its environment.
    pub environment: Vec<CString>,
}

/// The program and the descriptors of a new process.
struct Launch<'a> {
    file: RawFd,
    given: &'a [Option<RawFd>],
    /// Ranges of numbers that are not open in the new program, both ends included.
    closed: &'a [(u32, u32)],
    arguments: *const *const libc::c_char,
    environment: *const *const libc::c_char,
    parent: Pid,
}

/// Starts a process that ends with this thread. It has `given` under the numbers from
/// [`FIRST_GIVEN`] on, the standard three, and `also` under the numbers that these have here. A number
/// whose place in `given` is empty is closed there.
///
/// # Errors
/// The kernel's. That the program cannot be run is seen by its end, with the code 127.
///
/// # Panics
/// With more than eight descriptors, or with one of `also` among the numbers of the given.
pub fn spawn(
    program: &Program<'_>,
    given: &[Option<BorrowedFd<'_>>],
    also: &[RawFd],
) -> io::Result<Pid> {
    let first_free = FIRST_GIVEN + given.len() as RawFd;
    assert!(given.len() <= GIVEN_MAX && also.iter().all(|fd| *fd >= first_free));
    let given: Vec<_> = given.iter().map(|fd| fd.as_ref().map(AsRawFd::as_raw_fd)).collect();
    let closed = gaps(first_free, also);
    let (arguments, environment) = (pointers(&program.arguments), pointers(&program.environment));
    let launch = Launch {
        file: program.file.as_raw_fd(),
        given: &given,
        closed: &closed,
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        parent: getpid(),
    };
    // SAFETY: the child calls nothing but `become_program`, which allocates nothing, takes no lock and
    // does not return.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: this is the new process, with one thread, and the pointers are those of living
        // vectors of living strings.
        0 => unsafe { become_program(&launch) },
        pid => Pid::from_raw(pid).ok_or_else(|| io::Error::other("a process without a number")),
    }
}

/// The numbers from `first` on that are not among `kept`.
fn gaps(first: RawFd, kept: &[RawFd]) -> Vec<(u32, u32)> {
    let mut kept: Vec<u32> = kept.iter().map(|fd| *fd as u32).collect();
    kept.sort_unstable();
    let (mut gaps, mut from) = (Vec::new(), first as u32);
    for fd in kept {
        if fd > from {
            gaps.push((from, fd - 1));
        }
        from = fd + 1;
    }
    gaps.push((from, u32::MAX));
    gaps
}

/// With a null behind the last, as the kernel wants it.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

/// The new process: makes its descriptors what they are to be, and becomes the program.
///
/// # Safety
/// To be called in a child that was just forked; the pointers are lists of strings with a null behind.
unsafe fn become_program(launch: &Launch<'_>) -> ! {
    let fail = |why: &[u8]| -> ! {
        // SAFETY: the bytes are those of a slice; the process ends without any clean-up.
        unsafe {
            libc::write(2, why.as_ptr().cast(), why.len());
            libc::_exit(127)
        }
    };
    let ends = set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
    // It may have ended before that was said.
    if !ends || getppid() != Some(launch.parent) {
        fail(b"ferrite: a process has lost its keeper before it began\n");
    }
    let first_free = FIRST_GIVEN + launch.given.len() as RawFd;
    // SAFETY: fcntl, dup2, close, close_range and execveat take numbers and the lists, as the caller says.
    unsafe {
        let above = |fd: RawFd| libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, first_free);
        // All of them out of the way before the first gets its number.
        let mut raised = [0; GIVEN_MAX];
        let file = above(launch.file);
        for (raised, fd) in raised.iter_mut().zip(launch.given) {
            *raised = fd.map_or(0, above);
        }
        for (i, fd) in launch.given.iter().enumerate() {
            let number = FIRST_GIVEN + i as RawFd;
            if fd.is_none() {
                libc::close(number);
            } else if libc::dup2(raised[i], number) < 0 {
                fail(b"ferrite: a process cannot have the descriptors that it needs\n");
            }
        }
        // Linux 5.11. Before that there is nothing to close: all that we open is close-on-exec.
        for (from, to) in launch.closed {
            libc::syscall(libc::SYS_close_range, *from, *to, libc::CLOSE_RANGE_CLOEXEC);
        }
        libc::syscall(
            libc::SYS_execveat,
            file,
            c"".as_ptr(),
            launch.arguments,
            launch.environment,
            libc::AT_EMPTY_PATH,
        );
    }
    fail(b"ferrite: a process cannot become its program\n")
}

/// Becomes the program, in this process, which keeps `kept` under their numbers. Nothing of this one
/// goes on if that works.
///
/// # Errors
/// It does not work, and nothing has changed.
pub fn become_in_place(program: &Program<'_>, kept: &[BorrowedFd<'_>]) -> io::Error {
    let flags = |flags| {
        kept.iter().try_for_each(|fd| rustix::io::fcntl_setfd(fd, flags)).map_err(io::Error::from)
    };
    if let Err(e) = flags(rustix::io::FdFlags::empty()) {
        return e;
    }
    let (arguments, environment) = (pointers(&program.arguments), pointers(&program.environment));
    // SAFETY: the file is open, and the lists end with a null. If it returns, it has done nothing.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.file.as_raw_fd(),
            c"".as_ptr(),
            arguments.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    let e = io::Error::last_os_error();
    // A descriptor for which this fails stays open in children; a child that gets it by mistake cannot
    // know of it.
    let _ = flags(rustix::io::FdFlags::CLOEXEC);
    e
}

/// The environment of this process, without that variable.
pub fn environment_without(name: &str) -> Vec<CString> {
    std::env::vars_os()
        .filter(|(key, _)| key != name)
        .filter_map(|(key, value)| {
            let pair = [key.into_vec(), value.into_vec()].join(&b'=');
            CString::new(pair).ok()
        })
        .collect()
}

/// Which end of a fork this is.
#[derive(Debug, PartialEq, Eq)]
pub enum Fork {
    /// That which was called.
    Parent,
    /// The new one, which has this thread and no other.
    Child,
}

/// Goes on in two processes. For one that has a single thread: of others the child would have nothing
/// but their locks.
///
/// # Errors
/// The kernel's.
pub fn fork() -> io::Result<Fork> {
    // SAFETY: the child has a copy of all memory; that there is no other thread is the caller's.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        _ => Ok(Fork::Parent),
    }
}

/// Has this process end with its parent, which must be `parent`. To be said again after a change of
/// user: the kernel forgets it then.
///
/// # Errors
/// The kernel's; the parent is another one already.
pub fn end_with(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    match getppid() == Some(parent) {
        true => Ok(()),
        false => Err(io::Error::other("the process that it belongs to has ended")),
    }
}

/// Takes a descriptor that this process was started with, once: it is close-on-exec from then on.
///
/// # Errors
/// There is none of that number, or it is taken.
pub fn take_given(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: it only asks for a flag, and a number that is not open is an error.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    if number < FIRST_GIVEN || flags & libc::FD_CLOEXEC != 0 {
        return Err(io::Error::other("it was not handed to this process"));
    }
    // SAFETY: it is open, and nothing in this process owns it: all that is opened here is close-on-exec.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// `IOPRIO_WHO_PROCESS` and `IOPRIO_WHO_PGRP`, `linux/ioprio.h`.
const OF_PROCESS: libc::c_int = 1;
const OF_GROUP: libc::c_int = 2;

/// The priority of the I/O of a process's first thread, as the kernel writes it; 0: none was set.
///
/// # Errors
/// The kernel's: there is no such process.
pub fn io_priority(process: Pid) -> io::Result<i32> {
    // SAFETY: numbers go in and out.
    match unsafe { libc::syscall(libc::SYS_ioprio_get, OF_PROCESS, process.as_raw_pid()) } {
        priority if priority >= 0 => Ok(priority as i32),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives it to all threads of all processes of the group that this process leads.
///
/// # Errors
/// The kernel's.
pub fn set_io_priority_of_group(leader: Pid, priority: i32) -> io::Result<()> {
    // SAFETY: numbers go in and out.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, OF_GROUP, leader.as_raw_pid(), priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_are_closed_but_those_that_are_kept() {
        assert_eq!(gaps(5, &[]), [(5, u32::MAX)]);
        assert_eq!(gaps(5, &[9, 5, 6]), [(7, 8), (10, u32::MAX)]);
    }

    #[test]
    fn a_descriptor_of_our_own_is_not_taken_for_one_that_was_given() {
        let own = tempfile::tempfile().unwrap();
        assert!(take_given(own.as_raw_fd()).is_err());
        assert!(take_given(RawFd::MAX).is_err());
    }
}
