//! Other programs, which may be missing, and their locks.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ferrite_host::byte_locks::is_locked_by_others;

use crate::PATIENCE;

/// The environment variable that requires all of these programs.
const REQUIRE: &str = "FERRITE_TEST_REQUIRE_PEERS";

/// The lock of a writer on an image that QEMU respects.
const QEMU_WRITES: u32 = 101;

/// Reports that a test cannot run here; an error if that is not allowed.
#[track_caller]
pub fn skipped(why: &str) {
    let demanded = std::env::var_os(REQUIRE).is_some();
    assert!(!(demanded && rustix::process::geteuid().is_root()), "{why}");
    eprintln!("skipped: {why}");
}

/// Waits until no process writes to an image, by QEMU's locks. This process may just have closed it: an io_uring keeps
/// its files some time longer, and so does a program that another thread is about to start. QEMU does not wait for
/// either.
pub fn wait_until_released(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    let end = Instant::now() + PATIENCE;
    while is_locked_by_others(&file, QEMU_WRITES).unwrap_or(false) {
        assert!(Instant::now() < end, "{} is not released", path.display());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a program, again as long as it fails because of QEMU's locks on an image.
///
/// # Errors
/// The system's, if there is no such program.
pub fn output(program: &str, args: &[impl AsRef<OsStr>]) -> io::Result<Output> {
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

/// Runs a program of the system; its output, or `None` if it is missing or failed.
pub fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = output(program, args).ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The output of a peer. `None`: it is not installed, which is reported, and is an error if peers are required.
#[track_caller]
pub fn installed(program: &str, said: io::Result<Output>) -> Option<Output> {
    match said {
        Ok(output) => Some(output),
        Err(e) => {
            assert!(std::env::var_os(REQUIRE).is_none(), "{program} is not installed: {e}");
            eprintln!("skipped: {program} is not installed");
            None
        }
    }
}

/// The output of a peer, which has to succeed. `None`: as for [`installed`].
#[track_caller]
pub fn peer(program: &str, args: &[&str]) -> Option<String> {
    let output = installed(program, output(program, args))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {out}{err}");
    Some(out)
}

/// Runs `qemu-img` on images that no process writes to: whether it succeeded, and its output. `None`: as for
/// [`installed`].
#[track_caller]
pub fn qemu_img(args: &[&str]) -> Option<(bool, String)> {
    args.iter().map(Path::new).filter(|path| path.is_file()).for_each(wait_until_released);
    let output = installed("qemu-img", Command::new("qemu-img").args(args).output())?;
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

/// Runs `qemu-img`, which has to succeed; false: it is not installed.
#[track_caller]
pub fn qemu(args: &[&str]) -> bool {
    match qemu_img(args) {
        Some((true, _)) => true,
        Some((false, text)) => panic!("qemu-img {args:?}: {text}"),
        None => false,
    }
}

/// Checks that `qemu-img check` finds nothing.
#[track_caller]
pub fn check_clean(path: &Path) {
    qemu(&["check", "-q", "-f", "qcow2", path.to_str().unwrap()]);
}
