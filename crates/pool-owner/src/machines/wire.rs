//! Connections: the driver is between an owner and a server, and passes whole messages on, each at its time.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ferrite_pool::wire::{Greeting, HEADER_BYTES, Header};
use ferrite_pool::{ConnId, Event, MemberId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::{Machine, POOL, What, World};
use crate::link::{Link, create, greet_server};

/// How long the driver waits for an answer of a server that may have none, and when each one has to come.
const WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 3_000_000 };
const CALM_WAIT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// A message, or the connection's end.
pub(super) type Message = Option<Vec<u8>>;

/// One end of the driver's, and what has come there of a message that is not whole.
struct End {
    socket: OwnedFd,
    part: Vec<u8>,
    is_over: bool,
    /// The last arrival of what came from here.
    last: u64,
}

/// A connection.
pub(super) struct Wire {
    pub(super) host: usize,
    pub(super) member: MemberId,
    conn: ConnId,
    link: Arc<Link>,
    owner: End,
    server: End,
    /// The server's own end.
    servers: OwnedFd,
    /// The number of requests that the server has to answer.
    asked: usize,
    /// It has not answered when it was waited for.
    is_slow: bool,
}

impl End {
    fn new(socket: OwnedFd) -> End {
        End { socket, part: Vec::new(), is_over: false, last: 0 }
    }

    /// Takes the input that has come: whole messages, and the end.
    fn take(&mut self) -> Vec<Message> {
        let mut taken = Vec::new();
        let mut bytes = [0; 64 << 10];
        while !self.is_over {
            match recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.is_over = true,
                Ok((n, _)) => self.part.extend(&bytes[..n]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.part.is_empty() => break,
                // The rest of a message is on its way.
                Err(Errno::AGAIN) => {
                    let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], None);
                }
                Err(_) => self.is_over = true,
            }
            while let Some(head) = self.part.first_chunk::<HEADER_BYTES>() {
                let len = HEADER_BYTES + Header::from_bytes(head).unwrap().payload as usize;
                if self.part.len() < len {
                    break;
                }
                let rest = self.part.split_off(len);
                taken.push(Some(std::mem::replace(&mut self.part, rest)));
            }
        }
        if self.is_over {
            taken.push(None);
        }
        taken
    }

    fn give(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            bytes = &bytes[send(&self.socket, bytes, SendFlags::NOSIGNAL)?..];
        }
        Ok(())
    }
}

impl Machine {
    /// A connection to its server behind the greeting, and the server's end.
    fn connect(&self) -> Option<(OwnedFd, OwnedFd)> {
        let server = self.server.as_ref()?;
        let (ours, theirs) = UnixStream::pair().unwrap();
        let kept = theirs.try_clone().unwrap();
        server.connect(theirs.into(), "the driver".to_owned());
        let ours = OwnedFd::from(ours);
        let greeting = Greeting { pool: POOL, server: self.place.server.clone() };
        greet_server(&ours, &greeting).ok()?;
        Some((ours, kept.into()))
    }

    /// Makes the empty copy of a new disk.
    pub(super) fn make(&self) {
        let (socket, _) = self.connect().unwrap();
        create(&socket, &self.place.extent, self.place.bytes, true).unwrap();
    }
}

impl World {
    pub(super) fn connect(&mut self, host: usize, member: MemberId) {
        if self.hosts[host].paused_until > self.now {
            return self.at_time(self.hosts[host].paused_until, What::Connect(host, member));
        }
        let is_cut = [true, false].map(|to| self.cut(host, member, to) > self.now).contains(&true);
        let machine = &self.machines[&member];
        let connected = if is_cut { None } else { machine.connect() };
        let set = self.hosts[host].set.clone();
        let connected = connected.filter(|(socket, _)| {
            let place = &machine.place;
            set.is_in_sync(member) || create(socket, &place.extent, place.bytes, false).is_ok()
        });
        let Some((server, servers)) = connected.filter(|_| self.hosts[host].is_alive) else {
            self.tell(host, |set| set.happened(Event::Unconnected(member)));
            return;
        };
        let (owners, ours) = UnixStream::pair().unwrap();
        let link = Arc::new(Link::new(owners.into()));
        let sender = link.clone();
        if self.bytes > 1 << 20 {
            std::thread::spawn(move || sender.run());
        }
        let mut conn = ConnId(0);
        self.tell(host, |set| conn = set.connected(member, &link));
        self.values += 1;
        let (owner, server) = (End::new(ours.into()), End::new(server));
        let (asked, is_slow) = (0, false);
        let wire = Wire { host, member, conn, link, owner, server, servers, asked, is_slow };
        self.wires.insert(self.values, wire);
    }

