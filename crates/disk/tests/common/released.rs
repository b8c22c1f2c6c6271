//! Images that this process has just dropped: an io_uring keeps its files some time longer, and so does
//! a program that another thread is about to start. QEMU does not wait for either.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ferrite_io::byte_locks::is_locked_by_others;

/// Who writes to an image has a lock there that QEMU minds.
const QEMU_WRITES: u32 = 101;

const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until nobody writes to an image, as far as QEMU knows.
pub(crate) fn wait_until_released(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    let end = Instant::now() + PATIENCE;
    while is_locked_by_others(&file, QEMU_WRITES).unwrap_or(false) {
        assert!(Instant::now() < end, "{} is not released", path.display());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a program, again as long as it says that QEMU's locks keep it from an image.
pub(crate) fn output(program: &str, args: &[impl AsRef<OsStr>]) -> io::Result<Output> {
    let end = Instant::now() + PATIENCE;
    loop {
        let output = Command::new(program).args(args).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let is_kept = said.contains("Failed to get ") && said.contains(" lock");
        if output.status.success() || !is_kept || Instant::now() > end {
            return Ok(output);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
