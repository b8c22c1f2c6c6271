//! The load of the host's processors, passed from a process that may ask the hypervisor to the
//! disks that poll (processes.md 9).
//!
//! There are two files. The asking process writes one, which disks only read. The other holds one
//! word by which disks request the numbers: the asking process sleeps while there is no request.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use ferrite_host::clock::Clock;
use ferrite_host::names;
use ferrite_host::shm::Shm;
use ferrite_xen::hypervisor::HostTimes;
use rustix::fs::{Mode, OFlags};

use super::HostLoad;

/// The file with the numbers, in the run directory.
const PUBLISHED: &str = "processors";
/// The file with the request word, in the run directory.
const WANTED: &str = "processors-wanted";
const BYTES: usize = 4096;

/// Offset of the time of the numbers, by the clock that all processes of a host share; 0: never.
const AT_NS: usize = 0;
/// Offset of the numbers: processors in the upper half, thousandths of idle ones in the lower.
const LOOK: usize = 8;
/// Offset of the request word.
const WORD: usize = 0;

/// The interval between two questions.
const APART: Duration = Duration::from_millis(100);
/// Two questions this far apart say nothing about the present, in nanoseconds.
const FAR_NS: u64 = 1_000_000_000;
/// Numbers of this age are not believed, in nanoseconds. The asking process may be late on a busy
/// host.
const FRESH_NS: u64 = 500_000_000;

/// A disk's view of the host's processors.
#[derive(Debug)]
pub struct HostView {
    published: Shm,
    wanted: Shm,
}

impl HostView {
    /// Opens the files in this run directory, whether or not a process asks.
    ///
    /// # Errors
    /// The files cannot be opened or created.
    pub fn open(run: &Path) -> io::Result<HostView> {
        open(&run.join(PUBLISHED))?;
        // It is opened for reading only, since other disks rely on it.
        Ok(HostView {
            published: Shm::look(run.join(PUBLISHED))?,
            wanted: open(&run.join(WANTED))?,
        })
    }

    /// The current numbers. `None`: there are none that are fresh.
    pub(crate) fn look(&self, now_ns: u64) -> Option<HostLoad> {
        let at_ns = self.published.load_u64(AT_NS);
        let look = self.published.load_u64(LOOK);
        (at_ns > 0 && now_ns.saturating_sub(at_ns) < FRESH_NS)
            .then_some(HostLoad { cpus: (look >> 32) as u32, idle_milli: look as u32 })
    }

    /// Requests new numbers, with one system call for each question at most.
    pub(crate) fn want(&self) {
        if self.wanted.load_u32(WORD) == 0 && self.wanted.swap_u32(WORD, 1) == 0 {
            self.wanted.wake(WORD);
        }
    }
}

/// The process that asks the hypervisor, as a source of these numbers.
#[derive(Debug)]
pub struct HostMonitor {
    published: Shm,
    wanted: Shm,
    last: Option<(u64, HostTimes)>,
}

impl HostMonitor {
    /// Opens the files in this run directory. Several processes may do so: they write the same
    /// numbers.
    ///
    /// # Errors
    /// The files cannot be opened or created.
    pub fn open(run: &Path) -> io::Result<HostMonitor> {
        Ok(HostMonitor {
            published: open(&run.join(PUBLISHED))?,
            wanted: open(&run.join(WANTED))?,
            last: None,
        })
    }

    /// Asks and writes the numbers for ever. It asks ten times a second at most, whatever is
    /// written to the word, and never without a request.
    pub fn run(mut self, clock: &dyn Clock, ask: &mut dyn FnMut() -> io::Result<HostTimes>) -> ! {
        let mut failed = false;
        loop {
            while !self.is_wanted() {
                self.wanted.wait(WORD, 0);
            }
            match self.publish(clock.now_ns(), ask) {
                Ok(()) => failed = false,
                Err(e) if !std::mem::replace(&mut failed, true) => {
                    tracing::warn!("cannot ask for the host's processors: {e}");
                }
                Err(_) => {}
            }
            clock.sleep(APART);
        }
    }

