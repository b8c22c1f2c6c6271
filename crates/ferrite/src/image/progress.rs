//! The progress of an operation, on one line of the terminal.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_image_tools::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const LINE: &str = "{bar:40} {percent:>3}% {bytes_per_sec} {eta_precise} left";

/// A progress bar, shown once the total is known. Without a terminal it shows nothing.
pub(crate) struct Shown {
    bar: RefCell<Option<ProgressBar>>,
    quiet: bool,
    stop: Arc<AtomicBool>,
}

impl Shown {
    pub(crate) fn new(quiet: bool, stop: Arc<AtomicBool>) -> Shown {
        Shown { bar: RefCell::new(None), quiet, stop }
    }

    /// Shows the progress. `false`: the command was interrupted.
    pub(crate) fn show(&self, progress: Progress) -> bool {
        // The total is not known yet.
        if !self.quiet && progress.total_bytes > 0 {
            let mut bar = self.bar.borrow_mut();
            let bar = bar.get_or_insert_with(|| new_bar(progress.total_bytes));
            bar.set_position(progress.done_bytes);
        }
        !self.stop.load(Ordering::Relaxed)
    }

    /// Clears the line.
    pub(crate) fn clear(&self) {
        if let Some(bar) = self.bar.borrow_mut().take() {
            bar.finish_and_clear();
        }
    }
}

fn new_bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(5));
    match ProgressStyle::with_template(LINE) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
