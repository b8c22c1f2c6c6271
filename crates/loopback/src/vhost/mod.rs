//! A front end of vhost-user with a guest's driver for a virtio block device, both simulated: they send exactly what their
//! caller says, valid or not. They panic when the back end does what the protocol does not allow, or nothing.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_io::foreign::Memory;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

mod driver;

pub use driver::{Ask, Driver, NEXT, SLOT_BYTES, TABLE, WRITE, kind};

/// How long the back end may take for anything that ends at all, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Requests of the protocol.
pub mod message {
    #![allow(missing_docs, reason = "the protocol's names")]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
}

/// `VIRTIO_BLK_F_FLUSH`.
pub const FLUSH: u64 = 1 << 9;
/// `VIRTIO_RING_F_INDIRECT_DESC`.
pub const INDIRECT: u64 = 1 << 28;
/// `VIRTIO_RING_F_EVENT_IDX`.
pub const EVENT_INDEX: u64 = 1 << 29;
/// `VHOST_USER_F_PROTOCOL_FEATURES`.
pub const PROTOCOL: u64 = 1 << 30;
/// `VIRTIO_F_RING_PACKED`.
pub const PACKED: u64 = 1 << 34;
/// `VHOST_F_LOG_ALL`.
pub const LOG_ALL: u64 = 1 << 26;

const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The guest's physical address of its memory's first byte, and the front end's own address of it.
pub const GUEST_BASE: u64 = 1 << 30;
/// The front end's own address of the same byte.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// The memory of a guest: a memfd.
pub struct Guest {
    /// The file.
    pub file: File,
    /// Its mapping here.
    pub memory: Memory,
}

impl Guest {
    /// New memory of zeros.
    pub fn new(bytes: u64) -> Arc<Guest> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("guest", flags).unwrap());
        file.set_len(bytes).unwrap();
        let memory = Memory::map(&file, 0, bytes).unwrap();
        Arc::new(Guest { file, memory })
    }

    /// The table of this memory in two regions, which are neighbours for the guest, and not for the front end.
    pub fn table(&self) -> Vec<Region> {
        let half = self.memory.len() as u64 / 2;
        let region = |offset: u64| Region {
            guest: GUEST_BASE + offset,
            len: half,
            user: user_of(offset, half),
            offset,
        };
        vec![region(half), region(0)]
    }

    /// The front end's address of a byte of it.
    pub fn user(&self, offset: u64) -> u64 {
        user_of(offset, self.memory.len() as u64 / 2)
    }
}

fn user_of(offset: u64, half: u64) -> u64 {
    if offset < half { USER_BASE + offset } else { USER_BASE / 2 + offset }
}

/// A region of a memory table.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The guest's physical address.
    pub guest: u64,
    /// Bytes.
    pub len: u64,
    /// The front end's address.
    pub user: u64,
    /// Where it begins in its file.
    pub offset: u64,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The body.
    pub body: Vec<u8>,
    /// The descriptor that came with it.
    pub file: Option<OwnedFd>,
}

impl Answer {
    /// The number that the body is.
    pub fn number(&self) -> u64 {
        u64::from_le_bytes(self.body.as_slice().try_into().unwrap())
    }
}

/// A connection of a front end.
pub struct FrontEnd {
    socket: UnixStream,
}

