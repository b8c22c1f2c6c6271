//! Programs of others, which a machine has or not, and what they are kept from.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ferrite_host::byte_locks::is_locked_by_others;

use crate::PATIENCE;

/// Says that all of what tests can use has to be there.
const REQUIRE: &str = "FERRITE_TEST_REQUIRE_PEERS";

/// Who writes to an image has a lock there that QEMU minds.
const QEMU_WRITES: u32 = 101;

/// Says that a test cannot be done here; an error where that is not to be.
#[track_caller]
pub fn skipped(why: &str) {
    let demanded = std::env::var_os(REQUIRE).is_some();
    assert!(!(demanded && rustix::process::geteuid().is_root()), "{why}");
    eprintln!("skipped: {why}");
}

/// Waits until nobody writes to an image, as far as QEMU knows. This process may just have dropped it:
/// an io_uring keeps its files some time longer, and so does a program that another thread is about to
/// start. QEMU does not wait for either.
pub fn wait_until_released(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    let end = Instant::now() + PATIENCE;
    while is_locked_by_others(&file, QEMU_WRITES).unwrap_or(false) {
        assert!(Instant::now() < end, "{} is not released", path.display());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a program, again as long as it says that QEMU's locks keep it from an image.
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

/// Runs a program of the system's; its output, or `None` if there is none or it failed.
pub fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = output(program, args).ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// What a peer said, if it is there. `None`: it is not, which is said, and is an error where peers are
/// demanded.
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

/// The output of a peer, which has to succeed. `None`: as of [`installed`].
#[track_caller]
pub fn peer(program: &str, args: &[&str]) -> Option<String> {
    let output = installed(program, output(program, args))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {out}{err}");
    Some(out)
}

/// Runs `qemu-img` on images that nobody writes to: whether it succeeded, and all that it said.
/// `None`: as of [`installed`].
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

/// That `qemu-img check` finds nothing.
#[track_caller]
pub fn check_clean(path: &Path) {
    qemu(&["check", "-q", "-f", "qcow2", path.to_str().unwrap()]);
}
