//! How a bench ends that is told to: by a signal, with nothing left behind.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// The program with no signal ignored, whatever runs the tests ignores.
fn listening() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,TERM", env!("CARGO_BIN_EXE_ferrite-bench")]);
    command
}

/// The directories on tmpfs of a bench.
fn run_dirs(bench: &Child) -> Vec<PathBuf> {
    let ours = format!("ferrite-bench-{}-", bench.id());
    let entries = ["/dev/shm", "/run"].map(|dir| fs::read_dir(dir).into_iter().flatten());
    let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(&ours)).collect()
}

/// A bench of a minute, as soon as it has made its directory.
fn bench(mut command: Command) -> Child {
    command.args(["null:", "--seconds", "60"]);
    let mut bench = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while run_dirs(&bench).is_empty() {
        assert!(bench.try_wait().unwrap().is_none(), "it ended");
        thread::sleep(Duration::from_millis(1));
    }
    bench
}

#[test]
fn a_bench_that_is_told_to_end_leaves_nothing() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let mut bench = bench(listening());
        kill_process(Pid::from_child(&bench), signal).unwrap();
        assert_eq!(bench.wait().unwrap().code(), Some(130), "{signal:?}");
        assert!(run_dirs(&bench).is_empty(), "{signal:?}");
    }
}

#[test]
fn who_asked_for_it_outlives_the_terminal() {
    let mut command = Command::new("env");
    command.args(["--ignore-signal=HUP", env!("CARGO_BIN_EXE_ferrite-bench")]);
    let mut bench = bench(command);
    let status = fs::read_to_string(format!("/proc/{}/status", bench.id())).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let mask = u64::from_str_radix(mask.trim(), 16).unwrap();
    kill_process(Pid::from_child(&bench), Signal::TERM).unwrap();
    assert_eq!(bench.wait().unwrap().code(), Some(130));
    assert_eq!(mask & 1, 1, "SIGHUP is not ignored any more");
}