    /// Takes the request. It has to be repeated after that.
    fn is_wanted(&self) -> bool {
        self.wanted.swap_u32(WORD, 0) != 0
    }

    fn publish(
        &mut self,
        now_ns: u64,
        ask: &mut dyn FnMut() -> io::Result<HostTimes>,
    ) -> io::Result<()> {
        let times = ask()?;
        let before = self.last.replace((now_ns, times));
        match before {
            Some((then_ns, before)) if now_ns.saturating_sub(then_ns) < FAR_NS => {
                let idle_milli = times.idle_milli(&before, now_ns - then_ns);
                let look = u64::from(times.cpus) << 32 | u64::from(idle_milli);
                self.published.store_u64(LOOK, look);
                self.published.store_u64(AT_NS, now_ns);
            }
            // Only the difference to the next question has a meaning.
            _ => self.wanted.store_u32(WORD, 1),
        }
        Ok(())
    }
}

/// Opens or creates a file. It is never made shorter, since other processes may have it mapped.
fn open(path: &Path) -> io::Result<Shm> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW;
    let file = File::from(names::open(path, flags, Mode::RUSR | Mode::WUSR)?);
    Shm::part(&file, 0, BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A host of four processors, of which two are idle.
    fn times(now_ns: u64) -> io::Result<HostTimes> {
        Ok(HostTimes { cpus: 4, idle_ns: 2 * now_ns })
    }

    fn publish(monitor: &mut HostMonitor, now_ns: u64) {
        monitor.publish(now_ns, &mut || times(now_ns)).unwrap();
    }

    const HALF: Option<HostLoad> = Some(HostLoad { cpus: 4, idle_milli: 2000 });

    #[test]
    fn what_is_told_is_believed_for_a_while_and_takes_two_questions() {
        let run = tempfile::tempdir().unwrap();
        let view = HostView::open(run.path()).unwrap();
        let mut monitor = HostMonitor::open(run.path()).unwrap();
        let from_ns = 7000 * MS;
        publish(&mut monitor, from_ns);
        assert_eq!(view.look(from_ns), None, "one question tells nothing");
        assert!(monitor.is_wanted(), "the second is asked by itself");
        publish(&mut monitor, from_ns + 100 * MS);
        assert!(!monitor.is_wanted());
        let told_ns = from_ns + 100 * MS;
        assert_eq!(view.look(told_ns), HALF);
        assert_eq!(HostView::open(run.path()).unwrap().look(told_ns + FRESH_NS - 1), HALF);
        assert_eq!(view.look(told_ns + FRESH_NS), None);
        // After a long rest, the difference says nothing about the present.
        publish(&mut monitor, told_ns + FAR_NS);
        assert_eq!(view.look(told_ns + FAR_NS), None);
        assert!(monitor.publish(0, &mut || Err(io::ErrorKind::Other.into())).is_err());
    }

    #[test]
    fn who_asks_is_woken_by_who_wants_to_know_once() {
        let run = tempfile::tempdir().unwrap();
        let monitor = HostMonitor::open(run.path()).unwrap();
        let views = [(); 2].map(|()| HostView::open(run.path()).unwrap());
        assert!(!monitor.is_wanted());
        for _ in 0..3 {
            views.iter().for_each(HostView::want);
        }
        assert!(monitor.is_wanted() && !monitor.is_wanted());
    }

    #[test]
    fn a_disk_cannot_change_what_is_told_to_others() {
        let run = tempfile::tempdir().unwrap();
        let [one, other] = [(); 2].map(|()| HostView::open(run.path()).unwrap());
        one.published.store_u64(AT_NS, MS);
        one.published.store_u64(LOOK, u64::MAX);
        assert_eq!(other.look(MS), None);
        let mut monitor = HostMonitor::open(run.path()).unwrap();
        for at_ns in [100, 200] {
            publish(&mut monitor, at_ns * MS);
        }
        assert_eq!(other.look(200 * MS), HALF);
    }
}
