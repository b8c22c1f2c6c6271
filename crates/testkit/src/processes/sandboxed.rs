//! A keeper and its worker in one program: the keeper opens files, and the worker has no rights.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use ferrite_host::names::policy::{Policy, Right};
use ferrite_host::names::server::{Images, Served, Server};
use ferrite_host::names::{self, Broker};
use ferrite_host::process::{Fork, fork};
use ferrite_host::sandbox::{Lockdown, Means, user_of};
use ferrite_serve::counters::{remember_process, stats_file};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Signal, WaitOptions, set_parent_process_death_signal, wait};

use super::{DEVID, IMAGE, RUN_DIR, env};

/// An empty folder in the run directory.
const ROOT: &str = "empty";

/// Runs `work` in a child, with the socket to this process that opens files for it. It ends as the child does.
pub(super) fn keep(work: impl FnOnce(OwnedFd)) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let run_dir = PathBuf::from(env(RUN_DIR));
    std::fs::create_dir_all(run_dir.join(ROOT)).unwrap();
    // Another thread of a test program that waits is not copied.
    if fork().unwrap() == Fork::Child {
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        drop(ours);
        let done = catch_unwind(AssertUnwindSafe(|| work(theirs)));
        std::process::exit(if done.is_ok() { 0 } else { 101 });
    }
    drop(theirs);
    let image = PathBuf::from(env(IMAGE));
    let mut policy = Policy::of_disk(&image, true, &[]);
    policy.add(&run_dir, true, Right::Own);
    policy.add(&crate::images::state_dir(&image), true, Right::Own);
    let stats = stats_file(&run_dir);
    [stats.with_extension("new"), stats]
        .iter()
        .for_each(|file| policy.add(file, false, Right::Own));
    let server = Server::new(ours, policy, 0);
    let mut images = Images::default();
    loop {
        poll(&mut [PollFd::new(&server.fd(), PollFlags::IN)], None).unwrap();
        if server.serve_one(&mut images).unwrap() == Served::Ended {
            break;
        }
    }
    let (_, status) = wait(WaitOptions::empty()).unwrap().unwrap();
    if let Some(signal) = status.terminating_signal() {
        eprintln!("the worker was ended by signal {signal}");
    }
    std::process::exit(status.exit_status().unwrap_or(1));
}

/// Drops all rights of this process: its keeper opens files for it.
pub(super) fn give_rights_up(keeper: OwnedFd) {
    // Read from files, as the program does at its beginning.
    remember_process();
    names::install(Broker::new(keeper)).unwrap();
    let root = PathBuf::from(env(RUN_DIR)).join(ROOT);
    let lockdown = Lockdown { user: user_of(1, DEVID), root, means: Means::default() };
    lockdown.enter().unwrap();
}
