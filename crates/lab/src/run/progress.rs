//! The progress, on one line of the terminal.

use std::io::{IsTerminal, Write as _, stderr};

/// A line that is overwritten. Without a terminal nothing is printed.
pub(crate) struct Progress {
    shown: bool,
    on_terminal: bool,
}

impl Progress {
    pub(crate) fn new() -> Progress {
        Progress { shown: false, on_terminal: stderr().is_terminal() }
    }

    /// Replaces the line.
    pub(crate) fn show(&mut self, text: &str) {
        if self.on_terminal {
            self.shown = true;
            let _ = write!(stderr(), "\r\x1b[K{text}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}
