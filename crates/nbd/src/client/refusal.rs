//! Why a handshake has no result, in words.

use std::fmt;

use crate::wire::{option, reply};

/// The errors of options that [`reply`] does not name.
mod more {
    pub(super) const POLICY: u32 = 1 << 31 | 2;
    pub(super) const PLATFORM: u32 = 1 << 31 | 4;
    pub(super) const TLS_REQUIRED: u32 = 1 << 31 | 5;
    pub(super) const SHUTDOWN: u32 = 1 << 31 | 7;
    pub(super) const BLOCK_SIZE_REQUIRED: u32 = 1 << 31 | 8;
}

/// The longest text of a server that is repeated.
const MAX_TEXT_CHARS: usize = 400;

/// The reason that a server gave no export, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub why: String,
    /// The next step for the user.
    pub help: String,
    /// Whether a later attempt may succeed without a change by the user.
    pub passes: bool,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl Refusal {
    /// The server's bytes are not NBD, or contradict it.
    pub(super) fn nonsense(why: impl Into<String>) -> Refusal {
        let help = "check that the address is that of an NBD server, and its version";
        Refusal { why: why.into(), help: help.into(), passes: false }
    }

    /// The server speaks the protocol, and this export cannot be used.
    pub(super) fn unfit(why: impl Into<String>, help: &str) -> Refusal {
        Refusal { why: why.into(), help: help.into(), passes: false }
    }

    /// The server answered `asked` for `export` with the error `code`, and perhaps a text.
    pub(super) fn of_reply(asked: u32, code: u32, text: &[u8], export: &str) -> Refusal {
        let name = match export {
            "" => "the default export (the one without a name)".to_owned(),
            name => format!("the export {name:?}"),
        };
        if matches!(code, reply::FAULT | reply::PASSING_FAULT) {
            return Refusal::of_fault(text, code == reply::PASSING_FAULT);
        }
        let (why, help, passes) = match code {
            reply::UNKNOWN => (
                format!("the server has no such export: {name}"),
                "ask the server for its exports (nbdinfo --list) and write the name after the address",
                false,
            ),
            more::TLS_REQUIRED => (
                "the server accepts encrypted connections only".to_owned(),
                "write nbds://HOST:PORT/EXPORT?tls-certificates=DIR",
                false,
            ),
            more::POLICY => (
                format!("the server's configuration refuses this client {name}"),
                "allow this host's address, or its certificate, in the server's configuration",
                false,
            ),
            more::SHUTDOWN => {
                ("the server is shutting down".to_owned(), "start the server again", true)
            }
            more::PLATFORM => (
                format!("the server's platform does not support what {} needs", asked_name(asked)),
                "use another server program",
                false,
            ),
            more::BLOCK_SIZE_REQUIRED => (
                "the server demands that its block sizes are asked for, and they were".to_owned(),
                "check the version of the server",
                false,
            ),
            reply::TOO_BIG => (
                format!("the server finds {name} too large"),
                "use a shorter name for the export",
                false,
            ),
            reply::INVALID => (
                format!("the server finds {} invalid", asked_name(asked)),
                "check the name of the export, and the version of the server",
                false,
            ),
            reply::UNSUPPORTED => (
                format!("the server does not know {}", asked_name(asked)),
                "use a newer version of the server",
                false,
            ),
            other => (
                format!("the server refuses {} with the error {other:#x}", asked_name(asked)),
                "look into the server's log",
                false,
            ),
        };
        Refusal { why: with_text(why, text), help: help.to_owned(), passes }
    }

    /// A helper process of this host said why it has no export, and what to do.
    fn of_fault(text: &[u8], passes: bool) -> Refusal {
        let mut parts = text.splitn(2, |byte| *byte == b'\n').map(clean);
        let mut next = || parts.next().filter(|part| !part.is_empty());
        let why = next().unwrap_or_else(|| "the helper process does not say why".into());
        let help = next().unwrap_or_else(|| "look into the log".into());
        Refusal { why, help, passes }
    }
}

/// Adds what the server said, without its control characters.
fn with_text(why: String, text: &[u8]) -> String {
    let clean = clean(text);
    if clean.is_empty() { why } else { format!("{why} ({clean})") }
}

fn clean(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().filter(|c| !c.is_control()).take(MAX_TEXT_CHARS).collect()
}

fn asked_name(asked: u32) -> &'static str {
    match asked {
        option::STRUCTURED_REPLY => "structured replies",
        option::SET_META_CONTEXT => "the question for allocated parts",
        option::GO | option::EXPORT_NAME => "the choice of the export",
        _ => "an option",
    }
}
