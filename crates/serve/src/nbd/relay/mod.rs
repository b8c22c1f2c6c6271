//! The relay of a disk: the process that clients of NBD are connected with, and that passes on what they
//! and the disk's worker say. It knows what is not answered yet. So a client goes on with the next worker
//! when one ends, and notices a pause (docs/internals/processes.md 7).
//!
//! * `handshake.rs`: what was agreed upon, to be agreed upon again with the next worker.
//! * `requests.rs`: what was asked for and not answered.
//! * `client.rs`: one client and its link to the worker.
//! * `stream.rs`: bytes from and to a socket.
//!
//! One thread, one `poll`. It never waits for anybody else, and has nothing but its sockets.

mod client;
mod handshake;
mod requests;
mod stream;

use std::convert::Infallible;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ferrite_io::process::{receive_with, send_with};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use client::Client;
use stream::Ready;

/// Clients at once. More are turned away.
const MAX_CLIENTS: usize = 16;
/// The longest message of the keeper's.
const MESSAGE_BYTES: usize = 64;

/// Relays the clients that come by this socket of the keeper's, for as long as there is the keeper. With
/// a message `client` comes a client. `link N` asks for a link to the worker, and is answered by the same
/// with one end of a stream, or with none. `idle N` says that all clients are gone, of N that came.
///
/// # Errors
/// The keeper is gone, or does not understand.
pub fn relay(keeper: &OwnedFd) -> io::Result<Infallible> {
    let mut clients: Vec<(u64, Client)> = Vec::new();
    let (mut came, mut told_idle) = (0, 0);
    loop {
        let now = Instant::now();
        for (number, client) in &mut clients {
            if client.wants_link(now) {
                send_with(keeper, format!("link {number}").as_bytes(), None)?;
            }
        }
        if clients.is_empty() && told_idle != came {
            send_with(keeper, format!("idle {came}").as_bytes(), None)?;
            told_idle = came;
        }
        let (called, ready) = wait(keeper, &clients)?;
        if called {
            match hear(keeper)? {
                Some((Message::Client, Some(socket))) => {
                    came += 1;
                    if clients.len() < MAX_CLIENTS {
                        clients.push((came, Client::new(socket)));
                    }
                }
                // Its descriptor was lost on the way, for want of one here.
                Some((Message::Client, None)) => came += 1,
                Some((Message::Link(number), link)) => {
                    if let Some((_, client)) = clients.iter_mut().find(|(n, _)| *n == number) {
                        client.link(link);
                    }
                }
                None => {}
            }
        }
        let now = Instant::now();
        for (i, ready) in ready.into_iter().enumerate() {
            clients[i].1.go_on(ready, now);
        }
        clients.retain(|(_, client)| !client.is_over());
    }
}

/// What a keeper says.
enum Message {
    Client,
    Link(u64),
}

/// The next message, if it is there.
fn hear(keeper: &OwnedFd) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let (bytes, file) = match receive_with(keeper, MESSAGE_BYTES, false) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        heard => heard?,
    };
    let text = std::str::from_utf8(&bytes).unwrap_or_default();
    let number = text.strip_prefix("link ").and_then(|number| number.parse().ok());
    match (text, number) {
        ("client", _) => Ok(Some((Message::Client, file))),
        (_, Some(number)) => Ok(Some((Message::Link(number), file))),
        ("", _) => Err(io::ErrorKind::UnexpectedEof.into()),
        // Of a newer keeper, which does not count on it.
        _ => Ok(None),
    }
}

/// Waits until there is something to do. Whether the keeper has said something, and what has come for
/// each client.
fn wait(keeper: &OwnedFd, clients: &[(u64, Client)]) -> io::Result<(bool, Vec<Ready>)> {
    let mut fds = vec![PollFd::new(keeper, PollFlags::IN)];
    // Where those of each client are.
    let mut places = Vec::with_capacity(clients.len());
    let (now, mut first_due) = (Instant::now(), None::<Instant>);
    for (_, client) in clients {
        let mut add = |watched| {
            let (fd, flags): (BorrowedFd<'_>, PollFlags) = watched?;
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            Some(fds.len() - 1)
        };
        places.push((add(client.watch_client()), add(client.watch_link())));
        first_due = first_due.into_iter().chain(client.due(now)).min();
    }
    let left = first_due.map(|due| {
        // Not before it: the kernel counts what is below a millisecond, too.
        let left = due.saturating_duration_since(now) + Duration::from_micros(1);
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
    });
    match poll(&mut fds, left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    let came = |at: Option<usize>| at.map_or(PollFlags::empty(), |at| fds[at].revents());
    let now = Instant::now();
    let ready = clients.iter().zip(places).map(|((_, client), (at, link))| Ready {
        client: !came(at).is_empty(),
        gone: came(at).intersects(PollFlags::HUP | PollFlags::ERR),
        link: !came(link).is_empty(),
        due: client.due(now).is_some_and(|due| due <= now),
    });
    Ok((!came(Some(0)).is_empty(), ready.collect()))
}
