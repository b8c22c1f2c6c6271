//! What the hypervisor says of the host's processors, from those who may ask it to those who poll
//! (processes.md 9).
//!
//! It is two files. One is written by who asks, and only read by disks. In the other is one word, by
//! which disks say that they want to know: who asks sleeps while none does.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use ferrite_io::clock::Clock;
use ferrite_io::names;
use ferrite_io::shm::Shm;
use ferrite_xen::hypervisor::HostTimes;
use rustix::fs::{Mode, OFlags};

use super::HostLook;

/// In the run directory: what was told.
const TOLD: &str = "processors";
/// The same: whether anybody wants to know.
const WANTED: &str = "processors-wanted";
const BYTES: usize = 4096;

/// When it was told, by the clock that all processes of a host have; 0: never.
const AT_NS: usize = 0;
/// Processors in the upper half, thousandths of idle ones in the lower.
const LOOK: usize = 8;
/// The word of the other file.
const WORD: usize = 0;

/// Between two questions.
const APART: Duration = Duration::from_millis(100);
/// What lies so far apart says nothing of late, in nanoseconds.
const FAR_NS: u64 = 1_000_000_000;
/// Who asks may be late on a busy host. What was told so long ago is not believed, in nanoseconds.
const FRESH_NS: u64 = 500_000_000;

/// Its way to a disk.
#[derive(Debug)]
pub struct HostView {
    told: Shm,
    wanted: Shm,
}

impl HostView {
    /// In this run directory, with or without somebody who asks.
    ///
    /// # Errors
    /// The files cannot be opened or made.
    pub fn open(run: &Path) -> io::Result<HostView> {
        open(&run.join(TOLD))?;
        // Without the right to write to it: other disks rest on it.
        Ok(HostView { told: Shm::look(run.join(TOLD))?, wanted: open(&run.join(WANTED))? })
    }

    /// What was told of late.
    pub(crate) fn look(&self, now_ns: u64) -> Option<HostLook> {
        let at_ns = self.told.load_u64(AT_NS);
        let look = self.told.load_u64(LOOK);
        (at_ns > 0 && now_ns.saturating_sub(at_ns) < FRESH_NS)
            .then_some(HostLook { cpus: (look >> 32) as u32, idle_milli: look as u32 })
    }

    /// Somebody is to ask. No more than one system call for each question.
    pub(crate) fn want(&self) {
        if self.wanted.load_u32(WORD) == 0 && self.wanted.swap_u32(WORD, 1) == 0 {
            self.wanted.wake(WORD);
        }
    }
}

/// Who asks.
#[derive(Debug)]
pub struct Teller {
    told: Shm,
    wanted: Shm,
    last: Option<(u64, HostTimes)>,
}

impl Teller {
    /// In this run directory. Several tell the same.
    ///
    /// # Errors
    /// The files cannot be opened or made.
    pub fn open(run: &Path) -> io::Result<Teller> {
        Ok(Teller { told: open(&run.join(TOLD))?, wanted: open(&run.join(WANTED))?, last: None })
    }

    /// Tells whoever wants to know, for ever. Ten questions a second at most, whatever is written to
    /// the word, and none while nobody wants to know.
    pub fn run(mut self, clock: &dyn Clock, ask: &mut dyn FnMut() -> io::Result<HostTimes>) -> ! {
        let mut failed = false;
        loop {
            while !self.is_wanted() {
                self.wanted.wait(WORD, 0);
            }
            match self.tell(clock.now_ns(), ask) {
                Ok(()) => failed = false,
                Err(e) if !std::mem::replace(&mut failed, true) => {
                    tracing::warn!("cannot ask for the host's processors: {e}");
                }
                Err(_) => {}
            }
            clock.sleep(APART);
        }
    }

    /// Whether anybody wants to know. It has to be said again after that.
    fn is_wanted(&self) -> bool {
        self.wanted.swap_u32(WORD, 0) != 0
    }

    fn tell(
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
                self.told.store_u64(LOOK, look);
                self.told.store_u64(AT_NS, now_ns);
            }
            // The next question gives it a meaning.
            _ => self.wanted.store_u32(WORD, 1),
        }
        Ok(())
    }
}

/// Never made shorter: others may have it mapped.
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

    fn tell(teller: &mut Teller, now_ns: u64) {
        teller.tell(now_ns, &mut || times(now_ns)).unwrap();
    }

    const HALF: Option<HostLook> = Some(HostLook { cpus: 4, idle_milli: 2000 });

    #[test]
    fn what_is_told_is_believed_for_a_while_and_takes_two_questions() {
        let run = tempfile::tempdir().unwrap();
        let view = HostView::open(run.path()).unwrap();
        let mut teller = Teller::open(run.path()).unwrap();
        let from_ns = 7000 * MS;
        tell(&mut teller, from_ns);
        assert_eq!(view.look(from_ns), None, "one question tells nothing");
        assert!(teller.is_wanted(), "the second is asked by itself");
        tell(&mut teller, from_ns + 100 * MS);
        assert!(!teller.is_wanted());
        let told_ns = from_ns + 100 * MS;
        assert_eq!(view.look(told_ns), HALF);
        assert_eq!(HostView::open(run.path()).unwrap().look(told_ns + FRESH_NS - 1), HALF);
        assert_eq!(view.look(told_ns + FRESH_NS), None);
        // After a long rest, what is between says nothing of late.
        tell(&mut teller, told_ns + FAR_NS);
        assert_eq!(view.look(told_ns + FAR_NS), None);
        assert!(teller.tell(0, &mut || Err(io::ErrorKind::Other.into())).is_err());
    }

    #[test]
    fn who_asks_is_woken_by_who_wants_to_know_once() {
        let run = tempfile::tempdir().unwrap();
        let teller = Teller::open(run.path()).unwrap();
        let views = [(); 2].map(|()| HostView::open(run.path()).unwrap());
        assert!(!teller.is_wanted());
        for _ in 0..3 {
            views.iter().for_each(HostView::want);
        }
        assert!(teller.is_wanted() && !teller.is_wanted());
    }

    #[test]
    fn a_disk_cannot_change_what_is_told_to_others() {
        let run = tempfile::tempdir().unwrap();
        let [one, other] = [(); 2].map(|()| HostView::open(run.path()).unwrap());
        one.told.store_u64(AT_NS, MS);
        one.told.store_u64(LOOK, u64::MAX);
        assert_eq!(other.look(MS), None);
        let mut teller = Teller::open(run.path()).unwrap();
        for at_ns in [100, 200] {
            tell(&mut teller, at_ns * MS);
        }
        assert_eq!(other.look(200 * MS), HALF);
    }
}
