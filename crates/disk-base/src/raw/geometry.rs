//! The access to an open image: past the page cache where possible, and the block size.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};

use ferrite_host::nvme::Namespace;
use rustix::fs::{
    AtFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, fstatfs, ioctl_blkpbszget,
    ioctl_blksszget, major, minor, statx,
};
use rustix::io::Errno;

use super::lock::Opened;
use super::medium::{Medium, Use, sysfs_number};
use crate::SECTOR_BYTES;

/// The largest block that the code above this crate supports.
const MAX_BLOCK_BYTES: u32 = 4096;

/// The block size of most file systems, and the safe guess.
const USUAL_BLOCK_BYTES: u32 = 4096;

const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The flags with which io_uring copies to and from a tmpfs directly. Without the first flag it passes every write, and
/// without the second every transfer, to a worker thread, which costs three times the transfer itself. Neither changes
/// anything else there. Kernels whose tmpfs refuses the first (before 6.6) do not need the second, and some of them
/// answer it with `EAGAIN`.
const IN_MEMORY: OFlags = OFlags::DIRECT.union(OFlags::NONBLOCK);

/// Block sizes in bytes, and whether I/O goes past the page cache.
#[derive(Debug)]
pub(super) struct Geometry {
    /// All I/O is in multiples of this.
    pub(super) block_bytes: u32,
    /// At least `block_bytes`.
    pub(super) physical_block_bytes: u32,
    /// Why `O_DIRECT` is not used; `None`: it is used.
    pub(super) buffered_because: Option<String>,
}

impl Geometry {
    /// Geometry for commands, which bypass all caches of the kernel, in the namespace's blocks.
    pub(super) fn of_namespace(namespace: &Namespace) -> Geometry {
        Geometry {
            block_bytes: if namespace.block_bytes > 512 { MAX_BLOCK_BYTES } else { 512 },
            physical_block_bytes: namespace.block_bytes.max(512),
            buffered_because: None,
        }
    }

    /// Geometry of a medium that is briefly read, and never written.
    pub(super) fn of_glance() -> Geometry {
        let buffered_because = Some("it is only looked at".to_owned());
        let block_bytes = SECTOR_BYTES as u32;
        Geometry { block_bytes, physical_block_bytes: block_bytes, buffered_because }
    }

    /// Chooses the geometry, and sets the flags of the open file accordingly. It is the file that holds the locks, so
    /// it is not opened again.
    pub(super) fn choose(
        opened: &Opened,
        size_bytes: u64,
        use_: Use,
    ) -> rustix::io::Result<Geometry> {
        let base = fcntl_getfl(&opened.file)? - OFlags::NONBLOCK - OFlags::DIRECT;
        let direct = direct_block(opened)
            .and_then(|block| match use_ {
                Use::Disk => check_block(block, size_bytes),
                Use::Medium => check_medium_block(block),
                // Bytes after its last whole block are not used.
                Use::Store => check_block(block, 0),
            })
            .and_then(|block| try_direct(&opened.file, base, block));
        let (block_bytes, buffered_because) = match direct {
            Ok(block) => (block, None),
            Err(reason) => {
                if !(is_tmpfs(opened) && fcntl_setfl(&opened.file, base | IN_MEMORY).is_ok()) {
                    fcntl_setfl(&opened.file, base)?;
                }
                (SECTOR_BYTES as u32, Some(reason))
            }
        };
        let physical_block_bytes = physical_block(opened).max(block_bytes);
        Ok(Geometry { block_bytes, physical_block_bytes, buffered_because })
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.buffered_because {
            None => write!(f, "direct I/O")?,
            Some(reason) => write!(f, "through the page cache ({reason})")?,
        }
        write!(
            f,
            " in blocks of {} bytes (physical {})",
            self.block_bytes, self.physical_block_bytes
        )
    }
}

