//! Limits for log lines that a guest or a client can cause (XSA-180).

use std::sync::{Mutex, PoisonError};

/// Lines that are let through in one window.
const LINES: u32 = 5;
/// Length of a window in nanoseconds.
const WINDOW_NS: u64 = 10_000_000_000;

/// Lets through five lines in ten seconds and counts the rest.
#[derive(Debug, Default)]
pub struct LogLimit {
    window_start_ns: u64,
    lines: u32,
    held_back: u64,
}

impl LogLimit {
    /// Returns whether to log a line now. `Some` holds the number of lines held back since the last
    /// one that was let through. `None` means to hold this line back, too.
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

/// Returns the number of held back lines as the field `held_back` of the next line. Returns none if
/// there were none.
pub fn field(held_back: u64) -> Option<u64> {
    (held_back > 0).then_some(held_back)
}

/// Logs a line if `$limit` lets it through at `$now_ns`, together with the number of held back
/// lines. Arguments: a level, a [`SharedLogLimit`], nanoseconds, then the arguments of tracing's
/// macro for that level.
#[macro_export]
macro_rules! limited {
    ($level:ident, $limit:expr, $now_ns:expr, $($line:tt)+) => {
        if let Some(held_back) = $limit.allow($now_ns) {
            tracing::$level!(held_back = $crate::log_limit::field(held_back), $($line)+);
        }
    };
}
/// A [`LogLimit`] for several threads.
#[derive(Debug, Default)]
pub struct SharedLogLimit(Mutex<LogLimit>);

impl SharedLogLimit {
    /// See [`LogLimit::allow`].
    pub fn allow(&self, now_ns: u64) -> Option<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).allow(now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_errors_in_a_minute_give_thirty_lines_that_count_them_all() {
        let mut limit = LogLimit::default();
        let (mut lines, mut counted) = (0, 0);
        for i in 0..1_000_000u64 {
            if let Some(held_back) = limit.allow(WINDOW_NS + i * 60_000) {
                lines += 1;
                counted += 1 + held_back;
            }
        }
        assert_eq!(lines, 30);
        assert!(counted > 800_000, "{counted}");
    }
}
