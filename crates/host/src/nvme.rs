//! NVMe namespaces by their character devices (`/dev/ngXnY`): what they are, and the commands that
//! read and write them (NVM Express base and NVM command set specifications).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;

use rustix::fs::{fstat, major, minor};

use crate::fence::lun::{Abilities, Reservation};
use crate::names;

/// `_IO('N', 0x40)` of linux/nvme_ioctl.h: the namespace's number.
const IOCTL_ID: libc::Ioctl = 0x4e40;
/// `_IOWR('N', 0x41, struct nvme_admin_cmd)`.
const IOCTL_ADMIN: libc::Ioctl = 0xc048_4e41_u32 as libc::Ioctl;
/// `_IOWR('N', 0x43, struct nvme_passthru_cmd)`: a command for the data of a namespace, whose answer is waited for.
const IOCTL_IO: libc::Ioctl = 0xc048_4e43_u32 as libc::Ioctl;
/// `_IOWR('N', 0x80, struct nvme_uring_cmd)`: a command whose data is in one piece.
pub const URING_IO: u32 = 0xc048_4e80;
/// `_IOWR('N', 0x81, struct nvme_uring_cmd)`: a command whose data is in vectors.
pub const URING_IO_VEC: u32 = 0xc048_4e81;

/// Identify, an admin command.
const IDENTIFY: u8 = 0x06;
const IDENTIFY_BYTES: usize = 4096;

const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const DATASET_MANAGEMENT: u8 = 0x09;
/// Dataset management: the ranges may be deallocated.
const DEALLOCATE: u32 = 1 << 2;

const PAGE_BYTES: u64 = 4096;
/// Blocks that one command can name.
const MAX_BLOCKS: u64 = 1 << 16;

/// `struct nvme_passthru_cmd` and `struct nvme_uring_cmd`, which differ in the last word only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Command {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    dwords_2_3: [u32; 2],
    metadata: u64,
    /// Where the data is, or its vectors.
    pub address: u64,
    metadata_bytes: u32,
    /// Bytes of data, or how many vectors.
    pub data_len: u32,
    dwords_10_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<Command>() == 72);

impl Command {
    /// The 80 bytes that follow the header of a submission entry of 128 bytes.
    pub fn to_bytes(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        put(&[self.opcode, self.flags]);
        put(&self.reserved.to_ne_bytes());
        put(&self.namespace.to_ne_bytes());
        self.dwords_2_3.iter().for_each(|d| put(&d.to_ne_bytes()));
        put(&self.metadata.to_ne_bytes());
        put(&self.address.to_ne_bytes());
        put(&self.metadata_bytes.to_ne_bytes());
        put(&self.data_len.to_ne_bytes());
        self.dwords_10_15.iter().for_each(|d| put(&d.to_ne_bytes()));
        put(&self.timeout_ms.to_ne_bytes());
        put(&self.result.to_ne_bytes());
        bytes
    }
}

/// A namespace, as far as reading and writing it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    id: u32,
    /// Its size.
    pub bytes: u64,
    /// Bytes of a logical block.
    pub block_bytes: u32,
    /// Most bytes that one command transfers.
    pub max_transfer_bytes: u32,
    /// Whether blocks can be deallocated.
    pub deallocates: bool,
    /// Whether the controller refuses writes.
    pub write_protected: bool,
}

impl Namespace {
    /// Asks the controller about the namespace of an open `/dev/ngXnY`.
    ///
    /// # Errors
    /// The kernel's error; `Unsupported` for formats with metadata in the data.
    pub fn of(file: BorrowedFd<'_>) -> io::Result<Namespace> {
        let id = id_of(file)?;
        let namespace = identify(file, id, 0)?;
        let controller = identify(file, 0, 1)?;
        let mut found = decode(id, &namespace, &controller)?;
        if let Some(limit) = kernel_limit_bytes(file) {
            found.max_transfer_bytes = found.max_transfer_bytes.min(limit).max(found.block_bytes);
        }
        Ok(found)
    }

