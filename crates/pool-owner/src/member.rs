//! The thread of a copy: it connects to the copy's server when the set's owner asks for it, and takes the answers.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_pool::wire::{Extent, Greeting, Header, Kind, regions_from_bytes};
use ferrite_pool::{Event, Generation, MemberId, OpId, Region, Reply};
use ferrite_pool_map::{Access, Copy, Id};
use rustix::io::Errno;

use crate::link::{Link, connect, create, greet_server, wait_for_answers, words};
use crate::luns::Luns;
use crate::set::Set;

/// The first pause after a server has failed an operation: the set's owner drops it meanwhile, if another copy stays.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The pauses between two attempts to connect grow from the first to the last of these. By TLS each attempt is a process.
const FIRST_ATTEMPT: Duration = Duration::from_millis(100);
const LAST_ATTEMPT: Duration = Duration::from_secs(2);
const LAST_BY_TLS: Duration = Duration::from_secs(10);
/// The pause between two questions for a server's address.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const STACK_BYTES: usize = 256 << 10;

/// How all copies of a disk are reached.
pub(crate) struct Way {
    pub(crate) access: Arc<Access>,
    pub(crate) pool: Id,
    pub(crate) tls: Option<PathBuf>,
    pub(crate) luns: Arc<Luns>,
}

/// A copy, and the server that has it.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) member: MemberId,
    pub(crate) server: String,
    pub(crate) extent: Extent,
    /// Bytes of the copy.
    pub(crate) bytes: u64,
    /// Where its range of a LUN begins.
    pub(crate) start: Option<u64>,
    /// Where the server was last.
    pub(crate) address: Arc<Mutex<Option<SocketAddr>>>,
}

impl Place {
    pub(crate) fn of(copy: &Copy, bytes: u64, address: Option<SocketAddr>) -> Place {
        let extent = Extent { id: copy.id.0, name: copy.name.clone() };
        let (member, server) = (MemberId(copy.member), copy.server.clone());
        Place {
            member,
            server,
            extent,
            bytes,
            start: copy.start,
            address: Arc::new(Mutex::new(address)),
        }
    }

    fn greeting(&self, way: &Way) -> Greeting {
        Greeting { pool: way.pool.0, server: self.server.clone() }
    }

