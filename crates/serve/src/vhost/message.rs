//! The messages of vhost-user as bytes, as far as this back end takes part. No I/O.
//!
//! A message has a header of three little-endian words of 32 bits (request, flags, bytes of the body), and a body. On x86-64
//! and little-endian ARM "native" is that.

use std::fmt;

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 12;
/// Bytes of the longest body that is accepted. A table of eight regions has 264.
pub(super) const MAX_BODY_BYTES: usize = 512;
/// Most memory regions of a table, as a front end without memory slots may send them.
pub(super) const MAX_REGIONS: usize = 8;
/// Most descriptors of a message.
pub(super) const MAX_FILES: usize = MAX_REGIONS;
/// Bytes of the configuration space that can be asked for.
pub(super) const MAX_CONFIG_BYTES: usize = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// In the number of a queue: no descriptor comes with the message.
const NO_FILE: u64 = 1 << 8;

/// Requests of the front end.
pub(super) mod request {
    pub(in crate::vhost) const GET_FEATURES: u32 = 1;
    pub(in crate::vhost) const SET_FEATURES: u32 = 2;
    pub(in crate::vhost) const SET_OWNER: u32 = 3;
    pub(in crate::vhost) const RESET_OWNER: u32 = 4;
    pub(in crate::vhost) const SET_MEM_TABLE: u32 = 5;
    pub(in crate::vhost) const SET_VRING_NUM: u32 = 8;
    pub(in crate::vhost) const SET_VRING_ADDR: u32 = 9;
    pub(in crate::vhost) const SET_VRING_BASE: u32 = 10;
    pub(in crate::vhost) const GET_VRING_BASE: u32 = 11;
    pub(in crate::vhost) const SET_VRING_KICK: u32 = 12;
    pub(in crate::vhost) const SET_VRING_CALL: u32 = 13;
    pub(in crate::vhost) const SET_VRING_ERR: u32 = 14;
    pub(in crate::vhost) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(in crate::vhost) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(in crate::vhost) const GET_QUEUE_NUM: u32 = 17;
    pub(in crate::vhost) const SET_VRING_ENABLE: u32 = 18;
    pub(in crate::vhost) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(in crate::vhost) const GET_CONFIG: u32 = 24;
    pub(in crate::vhost) const SET_CONFIG: u32 = 25;
    pub(in crate::vhost) const GET_INFLIGHT_FD: u32 = 31;
    pub(in crate::vhost) const SET_INFLIGHT_FD: u32 = 32;
}

/// Tells the front end that the configuration space has changed.
pub(super) const BACKEND_CONFIG_CHANGE: u32 = 2;

/// A message that has no meaning. The front end is disconnected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) request: u32,
    /// Whether the front end waits for an answer, if that was agreed.
    pub(super) need_reply: bool,
    /// Bytes of the body.
    pub(super) size: usize,
}

impl Header {
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Malformed> {
        let [request, flags, size] = [0, 4, 8].map(|at| u32_at(bytes, at));
        if flags & VERSION_MASK != VERSION || flags & REPLY != 0 {
            return Err(Malformed(format!("a message has the flags {flags:#x}")));
        }
        let size = size as usize;
        if size > MAX_BODY_BYTES {
            let why = format!(
                "message {request} has {size} bytes, and at most {MAX_BODY_BYTES} are allowed"
            );
            return Err(Malformed(why));
        }
        Ok(Header { request, need_reply: flags & NEED_REPLY != 0, size })
    }
}

/// The bytes of an answer to the front end.
pub(super) fn answer(request: u32, body: &[u8]) -> Vec<u8> {
    encode(request, VERSION | REPLY, body)
}

/// The bytes of a message to the front end that is no answer.
pub(super) fn tell(request: u32) -> Vec<u8> {
    encode(request, VERSION, &[])
}

fn encode(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let header = [request, flags, body.len() as u32].map(u32::to_le_bytes).concat();
    [&header, body].concat()
}

/// A region of a memory table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawRegion {
    /// The guest's physical address.
    pub(super) guest: u64,
    pub(super) len: u64,
    /// The front end's own address, by which it names rings.
    pub(super) user: u64,
    /// Where it begins in its file.
    pub(super) offset: u64,
}

/// The places of a ring, as addresses of the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawAddresses {
    pub(super) desc: u64,
    pub(super) used: u64,
    pub(super) avail: u64,
}

/// The measures of a table of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawInflight {
    pub(super) bytes: u64,
    pub(super) offset: u64,
    pub(super) queues: u16,
    pub(super) queue_size: u16,
}

impl RawInflight {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = [self.bytes, self.offset].map(u64::to_le_bytes).concat();
        body.extend([self.queues, self.queue_size].map(u16::to_le_bytes).concat());
        // As C lays the structure out.
        body.extend([0; 4]);
        body
    }
}

/// A message of the front end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<RawRegion>),
    SetVringNum { queue: u32, value: u32 },
    SetVringAddr { queue: u32, addresses: RawAddresses },
    SetVringBase { queue: u32, value: u32 },
    GetVringBase { queue: u32 },
    SetVringKick { queue: u32 },
    SetVringCall { queue: u32 },
    SetVringErr { queue: u32 },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable { queue: u32, enabled: bool },
    SetBackendReqFd,
    GetConfig { offset: u32, size: u32, flags: u32 },
    SetConfig,
    GetInflight(RawInflight),
    SetInflight(RawInflight),
}

