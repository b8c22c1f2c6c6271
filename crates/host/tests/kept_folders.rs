//! A process that keeps some folders only. It takes root, as all that gives up rights does.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use ferrite_host::sandbox::keep_folders;

const KEPT: &str = "FERRITE_TEST_KEPT";
const OTHER: &str = "FERRITE_TEST_OTHER";
/// All went as it should.
const GOOD: i32 = 42;

/// Goes on in a child, which has one thread: tests run on a second one.
#[expect(unsafe_code, reason = "a fork")]
fn in_a_process_with_one_thread(run: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the other thread waits for this one, and holds nothing that the child needs.
    let child = unsafe { libc::fork() };
    let Some(child) = rustix::process::Pid::from_raw(child) else {
        std::process::exit(run());
    };
    let options = rustix::process::WaitOptions::empty();
    let (_, status) = rustix::process::waitpid(Some(child), options).unwrap().unwrap();
    status.exit_status().unwrap_or(1)
}

/// Asks a device something by an ioctl, as rings and events are asked for.
#[expect(unsafe_code, reason = "an ioctl")]
fn asks(device: &fs::File) -> bool {
    const RNDGETENTCNT: libc::c_ulong = 0x8004_5200;
    let mut bits: libc::c_int = 0;
    // SAFETY: the kernel writes one number, which outlives the call.
    let done = unsafe { libc::ioctl(device.as_raw_fd(), RNDGETENTCNT, &raw mut bits) };
    done == 0
}

/// The number of the first thing that is not as it should be.
fn judge(kept: &Path, other: &Path) -> i32 {
    let capabilities = || {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        status.lines().filter(|l| l.starts_with("Cap")).all(|l| l.ends_with("0000000000000000"))
    };
    // With all that a program is started from, so that only the right to execute is missing.
    let folders =
        [kept, Path::new("/proc"), Path::new("/dev"), Path::new("/usr"), Path::new("/lib64")];
    match keep_folders(&folders) {
        // Without it nothing is promised of folders.
        Ok(lacking) if lacking.to_string().contains("no landlock") => return GOOD,
        Ok(_) => {}
        Err(_) => return 1,
    }
    let program = kept.join("program");
    let checks: [&dyn Fn() -> bool; 10] = [
        &|| fs::write(kept.join("new"), "1").is_ok(),
        &|| fs::rename(kept.join("new"), kept.join("renamed")).is_ok(),
        &|| fs::read(kept.join("renamed")).is_ok_and(|bytes| bytes == b"1"),
        &|| fs::remove_file(kept.join("renamed")).is_ok(),
        &|| fs::write("/dev/null", "1").is_ok(),
        &|| fs::File::open("/dev/urandom").is_ok_and(|device| asks(&device)),
        &|| fs::read(other.join("secret")).is_err() && fs::write(other.join("x"), "").is_err(),
        &|| Command::new(&program).status().is_err(),
        &|| std::net::TcpListener::bind("127.0.0.1:0").is_err(),
        &capabilities,
    ];
    let failed = checks.iter().position(|check| !check());
    // Threads that begin now are as it is.
    let later =
        std::thread::scope(|scope| scope.spawn(|| fs::read(other.join("secret")).is_err()).join());
    match (failed, later) {
        (None, Ok(true)) => GOOD,
        (None, _) => 3,
        (Some(at), _) => 10 + at as i32,
    }
}

#[test]
fn child() {
    let path = |name| std::env::var_os(name).map(PathBuf::from);
    let (Some(kept), Some(other)) = (path(KEPT), path(OTHER)) else { return };
    std::process::exit(in_a_process_with_one_thread(|| judge(&kept, &other)));
}

#[test]
fn what_is_below_the_folders_can_be_used_and_nothing_else() {
    let (kept, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(other.path().join("secret"), "2").unwrap();
    fs::copy("/bin/true", kept.path().join("program")).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
    command.env(KEPT, kept.path()).env(OTHER, other.path());
    let status = command.status().unwrap();
    assert_eq!((status.code(), status.signal()), (Some(GOOD), None));
}
