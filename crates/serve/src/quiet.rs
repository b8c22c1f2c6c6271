//! Log lines that a guest can cause, bounded (XSA-180).

use std::sync::{Mutex, PoisonError};

/// Lines let through in one window.
const LINES: u32 = 5;
/// Nanoseconds of a window.
const WINDOW_NS: u64 = 10_000_000_000;

/// Lets through five lines in ten seconds and counts the rest.
#[derive(Debug, Default)]
pub struct Quiet {
    window_start_ns: u64,
    lines: u32,
    held_back: u64,
}

impl Quiet {
    /// Whether to log now: the number of lines held back since the last one that was let through,
    /// or `None` for this one to be held back too.
    pub fn allow(&mut self, now_ns: u64) -> Option<u64> {
        if now_ns.saturating_sub(self.window_start_ns) >= WINDOW_NS {
            self.window_start_ns = now_ns;
            self.lines = 0;
        }
        if self.lines == LINES {
            self.held_back += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.held_back))
    }
}

/// The number of held back lines as the field of the next line: none if there were none.
pub fn told(held_back: u64) -> Option<u64> {
    (held_back > 0).then_some(held_back)
}

/// A [`Quiet`] for several threads.
#[derive(Debug, Default)]
pub struct SharedQuiet(Mutex<Quiet>);

impl SharedQuiet {
    /// As [`Quiet::allow`].
    pub fn allow(&self, now_ns: u64) -> Option<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).allow(now_ns)
    }
}

/// What one disk may log, by cause, so that none drowns another. It belongs to the disk and not
/// to a connection or a queue: a guest can make any number of those.
#[derive(Debug, Default)]
pub struct Budgets {
    /// Requests that are wrong.
    pub requests: SharedQuiet,
    /// Connections that come, go, break or are refused.
    pub connections: SharedQuiet,
    /// Storage that fails.
    pub storage: SharedQuiet,
    /// A xenstore that fails.
    pub store: SharedQuiet,
    /// A guest that makes us ask xenstore too often.
    pub pace: SharedQuiet,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_errors_in_a_minute_give_thirty_lines_that_count_them_all() {
        let mut quiet = Quiet::default();
        let (mut lines, mut told) = (0, 0);
        for i in 0..1_000_000u64 {
            if let Some(held_back) = quiet.allow(WINDOW_NS + i * 60_000) {
                lines += 1;
                told += 1 + held_back;
            }
        }
        assert_eq!(lines, 30);
        assert!(told > 800_000, "{told}");
    }
}
