//! PERSISTENT RESERVE IN of SCSI (SPC-4 6.16), and the registration at a target that forgets it, by `SG_IO`.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use super::lun::{Abilities, Outcome, Reservation};

/// `SG_IO` of scsi/sg.h.
const SG_IO: libc::Ioctl = 0x2285;
const FROM_DEVICE: i32 = -3;
const TO_DEVICE: i32 = -2;
const PERSISTENT_RESERVE_IN: u8 = 0x5e;
const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
const REGISTER: u8 = 0;
const REGISTER_ANYWAY: u8 = 6;
const READ_KEYS: u8 = 0;
const READ_RESERVATION: u8 = 1;
const REPORT_CAPABILITIES: u8 = 2;
/// The type Write Exclusive, Registrants Only.
const REGISTRANTS_ONLY: u8 = 5;

/// How long a command may take.
const TIMEOUT_MS: u32 = 20_000;
/// The first commands after an event are answered by that (UNIT ATTENTION).
const ATTENTIONS: u32 = 8;
const MAX_KEYS: usize = 1024;

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;
const CONFLICT: u8 = 0x18;
const ILLEGAL_REQUEST: u8 = 5;
const UNIT_ATTENTION: u8 = 6;

/// `struct sg_io_hdr`.
#[repr(C)]
struct Header {
    interface: i32,
    direction: i32,
    command_len: u8,
    sense_len: u8,
    vectors: u16,
    data_len: u32,
    data: *mut u8,
    command: *const u8,
    sense: *mut u8,
    timeout_ms: u32,
    flags: u32,
    pack_id: i32,
    user: *mut u8,
    status: u8,
    masked_status: u8,
    message_status: u8,
    sense_written: u8,
    host_status: u16,
    driver_status: u16,
    residual: i32,
    duration_ms: u32,
    info: u32,
}

pub(super) fn abilities(file: BorrowedFd<'_>) -> io::Result<Abilities> {
    decode_abilities(&ask(file, REPORT_CAPABILITIES, 8)?)
}

pub(super) fn reservation(file: BorrowedFd<'_>) -> io::Result<Option<Reservation>> {
    decode_reservation(&ask(file, READ_RESERVATION, 24)?)
}

pub(super) fn keys(file: BorrowedFd<'_>) -> io::Result<Vec<u64>> {
    decode_keys(&ask(file, READ_KEYS, 8 + 8 * MAX_KEYS)?)
}

/// REGISTER, or REGISTER AND IGNORE EXISTING KEY, without the wish that it outlives the target's restart: the kernel's own order
/// always has it, and a target that cannot grant it refuses.
pub(super) fn register(file: BorrowedFd<'_>, old: Option<u64>, new: u64) -> io::Result<Outcome> {
    let mut data = [0; 24];
    data[..8].copy_from_slice(&old.unwrap_or(0).to_be_bytes());
    data[8..16].copy_from_slice(&new.to_be_bytes());
    let action = if old.is_none() { REGISTER_ANYWAY } else { REGISTER };
    let command = [PERSISTENT_RESERVE_OUT, action, 0, 0, 0, 0, 0, 0, data.len() as u8, 0];
    match send(file, &command, TO_DEVICE, &mut data)? {
        (GOOD, ..) => Ok(Outcome::Done),
        (CONFLICT, ..) => Ok(Outcome::Conflict),
        (status, key, _) => Err(refused(status, key)),
    }
}

/// One question, whose answer has at most `len` bytes: those that the LUN has sent.
fn ask(file: BorrowedFd<'_>, action: u8, len: usize) -> io::Result<Vec<u8>> {
    let mut data = vec![0; len];
    let [high, low] = (len as u16).to_be_bytes();
    let command = [PERSISTENT_RESERVE_IN, action, 0, 0, 0, 0, 0, high, low, 0];
    match send(file, &command, FROM_DEVICE, &mut data)? {
        (GOOD, _, missing) => {
            data.truncate(len.saturating_sub(missing));
            Ok(data)
        }
        (CHECK_CONDITION, ILLEGAL_REQUEST, _) => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "it has no reservations"))
        }
        (status, key, _) => Err(refused(status, key)),
    }
}

fn refused(status: u8, key: u8) -> io::Error {
    let text = format!(
        "the LUN refuses a command about reservations (status {status:#x}, sense {key:#x})"
    );
    io::Error::other(text)
}

