//! The names and arguments of keepers and workers in lists of processes.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use ferrite_keeper::{DiskSpec, Keeper};
use ferrite_testkit::wait_until;

/// They are run by descriptors and by /proc/self/exe, which the kernel would use as their names.
#[test]
fn keeper_and_worker_are_called_ferrite_whatever_they_were_run_by() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("exe");
    symlink(env!("CARGO_BIN_EXE_ferrite"), &program).unwrap();
    let run = dir.path().join("run");
    let of_run = format!("--run-dir={}", run.display());
    let worker = ["worker", "--xen=1/51712", &of_run, "--", "/nonexistent"];
    let spec = DiskSpec {
        socket: run.join("keepers/vbd-1-51712.sock"),
        run_dir: run.join("vbd-1-51712"),
        worker: worker.map(str::to_owned).to_vec(),
        sandbox: None,
        relay: None,
        group: None,
        public: None,
        preopens: Vec::new(),
    };
    let mut command = Command::new(program);
    command.arg0("ferrite").args(["keeper", "1/51712"]);
    spec.start(command).unwrap();
    let keeper = Keeper::connect(&spec.socket).unwrap();
    let pid = keeper.line(None).unwrap().keeper;
    let comm = |pid: &str| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    assert_eq!(comm(&pid.to_string()), "ferrite\n");
    wait_until("a worker of that name", || {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().any(|child| comm(child) == "ferrite\n")
    });
    keeper.end().unwrap();
}

/// The kernel gives the process that has locked an image: a number, and often that of an ended worker.
#[test]
fn an_image_that_is_served_is_refused_with_the_disks_number() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    let locked = fs::File::create(&image).unwrap();
    locked.set_len(1 << 20).unwrap();
    locked.lock().unwrap();
    // By its arguments it is a keeper, and it has the image open.
    fs::write(dir.path().join("keeper"), "exec 9<a.img; echo; read end").unwrap();
    let mut keeper = Command::new("sh");
    keeper.arg0("ferrite").args(["keeper", "3/51712"]).current_dir(dir.path());
    let mut keeper = keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    keeper.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let mut check = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    let check = check.args(["image", "resize"]).arg(&image).arg("2M").output().unwrap();
    drop(keeper.stdin.take());
    keeper.wait().unwrap();
    let said = String::from_utf8(check.stderr).unwrap();
    assert_eq!(check.status.code(), Some(4), "{said}");
    assert!(said.contains("it is served as disk 3/51712 (ferrite disk show 3/51712)"), "{said}");
}