impl Message {
    /// A message and how many descriptors it must have, at least and at most.
    pub(super) fn decode(request: u32, body: &[u8]) -> Result<(Message, [usize; 2]), Malformed> {
        use self::request as r;
        let exact = |len: usize| match body.len() == len {
            true => Ok(body),
            false => Err(Malformed(format!(
                "message {request} has {} bytes instead of {len}",
                body.len()
            ))),
        };
        let number = || exact(8).map(|body| u64_at(body, 0));
        let state = || exact(8).map(|body| (u32_at(body, 0), u32_at(body, 4)));
        let inflight = || {
            // With or without the four bytes that C adds.
            if body.len() != 20 {
                exact(24)?
            } else {
                body
            };
            let (queues, queue_size) = (u16_at(body, 16), u16_at(body, 18));
            Ok(RawInflight { bytes: u64_at(body, 0), offset: u64_at(body, 8), queues, queue_size })
        };
        // A descriptor comes, or the message says that none does.
        let vring = |optional: bool| {
            let value = number()?;
            let count = match value & NO_FILE {
                0 => [1, 1],
                _ if optional => [0, 0],
                _ => return Err(Malformed(format!("message {request} has no descriptor"))),
            };
            match value & !(NO_FILE | 0xff) {
                0 => Ok(((value & 0xff) as u32, count)),
                _ => Err(Malformed(format!("message {request} is for queue {value:#x}"))),
            }
        };
        let none = [0, 0];
        let empty = |message: Message| exact(0).map(|_| (message, none));
        match request {
            r::GET_FEATURES => empty(Message::GetFeatures),
            r::SET_FEATURES => Ok((Message::SetFeatures(number()?), none)),
            r::SET_OWNER => empty(Message::SetOwner),
            r::RESET_OWNER => empty(Message::ResetOwner),
            r::SET_MEM_TABLE => {
                let regions = regions(body)?;
                let count = [regions.len(); 2];
                Ok((Message::SetMemTable(regions), count))
            }
            r::SET_VRING_NUM => {
                state().map(|(queue, value)| (Message::SetVringNum { queue, value }, none))
            }
            r::SET_VRING_ADDR => {
                let (body, queue) = (exact(40)?, u32_at(body, 0));
                let [desc, used, avail] = [8, 16, 24].map(|at| u64_at(body, at));
                let addresses = RawAddresses { desc, used, avail };
                Ok((Message::SetVringAddr { queue, addresses }, none))
            }
            r::SET_VRING_BASE => {
                state().map(|(queue, value)| (Message::SetVringBase { queue, value }, none))
            }
            r::GET_VRING_BASE => state().map(|(queue, _)| (Message::GetVringBase { queue }, none)),
            r::SET_VRING_KICK => {
                vring(false).map(|(queue, count)| (Message::SetVringKick { queue }, count))
            }
            r::SET_VRING_CALL => {
                vring(true).map(|(queue, count)| (Message::SetVringCall { queue }, count))
            }
            r::SET_VRING_ERR => {
                vring(true).map(|(queue, count)| (Message::SetVringErr { queue }, count))
            }
            r::GET_PROTOCOL_FEATURES => empty(Message::GetProtocolFeatures),
            r::SET_PROTOCOL_FEATURES => Ok((Message::SetProtocolFeatures(number()?), none)),
            r::GET_QUEUE_NUM => empty(Message::GetQueueNum),
            r::SET_VRING_ENABLE => {
                let (queue, value) = state()?;
                Ok((Message::SetVringEnable { queue, enabled: value != 0 }, none))
            }
            r::SET_BACKEND_REQ_FD => {
                // QEMU sends it without a body; the specification has a number.
                if !body.is_empty() {
                    number()?;
                }
                Ok((Message::SetBackendReqFd, [1, 1]))
            }
            r::GET_CONFIG | r::SET_CONFIG => {
                if body.len() < 12 {
                    return Err(Malformed(format!("message {request} has {} bytes", body.len())));
                }
                let [offset, size, flags] = [0, 4, 8].map(|at| u32_at(body, at));
                if size as usize > MAX_CONFIG_BYTES || body.len() != 12 + size as usize {
                    let why =
                        format!("message {request} is about {size} bytes, and has {}", body.len());
                    return Err(Malformed(why));
                }
                let get = Message::GetConfig { offset, size, flags };
                Ok((if request == r::GET_CONFIG { get } else { Message::SetConfig }, none))
            }
            r::GET_INFLIGHT_FD => Ok((Message::GetInflight(inflight()?), none)),
            r::SET_INFLIGHT_FD => Ok((Message::SetInflight(inflight()?), [1, 1])),
            _ => Err(Malformed(format!("message {request} was not agreed on"))),
        }
    }
}

fn regions(body: &[u8]) -> Result<Vec<RawRegion>, Malformed> {
    if body.len() < 8 {
        return Err(Malformed(format!("a memory table has {} bytes", body.len())));
    }
    let count = u32_at(body, 0) as usize;
    if count > MAX_REGIONS || body.len() < 8 + 32 * count {
        let why = format!(
            "a memory table of {count} regions has {} bytes; at most {MAX_REGIONS} are allowed",
            body.len()
        );
        return Err(Malformed(why));
    }
    let region = |raw: &[u8]| {
        let [guest, len, user, offset] = [0, 8, 16, 24].map(|at| u64_at(raw, at));
        RawRegion { guest, len, user, offset }
    };
    Ok(body[8..].chunks_exact(32).take(count).map(region).collect())
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
