//! Connections that XAPI has made and passed to a tap, for storage motion (docs/internals/mirror.md 6). The peer speaks
//! the handshake of the old style, which has no options.
//!
//! * [`passed_server`]: the tap is the target. The disk's own server is behind a stream of this host.
//! * [`passed_client`]: the tap is the source. The mirror's target is behind the connection, and the tap's worker comes
//!   by a socket of this host, with a connection for each of its queues.

use std::os::fd::OwnedFd;
use std::time::Instant;

use ferrite_nbd::client::{Handshake, Wanted};
use ferrite_nbd::old_style::Greeting;
use ferrite_nbd::wire::can;

use crate::plain;
use crate::stream::{GREETING, Timed};
use crate::{End, Fault};

mod client;
#[cfg(test)]
mod tests;

pub use client::passed_client;

const PEER: &str = "a connection of storage motion";

/// The abilities of the disk that the peer may be told.
const TOLD: u16 =
    can::READ_ONLY | can::FLUSH | can::FUA | can::TRIM | can::WRITE_ZEROES | can::MULTI_CONN;

/// Serves the disk of the server behind `inside` to the peer behind `outside`, until one of them ends. `with_options`:
/// the handshake is the server's own.
///
/// # Errors
/// The disk's server refuses, or takes more than 10 s.
pub fn passed_server(outside: &OwnedFd, inside: &OwnedFd, with_options: bool) -> Result<(), Fault> {
    if with_options {
        plain::pass(outside, inside);
        return Ok(());
    }
    let greeting = match disk_of(inside) {
        Ok(greeting) => greeting,
        Err(End::Refused(fault)) => return Err(fault),
        Err(End::Left) => {
            let help = "ferrite disk list shows whether the tap is open";
            return Err(Fault::new(PEER, "the disk's server has closed the connection", help));
        }
    };
    let peer = Timed { socket: outside, end: Instant::now() + GREETING, whom: "client" };
    match peer.write_all(&greeting.to_bytes()) {
        Ok(()) => plain::pass(outside, inside),
        Err(End::Refused(fault)) => return Err(fault),
        Err(End::Left) => {}
    }
    Ok(())
}

/// Does the handshake with the disk's own server.
fn disk_of(inside: &OwnedFd) -> Result<Greeting, End> {
    let refused = |why: String, help: &str| End::Refused(Fault::new(PEER, why, help));
    let wanted = Wanted { simple_replies: true, ..Wanted::default() };
    let mut handshake = Handshake::new(wanted).map_err(|e| refused(e.why, &e.help))?;
    let server = Timed { socket: inside, end: Instant::now() + GREETING, whom: "disk" };
    let mut out = Vec::new();
    loop {
        let mut bytes = vec![0; handshake.needs()];
        server.read_exact(&mut bytes)?;
        let done = handshake.take(&bytes, &mut out).map_err(|e| refused(e.why, &e.help))?;
        server.write_all(&out)?;
        out.clear();
        if let Some(export) = done {
            return Ok(Greeting {
                bytes: export.bytes,
                flags: export.flags & TOLD | can::HAS_FLAGS,
            });
        }
    }
}