    /// A namespace of no controller, for tests of the engine that makes its commands.
    pub fn pretended(bytes: u64, block_bytes: u32, max_transfer_bytes: u32) -> Namespace {
        Namespace {
            id: 1,
            bytes,
            block_bytes,
            max_transfer_bytes,
            deallocates: true,
            write_protected: false,
        }
    }

    /// The first block and the number of blocks of a range, or the errno of what is wrong with it.
    fn blocks(&self, offset: u64, bytes: u64) -> Result<(u64, u64), i32> {
        let block = u64::from(self.block_bytes);
        match offset.is_multiple_of(block) && bytes.is_multiple_of(block) && bytes > 0 {
            true => Ok((offset / block, bytes / block)),
            false => Err(libc::EINVAL),
        }
    }

    /// The command that reads or writes `bytes` at `offset`. The caller sets the address of the data.
    ///
    /// # Errors
    /// EINVAL for parts of a block and for more than one command transfers.
    pub fn transfer(&self, write: bool, offset: u64, bytes: u64) -> Result<Command, i32> {
        let (first, blocks) = self.blocks(offset, bytes)?;
        if blocks > MAX_BLOCKS || bytes > u64::from(self.max_transfer_bytes) {
            return Err(libc::EINVAL);
        }
        Ok(Command {
            opcode: if write { WRITE } else { READ },
            namespace: self.id,
            dwords_10_15: [first as u32, (first >> 32) as u32, blocks as u32 - 1, 0, 0, 0],
            ..Command::default()
        })
    }

    /// The command that makes written data durable.
    pub fn flush(&self) -> Command {
        Command { opcode: FLUSH, namespace: self.id, ..Command::default() }
    }

    /// The command that deallocates a range, and the list of ranges that it reads from memory.
    ///
    /// # Errors
    /// EINVAL for parts of a block and for more than 2^32 blocks.
    pub fn deallocate(&self, offset: u64, bytes: u64) -> Result<(Command, [u64; 2]), i32> {
        let (first, blocks) = self.blocks(offset, bytes)?;
        let blocks = u32::try_from(blocks).map_err(|_| libc::EINVAL)?;
        let command = Command {
            opcode: DATASET_MANAGEMENT,
            namespace: self.id,
            data_len: 16,
            dwords_10_15: [0, DEALLOCATE, 0, 0, 0, 0],
            ..Command::default()
        };
        // Attributes (none) in the low half, the number of blocks in the high one.
        Ok((command, [u64::from(blocks) << 32, first]))
    }
}

/// The errno for the status of a command that the controller has ended with an error.
pub fn errno_of_status(status: i32) -> i32 {
    // The status code type and the code; above them is what the kernel uses for retries.
    match status & 0x7ff {
        0x001 => libc::EOPNOTSUPP,
        0x002 => libc::EINVAL,
        0x020 => libc::EROFS,
        0x081 => libc::ENOSPC,
        // Not ready, or a path error: to be tried again.
        0x082 | 0x300..=0x3ff => libc::EAGAIN,
        _ => libc::EIO,
    }
}

