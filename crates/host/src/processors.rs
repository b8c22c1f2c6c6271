//! How many processors this process may use.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread::available_parallelism;

static REMEMBERED: OnceLock<usize> = OnceLock::new();

/// Their number now, or what it was when it was [remembered](remember).
pub fn count() -> usize {
    REMEMBERED.get().copied().unwrap_or_else(now)
}

/// Asks now, for good: the answer is made of files that are not to be opened later.
pub fn remember() {
    REMEMBERED.get_or_init(now);
}

fn now() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}
