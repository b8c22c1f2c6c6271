//! The relay of a disk: the process that NBD clients are connected with. It passes bytes between
//! them and the disk's worker, and knows the requests without a reply. So when a worker ends,
//! clients go on with the next one and see only a pause (docs/internals/processes.md 7).
//!
//! * `handshake.rs`: the handshake, to be repeated with the next worker.
//! * `requests.rs`: the requests without a reply.
//! * `client.rs`: one client and its link to the worker.
//! * `stream.rs`: bytes from and to a socket.
//!
//! It has one thread with one `poll`, never blocks on another process, and has only its sockets.

mod client;
mod handshake;
mod requests;
mod stream;

use std::convert::Infallible;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ferrite_host::frames::{Frame, RELAY};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use client::Client;
use stream::Ready;

/// Most clients at a time. More are turned away.
const MAX_CLIENTS: usize = 16;

/// Relays the clients that come by the keeper's socket, until the keeper ends. A client comes with
/// the message `client`. `link N` requests a link to the worker. The keeper replies with the same
/// text and one end of a stream, or none. `idle N` says that all N clients so far are gone.
///
/// # Errors
/// The keeper is gone, or the socket fails.
pub fn relay(keeper: &OwnedFd) -> io::Result<Infallible> {
    let mut clients: Vec<(u64, Client)> = Vec::new();
    let (mut came, mut reported_idle) = (0, 0);
    loop {
        let now = Instant::now();
        for (number, client) in &mut clients {
            if client.wants_link(now) {
                RELAY.try_send(keeper, format!("link {number}").as_bytes(), &[])?;
            }
        }
        if clients.is_empty() && reported_idle != came {
            RELAY.try_send(keeper, format!("idle {came}").as_bytes(), &[])?;
            reported_idle = came;
        }
        let (called, ready) = wait(keeper, &clients)?;
        if called {
            match receive_message(keeper)? {
                Some((Message::Client, Some(socket))) => {
                    came += 1;
                    if clients.len() < MAX_CLIENTS {
                        clients.push((came, Client::new(socket)));
                    }
                }
                // Its descriptor was lost on the way, since this process had none free.
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

/// A message of the keeper.
enum Message {
    Client,
    Link(u64),
}

/// Receives the next message, if there is one.
fn receive_message(keeper: &OwnedFd) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let Some(Frame { bytes, files }) = RELAY.try_receive(keeper)? else { return Ok(None) };
    let file = files.into_iter().next();
    let text = std::str::from_utf8(&bytes).unwrap_or_default();
    let number = text.strip_prefix("link ").and_then(|number| number.parse().ok());
    match (text, number) {
        ("client", _) => Ok(Some((Message::Client, file))),
        (_, Some(number)) => Ok(Some((Message::Link(number), file))),
        // A newer keeper sends unknown messages, and does not rely on them.
        _ => Ok(None),
    }
}

/// Waits until there is something to do. Returns whether the keeper has sent a message, and the
/// events of each client.
fn wait(keeper: &OwnedFd, clients: &[(u64, Client)]) -> io::Result<(bool, Vec<Ready>)> {
    let mut fds = vec![PollFd::new(keeper, PollFlags::IN)];
    // Indices of each client's descriptors.
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
        // The wait must not end before that time: the kernel also counts microseconds.
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