fn identify(file: BorrowedFd<'_>, namespace: u32, what: u32) -> io::Result<[u8; IDENTIFY_BYTES]> {
    let mut data = [0; IDENTIFY_BYTES];
    let mut command = Command {
        opcode: IDENTIFY,
        namespace,
        address: data.as_mut_ptr() as u64,
        data_len: IDENTIFY_BYTES as u32,
        dwords_10_15: [what, 0, 0, 0, 0, 0],
        ..Command::default()
    };
    // SAFETY: the kernel reads and writes the command, and writes that many bytes of `data`; both
    // outlive the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), IOCTL_ADMIN, &raw mut command) } {
        0 => Ok(data),
        status if status > 0 => Err(io::Error::from_raw_os_error(errno_of_status(status))),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Get Features, an admin command, and the feature Reservation Persistence.
const GET_FEATURES: u8 = 0x0a;
const RESERVATION_PERSISTENCE: u32 = 0x83;
const RESERVATION_REPORT: u8 = 0x0e;
/// Room for 40 controllers in a report.
const REPORT_BYTES: usize = 24 + 24 * 40;
/// The type Write Exclusive, Registrants Only.
const REGISTRANTS_ONLY: u8 = 3;

/// Sends a command, and returns its result.
fn send(file: BorrowedFd<'_>, request: libc::Ioctl, mut command: Command) -> io::Result<u32> {
    // SAFETY: the kernel reads and writes the command. Its data are memory of the caller's, who waits here.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut command) } {
        0 => Ok(command.result),
        status if status > 0 && matches!(status & 0x7ff, 0x001 | 0x002) => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "it has no reservations"))
        }
        status if status > 0 => Err(io::Error::from_raw_os_error(errno_of_status(status))),
        _ => Err(io::Error::last_os_error()),
    }
}

fn id_of(file: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: no argument, no memory.
    let id = unsafe { libc::ioctl(file.as_raw_fd(), IOCTL_ID) };
    u32::try_from(id).map_err(|_| io::Error::last_os_error())
}

/// The abilities of a namespace for reservations. Its identity names them; the feature says whether reservations
/// outlive a power cut.
pub(crate) fn reservation_abilities(file: BorrowedFd<'_>) -> io::Result<Abilities> {
    let namespace = id_of(file)?;
    let can = identify(file, namespace, 0)?[31];
    if can == 0 {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "it has no reservations"));
    }
    let dwords_10_15 = [RESERVATION_PERSISTENCE, 0, 0, 0, 0, 0];
    let command = Command { opcode: GET_FEATURES, namespace, dwords_10_15, ..Command::default() };
    let persists = send(file, IOCTL_ADMIN, command)? & 1 != 0;
    Ok(Abilities { has_type: can & 1 << 3 != 0, can_persist: can & 1 != 0, persists })
}

/// The reservation of a namespace, and the keys of all registered controllers.
pub(crate) fn reservations(file: BorrowedFd<'_>) -> io::Result<(Option<Reservation>, Vec<u64>)> {
    let mut data = [0; REPORT_BYTES];
    let command = Command {
        opcode: RESERVATION_REPORT,
        namespace: id_of(file)?,
        address: data.as_mut_ptr() as u64,
        data_len: REPORT_BYTES as u32,
        dwords_10_15: [REPORT_BYTES as u32 / 4 - 1, 0, 0, 0, 0, 0],
        ..Command::default()
    };
    send(file, IOCTL_IO, command)?;
    Ok(decode_report(&data))
}

fn decode_report(data: &[u8; REPORT_BYTES]) -> (Option<Reservation>, Vec<u64>) {
    let count = usize::from(u16::from_le_bytes([data[5], data[6]]));
    let controllers = data[24..].as_chunks::<24>().0.iter().take(count);
    let key = |one: &[u8; 24]| u64::from_le_bytes(std::array::from_fn(|i| one[16 + i]));
    let holder = controllers.clone().find(|one| one[2] & 1 != 0);
    let reservation = holder
        .filter(|_| data[4] != 0)
        .map(|one| Reservation { key: key(one), is_ours_by_type: data[4] == REGISTRANTS_ONLY });
    (reservation, controllers.map(key).collect())
}

