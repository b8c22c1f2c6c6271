//! Numbers and bytes of the interface (`linux/ublk_cmd.h`). All numbers are of the host's byte order.

/// Most tags of a queue.
pub const MAX_DEPTH: u16 = 4096;
/// Bytes of a request's description.
pub(super) const DESCRIPTION_BYTES: usize = 24;
/// Where data are on the character device.
const DATA_AT: u64 = 0x8000_0000;
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = 41;

/// Features of a device.
pub mod flag {
    /// A device whose server has gone waits for another one.
    pub const RECOVERY: u64 = 1 << 3;
    /// The next server also gets the requests that the dead one had taken.
    pub const REISSUE: u64 = 1 << 4;
    /// Commands are numbered as ioctls are.
    pub const IOCTL_NUMBERS: u64 = 1 << 6;
    /// Data are read from and written to the character device.
    pub const USER_COPY: u64 = 1 << 7;
}

/// All features that this program needs.
pub const USER_COPY: u64 = flag::RECOVERY | flag::REISSUE | flag::IOCTL_NUMBERS | flag::USER_COPY;

/// Whether an ioctl takes bytes and gives some (3), or gives only (2).
const fn number(direction: u32, bytes: u32, number: u32) -> u32 {
    direction << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

const fn control(direction: u32, command: u32) -> u32 {
    number(direction, CONTROL_BYTES as u32, command)
}

/// Bytes of a control command.
pub(super) const CONTROL_BYTES: usize = 32;
pub(super) const GET_INFO: u32 = control(2, 0x02);
pub(super) const ADD: u32 = control(3, 0x04);
pub(super) const DELETE: u32 = control(3, 0x05);
pub(super) const START: u32 = control(3, 0x06);
pub(super) const STOP: u32 = control(3, 0x07);
pub(super) const SET_PARAMETERS: u32 = control(3, 0x08);
pub(super) const GET_PARAMETERS: u32 = control(2, 0x09);
pub(super) const BEGIN_RECOVERY: u32 = control(3, 0x10);
pub(super) const END_RECOVERY: u32 = control(3, 0x11);

/// Bytes of a command on a tag.
pub(super) const TAG_BYTES: usize = 16;
pub(super) const FETCH: u32 = number(3, TAG_BYTES as u32, 0x20);
pub(super) const COMMIT_AND_FETCH: u32 = number(3, TAG_BYTES as u32, 0x21);

/// A control command that is for no queue, with a buffer and a number.
pub(super) fn control_bytes(device: u32, buffer: (u64, u16), value: u64) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[..4].copy_from_slice(&device.to_ne_bytes());
    bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    bytes[6..8].copy_from_slice(&buffer.1.to_ne_bytes());
    bytes[8..16].copy_from_slice(&buffer.0.to_ne_bytes());
    bytes[16..24].copy_from_slice(&value.to_ne_bytes());
    bytes
}

/// A command on a tag. It names no memory.
pub(super) fn tag_bytes(queue: u16, tag: u16, result: i32) -> [u8; TAG_BYTES] {
    let mut bytes = [0; TAG_BYTES];
    bytes[..2].copy_from_slice(&queue.to_ne_bytes());
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes
}

/// Where byte `at` of a request's data is on the character device.
pub(super) fn data_at(queue: u16, tag: u16, at: u64) -> u64 {
    DATA_AT + (u64::from(queue) << QUEUE_SHIFT | u64::from(tag) << TAG_SHIFT | at)
}

/// Where the descriptions of a queue begin on the character device: each has room for the most tags.
pub(super) fn descriptions_at(queue: u16, page_bytes: usize) -> u64 {
    let all = (usize::from(MAX_DEPTH) * DESCRIPTION_BYTES).next_multiple_of(page_bytes);
    u64::from(queue) * all as u64
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]))
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Flush what was answered.
    Flush,
    /// The range is not used any more.
    Discard,
    /// Another one, by its number.
    Other(u8),
}

/// The description of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its operation.
    pub operation: Operation,
    /// The first sector of 512 bytes.
    pub sector: u64,
    /// The number of them.
    pub sectors: u32,
}

impl Description {
    /// Of these bytes.
    pub(super) fn of(bytes: &[u8; DESCRIPTION_BYTES]) -> Description {
        let operation = match operation_of(u32_at(bytes, 0)) {
            0 => Operation::Read,
            1 => Operation::Write,
            2 => Operation::Flush,
            3 => Operation::Discard,
            other => Operation::Other(other),
        };
        Description { operation, sectors: u32_at(bytes, 4), sector: u64_at(bytes, 8) }
    }
}

/// The operation, without its flags.
fn operation_of(operation_and_flags: u32) -> u8 {
    operation_and_flags as u8
}

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is not started.
    Dead,
    /// It is served.
    Live,
    /// Its server has gone, and requests wait for another one.
    Quiesced,
    /// Another one.
    Other(u16),
}

/// The driver's description of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Number of queues.
    pub queues: u16,
    /// Tags of each.
    pub depth: u16,
    /// Its state.
    pub state: State,
    /// Most bytes of a request.
    pub max_bytes: u32,
    /// Its number.
    pub number: u32,
    /// The process that serves it.
    pub pid: i32,
    /// Its features.
    pub flags: u64,
    /// A value of the server, which the driver keeps.
    pub own: u64,
}

/// Bytes of [`Info`].
pub(super) const INFO_BYTES: usize = 64;

impl Info {
    pub(super) fn to_bytes(self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        bytes[..2].copy_from_slice(&self.queues.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.depth.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.max_bytes.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.number.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.own.to_ne_bytes());
        bytes
    }

