//! Messages of generic netlink and of its family `nbd`, as bytes (linux/netlink.h, linux/genetlink.h,
//! linux/nbd-netlink.h). Numbers are in the host's order.

/// The message that ends a question: an error, or success.
const ERROR: u16 = 2;
/// The family that knows all others.
const CONTROL: u16 = 16;

const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;

const HEADER_BYTES: usize = 16;
const GENERIC_BYTES: usize = 4;
const ATTRIBUTE_BYTES: usize = 4;
const NESTED: u16 = 1 << 15;
/// The two highest bits of an attribute's kind say how it is stored.
const KIND: u16 = !(3 << 14);

/// `CTRL_CMD_GETFAMILY`, and its attributes.
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// The commands of the family `nbd`.
pub(super) mod command {
    pub(in super::super) const CONNECT: u8 = 1;
    pub(in super::super) const DISCONNECT: u8 = 2;
    pub(in super::super) const RECONFIGURE: u8 = 3;
    pub(in super::super) const STATUS: u8 = 5;
}

/// The attributes of the family `nbd`.
mod attribute {
    pub(super) const INDEX: u16 = 1;
    pub(super) const SIZE_BYTES: u16 = 2;
    pub(super) const BLOCK_BYTES: u16 = 3;
    pub(super) const TIMEOUT_S: u16 = 4;
    pub(super) const SERVER_FLAGS: u16 = 5;
    pub(super) const SOCKETS: u16 = 7;
    pub(super) const DEAD_TIMEOUT_S: u16 = 8;
    pub(super) const DEVICES: u16 = 9;
    pub(super) const IDENTIFIER: u16 = 10;
    /// An item of `SOCKETS` or `DEVICES`.
    pub(super) const ITEM: u16 = 1;
    pub(super) const SOCKET: u16 = 1;
    pub(super) const DEVICE_INDEX: u16 = 1;
    pub(super) const DEVICE_CONNECTED: u16 = 2;
}

/// A device that is to be made, or its new connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection<'a> {
    /// Descriptors of stream sockets on which the export was chosen, for replies without chunks.
    pub sockets: &'a [i32],
    /// The size of the device in bytes.
    pub bytes: u64,
    /// Bytes of a block: 512 to 4096, a power of two.
    pub block_bytes: u64,
    /// The flags that the server has told.
    pub server_flags: u64,
    /// Seconds after which a request is sent again on another connection. 0: it is waited for without limit.
    pub timeout_s: u64,
    /// Seconds for which requests wait for a connection, when there is none.
    pub dead_timeout_s: u64,
    /// A text of the caller's, which sysfs shows.
    pub identifier: &'a str,
}

/// A request that is made.
pub(super) struct Message(Vec<u8>);

