//! Files that the kernel has not let go of yet.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_io::byte_locks::is_locked_by_others;

/// Who writes to an image has a lock there that QEMU minds.
const QEMU_WRITES: u32 = 101;

/// Waits until an image is nobody's: an io_uring keeps its files some time longer than the process
/// that has died, or has dropped it. QEMU does not wait.
pub(crate) fn wait_until_released(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    let end = Instant::now() + Duration::from_secs(30);
    while is_locked_by_others(&file, QEMU_WRITES).unwrap_or(false) {
        assert!(Instant::now() < end, "{} is not released", path.display());
        std::thread::sleep(Duration::from_millis(1));
    }
}
