//! Keepers and workers of this program, as whoever looks at processes finds them.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use ferrite_keeper::{Keep, Keeper};
use ferrite_testkit::wait_until;

/// They are run by descriptors and by /proc/self/exe, after which the kernel would call them.
#[test]
fn keeper_and_worker_are_called_ferrite_whatever_they_were_run_by() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("exe");
    symlink(env!("CARGO_BIN_EXE_ferrite"), &program).unwrap();
    let run = dir.path().join("run");
    let of_run = format!("--run-dir={}", run.display());
    let worker = ["worker", "--xen=1/51712", &of_run, "--", "/nonexistent"];
    let keep = Keep {
        socket: run.join("keepers/vbd-1-51712.sock"),
        run_dir: run.join("vbd-1-51712"),
        worker: worker.map(str::to_owned).to_vec(),
        names: None,
        relay: None,
    };
    let mut command = Command::new(program);
    command.arg0("ferrite").args(["keeper", "1/51712"]);
    keep.start(command).unwrap();
    let keeper = Keeper::connect(&keep.socket).unwrap();
    let pid = keeper.line(None).unwrap().keeper;
    let comm = |pid: &str| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    assert_eq!(comm(&pid.to_string()), "ferrite\n");
    wait_until("a worker of that name", || {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().any(|child| comm(child) == "ferrite\n")
    });
    keeper.end().unwrap();
}