impl Message {
    fn new(family: u16, command: u8, version: u8, sequence: u32) -> Message {
        let mut bytes = vec![0; 4];
        bytes.extend(family.to_ne_bytes());
        bytes.extend((REQUEST | ACKNOWLEDGE).to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        bytes.extend([command, version, 0, 0]);
        Message(bytes)
    }

    /// Adds an attribute, and the zeros behind it.
    fn add(&mut self, kind: u16, data: &[u8]) {
        // The longest is a name of 128 bytes, or four nested sockets.
        self.0.extend(((ATTRIBUTE_BYTES + data.len()) as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(data);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn add_text(&mut self, kind: u16, text: &str) {
        let bytes = [text.as_bytes(), &[0]].concat();
        self.add(kind, &bytes);
    }

    /// The bytes, with their number in front.
    pub(super) fn done(mut self) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0
    }
}

/// Asks for the number of a family.
pub(super) fn get_family(name: &str, sequence: u32) -> Message {
    let mut message = Message::new(CONTROL, GET_FAMILY, 1, sequence);
    message.add_text(FAMILY_NAME, name);
    message
}

/// Asks for a device, for a new one if there is no index.
pub(super) fn connect(family: u16, sequence: u32, wanted: &Connection<'_>) -> Message {
    let mut message = Message::new(family, command::CONNECT, 1, sequence);
    message.add(attribute::SIZE_BYTES, &wanted.bytes.to_ne_bytes());
    message.add(attribute::BLOCK_BYTES, &wanted.block_bytes.to_ne_bytes());
    message.add(attribute::SERVER_FLAGS, &wanted.server_flags.to_ne_bytes());
    connection(&mut message, wanted);
    message
}

/// Gives a device new connections in the place of dead ones.
pub(super) fn reconfigure(
    family: u16,
    sequence: u32,
    index: u32,
    wanted: &Connection<'_>,
) -> Message {
    let mut message = Message::new(family, command::RECONFIGURE, 1, sequence);
    message.add(attribute::INDEX, &index.to_ne_bytes());
    connection(&mut message, wanted);
    message
}

fn connection(message: &mut Message, wanted: &Connection<'_>) {
    message.add(attribute::TIMEOUT_S, &wanted.timeout_s.to_ne_bytes());
    message.add(attribute::DEAD_TIMEOUT_S, &wanted.dead_timeout_s.to_ne_bytes());
    message.add_text(attribute::IDENTIFIER, wanted.identifier);
    let mut items = Message(Vec::new());
    for socket in wanted.sockets {
        let mut item = Message(Vec::new());
        item.add(attribute::SOCKET, &socket.to_ne_bytes());
        items.add(attribute::ITEM | NESTED, &item.0);
    }
    message.add(attribute::SOCKETS | NESTED, &items.0);
}

/// Asks for the end of a device.
pub(super) fn disconnect(family: u16, sequence: u32, index: u32) -> Message {
    let mut message = Message::new(family, command::DISCONNECT, 1, sequence);
    message.add(attribute::INDEX, &index.to_ne_bytes());
    message
}

/// Asks which devices are connected.
pub(super) fn status(family: u16, sequence: u32) -> Message {
    Message::new(family, command::STATUS, 1, sequence)
}

/// A message of the kernel's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// The question is answered whole; otherwise its error.
    Ended(Result<(), i32>),
    /// The attributes of an answer.
    Answer(Vec<u8>),
}

/// The messages of a datagram that answer the question of this number.
pub(super) fn parse(mut datagram: &[u8], sequence: u32) -> Vec<Said> {
    let mut said = Vec::new();
    while let Some((header, _)) = datagram.split_at_checked(HEADER_BYTES) {
        let len = u32_at(header, 0) as usize;
        let Some((message, rest)) = datagram.split_at_checked(len.max(HEADER_BYTES)) else { break };
        datagram = rest.get(len.next_multiple_of(4) - len..).unwrap_or_default();
        if u32_at(message, 8) != sequence {
            continue;
        }
        let body = &message[HEADER_BYTES..];
        match u16_at(message, 4) {
            ERROR if body.len() >= 4 => {
                said.push(Said::Ended(match i32::from_ne_bytes(array(body)) {
                    0 => Ok(()),
                    errno => Err(errno.wrapping_neg()),
                }))
            }
            ERROR => break,
            _ => said.push(Said::Answer(body.get(GENERIC_BYTES..).unwrap_or_default().to_vec())),
        }
    }
    said
}

/// The attributes of bytes, by kind, as far as they are whole.
fn attributes(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while bytes.len() >= ATTRIBUTE_BYTES {
        let (len, kind) = (usize::from(u16_at(bytes, 0)), u16_at(bytes, 2) & KIND);
        let Some(data) = bytes.get(ATTRIBUTE_BYTES..len) else { break };
        found.push((kind, data));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn attribute_of(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).into_iter().find_map(|(kind, data)| (kind == wanted).then_some(data))
}

/// The number of the family in an answer.
pub(super) fn family_id(answer: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(attribute_of(answer, FAMILY_ID)?.try_into().ok()?))
}

/// The index of the device in an answer.
pub(super) fn index(answer: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(attribute_of(answer, attribute::INDEX)?.try_into().ok()?))
}

/// The devices in an answer, and whether each is connected.
pub(super) fn devices(answer: &[u8]) -> Vec<(u32, bool)> {
    let list = attribute_of(answer, attribute::DEVICES).unwrap_or_default();
    let device = |(_, item)| {
        let index = attribute_of(item, attribute::DEVICE_INDEX)?.try_into().ok()?;
        let connected = attribute_of(item, attribute::DEVICE_CONNECTED)?;
        Some((u32::from_ne_bytes(index), connected.first() == Some(&1)))
    };
    attributes(list).into_iter().filter_map(device).collect()
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.first_chunk().copied().unwrap_or([0; N])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(array(&bytes[at..]))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(array(&bytes[at..]))
}
