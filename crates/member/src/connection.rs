//! A connection of an owner.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ferrite_nbd::wire;
use ferrite_pool::wire::{
    Extent, Greeting, HEADER_BYTES, Header, Kind, MAX_HASHED, MAX_NAME, MAX_PAYLOAD, OPTION,
};
use ferrite_pool::{ConnId, Generation, OwnerId};
use rustix::io::Errno;

use crate::Fault;
use crate::copy::{Copy, Request, fail, refused};
use crate::link::{Link, message_end, send_all};
use crate::server::{Opened, Shared};

/// Time until the session is asked for.
const GREETING: Duration = Duration::from_secs(10);
/// Address space of the stack of a connection's threads.
const STACK_BYTES: usize = 256 << 10;

/// Why a connection ends.
enum End {
    /// The other side has gone, or was too slow.
    Left,
    /// It asked for what it does not get.
    Refused(u64, Fault),
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> End {
        End::Left
    }
}

/// Serves a connection until it ends. A second thread sends.
pub(crate) fn serve(shared: &Shared, conn: ConnId, socket: OwnedFd) -> io::Result<()> {
    let (outbox, queue) = channel();
    let link = Arc::new(Link::new(socket, shared.budget.clone(), outbox)?);
    let by = Instant::now() + GREETING;
    match greet(shared, &link, by) {
        Ok(()) => {}
        Err(End::Left) => return Ok(()),
        Err(End::Refused(_, fault)) => return Err(io::Error::other(fault.to_string())),
    }
    let sender = link.clone();
    let thread = std::thread::Builder::new().name("answers".to_owned());
    let thread = thread.stack_size(STACK_BYTES).spawn(move || send_all(&sender, &queue))?;
    let mut copy = None;
    let ended = requests(shared, conn, &link, by, &mut copy);
    if let Some(copy) = &copy {
        copy.ended(conn);
    }
    let told = match ended {
        Err(End::Refused(op, fault)) => {
            fail(&link, op, &fault);
            Err(io::Error::other(fault.to_string()))
        }
        Ok(()) | Err(End::Left) => Ok(()),
    };
    link.close();
    let _ = thread.join();
    told
}

/// NBD's handshake, up to our option.
fn greet(shared: &Shared, link: &Link, by: Instant) -> Result<(), End> {
    let mut hello = Vec::with_capacity(18);
    hello.extend(wire::SERVER_MAGIC.to_be_bytes());
    hello.extend(wire::OPTION_MAGIC.to_be_bytes());
    hello.extend((wire::FIXED_NEWSTYLE | wire::NO_ZEROES).to_be_bytes());
    link.send(&hello)?;
    let mut flags = [0; 4];
    link.receive(&mut flags, false, by)?;
    let mut head = [0; 16];
    link.receive(&mut head, false, by)?;
    let (magic, rest) = head.split_at(8);
    let (option, len) = rest.split_at(4);
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    let (magic, option, len) = (number(magic), number(option) as u32, number(len) as usize);
    if magic != wire::OPTION_MAGIC || len > 16 + MAX_NAME {
        return Err(End::Refused(0, refused("it is no client of NBD or of a pool".to_owned())));
    }
    let mut data = vec![0; len];
    link.receive(&mut data, false, by)?;
    let checked = match option {
        OPTION => check(shared, &data),
        _ => Err(refused("this port serves copies of a pool's disks, and no NBD".to_owned())),
    };
    let mut answer = Vec::new();
    answer.extend(wire::OPTION_REPLY_MAGIC.to_be_bytes());
    answer.extend(option.to_be_bytes());
    let (kind, text) = match &checked {
        Ok(()) => (wire::reply::ACK, String::new()),
        Err(fault) => (wire::reply::POLICY, fault.to_string()),
    };
    answer.extend(kind.to_be_bytes());
    answer.extend((text.len() as u32).to_be_bytes());
    answer.extend(text.as_bytes());
    link.send(&answer)?;
    checked.map_err(|fault| End::Refused(0, fault))
}

/// Whether the client means this server.
fn check(shared: &Shared, data: &[u8]) -> Result<(), Fault> {
    let greeting = Greeting::from_bytes(data).map_err(|e| refused(e.to_string()))?;
    let (pool, server) = shared.identity();
    if greeting.pool == pool && greeting.server == server {
        return Ok(());
    }
    let why = format!(
        "it is server {server} of pool {}, and not {} of {}",
        crate::folder::hex(&pool),
        greeting.server,
        crate::folder::hex(&greeting.pool)
    );
    let help = "see which server has this address";
    Err(Fault::new("another server was meant", why, help).with(Errno::STALE))
}

/// Takes requests until the connection ends.
fn requests(
    shared: &Shared,
    conn: ConnId,
    link: &Arc<Link>,
    by: Instant,
    copy: &mut Option<Arc<Copy>>,
) -> Result<(), End> {
    loop {
        let mut bytes = [0; HEADER_BYTES];
        link.receive(&mut bytes, copy.is_some(), by)?;
        let header =
            Header::from_bytes(&bytes).map_err(|e| End::Refused(0, refused(e.to_string())))?;
        let end = |fault| End::Refused(header.op, fault);
        check_lengths(&header).map_err(end)?;
        // Data that are read need room, too. A hash needs little.
        let read = if header.kind == Kind::Read { header.len as usize } else { 0 };
        let room = link.room(header.payload as usize + read).ok_or(End::Left)?;
        let mut payload = vec![0; header.payload as usize];
        link.receive(&mut payload, false, message_end())?;
        let extent = || Extent::from_bytes(&payload).map_err(|e| refused(e.to_string()));
        match (header.kind, &*copy) {
            (Kind::Create, None) => {
                let made = extent().and_then(|e| shared.create(&e, header.len, header.start == 0));
                made.map_err(end)?;
                link.answer(Header { kind: Kind::Done, payload: 0, ..header }, Vec::new(), None);
            }
            (Kind::Open, None) => {
                let (generation, owner) = (Generation(header.start), OwnerId(header.len));
                let opened = extent().and_then(|e| shared.copy(&e, generation, owner));
                match opened.map_err(end)? {
                    Opened::Copy(opened) => {
                        *copy = Some(opened.clone());
                        opened.open(conn, link, header).map_err(end)?;
                    }
                    Opened::Refused(Generation(start)) => {
                        let refused =
                            Header { kind: Kind::Refused, op: 0, start, len: 0, payload: 0 };
                        link.answer(refused, Vec::new(), None);
                        return Ok(());
                    }
                }
            }
            (Kind::Delete, Some(copy)) => {
                shared.remove(copy, conn).map_err(end)?;
                link.answer(Header { kind: Kind::Done, payload: 0, ..header }, Vec::new(), None);
                return Ok(());
            }
            (_, Some(copy)) => {
                copy.request(conn, Request { header, payload, _room: room }).map_err(end)?;
            }
            (kind, None) => {
                return Err(end(refused(format!("{kind:?} needs a session"))));
            }
        }
    }
}

fn check_lengths(header: &Header) -> Result<(), Fault> {
    let most = match header.kind {
        Kind::Read => u64::from(MAX_PAYLOAD),
        Kind::Hash => MAX_HASHED,
        _ => u64::MAX,
    };
    let takes_payload = matches!(
        header.kind,
        Kind::Create | Kind::Open | Kind::Write | Kind::Repair | Kind::Mark | Kind::Clear
    );
    if header.len > most || (header.payload > 0 && !takes_payload) {
        let why = format!("{:?} of {} bytes with {}", header.kind, header.len, header.payload);
        return Err(refused(why));
    }
    Ok(())
}