fn decode(
    id: u32,
    namespace: &[u8; IDENTIFY_BYTES],
    controller: &[u8; IDENTIFY_BYTES],
) -> io::Result<Namespace> {
    let refuse = |text: &str| Err(io::Error::new(io::ErrorKind::Unsupported, text));
    let blocks = u64::from_le_bytes(std::array::from_fn(|i| namespace[i]));
    let format = usize::from((namespace[26] & 0xf) | (namespace[26] >> 5 & 3) << 4);
    let at = 128 + 4 * format;
    if namespace[at] != 0 || namespace[at + 1] != 0 {
        return refuse("its blocks carry metadata");
    }
    let shift = u32::from(namespace[at + 2]);
    if !(9..=12).contains(&shift) {
        return refuse("its blocks are neither of 512 nor of up to 4096 bytes");
    }
    let Some(bytes) = blocks.checked_mul(1 << shift) else { return refuse("its size overflows") };
    // In units of the controller's smallest page, which is at least this; 0: no limit.
    let max = match controller[77] {
        0 => MAX_BLOCKS << shift,
        pages => (PAGE_BYTES << pages.min(20)).min(MAX_BLOCKS << shift),
    };
    let optional = u16::from_le_bytes([controller[520], controller[521]]);
    Ok(Namespace {
        id,
        bytes,
        block_bytes: 1 << shift,
        max_transfer_bytes: u32::try_from(max).unwrap_or(1 << 30),
        deallocates: optional & 1 << 2 != 0,
        write_protected: namespace[99] & 1 != 0,
    })
}

/// The block device of the same namespace: `nvme0n1` for `/dev/ng0n1`. Nothing: it is no
/// character device of a namespace.
pub fn block_device(device: (u32, u32)) -> Option<String> {
    let of = PathBuf::from(format!("/sys/dev/char/{}:{}", device.0, device.1));
    let subsystem = names::read_link(of.join("subsystem")).ok()?;
    if subsystem.file_name()? != "nvme-generic" {
        return None;
    }
    let name = names::read_link(of).ok()?;
    name.file_name()?.to_str()?.strip_prefix("ng").map(|rest| format!("nvme{rest}"))
}

/// The bytes that the kernel maps for one command: its own limit, and a page a segment.
fn kernel_limit_bytes(file: BorrowedFd<'_>) -> Option<u32> {
    let stat = fstat(file).ok()?;
    let name = block_device((major(stat.st_rdev), minor(stat.st_rdev)))?;
    let number = |what: &str| -> Option<u32> {
        let path = format!("/sys/block/{name}/queue/{what}");
        names::read_to_string(path).ok()?.trim().parse().ok()
    };
    let by_size = number("max_hw_sectors_kb")?.saturating_mul(1024);
    // One segment less: memory need not begin on a page.
    let by_segments = number("max_segments")?.saturating_sub(1).saturating_mul(PAGE_BYTES as u32);
    Some(by_size.min(by_segments))
}

/// Why commands for the namespace are not polled for, if they are not.
pub fn not_polled(file: impl AsFd) -> Option<&'static str> {
    if !has_poll_queues(file) {
        return Some("its driver has no poll queues (nvme.poll_queues=N)");
    }
    let release = names::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    (!polls_requests(&release)).then_some("polled NVMe commands need Linux 6.5")
}

/// Before Linux 6.5 a flush among polled commands ends by interrupt. It keeps there what runs then in
/// the place of what is polled. The kernel crashes if it polls first, or if the process is killed.
fn polls_requests(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.trim().parse::<u32>().ok());
    matches!((numbers.next(), numbers.next()), (Some(major), Some(minor)) if (major, minor) >= (6, 5))
}

