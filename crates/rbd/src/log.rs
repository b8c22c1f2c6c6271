//! The log.

use std::io::Write as _;

/// Writes a line to standard error, for the journal with its priority (sd-daemon(3)). Its callers write few.
pub(crate) fn log(priority: u8, text: &str) {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let line = match std::env::var_os("JOURNAL_STREAM") {
        Some(_) => format!("<{priority}>ferrite-rbd: {text}\n"),
        None => format!("ferrite-rbd: {text}\n"),
    };
    // Without a log it serves nevertheless.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
