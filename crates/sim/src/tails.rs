//! The bytes after the end of a disk that does not fill its last unit: other programs may leave any. They are not read
//! before the disk grows.
//!
//! The machine is not told of these changes: a crash may have happened, and its knowledge of the file stays true.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ferrite_host::clock::{Random, SplitMix64};

const SECTOR: u64 = 512;

/// Writes noise after the last entry of a qcow2 image's L1, in the rest of its clusters.
pub(crate) fn of_qcow2(file: &File, random: &mut SplitMix64) -> io::Result<()> {
    let cluster = 1 << number(file, 20, 4)?;
    let end = number(file, 40, 8)? + number(file, 36, 4)? * 8;
    noise(file, end, end.next_multiple_of(cluster), random)
}

/// Writes noise in the last block of a sparse VHD with a disk of so many bytes, and sets its bits, as QEMU sets all of
/// a block.
pub(crate) fn of_vhd(file: &File, bytes: u64, random: &mut SplitMix64) -> io::Result<()> {
    let header = number(file, 16, 8)?;
    let (table, block_bytes) = (number(file, header + 16, 8)?, number(file, header + 32, 4)?);
    let (block, within) = (bytes / block_bytes, bytes % block_bytes);
    if within == 0 {
        return Ok(());
    }
    let place = number(file, table + block * 4, 4)?;
    if place == u64::from(u32::MAX) {
        return Ok(());
    }
    let bitmap_bytes = (block_bytes / SECTOR).div_ceil(8).next_multiple_of(SECTOR);
    let mut bits = vec![0; (block_bytes / SECTOR).div_ceil(8) as usize];
    file.read_exact_at(&mut bits, place * SECTOR)?;
    for sector in within / SECTOR..block_bytes / SECTOR {
        bits[sector as usize / 8] |= 0x80 >> (sector % 8);
    }
    file.write_all_at(&bits, place * SECTOR)?;
    let data = place * SECTOR + bitmap_bytes;
    noise(file, data + within, data + block_bytes, random)
}

/// Noise within the file's length.
fn noise(file: &File, from: u64, to: u64, random: &mut SplitMix64) -> io::Result<()> {
    let to = to.min(file.metadata()?.len());
    let noise: Vec<u8> = (from..to).map(|_| random.next_u64() as u8).collect();
    file.write_all_at(&noise, from)
}

/// A number of some bytes, big endian.
fn number(file: &File, at: u64, len: usize) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes[8 - len..], at)?;
    Ok(u64::from_be_bytes(bytes))
}