    fn last_address(&self) -> Option<SocketAddr> {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks etcd where the server is now.
    fn look_up(&self, way: &Way) -> Option<SocketAddr> {
        let server = way.access.server(way.pool, &self.server).ok().flatten()?;
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = Some(server.address);
        Some(server.address)
    }

    /// The reply in an answer, and the data that were read. The error: whether the server has said it, and the reason.
    pub(crate) fn reply(
        &self,
        header: &Header,
        payload: Vec<u8>,
    ) -> Result<(Reply, Vec<u8>), (bool, String)> {
        let op = OpId(header.op);
        let regions = || {
            let regions = regions_from_bytes(&payload).map_err(|e| (false, e.to_string()))?;
            let count = self.bytes.div_ceil(crate::set::region_bytes(self.bytes));
            match regions.iter().all(|region| region.0 < count) {
                true => Ok(regions.into_iter().collect::<std::collections::BTreeSet<Region>>()),
                false => Err((false, "it names regions behind the copy's end".to_owned())),
            }
        };
        let reply = match header.kind {
            Kind::Opened if header.len != crate::set::region_bytes(self.bytes) => {
                return Err((false, format!("its regions have {} bytes", header.len)));
            }
            Kind::Opened => Reply::Opened { incomplete: header.start != 0, dirty: regions()? },
            Kind::Refused => Reply::Refused { stored: Generation(header.start) },
            Kind::Done => return Ok((Reply::Done { op }, payload)),
            Kind::Dirty => Reply::Bits { op, dirty: regions()? },
            Kind::Failed => {
                let errno = i32::try_from(header.start).map(Errno::from_raw_os_error);
                let errno = errno.map_or_else(|_| String::new(), |e| format!(" ({e})"));
                return Err((true, format!("{}{errno}", words(&payload))));
            }
            other => return Err((false, format!("{other:?} is no answer"))),
        };
        Ok((reply, Vec::new()))
    }

    /// Makes the file of a disk that no owner has opened yet.
    ///
    /// # Errors
    /// In words.
    pub(crate) fn make(&self, way: &Way) -> Result<(), String> {
        let socket = match self.start {
            Some(start) => self.lun(way, start)?,
            None => {
                let at = self.last_address().or_else(|| self.look_up(way));
                let at = at.ok_or("it does not announce itself")?;
                connect(at, way.tls.as_deref(), &self.greeting(way))?
            }
        };
        create(&socket, &self.extent, self.bytes, true)
    }

    /// Connects to the LUN that has it, which this process opens.
    fn lun(&self, way: &Way, start: u64) -> Result<OwnedFd, String> {
        let found = way.access.lun(way.pool, &self.server).map_err(|e| e.to_string())?;
        let lun = found.ok_or("the pool has no such LUN any more")?;
        let socket = way.luns.connect(self, start, &lun)?;
        greet_server(&socket, &self.greeting(way))?;
        Ok(socket)
    }
}

/// Starts the thread of a copy. It connects once for each message.
///
/// # Errors
/// The kernel's.
pub(crate) fn start(place: Place, way: Arc<Way>, set: Weak<Set>) -> std::io::Result<Sender<()>> {
    let (go, asked) = channel();
    let thread = std::thread::Builder::new().name("copy".into()).stack_size(STACK_BYTES);
    thread.spawn(move || Thread::new(place, way, set).run(&asked))?;
    Ok(go)
}

struct Thread {
    place: Place,
    way: Arc<Way>,
    set: Weak<Set>,
    limit: SharedLogLimit,
    /// Nothing is tried before this time, since the server could not be reached, or has failed an operation.
    not_before: Option<Instant>,
    pause: Duration,
    next_attempt: Duration,
    looked_up: Option<Instant>,
}

impl Thread {
    fn new(place: Place, way: Arc<Way>, set: Weak<Set>) -> Thread {
        let (limit, pause) = (SharedLogLimit::default(), FIRST_PAUSE);
        let next_attempt = FIRST_ATTEMPT;
        Thread { place, way, set, limit, not_before: None, pause, next_attempt, looked_up: None }
    }

    fn run(&mut self, asked: &Receiver<()>) {
        while asked.recv().is_ok() {
            let Some(set) = self.set.upgrade() else { return };
            let waits = self.not_before.is_some_and(|until| Instant::now() < until);
            if waits {
                set.happened(Event::Unconnected(self.place.member));
                continue;
            }
            match self.connect(&set) {
                None => {
                    let last = if self.way.tls.is_some() { LAST_BY_TLS } else { LAST_ATTEMPT };
                    self.not_before = Some(Instant::now() + self.next_attempt);
                    self.next_attempt = (self.next_attempt * 2).min(last);
                    set.happened(Event::Unconnected(self.place.member));
                }
                Some(link) => {
                    self.next_attempt = FIRST_ATTEMPT;
                    self.serve(&set, &link);
                }
            }
        }
    }

    fn connect(&mut self, set: &Set) -> Option<Arc<Link>> {
        let Thread { place, way, .. } = self;
        let (tls, greeting) = (way.tls.as_deref(), place.greeting(way));
        let begin = |socket: OwnedFd| {
            if !set.is_in_sync(place.member) {
                // It may be new, or its server has lost it: then it is made, and gets everything.
                create(&socket, &place.extent, place.bytes, false)?;
            }
            wait_for_answers(&socket).map_err(|e| e.to_string())?;
            Ok::<_, String>(Link::new(socket))
        };
        let open = |at| begin(connect(at, tls, &greeting)?);
        let known = place.last_address();
        let mut tried = match (place.start, known) {
            (Some(start), _) => place.lun(way, start).and_then(begin),
            (None, Some(at)) => open(at),
            (None, None) => Err("it does not announce itself".to_owned()),
        };
        let may_look =
            place.start.is_none() && self.looked_up.is_none_or(|at| at.elapsed() >= LOOK_AGAIN);
        if tried.is_err() && may_look {
            self.looked_up = Some(Instant::now());
            if let Some(at) = place.look_up(way).filter(|at| Some(*at) != known) {
                tried = open(at);
            }
        }
        match tried {
            Ok(link) => Some(Arc::new(link)),
            Err(why) => {
                self.log(set, &format!("cannot be reached: {why}"));
                None
            }
        }
    }

