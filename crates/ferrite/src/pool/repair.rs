//! `ferrite pool repair`: has a disk until all its copies are in sync. A disk that a guest has is filled by its owner; then the
//! command waits for that.

use std::time::{Duration, Instant};

use ferrite_pool_owner::{Disk, Name, open};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::args::{DiskName, PoolArgs};
use super::status::Status;
use super::{Say, access, failed, find, say_disk, settings};
use crate::exit::{Code, Failure};
use crate::serve::stop_on_signals;

/// The pause between two looks.
const LOOK: Duration = Duration::from_millis(500);

/// The pause between two attempts to have the disk.
const OPEN_AGAIN: Duration = Duration::from_secs(5);

/// Waits until all copies of the disk are in sync. A signal ends it.
pub(super) fn run(args: &PoolArgs, of: &DiskName, say: &Say) -> Result<(), Failure> {
    let what = format!("repair {}/{}", of.pool, of.disk);
    let stop = stop_on_signals()?;
    let pool = access(args, &of.pool)?;
    let settings = settings::of(args, &of.pool)?;
    let name = Name {
        etcd: settings.endpoints,
        pool: of.pool.clone(),
        disk: of.disk.clone(),
        tls: settings.tls.map(|files| files.0),
        take_over: false,
        read_only: true,
        fences: settings::fences(),
    };
    let mut own: Option<Disk> = None;
    let (mut told, mut why) = (Vec::new(), String::new());
    let mut next = Instant::now();
    let ended = loop {
        let state = pool.state().map_err(|e| failed(&what, &e))?;
        let status = Status::of(&of.pool, &state);
        let disk = find(&status, &of.disk)?;
        let missing = disk.not_in_sync();
        if missing.is_empty() {
            break Ok(());
        }
        if missing != told {
            eprintln!("not in sync yet: {}", missing.join(", "));
            told = missing;
        }
        if own.is_none() && Instant::now() >= next {
            next = Instant::now() + OPEN_AGAIN;
            match open(&name) {
                Ok(disk) => own = Some(disk),
                // Another process has the disk open and fills the copies, or its servers are away.
                Err(fault) if fault.passes && why == fault.why => {}
                Err(fault) if fault.passes => {
                    eprintln!("{}", fault.why);
                    why = fault.why;
                }
                Err(fault) => {
                    let failure = Failure::new(format!("cannot {what}"), fault.why, &fault.help);
                    break Err(failure.with_code(Code::FAILED));
                }
            }
        }
        let mut polled = [PollFd::from_borrowed_fd(stop.fd(), PollFlags::IN)];
        let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(LOOK.subsec_nanos()) };
        let _ = poll(&mut polled, Some(&pause));
        if !polled[0].revents().is_empty() {
            let why = format!("a signal has come; not in sync: {}", told.join(", "));
            let help = "repeat it, or see whether their servers run: ferrite pool status";
            break Err(Failure::new(format!("cannot {what}"), why, help));
        }
    };
    if let Some(disk) = own {
        disk.close();
    }
    ended.and_then(|()| say_disk(&pool, &of.disk, say))
}