impl FrontEnd {
    /// Connects.
    pub fn connect(socket: &Path) -> FrontEnd {
        let end = Instant::now() + PATIENCE;
        let socket = loop {
            match UnixStream::connect(socket) {
                Ok(connected) => break connected,
                Err(e) => assert!(Instant::now() < end, "no server at {}: {e}", socket.display()),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        FrontEnd { socket }
    }

    /// Sends bytes, with descriptors.
    pub fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        let sent = self.try_send(bytes, files);
        assert!(sent, "the server reads messages");
    }

    /// Sends bytes, with descriptors, to a server that may have ended. Returns whether the connection is there.
    pub fn try_send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(files)));
        }
        let slices = [IoSlice::new(bytes)];
        let flags = SendFlags::NOSIGNAL;
        retry_on_intr(|| sendmsg(&self.socket, &slices, &mut ancillary, flags)).is_ok()
    }

    /// The bytes of a message.
    pub fn encode(request: u32, body: &[u8]) -> Vec<u8> {
        let header = [request, VERSION, body.len() as u32].map(u32::to_le_bytes).concat();
        [&header, body].concat()
    }

    /// Sends a message that has no answer.
    pub fn tell(&self, request: u32, body: &[u8], files: &[BorrowedFd<'_>]) {
        self.send(&FrontEnd::encode(request, body), files);
    }

    /// Sends a message that is acknowledged, and returns whether it was done.
    pub fn order(&self, request: u32, body: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        let mut bytes = FrontEnd::encode(request, body);
        bytes[4..8].copy_from_slice(&(VERSION | NEED_REPLY).to_le_bytes());
        self.try_send(&bytes, files)
            && self.answer(request).is_some_and(|answer| answer.number() == 0)
    }

    /// Whether a server answers. A connection that was accepted for a server that has ended is closed; a front end connects
    /// again then.
    pub fn is_served(&self) -> bool {
        let request = message::GET_FEATURES;
        self.try_send(&FrontEnd::encode(request, &[]), &[]) && self.answer(request).is_some()
    }

    /// Asks a question.
    pub fn ask(&self, request: u32, body: &[u8]) -> Answer {
        self.tell(request, body, &[]);
        self.answer(request).expect("an answer comes")
    }

    /// The next answer. `None`: the server has closed the connection.
    pub fn answer(&self, request: u32) -> Option<Answer> {
        let (header, file) = self.receive(12)?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (request, VERSION | REPLY));
        let body = match word(8) as usize {
            0 => Vec::new(),
            len => self.receive(len)?.0,
        };
        Some(Answer { body, file })
    }

    /// Reads so many bytes. `None`: the connection ends.
    fn receive(&self, len: usize) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let (mut all, mut file) = (Vec::new(), None);
        while all.len() < len {
            let mut bytes = vec![0; len - all.len()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let received = {
                let mut into = [IoSliceMut::new(&mut bytes)];
                let flags = RecvFlags::CMSG_CLOEXEC;
                retry_on_intr(|| recvmsg(&self.socket, &mut into, &mut ancillary, flags))
            };
            let count = match received {
                Ok(message) => message.bytes,
                Err(rustix::io::Errno::CONNRESET) => 0,
                Err(e) => panic!("no answer comes: {e}"),
            };
            if count == 0 {
                return None;
            }
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    file = files.into_iter().next();
                }
            }
            all.extend_from_slice(&bytes[..count]);
        }
        Some((all, file))
    }

    /// Whether the server ends the connection, rather than to answer.
    pub fn is_closed(&self) -> bool {
        self.receive(1).is_none()
    }

    /// Whether the connection is there: the server answers.
    pub fn is_alive(&self) -> bool {
        self.try_send(&FrontEnd::encode(message::GET_QUEUE_NUM, &[]), &[])
            && self.answer(message::GET_QUEUE_NUM).is_some()
    }

    /// Agrees on all features that are offered, but for these. Returns what was agreed on.
    pub fn agree(&self, without: u64) -> u64 {
        let features = self.ask(message::GET_FEATURES, &[]).number() & !without;
        let protocol = self.ask(message::GET_PROTOCOL_FEATURES, &[]).number();
        self.tell(message::SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[]);
        self.tell(message::SET_OWNER, &[], &[]);
        self.tell(message::SET_FEATURES, &features.to_le_bytes(), &[]);
        features
    }

    /// Gives a memory table.
    pub fn set_memory(&self, table: &[Region], files: &[BorrowedFd<'_>]) -> bool {
        let mut body = [table.len() as u32, 0].map(u32::to_le_bytes).concat();
        for region in table {
            let words = [region.guest, region.len, region.user, region.offset];
            body.extend(words.map(u64::to_le_bytes).concat());
        }
        self.order(message::SET_MEM_TABLE, &body, files)
    }

    /// Gives all of a guest's memory.
    pub fn give(&self, guest: &Guest) {
        assert!(self.set_memory(&guest.table(), &[guest.file.as_fd(); 2]));
    }

    /// A message about a queue with a number.
    pub fn set_state(&self, request: u32, queue: u16, value: u32) -> bool {
        let body = [u32::from(queue), value].map(u32::to_le_bytes).concat();
        self.order(request, &body, &[])
    }

    /// Sets a queue up for this driver, which begins at that entry of the available ring, and starts it.
    pub fn start(&self, driver: &Driver, from: u16) -> bool {
        let queue = driver.number;
        let number = u64::from(queue).to_le_bytes();
        self.set_state(message::SET_VRING_NUM, queue, driver.entries.into())
            && self.set_state(message::SET_VRING_BASE, queue, from.into())
            && self.order(message::SET_VRING_ADDR, &driver.addresses(), &[])
            && self.order(message::SET_VRING_KICK, &number, &[driver.kick.as_fd()])
            && self.order(message::SET_VRING_CALL, &number, &[driver.call.as_fd()])
            && self.order(message::SET_VRING_ERR, &number, &[driver.err.as_fd()])
            && self.set_state(message::SET_VRING_ENABLE, queue, 1)
    }

    /// Stops a queue. Returns the entry of the available ring that it would have taken next.
    pub fn stop(&self, queue: u16) -> u16 {
        let body = [u32::from(queue), 0].map(u32::to_le_bytes).concat();
        let state = self.ask(message::GET_VRING_BASE, &body).body;
        u16::from_le_bytes(state[4..6].try_into().unwrap())
    }

    /// A new table of requests in flight, as the server makes it: its measures and its memory.
    pub fn new_inflight(&self, queues: u16, entries: u16) -> (Vec<u8>, OwnedFd) {
        let mut body = vec![0; 16];
        body.extend([queues, entries].map(u16::to_le_bytes).concat());
        body.extend([0; 4]);
        let answer = self.ask(message::GET_INFLIGHT_FD, &body);
        (answer.body, answer.file.expect("memory comes with it"))
    }
}