    fn cut(&self, host: usize, member: MemberId, to_server: bool) -> u64 {
        self.cuts.get(&(host, member, to_server)).copied().unwrap_or(0)
    }

    /// Takes what owners and servers have sent, and waits for the answers of servers.
    pub(super) fn pump(&mut self) {
        loop {
            let ends = self.wires.iter().flat_map(|(id, wire)| {
                let both = [(true, &wire.owner), (false, &wire.server)];
                both.into_iter().filter(|(_, end)| !end.is_over).map(|(to, end)| (*id, to, end))
            });
            let (ends, mut sockets): (Vec<(u64, bool)>, Vec<_>) = ends
                .map(|(id, to, end)| ((id, to), PollFd::new(&end.socket, PollFlags::IN)))
                .unzip();
            let waits = self.wires.values().any(|wire| wire.asked > 0 && !wire.is_slow);
            let time = match (waits, self.calm) {
                (false, _) => Timespec::default(),
                (true, false) => WAIT,
                (true, true) => CALM_WAIT,
            };
            let ready = poll(&mut sockets, Some(&time));
            let ready = ready.map(|_| sockets.iter().map(|it| !it.revents().is_empty()).collect());
            let ready: Vec<bool> = ready.unwrap_or_default();
            let ready: Vec<_> =
                ends.into_iter().zip(ready).filter(|(_, is)| *is).map(|(end, _)| end).collect();
            if ready.is_empty() {
                self.wires.values_mut().for_each(|wire| wire.is_slow = true);
                return;
            }
            ready.into_iter().for_each(|(id, to_server)| self.take(id, to_server));
        }
    }

    /// Takes what has come from one end.
    fn take(&mut self, id: u64, to_server: bool) {
        let Some(wire) = self.wires.get_mut(&id) else { return };
        let taken = if to_server { wire.owner.take() } else { wire.server.take() };
        if !to_server {
            wire.asked = wire.asked.saturating_sub(taken.len());
            wire.is_slow = false;
            if wire.server.is_over {
                wire.asked = 0;
            }
        }
        let (host, member) = (wire.host, wire.member);
        for message in taken {
            let cut = self.cut(host, member, to_server).max(self.now);
            let delay = self.soon();
            let Some(wire) = self.wires.get_mut(&id) else { return };
            let end = if to_server { &mut wire.owner } else { &mut wire.server };
            end.last = end.last.max(cut + delay);
            let time = end.last;
            self.at_time(time, What::Arrives(id, to_server, message));
        }
    }

    pub(super) fn arrives(&mut self, id: u64, to_server: bool, message: Message) {
        let Some(wire) = self.wires.get_mut(&id) else { return };
        let paused = self.hosts[wire.host].paused_until;
        match (to_server, message) {
            (true, Some(bytes)) => {
                if wire.server.give(&bytes).is_ok() && !wire.server.is_over {
                    (wire.asked, wire.is_slow) = (wire.asked + 1, false);
                }
            }
            (true, None) => drop(shutdown(&wire.server.socket, Shutdown::Both)),
            (false, message) if paused > self.now => {
                self.at_time(paused, What::Arrives(id, false, message));
            }
            (false, Some(bytes)) => self.answered(id, &bytes),
            (false, None) => self.end_at_owner(id),
        }
    }

    fn end_at_owner(&mut self, id: u64) {
        let Some(wire) = self.wires.remove(&id) else { return };
        let _ = shutdown(&wire.server.socket, Shutdown::Both);
        wire.link.close();
        self.tell(wire.host, |set| set.ended(wire.conn));
    }

    /// A message of a server has come to its owner.
    fn answered(&mut self, id: u64, bytes: &[u8]) {
        let Some(wire) = self.wires.get(&id) else { return };
        // One that is longer than the socket is taken while it is given.
        let taken = std::thread::scope(|scope| {
            let give = || drop(wire.owner.give(bytes));
            if bytes.len() > 32 << 10 {
                scope.spawn(give);
            } else {
                give();
            }
            wire.link.receive()
        });
        let place = &self.machines[&wire.member].place;
        let reply = taken.ok().and_then(|(header, payload)| place.reply(&header, payload).ok());
        let Some((reply, data)) = reply else { return self.end_at_owner(id) };
        let (host, conn) = (wire.host, wire.conn);
        self.tell(host, |set| set.replied(conn, reply, data));
    }

    /// Nothing that a server sends from now on arrives: its process has ended.
    pub(super) fn end_wires_of(&mut self, member: MemberId) {
        for wire in self.wires.values().filter(|wire| wire.member == member) {
            let _ = shutdown(&wire.servers, Shutdown::Both);
        }
    }
}
