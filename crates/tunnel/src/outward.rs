//! A client of this host that goes by TLS to a server elsewhere.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::time::Instant;

use ferrite_host::tunnel::Files;
use ferrite_nbd::wire::{FIXED_NEWSTYLE, NO_ZEROES};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection};

use crate::credentials::{self, Contents};
use crate::faults::{Peer, fault, one_line};
use crate::greeting::{ask_for_tls, flags_of, greet, greeted, read_head, refuse};
use crate::pump::{Pump, bound, handshake};
use crate::stream::{GREETING, Timed};
use crate::{End, Fault};

/// Takes the client `inside` to the server `outside` by TLS, until one of them ends. The server's certificate has to be
/// of `server`. If there is no TLS, each option of the client is answered by an error with the reason.
///
/// # Errors
/// The reason, which the client has been told.
pub fn outward(
    server: &str,
    outside: &OwnedFd,
    inside: &OwnedFd,
    files: &Files,
) -> Result<(), Fault> {
    let mut way = Way { server, outside, inside, greeted: false, pending: None, through: false };
    match way.go(files) {
        Ok(()) => Ok(()),
        Err(e) => {
            let fault = match e {
                End::Refused(fault) => fault,
                End::Left => Fault::new(
                    format!("the connection to {} has ended", one_line(server)),
                    "the server or its client has closed it",
                    "see what that server logs",
                ),
            };
            if !way.through {
                // The client may be gone.
                let _ = way.refuse(&fault);
            }
            Err(fault)
        }
    }
}

/// A connection on its way to TLS.
struct Way<'a> {
    server: &'a str,
    outside: &'a OwnedFd,
    inside: &'a OwnedFd,
    /// Whether the client has been greeted.
    greeted: bool,
    /// The client's first option, until it is answered.
    pending: Option<u32>,
    /// Whether the server has answered the client: no word of ours may come between any more.
    through: bool,
}

impl Way<'_> {
    fn go(&mut self, files: &Files) -> Result<(), End> {
        let end = Instant::now() + GREETING;
        let name = ServerName::try_from(self.server.to_owned()).map_err(|_| {
            let help = "write nbds://HOST:PORT/ with a name or an address";
            Fault::new(one_line(self.server), "it is neither a host's name nor an address", help)
        })?;
        let config = credentials::client(&Contents::read(files)?)?;
        let outside = Timed { socket: self.outside, end, whom: "server" };
        let inside = Timed { socket: self.inside, end, whom: "client" };
        let offered = greeted(&outside)?;
        self.greeted = true;
        greet(&inside, offered & (FIXED_NEWSTYLE | NO_ZEROES))?;
        let flags = flags_of(&inside)?;
        outside.write_all(&flags.to_be_bytes())?;
        ask_for_tls(&outside)?;
        let connection =
            ClientConnection::new(config, name).map_err(|e| fault(&e, Peer::Server))?;
        let mut tls = Connection::Client(connection);
        bound(&mut tls);
        handshake(&mut tls, &outside, Peer::Server)?;
        // A server of TLS 1.3 refuses our certificate behind the handshake only. So the first option is remembered
        // until its answer has come.
        let (head, asked) = read_head(&inside)?;
        self.pending = Some(asked.option);
        let wrote = tls.writer().write_all(&head);
        wrote.map_err(|e| Fault::new("the connection is lost", e, "connect again"))?;
        let mut pump = Pump::new(&mut tls, Peer::Server, self.outside, self.inside);
        let moved = pump.run();
        self.through = pump.delivered > 0;
        match moved {
            Err(End::Refused(fault)) => Err(fault.into()),
            _ if self.through => Ok(()),
            // The server has ended without an answer.
            _ => Err(End::Left),
        }
    }

    fn refuse(&mut self, fault: &Fault) -> Result<(), End> {
        let end = Instant::now() + GREETING;
        let client = Timed { socket: self.inside, end, whom: "client" };
        if !self.greeted {
            greet(&client, FIXED_NEWSTYLE | NO_ZEROES)?;
            flags_of(&client)?;
        }
        refuse(&client, self.pending.take(), fault)
    }
}
