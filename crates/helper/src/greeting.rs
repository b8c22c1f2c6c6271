//! The handshake of NBD with one client.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use ferrite_nbd::client::{SESSION, Session as Name};
use ferrite_nbd::wire::{
    FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, SERVER_MAGIC, can, info, option,
    push_option_reply, reply,
};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::fault::Fault;

/// The longest data of a request.
pub const MAX_REQUEST_BYTES: u32 = 4 << 20;
const MIN_BLOCK_BYTES: u32 = 512;
const PREFERRED_BYTES: u32 = 4096;
const MAX_OPTION_BYTES: usize = 32 << 10;
const MAX_OPTIONS: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(10);

/// The properties of the disk that a client may know.
pub(crate) struct Offer {
    pub(crate) bytes: u64,
    pub(crate) read_only: bool,
}

impl Offer {
    fn flags(&self) -> u16 {
        // One process has the disk: a flush covers all connections.
        let always = can::HAS_FLAGS | can::FLUSH | can::FUA | can::MULTI_CONN;
        always | if self.read_only { can::READ_ONLY } else { can::TRIM | can::WRITE_ZEROES }
    }
}

/// Greets a client until it has chosen the disk. `replace` ends older connections that the named one replaces; false: they
/// do not end. `None`: the client has left.
pub(crate) fn greet(
    socket: BorrowedFd<'_>,
    offer: &Offer,
    mut replace: impl FnMut(Name) -> bool,
) -> io::Result<Option<()>> {
    let flags = begin(socket)?;
    for _ in 0..MAX_OPTIONS {
        let (asked, data) = next_option(socket)?;
        let mut out = Vec::new();
        match asked {
            option::ABORT => {
                push_option_reply(&mut out, asked, reply::ACK, &[]);
                write_all(socket, &out)?;
                return Ok(None);
            }
            option::EXPORT_NAME => {
                out.extend(offer.bytes.to_be_bytes());
                out.extend(offer.flags().to_be_bytes());
                let padding = if flags & u32::from(NO_ZEROES) == 0 { 124 } else { 0 };
                out.resize(out.len() + padding, 0);
                write_all(socket, &out)?;
                return done(socket);
            }
            option::GO | option::INFO => {
                describe(&mut out, asked, offer);
                write_all(socket, &out)?;
                if asked == option::GO {
                    return done(socket);
                }
                continue;
            }
            SESSION => match Name::parse(&data) {
                Some(name) if replace(name) => push_option_reply(&mut out, asked, reply::ACK, &[]),
                Some(_) => return Ok(None),
                None => push_option_reply(&mut out, asked, reply::INVALID, &[]),
            },
            _ => push_option_reply(&mut out, asked, reply::UNSUPPORTED, &[]),
        }
        write_all(socket, &out)?;
    }
    Ok(None)
}

/// Answers a client's options by this fault, until it goes.
pub(crate) fn refuse(socket: BorrowedFd<'_>, fault: &Fault) -> io::Result<()> {
    let text = format!("{}\n{}", fault.why, fault.help);
    let kind = if fault.passes { reply::PASSING_FAULT } else { reply::FAULT };
    begin(socket)?;
    for _ in 0..MAX_OPTIONS {
        let (asked, _) = next_option(socket)?;
        let mut out = Vec::new();
        // A session without a disk has nothing to end, and a client takes any answer to it.
        let kind = if asked == SESSION { reply::UNSUPPORTED } else { kind };
        let text: &[u8] = if asked == SESSION { b"" } else { text.as_bytes() };
        push_option_reply(&mut out, asked, kind, &[text]);
        write_all(socket, &out)?;
    }
    Ok(())
}

fn begin(socket: BorrowedFd<'_>) -> io::Result<u32> {
    // The client's end of the stream does not block; this one waits.
    set_socket_timeout(socket, Timeout::Recv, Some(TIMEOUT))?;
    set_socket_timeout(socket, Timeout::Send, Some(TIMEOUT))?;
    let mut out = Vec::new();
    out.extend(SERVER_MAGIC.to_be_bytes());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    write_all(socket, &out)?;
    let mut flags = [0; 4];
    read_exact(socket, &mut flags)?;
    Ok(u32::from_be_bytes(flags))
}

/// Requests come when they come.
fn done(socket: BorrowedFd<'_>) -> io::Result<Option<()>> {
    set_socket_timeout(socket, Timeout::Recv, None)?;
    Ok(Some(()))
}

fn describe(out: &mut Vec<u8>, asked: u32, offer: &Offer) {
    let (kind, bytes, flags) =
        (info::EXPORT.to_be_bytes(), offer.bytes.to_be_bytes(), offer.flags().to_be_bytes());
    push_option_reply(out, asked, reply::INFO, &[&kind, &bytes, &flags]);
    let sizes = [MIN_BLOCK_BYTES, PREFERRED_BYTES, MAX_REQUEST_BYTES].map(u32::to_be_bytes);
    let kind = info::BLOCK_SIZE.to_be_bytes();
    push_option_reply(out, asked, reply::INFO, &[&kind, &sizes[0], &sizes[1], &sizes[2]]);
    push_option_reply(out, asked, reply::ACK, &[]);
}

fn next_option(socket: BorrowedFd<'_>) -> io::Result<(u32, Vec<u8>)> {
    let mut head = [0; 16];
    read_exact(socket, &mut head)?;
    let mut fields = Fields(&head);
    let (magic, asked, len) = (fields.u64(), fields.u32(), fields.u32().unwrap_or(u32::MAX));
    match (magic, asked) {
        (Some(OPTION_MAGIC), Some(asked)) if len as usize <= MAX_OPTION_BYTES => {
            let mut data = vec![0; len as usize];
            read_exact(socket, &mut data)?;
            Ok((asked, data))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

pub(crate) fn read_exact(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match recv(socket, &mut bytes[done..], RecvFlags::empty()) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((n, _)) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn write_all(socket: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
