//! `ferrite backup create` of a volume of a store in use, by the processes of the program: only these answer for a store.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ferrite_testkit::nbd::Client;
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const AT: u64 = 5 << 20;

/// A daemon with a tap on the volume `web` of the store `pool`. The tap is killed with it.
struct Lab {
    daemon: Child,
    dir: tempfile::TempDir,
    tap: Option<u32>,
}

impl Lab {
    fn new() -> Lab {
        let dir = tempfile::tempdir().unwrap();
        let state = format!("state_folder = {:?}\n", dir.path().join("state"));
        fs::write(dir.path().join("ferrite.toml"), state).unwrap();
        let mut command = program(dir.path());
        command.args(["daemon", "--config", "ferrite.toml", "--run-dir"]);
        command.arg(dir.path().join("ferrite")).stdout(Stdio::null()).stderr(Stdio::null());
        let daemon = command.spawn().unwrap();
        let mut lab = Lab { daemon, dir, tap: None };
        lab.ok(&["store", "create", "pool", "--size", "64M"]);
        lab.ok(&["store", "create", "pool#web", "8M"]);
        let run = |line: &str| lab.served(&line.split(' ').collect::<Vec<_>>());
        let tap_ctl = |line: &str| run(&format!("compat tap-ctl {line}"));
        wait_until("the daemon", || tap_ctl("list").status.success());
        assert!(tap_ctl("allocate").status.success());
        let spawned = String::from_utf8(tap_ctl("spawn").stdout).unwrap();
        let pid = spawned.trim();
        assert!(tap_ctl(&format!("attach -p {pid} -m 0")).status.success());
        let volume = format!("store:{}", lab.volume());
        assert!(tap_ctl(&format!("open -p {pid} -m 0 -a {volume}")).status.success());
        lab.tap = lab.show()["disk"]["pid"].as_u64().map(|pid| pid.try_into().unwrap());
        lab
    }

    fn volume(&self) -> String {
        self.dir.path().join("pool#web").display().to_string()
    }

    /// Runs the program on disks of this daemon.
    fn served(&self, args: &[&str]) -> Output {
        let run = self.dir.path().join("ferrite");
        program(self.dir.path()).args(args).arg("--run-dir").arg(run).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        let done = program(self.dir.path()).args(args).output().unwrap();
        assert!(done.status.success(), "{args:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    fn show(&self) -> Value {
        serde_json::from_slice(&self.served(&["disk", "show", "tap/0", "--json"]).stdout).unwrap()
    }

    fn backup(&self, more: &[&str]) -> Result<Value, String> {
        let done = self.served(&[&["backup", "create", "tap/0", "b", "--json"], more].concat());
        match done.status.success() {
            true => Ok(serde_json::from_slice(&done.stdout).unwrap()),
            false => Err(String::from_utf8(done.stderr).unwrap()),
        }
    }

    /// The snapshots in the store.
    fn snapshots(&self) -> usize {
        let listed: Value =
            serde_json::from_str(&self.ok(&["store", "list", "pool", "--json"])).unwrap();
        let all = listed["volumes"].as_array().unwrap().iter();
        all.filter(|volume| volume["snapshot"] == true).count()
    }

    fn end(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        // Its worker ends with it.
        if let Some(pid) = self.tap.take().and_then(|pid| Pid::from_raw(pid.try_into().ok()?)) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.end();
    }
}

fn program(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    // Commands look there for the processes of stores, too.
    command.current_dir(dir).env("XDG_RUNTIME_DIR", dir).env_remove("RUST_LOG");
    command
}

#[test]
fn a_volume_in_use_is_backed_up_from_a_snapshot_in_its_store_which_is_removed() {
    let mut lab = Lab::new();
    let socket = lab.show()["nbd"].as_str().unwrap().to_owned();
    let mut client = Client::over(UnixStream::connect(socket).unwrap());
    client.go(true);
    client.write(AT, &[1; 4096]);
    assert_eq!(lab.backup(&["--name", "one"]).unwrap()["parent"], Value::Null);
    client.write(AT, &[2; 4096]);
    // The snapshot of an interrupted backup is removed.
    lab.ok(&["store", "snapshot", "pool#web", "web.ferrite-backup"]);
    let two = lab.backup(&["--name", "two", "--incremental"]).unwrap();
    assert!(two["parent"] == "one" && two["notes"].to_string().contains("interrupted"), "{two}");
    assert_eq!(lab.snapshots(), 0);
    // A volume that has the name of the snapshot is not removed.
    lab.ok(&["store", "clone", "pool#web", "web.ferrite-backup"]);
    let refused = lab.backup(&[]).unwrap_err();
    assert!(refused.contains("another name"), "{refused}");
    lab.ok(&["store", "delete", "pool#web.ferrite-backup"]);
    // A backup that fails leaves no snapshot either.
    let refused = lab.backup(&["--name", "three", "--incremental", "--no-map"]).unwrap_err();
    assert!(refused.contains("no-map"), "{refused}");
    client.write(AT, &[3; 4096]);
    drop(client);
    lab.end();
    let volume = format!("store:{}", lab.volume());
    let last = ["backup", "create", &volume, "b", "--name", "three", "--incremental"];
    wait_until("a store at rest", || {
        program(lab.dir.path()).args(last).output().unwrap().status.success()
    });
    lab.ok(&["backup", "verify", "b"]);
    for (name, byte) in [("one", 1), ("two", 2), ("three", 3)] {
        lab.ok(&["backup", "restore", "b", "x.img", "--name", name, "--force"]);
        let restored = fs::read(lab.dir.path().join("x.img")).unwrap();
        assert_eq!(restored[AT as usize], byte, "{name}");
    }
    lab.ok(&["image", "compare", "x.img", &volume]);
}
