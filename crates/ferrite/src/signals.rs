//! The signals that ask this program to end.

use std::ffi::c_int;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::exit::Failure;

/// The signals that end this program. SIGHUP, the end of the terminal, is ignored by a program that was started under nohup(1).
pub(crate) fn ending() -> Vec<c_int> {
    let mut signals = vec![SIGTERM, SIGINT];
    signals.extend((!is_ignored(SIGHUP)).then_some(SIGHUP));
    signals
}

/// Whether the parent of this process has had the signal ignored.
fn is_ignored(signal: c_int) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Receives the signals.
///
/// # Errors
/// The system does not allow a handler.
pub fn listen() -> Result<Signals, Failure> {
    Signals::new(ending()).map_err(cannot)
}

/// A flag that each signal sets.
///
/// # Errors
/// The system does not allow a handler.
pub fn flag() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in ending() {
        signal_hook::flag::register(signal, stop.clone()).map_err(cannot)?;
    }
    Ok(stop)
}

/// A flag that the first signal sets. A second one ends the process at once.
///
/// # Errors
/// The system does not allow a handler.
pub fn flag_once() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in ending() {
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED, stop.clone())
            .and_then(|_| signal_hook::flag::register(signal, stop.clone()))
            .map_err(cannot)?;
    }
    Ok(stop)
}

/// Each signal ends the process at once. The flag is never set.
///
/// # Errors
/// The system does not allow a handler.
pub fn end_at_once() -> Result<Arc<AtomicBool>, Failure> {
    let now = Arc::new(AtomicBool::new(true));
    for signal in ending() {
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED, now.clone())
            .map_err(cannot)?;
    }
    Ok(Arc::new(AtomicBool::new(false)))
}

/// The exit code of a process that a signal ended.
const INTERRUPTED: c_int = crate::exit::Code::INTERRUPTED.number() as c_int;

pub(crate) fn cannot(e: io::Error) -> Failure {
    Failure::new("cannot listen to signals", e, "check the limits of this process")
}
