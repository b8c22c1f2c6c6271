//! A daemon, and `tap-ctl` as XAPI's storage manager calls it.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::{images, wait_until};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) dir: tempfile::TempDir,
}

impl Daemon {
    pub(crate) fn new() -> Daemon {
        Daemon::with("")
    }

    /// A daemon with this in its configuration.
    pub(crate) fn with(configuration: &str) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let configuration = format!("state_folder = {state:?}\n{configuration}");
        fs::write(dir.path().join("ferrite.toml"), configuration).unwrap();
        for name in ["tap-ctl", "cbt-util"] {
            symlink(env!("CARGO_BIN_EXE_ferrite"), dir.path().join(name)).unwrap();
        }
        let child = start(dir.path());
        let daemon = Daemon { child, dir };
        daemon.wait();
        daemon
    }

    pub(crate) fn wait(&self) {
        wait_until("the daemon", || self.tap_ctl("list").status.success());
    }

    pub(crate) fn restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = start(self.dir.path());
        self.wait();
    }

    pub(crate) fn tap_ctl(&self, line: &str) -> Output {
        self.call(&line.split(' ').collect::<Vec<_>>())
    }

    pub(crate) fn call(&self, args: &[&str]) -> Output {
        let mut command = Command::new(self.dir.path().join("tap-ctl"));
        command.args(args).env_remove("XENBUS_PATH").env_remove("RUST_LOG");
        command.arg("--run-dir").arg(self.dir.path().join("run")).output().unwrap()
    }

    /// What `ferrite disk` prints with these arguments.
    pub(crate) fn disk(&self, args: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.arg("disk").args(args).arg("--run-dir").arg(self.dir.path().join("run"));
        String::from_utf8(command.env_remove("RUST_LOG").output().unwrap().stdout).unwrap()
    }

    /// Calls a verb that prints this, and succeeds.
    pub(crate) fn says(&self, line: &str, expected: &str) {
        let output = self.tap_ctl(line);
        let said = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!((said.as_str(), errors.as_str()), (expected, ""), "{line}");
        assert!(output.status.success(), "{line}");
    }

    /// Calls a verb that fails with this number, and prints nothing but the reason.
    pub(crate) fn fails(&self, line: &str, errno: i32) {
        let output = self.tap_ctl(line);
        assert_eq!(output.status.code(), Some(errno), "{line}");
        assert!(output.stdout.is_empty() && output.stderr.starts_with(b"tap-ctl: "), "{line}");
    }

    pub(crate) fn image(&self, name: &str, format: &str) -> String {
        let folder = self.dir.path().join(name);
        fs::create_dir_all(&folder).unwrap();
        images::make(&folder, format, 4 * MIB).into_os_string().into_string().unwrap()
    }

    pub(crate) fn spawn(&self) -> u32 {
        let output = self.tap_ctl("spawn");
        String::from_utf8(output.stdout).unwrap().trim_end().parse().unwrap()
    }

    pub(crate) fn blktap(&self) -> PathBuf {
        self.dir.path().join("blktap-control")
    }

    pub(crate) fn client(&self, pid: u32, minor: u32) -> Client {
        let socket = self.blktap().join(format!("nbd{pid}.{minor}"));
        let mut client = Client::over(UnixStream::connect(socket).unwrap());
        client.go(true);
        client
    }
}

pub(crate) fn start(dir: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["daemon", "--run-dir"]).arg(dir.join("run")).env_remove("RUST_LOG");
    command.arg("--config").arg(dir.join("ferrite.toml"));
    command
        .stdout(Stdio::null())
        .stderr(fs::File::create(dir.join("log")).unwrap())
        .spawn()
        .unwrap()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Keepers of a failed test live on.
        let list = fs::read_dir("/proc").unwrap().flatten();
        let run = self.dir.path().join("run");
        for process in list {
            let environment = fs::read(process.path().join("environ")).unwrap_or_default();
            let is_ours = environment
                .windows(run.as_os_str().len())
                .any(|w| w == run.as_os_str().as_encoded_bytes());
            let pid = process.file_name().to_str().and_then(|name| name.parse().ok());
            if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw).filter(|_| is_ours) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

pub(crate) fn write(client: &mut Client, byte: u8) {
    let cookie = client.send(command::WRITE, 0, 4096, 4096, &[byte; 4096]);
    assert_eq!((client.reply().cookie, 0), (cookie, 0));
}

pub(crate) fn read(client: &mut Client) -> Vec<u8> {
    let cookie = client.send(command::READ, 0, 4096, 4096, &[]);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (cookie, 0));
    reply.data
}