    pub(super) fn of(bytes: &[u8; INFO_BYTES]) -> Info {
        let state = match u16_at(bytes, 4) {
            0 => State::Dead,
            1 => State::Live,
            2 => State::Quiesced,
            other => State::Other(other),
        };
        Info {
            queues: u16_at(bytes, 0),
            depth: u16_at(bytes, 2),
            state,
            max_bytes: u32_at(bytes, 8),
            number: u32_at(bytes, 12),
            pid: u32_at(bytes, 16).cast_signed(),
            flags: u64_at(bytes, 24),
            own: u64_at(bytes, 32),
        }
    }
}

/// The properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Whether nothing may be written.
    pub read_only: bool,
    /// Its size in sectors of 512 bytes.
    pub sectors: u64,
    /// Most sectors of a read or write.
    pub max_sectors: u32,
    /// The best size of a request in bytes, a power of two of at least 512.
    pub best_bytes: u32,
    /// The granularity of discards in bytes. `None`: there are none.
    pub discards: Option<u32>,
}

/// Bytes of [`Parameters`]; those of the kernel may be more.
pub(super) const PARAMETER_BYTES: usize = 60;
const BASIC: u32 = 1;
const DISCARD: u32 = 2;
const READ_ONLY: u32 = 1;
const VOLATILE_CACHE: u32 = 4;
const SECTOR_SHIFT: u8 = 9;
/// Most sectors of a discard: 1 GiB.
const DISCARD_SECTORS: u32 = 2 << 20;

impl Parameters {
    pub(super) fn to_bytes(self) -> [u8; PARAMETER_BYTES] {
        let mut bytes = [0; PARAMETER_BYTES];
        let mut put =
            |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        let types = BASIC | if self.discards.is_some() { DISCARD } else { 0 };
        put(0, PARAMETER_BYTES as u32);
        put(4, types);
        // Without the cache the kernel sends no flushes.
        put(8, VOLATILE_CACHE | if self.read_only { READ_ONLY } else { 0 });
        put(16, self.max_sectors);
        if let Some(granularity) = self.discards {
            put(44, granularity);
            put(48, DISCARD_SECTORS);
            // Number of ranges of a discard. The upper half is reserved, on either byte order it is a number of 16 bits.
            bytes[56..58].copy_from_slice(&1u16.to_ne_bytes());
        }
        let best = self.best_bytes.max(512).ilog2() as u8;
        bytes[12..16].copy_from_slice(&[SECTOR_SHIFT, best, best, SECTOR_SHIFT]);
        bytes[24..32].copy_from_slice(&self.sectors.to_ne_bytes());
        bytes
    }

    /// The size in sectors that these bytes say.
    pub(super) fn sectors_of(bytes: &[u8; PARAMETER_BYTES]) -> u64 {
        u64_at(bytes, 24)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernel's header computes them.
    #[test]
    fn commands_have_the_numbers_of_the_header() {
        assert_eq!((ADD, GET_INFO), (0xc020_7504, 0x8020_7502));
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
        assert_eq!(data_at(0, 0, 0), 0x8000_0000);
        assert_eq!(data_at(1, 3, 512), 0x8000_0000 + (1 << 41) + (3 << 25) + 512);
        assert_eq!(descriptions_at(2, 4096), 2 * 98_304);
    }

    #[test]
    fn what_is_said_of_a_device_is_where_the_header_has_it() {
        let info = Info {
            queues: 2,
            depth: 64,
            state: State::Dead,
            max_bytes: 1 << 20,
            number: u32::MAX,
            pid: 0,
            flags: USER_COPY,
            own: 0x1122_3344_5566_7788,
        };
        let mut bytes = info.to_bytes();
        assert_eq!(Info::of(&bytes), info);
        bytes[4] = 2;
        bytes[16] = 7;
        assert_eq!((Info::of(&bytes).state, Info::of(&bytes).pid), (State::Quiesced, 7));
        let parameters = Parameters {
            read_only: true,
            sectors: 1000,
            max_sectors: 2048,
            best_bytes: 4096,
            discards: Some(65_536),
        };
        let bytes = parameters.to_bytes();
        assert_eq!((u32_at(&bytes, 0), u32_at(&bytes, 4), u32_at(&bytes, 8)), (60, 3, 5));
        assert_eq!((bytes[12], bytes[13], u32_at(&bytes, 16)), (9, 12, 2048));
        assert_eq!((u64_at(&bytes, 24), Parameters::sectors_of(&bytes)), (1000, 1000));
        assert_eq!((u32_at(&bytes, 40), u32_at(&bytes, 44), u16_at(&bytes, 56)), (0, 65_536, 1));
        let plain = Parameters { discards: None, read_only: false, ..parameters }.to_bytes();
        assert_eq!((u32_at(&plain, 4), u32_at(&plain, 8), u32_at(&plain, 48)), (1, 4, 0));
    }

    #[test]
    fn a_description_is_read_without_its_flags() {
        let mut bytes = [0; DESCRIPTION_BYTES];
        bytes[..4].copy_from_slice(&(1u32 | 1 << 13).to_ne_bytes());
        bytes[4..8].copy_from_slice(&8u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&77u64.to_ne_bytes());
        let expected = Description { operation: Operation::Write, sector: 77, sectors: 8 };
        assert_eq!(Description::of(&bytes), expected);
        bytes[0] = 5;
        assert_eq!(Description::of(&bytes).operation, Operation::Other(5));
    }
}