/// Sends a command, again if it is answered by an attention: its status, the key of its sense, and how many bytes of the data were
/// not transferred.
fn send(
    file: BorrowedFd<'_>,
    command: &[u8; 10],
    direction: i32,
    data: &mut [u8],
) -> io::Result<(u8, u8, usize)> {
    for _ in 0..ATTENTIONS {
        let mut sense = [0u8; 64];
        let mut header = Header {
            interface: i32::from(b'S'),
            direction,
            command_len: command.len() as u8,
            sense_len: sense.len() as u8,
            vectors: 0,
            data_len: data.len() as u32,
            data: data.as_mut_ptr(),
            command: command.as_ptr(),
            sense: sense.as_mut_ptr(),
            timeout_ms: TIMEOUT_MS,
            flags: 0,
            pack_id: 0,
            user: std::ptr::null_mut(),
            status: 0,
            masked_status: 0,
            message_status: 0,
            sense_written: 0,
            host_status: 0,
            driver_status: 0,
            residual: 0,
            duration_ms: 0,
            info: 0,
        };
        // SAFETY: the header is laid out as the kernel's. The kernel reads the command, reads or writes at most the given length of
        // data, writes at most that of sense, and all of them outlive the call.
        if unsafe { libc::ioctl(file.as_raw_fd(), SG_IO, &raw mut header) } != 0 {
            let e = io::Error::last_os_error();
            return Err(match e.raw_os_error() {
                Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) => {
                    io::Error::new(io::ErrorKind::Unsupported, "it takes no commands of SCSI")
                }
                _ => e,
            });
        }
        if header.host_status != 0 {
            let text = format!(
                "the command did not get to the LUN (host status {:#x})",
                header.host_status
            );
            return Err(io::Error::other(text));
        }
        match (header.status, sense_key(&sense)) {
            (CHECK_CONDITION, UNIT_ATTENTION) => {}
            (status, key) => {
                return Ok((status, key, usize::try_from(header.residual).unwrap_or(0)));
            }
        }
    }
    Err(io::Error::other("the LUN answers nothing but attentions"))
}

/// The sense key, of fixed or of descriptor format.
fn sense_key(sense: &[u8; 64]) -> u8 {
    match sense[0] & 0x7f {
        0x72 | 0x73 => sense[1] & 0xf,
        _ => sense[2] & 0xf,
    }
}

fn short() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the LUN's answer is too short")
}

fn decode_abilities(data: &[u8]) -> io::Result<Abilities> {
    let [_, _, first, second, types, ..] = *data else { return Err(short()) };
    // Without the mask of types the LUN does not say which it has.
    let has_mask = second & 0x80 != 0;
    Ok(Abilities {
        has_type: !has_mask || types & 1 << 5 != 0,
        can_persist: first & 1 != 0,
        persists: second & 1 != 0,
    })
}

fn decode_reservation(data: &[u8]) -> io::Result<Option<Reservation>> {
    let (len, rest) = descriptors(data)?;
    if len < 16 {
        return Ok(None);
    }
    let one = rest.get(..16).ok_or_else(short)?;
    let (key, _) = one.split_first_chunk().ok_or_else(short)?;
    let is_ours_by_type = one[13] & 0xf == REGISTRANTS_ONLY;
    Ok(Some(Reservation { key: u64::from_be_bytes(*key), is_ours_by_type }))
}

fn decode_keys(data: &[u8]) -> io::Result<Vec<u64>> {
    let (len, rest) = descriptors(data)?;
    let rest = rest.get(..len.min(rest.len())).unwrap_or_default();
    Ok(rest.as_chunks::<8>().0.iter().map(|key| u64::from_be_bytes(*key)).collect())
}

/// The length that the LUN reports, and the bytes behind the header of generation and length.
fn descriptors(data: &[u8]) -> io::Result<(usize, &[u8])> {
    let (header, rest) = data.split_first_chunk::<8>().ok_or_else(short)?;
    let len = u32::from_be_bytes(std::array::from_fn(|i| header[4 + i]));
    Ok((len as usize, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_any_length_are_understood_or_refused() {
        let mut data = vec![0, 0, 0, 9, 0, 0, 0, 16];
        data.extend(0x1122_3344_5566_7788_u64.to_be_bytes());
        data.extend([0, 0, 0, 0, 0, 5, 0, 0]);
        let found = decode_reservation(&data).unwrap().unwrap();
        assert_eq!(found, Reservation { key: 0x1122_3344_5566_7788, is_ours_by_type: true });
        data[21] = 1;
        assert!(!decode_reservation(&data).unwrap().unwrap().is_ours_by_type);
        assert!(decode_reservation(&data[..20]).is_err(), "it says that there is more");
        assert_eq!(decode_reservation(&[0; 8]).unwrap(), None);
        assert!(decode_reservation(&[0; 7]).is_err());
        assert_eq!(decode_keys(&data).unwrap().len(), 2);
        // More keys than were sent, and a part of one.
        data[4] = 0xff;
        assert_eq!(decode_keys(&data[..22]).unwrap(), [0x1122_3344_5566_7788]);
        for len in 0..5 {
            assert!(decode_abilities(&vec![0xff; len]).is_err());
        }
    }

    #[test]
    fn a_lun_says_whether_it_keeps_reservations() {
        // LIO: PTPL_C, not yet active, a mask of types. tgt: no PTPL_C.
        let lio = decode_abilities(&[0, 8, 0x01, 0x80, 0xea, 0x01, 0, 0]).unwrap();
        assert_eq!(lio, Abilities { has_type: true, can_persist: true, persists: false });
        let tgt = decode_abilities(&[0, 8, 0x00, 0x80, 0xea, 0x01, 0, 0]).unwrap();
        assert!(tgt.has_type && !tgt.can_persist);
        let none = decode_abilities(&[0, 8, 0x01, 0x81, 0x0a, 0x00, 0, 0]).unwrap();
        assert_eq!(none, Abilities { has_type: false, can_persist: true, persists: true });
    }
}
