//! The memory that the data in flight of a disk may take.

use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use ferrite_disk::size;
use ferrite_io::pool::HostMemory;

/// The memory of each disk in any case, unless it is configured.
const AUTO_BYTES: usize = 8 << 20;
/// Buffers are addressed with 32 bits, rounded up to 2 MiB.
const MAX_BYTES: u64 = 2 << 30;
/// All disks together may grow by one part in this many of the host's memory.
const HOST_PART: u64 = 8;

/// Memory for the data in flight of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataMemory {
    /// 8 MiB, and more while storage is slow.
    #[default]
    Auto,
    /// A fixed number of bytes.
    Bytes(usize),
}

impl DataMemory {
    /// Returns the bytes that the disk has in any case.
    pub fn bytes(self) -> usize {
        match self {
            DataMemory::Auto => AUTO_BYTES,
            DataMemory::Bytes(bytes) => bytes,
        }
    }

    /// Returns the memory by which the disk may grow beyond that, or none if it is fixed. All disks
    /// that share the file `shared` grow by at most `bytes` together.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub fn host(self, shared: &Path, bytes: Option<u64>) -> io::Result<Option<Arc<HostMemory>>> {
        match self {
            DataMemory::Auto => {
                HostMemory::open(shared, bytes.unwrap_or_else(host_bytes)).map(Some)
            }
            DataMemory::Bytes(_) => Ok(None),
        }
    }
}

/// Returns the bytes by which all disks of a host may grow together by default. The kernel is asked
/// once. A process that drops its privileges before it knows its disk should call this beforehand.
pub fn host_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let host = rustix::system::sysinfo();
        host.totalram as u64 * u64::from(host.mem_unit) / HOST_PART
    })
}

/// Parses a size of memory for data in flight, in bytes.
///
/// # Errors
/// Fails if the text is no size, or if the size is not allowed. The error says which sizes are.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let bytes = size::parse(text).map_err(|e| e.to_string())?;
    if bytes == 0 || bytes > MAX_BYTES {
        return Err("it must be more than 0 and at most 2G".into());
    }
    usize::try_from(bytes).map_err(|e| e.to_string())
}

impl FromStr for DataMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<DataMemory, String> {
        match text {
            "auto" => Ok(DataMemory::Auto),
            _ => parse_bytes(text).map(DataMemory::Bytes),
        }
    }
}

impl fmt::Display for DataMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataMemory::Auto => f.write_str("auto"),
            DataMemory::Bytes(bytes) => bytes.fmt(f),
        }
    }
}
