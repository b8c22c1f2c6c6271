//! Where an export listens: at a path, or at the socket that systemd has passed.

use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use ferrite_host::process::take_given;
use ferrite_serve::nbd::{BindError, Bound, bind};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

use crate::exit::{Code, Failure};

/// The first descriptor that systemd passes (sd_listen_fds(3)).
const FIRST_PASSED: RawFd = 3;

/// A listening socket.
pub(super) enum Listening {
    /// At a path; removed at the end.
    At(Bound),
    /// Of systemd, which keeps it.
    Passed(UnixListener),
}

impl Listening {
    pub(super) fn listener(&self) -> &UnixListener {
        match self {
            Listening::At(bound) => &bound.listener,
            Listening::Passed(listener) => listener,
        }
    }

    /// Whether a killed server may have been here before, whose I/O may still be in flight. systemd's socket outlives
    /// each server.
    pub(super) fn may_follow_another(&self) -> bool {
        match self {
            Listening::At(bound) => bound.was_left,
            Listening::Passed(_) => true,
        }
    }

    /// The place, for people.
    pub(super) fn place(&self, socket: Option<&Path>) -> String {
        match socket {
            Some(socket) => socket.display().to_string(),
            None => format!("the socket of systemd (descriptor {FIRST_PASSED})"),
        }
    }
}

/// Listens at this path, or without one at the socket of systemd. With neither, clients have to come `elsewhere`.
pub(super) fn listen(socket: Option<&Path>, elsewhere: bool) -> Result<Option<Listening>, Failure> {
    match (socket, passed()) {
        (Some(socket), 0) => {
            let bound = bind(socket).map_err(|e| no_socket(socket, &e))?;
            Ok(Some(Listening::At(bound)))
        }
        (None, 0) if elsewhere => Ok(None),
        (Some(_), _) => Err(Failure {
            code: Code::USAGE,
            ..Failure::new(
                "cannot choose a socket",
                "systemd has passed one, and --socket names another",
                "leave out --socket, or start it without the socket unit",
            )
        }),
        (None, 0) => Err(Failure {
            code: Code::USAGE,
            ..Failure::new(
                "there is nowhere to listen",
                "no socket is named, and systemd has passed none",
                "name one (--socket PATH or --listen ADDRESS:PORT), or start it by a socket unit (man systemd.socket)",
            )
        }),
        (None, 1) => take_passed().map(|passed| Some(Listening::Passed(passed))),
        (None, count) => Err(Failure::new(
            "cannot listen at the sockets of systemd",
            format!("it has passed {count} of them"),
            "give the socket unit one ListenStream=, and a unit of its own to each further socket",
        )),
    }
}

/// The number of sockets that systemd has passed to this process.
fn passed() -> u32 {
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    match number("LISTEN_PID") == Some(std::process::id()) {
        true => number("LISTEN_FDS").unwrap_or(0),
        false => 0,
    }
}

fn take_passed() -> Result<UnixListener, Failure> {
    let refuse = |why: String| {
        let what = format!("cannot listen at descriptor {FIRST_PASSED}, which systemd has passed");
        let help = "its unit needs ListenStream= with a path, and Accept=no";
        Failure::new(what, why, help)
    };
    let socket = take_given(FIRST_PASSED).map_err(|e| refuse(e.to_string()))?;
    match is_listening(&socket) {
        Ok(true) => Ok(socket.into()),
        Ok(false) => Err(refuse("it is no listening Unix stream socket".to_owned())),
        Err(e) => Err(refuse(e.to_string())),
    }
}

fn is_listening(socket: &OwnedFd) -> rustix::io::Result<bool> {
    let socket = socket.as_fd();
    Ok(socket_domain(socket)? == AddressFamily::UNIX
        && socket_type(socket)? == SocketType::STREAM
        && socket_acceptconn(socket)?)
}

fn no_socket(path: &Path, e: &BindError) -> Failure {
    let what = format!("cannot listen at {}", path.display());
    match e {
        BindError::InUse => {
            let help = "stop that program, or name another socket (--socket)";
            Failure { code: Code::BUSY, ..Failure::new(what, e, help) }
        }
        BindError::NoSocket => {
            Failure::new(what, e, "remove it, or name another socket (--socket)")
        }
        BindError::System(_) => {
            let help =
                "its folder must exist and be yours, and the name must be shorter than 108 bytes";
            Failure::new(what, e, help)
        }
    }
}