/// Whether the namespace's driver has poll queues.
fn has_poll_queues(file: impl AsFd) -> bool {
    let Ok(stat) = fstat(file.as_fd()) else { return false };
    block_device((major(stat.st_rdev), minor(stat.st_rdev))).is_some_and(|name| {
        let path = format!("/sys/block/{name}/queue/io_poll");
        names::read_to_string(path).is_ok_and(|text| text.trim() == "1")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(shift: u8, mdts: u8) -> ([u8; IDENTIFY_BYTES], [u8; IDENTIFY_BYTES]) {
        let (mut namespace, mut controller) = ([0; IDENTIFY_BYTES], [0; IDENTIFY_BYTES]);
        namespace[..8].copy_from_slice(&1000u64.to_le_bytes());
        // The second format of the list.
        namespace[26] = 1;
        namespace[128 + 4 + 2] = shift;
        controller[77] = mdts;
        controller[520] = 1 << 2;
        (namespace, controller)
    }

    #[test]
    fn commands_are_polled_for_by_kernels_that_survive_a_flush_among_them() {
        for release in ["6.5.0", "6.12.94+deb13-amd64\n", "6.18-rc1", "10.0.0"] {
            assert!(polls_requests(release), "{release}");
        }
        for release in ["6.1.0-50-amd64\n", "6.4.16", "5.19.17", "6", "six.5", ""] {
            assert!(!polls_requests(release), "{release}");
        }
    }

    #[test]
    fn a_namespace_is_what_its_identity_pages_say() {
        let (namespace, controller) = pages(12, 5);
        let n = decode(3, &namespace, &controller).unwrap();
        assert_eq!((n.id, n.bytes, n.block_bytes), (3, 4_096_000, 4096));
        assert_eq!(
            (n.max_transfer_bytes, n.deallocates, n.write_protected),
            (128 << 10, true, false)
        );
        let (mut namespace, controller) = pages(9, 0);
        assert_eq!(decode(1, &namespace, &controller).unwrap().max_transfer_bytes, 32 << 20);
        namespace[128 + 4] = 8;
        assert!(decode(1, &namespace, &controller).unwrap_err().to_string().contains("metadata"));
        let (namespace, controller) = pages(13, 0);
        assert!(decode(1, &namespace, &controller).is_err());
    }

    #[test]
    fn commands_name_blocks_and_refuse_parts_of_them() {
        let (namespace, controller) = pages(12, 5);
        let n = decode(3, &namespace, &controller).unwrap();
        let bytes = n.transfer(true, 5 << 12, 8 << 12).unwrap().to_bytes();
        assert_eq!((bytes[0], bytes[4]), (WRITE, 3));
        assert_eq!((bytes[40], bytes[48]), (5, 7), "first block, and blocks less one");
        for (offset, len) in [(1, 4096), (0, 4095), (0, 0), (0, 256 << 10)] {
            assert_eq!(n.transfer(false, offset, len), Err(libc::EINVAL), "{offset}+{len}");
        }
        let (command, range) = n.deallocate(8192, 4096).unwrap();
        assert_eq!((command.opcode, command.data_len, range), (9, 16, [1 << 32, 2]));
        assert_eq!(n.flush().to_bytes()[0], FLUSH);
    }

    #[test]
    fn a_report_tells_the_holder_and_all_keys_and_is_bounded() {
        let mut data = [0; REPORT_BYTES];
        assert_eq!(decode_report(&data), (None, vec![]));
        (data[4], data[5]) = (REGISTRANTS_ONLY, 2);
        data[24 + 16] = 7;
        (data[48 + 2], data[48 + 16]) = (1, 9);
        let reservation = Reservation { key: 9, is_ours_by_type: true };
        assert_eq!(decode_report(&data), (Some(reservation), vec![7, 9]));
        data[4] = 1;
        assert!(!decode_report(&data).0.unwrap().is_ours_by_type);
        (data[5], data[6]) = (0xff, 0xff);
        assert_eq!(decode_report(&data).1.len(), 40);
    }

    #[test]
    fn a_status_becomes_the_error_that_callers_know() {
        assert_eq!(errno_of_status(0x4001), libc::EOPNOTSUPP);
        assert_eq!(errno_of_status(0x281), libc::EIO);
        assert_eq!(errno_of_status(0x4020), libc::EROFS);
        assert_eq!(errno_of_status(0x371), libc::EAGAIN);
    }
}
