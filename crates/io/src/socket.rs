//! Streams whose bytes go straight between a socket and the arena: no copy in this process on the
//! way, and one system call for as many pieces as there are.
//!
//! Nothing here waits. Where the socket has no bytes, or no room, the error is `WouldBlock`; a caller
//! that wants to wait asks an engine ([`Op::Readable`](crate::engine::Op::Readable)).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use rustix::event::epoll;

use crate::arena::{Arena, Span};
use crate::engine::Transfer;

/// Pieces that one call takes at most.
pub const MAX_PIECES: usize = 128;

/// A piece of what is sent.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// Private bytes.
    Bytes(&'a [u8]),
    /// Bytes of the arena, as they are when the kernel takes them.
    Memory(Span),
}

fn vector(base: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base.cast(), iov_len: len }
}

fn header(vectors: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a message header of zeros is a valid one: no name, no vectors, no control bytes.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = vectors.as_mut_ptr();
    header.msg_iovlen = vectors.len();
    header
}

fn result(bytes: isize) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

/// Sends pieces, one after the other, as many as there is room for: [`MAX_PIECES`] at most. The
/// bytes that were taken. A peer that is gone is an error, and no signal.
///
/// # Errors
/// The kernel's; `WouldBlock`: there is no room now.
///
/// # Panics
/// If a span is not inside the arena.
pub fn send<'a>(
    socket: BorrowedFd<'_>,
    arena: &Arena,
    pieces: impl Iterator<Item = Piece<'a>>,
) -> io::Result<usize> {
    let mut vectors = [vector(ptr::null_mut(), 0); MAX_PIECES];
    let mut count = 0;
    for (slot, piece) in vectors.iter_mut().zip(pieces) {
        *slot = match piece {
            Piece::Bytes(bytes) => vector(bytes.as_ptr().cast_mut(), bytes.len()),
            Piece::Memory(span) => vector(arena.ptr(span).as_ptr(), span.len()),
        };
        count += 1;
    }
    let header = header(&mut vectors[..count]);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: every vector names memory that is mapped for its whole length until the call is over:
    // a slice that is borrowed for 'a, or a span that `ptr` has checked in an arena that is borrowed.
    // The kernel only reads it.
    result(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, flags) })
}

/// Receives bytes into the span, and what comes behind them into `rest`. The bytes that there were;
/// 0: the peer sends nothing more.
///
/// # Errors
/// The kernel's; `WouldBlock`: there is nothing now.
///
/// # Panics
/// If the span is not inside the arena.
pub fn receive(
    socket: BorrowedFd<'_>,
    arena: &Arena,
    first: Option<Span>,
    rest: &mut [u8],
) -> io::Result<usize> {
    let rest = vector(rest.as_mut_ptr(), rest.len());
    let mut vectors = match first {
        Some(span) => [vector(arena.ptr(span).as_ptr(), span.len()), rest],
        None => [rest, vector(ptr::null_mut(), 0)],
    };
    let mut header = header(&mut vectors);
    // SAFETY: `rest` is borrowed as mutable, and the span was checked by `ptr`; both stay mapped until
    // the call is over. There are no references to bytes of an arena.
    result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) })
}

/// Sends the spans, or receives into them: [`MAX_PIECES`] at most. The bytes that were moved; 0 of a receive:
/// the peer sends nothing more.
///
/// # Errors
/// The kernel's; `WouldBlock`: there is nothing now, or no room.
///
/// # Panics
/// If a span is not inside the arena.
pub fn transfer(
    transfer: Transfer,
    socket: BorrowedFd<'_>,
    arena: &Arena,
    spans: &[Span],
) -> io::Result<usize> {
    if transfer == Transfer::Write {
        return send(socket, arena, spans.iter().map(|span| Piece::Memory(*span)));
    }
    let mut vectors = [vector(ptr::null_mut(), 0); MAX_PIECES];
    for (slot, span) in vectors.iter_mut().zip(spans) {
        *slot = vector(arena.ptr(*span).as_ptr(), span.len());
    }
    let mut header = header(&mut vectors[..spans.len().min(MAX_PIECES)]);
    // SAFETY: every vector is a span that `ptr` has checked in an arena that is borrowed until the call is
    // over. There are no references to bytes of an arena.
    result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) })
}

/// A descriptor that is readable as long as a socket has room, for engines, which only wait for
/// something to read.
pub struct RoomWatch(OwnedFd);

impl RoomWatch {
    /// Watches this socket, which the kernel forgets when it is closed.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new(socket: BorrowedFd<'_>) -> io::Result<RoomWatch> {
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&watch, socket, epoll::EventData::new_u64(0), epoll::EventFlags::OUT)?;
        Ok(RoomWatch(watch))
    }

    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::engine::is_readable;

    #[test]
    fn pieces_of_the_arena_and_private_ones_arrive_in_their_order() {
        let arena = Arena::new(1).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        arena.copy_in(arena.span(4096, 3), b"two");
        let pieces =
            [Piece::Bytes(b"one "), Piece::Memory(arena.span(4096, 3)), Piece::Bytes(b" three")];
        assert_eq!(send(here.as_fd(), &arena, pieces.into_iter()).unwrap(), 13);
        let mut rest = [0; 64];
        let got = receive(there.as_fd(), &arena, Some(arena.span(0, 5)), &mut rest).unwrap();
        let mut first = [0; 6];
        arena.copy_out(arena.span(0, 6), &mut first);
        assert_eq!((got, &first, &rest[..8]), (13, b"one t\0", &b"wo three"[..]));
        let nothing = receive(there.as_fd(), &arena, None, &mut rest).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        drop(here);
        assert_eq!(receive(there.as_fd(), &arena, None, &mut rest).unwrap(), 0);
        let gone = send(there.as_fd(), &arena, [Piece::Bytes(b"x")].into_iter()).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn the_watch_is_readable_while_there_is_room() {
        let arena = Arena::new(1).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let watch = RoomWatch::new(here.as_fd()).unwrap();
        assert!(is_readable(watch.fd()).unwrap());
        let much = || [Piece::Memory(arena.span(0, 1 << 20))].into_iter();
        while send(here.as_fd(), &arena, much()).is_ok() {}
        assert!(!is_readable(watch.fd()).unwrap());
        let mut rest = vec![0; 1 << 20];
        while receive(there.as_fd(), &arena, None, &mut rest).is_ok() {}
        assert!(is_readable(watch.fd()).unwrap());
    }
}