/// The alignment in bytes that `O_DIRECT` needs, of offsets, lengths and memory alike, or why it cannot be used.
fn direct_block(opened: &Opened) -> Result<u32, String> {
    let x = statx(&opened.file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(x) = x
        && x.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        return match x.stx_dio_offset_align {
            0 => Err("the file system has no direct I/O for this file".into()),
            align => Ok(align.max(x.stx_dio_mem_align)),
        };
    }
    match opened.medium {
        Medium::BlockDevice | Medium::Nvme => ioctl_blksszget(&opened.file)
            .map_err(|e| format!("the device does not tell its block size: {e}")),
        Medium::File => file_block(opened),
    }
}

/// The alignment on kernels before 6.1 and file systems that do not answer `STATX_DIOALIGN`.
fn file_block(opened: &Opened) -> Result<u32, String> {
    if is_tmpfs(opened) {
        return Err("tmpfs is nothing but page cache".into());
    }
    let device = (major(opened.stat.st_dev), minor(opened.stat.st_dev));
    let block = sysfs_number(device, "queue/logical_block_size");
    Ok(block.and_then(|b| u32::try_from(b).ok()).unwrap_or(USUAL_BLOCK_BYTES))
}

/// Whether the file is on a tmpfs. The node of a device is on one, too, but its data are not.
fn is_tmpfs(opened: &Opened) -> bool {
    opened.medium == Medium::File
        && fstatfs(&opened.file).is_ok_and(|s| s.f_type as u64 == TMPFS_MAGIC)
}

fn check_block(block: u32, size_bytes: u64) -> Result<u32, String> {
    let block = block.max(SECTOR_BYTES as u32);
    if !block.is_power_of_two() || block > MAX_BLOCK_BYTES {
        return Err(format!("direct I/O would need blocks of {block} bytes"));
    }
    if !size_bytes.is_multiple_of(u64::from(block)) {
        return Err(format!("its size is not a multiple of {block}, as direct I/O needs here"));
    }
    Ok(block)
}

/// Checks the block size for images, which have sectors of 512 bytes, and grow by them.
fn check_medium_block(block: u32) -> Result<u32, String> {
    match block {
        0..=512 => Ok(SECTOR_BYTES as u32),
        _ => Err(format!("direct I/O would need blocks of {block} bytes, and images have 512")),
    }
}

/// Switches to `O_DIRECT`, and reads one block as a test: some file systems accept the flag and refuse the I/O.
fn try_direct(file: &OwnedFd, base: OFlags, block: u32) -> Result<u32, String> {
    fcntl_setfl(file, base | OFlags::DIRECT)
        .map_err(|e| format!("the file system refuses direct I/O: {e}"))?;
    let mut memory = vec![0u8; 2 * MAX_BLOCK_BYTES as usize];
    let start = memory.as_ptr().align_offset(MAX_BLOCK_BYTES as usize);
    let aligned = &mut memory[start..start + block as usize];
    match rustix::io::pread(file.as_fd(), aligned, 0) {
        Err(e @ (Errno::INVAL | Errno::OPNOTSUPP)) => {
            Err(format!("a direct read of {block} bytes is refused: {e}"))
        }
        // Any other error is the medium's: the guest gets it when it reads that block.
        _ => Ok(block),
    }
}

/// The block size below which, or without alignment to it, a write may cost a read.
fn physical_block(opened: &Opened) -> u32 {
    let told = match opened.medium {
        Medium::BlockDevice | Medium::Nvme => ioctl_blkpbszget(&opened.file).unwrap_or(0),
        Medium::File => u32::try_from(opened.stat.st_blksize).unwrap_or(0).min(USUAL_BLOCK_BYTES),
    };
    if told.is_power_of_two() { told.max(SECTOR_BYTES as u32) } else { SECTOR_BYTES as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_512_and_4096_are_accepted_if_the_size_fits() {
        assert_eq!(check_block(512, 512), Ok(512));
        assert_eq!(check_block(4, 512), Ok(512));
        assert_eq!(check_block(4096, 8192), Ok(4096));
        assert!(check_block(4096, 4096 + 512).unwrap_err().contains("multiple of 4096"));
    }

    #[test]
    fn other_blocks_mean_the_page_cache() {
        for block in [520, 3000, 8192, 65536] {
            assert!(check_block(block, 1 << 30).unwrap_err().contains(&block.to_string()));
        }
    }
}
