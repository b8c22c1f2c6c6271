//! The time that this thread had to wait for a processor.

use std::fs::File;
use std::os::unix::fs::FileExt;

use ferrite_host::names;
use rustix::fs::{Mode, OFlags};

/// The scheduler's count for one thread (`/proc/thread-self/schedstat`, second number).
#[derive(Debug)]
pub(crate) struct RunDelay(Option<File>);

impl RunDelay {
    /// The count of the calling thread. `None`: the kernel has none, and nothing is concluded.
    pub(crate) fn of_this_thread() -> RunDelay {
        let flags = OFlags::RDONLY;
        let opened = names::open("/proc/thread-self/schedstat", flags, Mode::empty());
        RunDelay(opened.ok().map(File::from))
    }

    /// The total time in nanoseconds.
    pub(crate) fn total_ns(&self) -> Option<u64> {
        let mut text = [0; 64];
        let read = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..read]).ok()?;
        text.split_ascii_whitespace().nth(1)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_never_falls() {
        let delay = RunDelay::of_this_thread();
        // Without it in the kernel there is nothing to test.
        let Some(first) = delay.total_ns() else { return };
        std::thread::yield_now();
        assert!(delay.total_ns().unwrap() >= first);
    }
}