    /// Takes answers until the connection ends.
    fn serve(&mut self, set: &Arc<Set>, link: &Arc<Link>) {
        let sender = link.clone();
        let thread = std::thread::Builder::new().name("messages".into()).stack_size(STACK_BYTES);
        if thread.spawn(move || sender.run()).is_err() {
            return set.happened(Event::Unconnected(self.place.member));
        }
        let conn = set.connected(self.place.member, link);
        let began = Instant::now();
        loop {
            let taken = match link.receive() {
                Ok((header, payload)) => self.place.reply(&header, payload),
                // The end: the server has gone, or the owner has closed it.
                Err(e) if e.kind() != std::io::ErrorKind::InvalidData => break,
                Err(e) => Err((false, e.to_string())),
            };
            match taken {
                Ok((reply, data)) => set.replied(conn, reply, data),
                Err((is_refusal, why)) => {
                    self.log(set, &format!("fails: {why}"));
                    if !is_refusal || began.elapsed() > LONGEST_PAUSE {
                        self.pause = FIRST_PAUSE;
                    }
                    self.not_before = Some(Instant::now() + self.pause);
                    self.pause = (self.pause * 2).min(LONGEST_PAUSE);
                    break;
                }
            }
        }
        link.close();
        set.ended(conn);
    }

    fn log(&self, set: &Set, what: &str) {
        let server = &self.place.server;
        limited!(
            warn,
            self.limit,
            SystemClock.now_ns(),
            "{}: the server {server} {what}",
            set.name()
        );
    }
}

#[cfg(test)]
mod tests {
    use ferrite_pool::wire::regions_to_bytes;

    use super::*;

    /// A copy of 4 MiB, which has four regions.
    fn place() -> Place {
        let (id, name) = (Id::random(), "d-0-0".to_owned());
        let server = "a".to_owned();
        let copy = Copy { member: 0, server, id, name, leaves: false, start: None };
        Place::of(&copy, 4 << 20, None)
    }

    #[test]
    fn a_server_that_says_what_cannot_be_is_not_believed() {
        let answer = |kind, start, len, payload: Vec<u8>| {
            let header = Header { kind, op: 7, start, len, payload: payload.len() as u32 };
            place().reply(&header, payload)
        };
        let regions = |numbers: &[u64]| regions_to_bytes(numbers.iter().map(|n| Region(*n)));
        let (opened, _) = answer(Kind::Opened, 1, 1 << 20, regions(&[0, 3])).unwrap();
        let dirty = [Region(0), Region(3)].into();
        assert_eq!(opened, Reply::Opened { incomplete: true, dirty });
        let (done, data) = answer(Kind::Done, 0, 0, vec![1; 512]).unwrap();
        assert_eq!((done, data.len()), (Reply::Done { op: OpId(7) }, 512));
        for (kind, len, payload) in [
            // Regions of another size, behind the end, and half of one.
            (Kind::Opened, 2 << 20, regions(&[0])),
            (Kind::Opened, 1 << 20, regions(&[4])),
            (Kind::Dirty, 0, regions(&[u64::MAX])),
            (Kind::Dirty, 0, vec![0; 7]),
            (Kind::Write, 0, Vec::new()),
        ] {
            let (is_refusal, _) = answer(kind, 0, len, payload).unwrap_err();
            assert!(!is_refusal, "{kind:?}");
        }
        let (is_refusal, why) = answer(Kind::Failed, 28, 0, b"full\x1b[2J".to_vec()).unwrap_err();
        assert!(is_refusal && why.starts_with("full[2J (No space left"), "{why}");
    }
}
