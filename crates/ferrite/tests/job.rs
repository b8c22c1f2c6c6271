//! `ferrite job` and `ferrite disk coalesce`, with a daemon in this process and a program that does the steps as the
//! test tells it to.

#[path = "../../daemon/tests/host/mod.rs"]
mod host;
#[path = "../../daemon/tests/tool/mod.rs"]
mod tool;

use std::io::Read as _;
use std::process::{Child, Command, Output, Stdio};

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::wait_until;
use host::{Host, connect};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tool::Files;

/// Not a test: a step of a job, if the environment asks for one.
#[test]
fn process_tool() {
    tool::be_a_tool();
}

struct Lab {
    host: Host,
    files: Files,
    _disk: DiskPaths,
}

impl Lab {
    /// A host with the disk 1/xvda, whose jobs stay in their first step.
    fn new() -> Lab {
        let mut host = Host::new(1);
        let files = Files::new(&host.dir.path().join("tool"));
        files.set("hold-copy");
        let means = files.means();
        let (config, store) = (host.config(), connect(&host.store_socket()));
        host.start_as(config, store, |daemon| daemon.with_jobs(means));
        let image = host.make_image("a.img", 1 << 20);
        let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
        host.wait_for_phase(&disk, PhaseName::Served);
        Lab { host, files, _disk: disk }
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(line.split(' ')).arg("--run-dir").arg(self.host.paths().run);
        command.env_remove("RUST_LOG").env("XENSTORED_PATH", self.host.store_socket());
        command.current_dir(self.host.image(""));
        command
    }

    fn out(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    /// The output of a command that succeeds.
    fn said(&self, line: &str) -> String {
        let output = self.out(line);
        assert!(output.status.success(), "{line}: {output:?}");
        text(&output.stdout)
    }

    fn start(&self, line: &str) -> Child {
        self.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

/// Waits until a command waits for its job: it handles Ctrl-C then.
fn wait_for_handler(command: &Child) {
    wait_until("a handler", || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", command.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
        caught >> (Signal::INT.as_raw() - 1) & 1 == 1
    });
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_job_is_started_listed_changed_and_waited_for() {
    let lab = Lab::new();
    let started = lab.said("disk coalesce 1/xvda --from b.vhd --speed 50M --background");
    assert_eq!(started, "job 1 is started; ferrite job wait 1 waits for it\n");
    wait_until("progress", || lab.said("job list").contains("/s "));
    let listed = lab.said("job list");
    let line: Vec<&str> = listed.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(line[..5], ["1", "coalesce", "guest-1/xvda", "running", "copy"], "{listed}");
    let shown = lab.said("job show 1");
    let planned = std::fs::read_to_string(lab.files.0.join("arguments-plan")).unwrap();
    let from = format!("--from {} ", lab.host.image("b.vhd").display());
    assert!(planned.contains(&from), "{planned}");
    for word in ["to         /srv/c", "limit      50 MiB/s", "of 100 bytes"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    assert_eq!(lab.said("job limit 1 20M"), "job 1 does at most 20 MiB/s\n");
    assert_eq!(lab.said("job limit 1 none"), "job 1 has no limit\n");
    assert_eq!(lab.said("job pause 1"), "job 1 is paused\n");
    assert_eq!(lab.said("job resume 1"), "job 1 goes on\n");
    for verb in ["show 1", "pause 1", "resume 1", "limit 1 7"] {
        let json: Value = serde_json::from_str(&lab.said(&format!("job {verb} --json"))).unwrap();
        assert_eq!((&json["id"], &json["kind"]), (&1.into(), &"coalesce".into()), "{verb}");
    }
    let late = lab.out("job wait 1 --timeout 0");
    assert_eq!(late.status.code(), Some(1));
    assert!(text(&late.stderr).contains("the time is over; the job goes on"), "{late:?}");
    let second = lab.out("disk coalesce 1/xvda");
    assert_eq!(second.status.code(), Some(4));
    let said = text(&second.stderr);
    assert!(said.contains("job 1 changes this disk already"), "{said}");
    assert!(said.contains("help: ferrite job wait 1 waits for it"), "{said}");
    let waiting = lab.start("job wait 1 --json");
    lab.files.unset("hold-copy");
    let waited = waiting.wait_with_output().unwrap();
    assert!(waited.status.success(), "{waited:?}");
    let json: Value = serde_json::from_slice(&waited.stdout).unwrap();
    assert_eq!((&json["phase"], &json["done"]), (&"done".into(), &100.into()));
    let json: Value = serde_json::from_str(&lab.said("job list --json")).unwrap();
    assert_eq!(json["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(lab.said("disk coalesce 1/xvda"), "job 2 is done\n");
}

#[test]
fn a_command_that_is_interrupted_leaves_its_job_and_says_so() {
    let lab = Lab::new();
    for line in ["disk coalesce 1/xvda", "job wait 1"] {
        let child = lab.start(line);
        wait_for_handler(&child);
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{output:?}");
        let expected = "ferrite: stopped waiting for job 1: interrupted; the job goes on\n\
                        help: ferrite job wait 1 waits again, ferrite job cancel 1 ends it\n";
        assert_eq!(text(&output.stderr), expected);
    }
    wait_until("its step", || lab.said("job show 1").contains("phase      running, step copy"));
    let waiting = lab.start("job wait 1");
    assert_eq!(lab.said("job cancel 1"), "job 1 was cancelled\n");
    let output = waiting.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("ferrite: job 1 was cancelled: "), "{output:?}");
}

#[test]
fn a_command_waits_over_the_restart_of_the_daemon() {
    let mut lab = Lab::new();
    let waiting = lab.start("disk coalesce 1/xvda");
    wait_for_handler(&waiting);
    lab.host.stop();
    // It asks while there is no daemon.
    std::thread::sleep(host::A_WHILE * 4);
    lab.files.unset("hold-copy");
    let means = lab.files.means();
    let (config, store) = (lab.host.config(), connect(&lab.host.store_socket()));
    lab.host.start_as(config, store, |daemon| daemon.with_jobs(means));
    let output = waiting.wait_with_output().unwrap();
    assert_eq!(text(&output.stdout), "job 1 is done\n", "{output:?}");
}

#[test]
fn a_job_that_failed_says_why_and_unknown_ones_are_not_found() {
    let lab = Lab::new();
    let failure = r#"{"what":"cannot merge","why":"no room","help":"make room","code":1}"#;
    lab.files.set_to("fail-copy", failure);
    let failed = lab.out("disk coalesce 1/xvda");
    assert_eq!(failed.status.code(), Some(1));
    let expected = "ferrite: job 1 has failed: cannot merge: no room\nhelp: make room\n";
    assert_eq!(text(&failed.stderr), expected);
    assert!(lab.said("job list").ends_with("    cannot merge: no room\n"));
    for verb in ["show 9", "wait 9", "cancel 9", "pause 9", "resume 9", "limit 9 5"] {
        let output = lab.out(&format!("job {verb}"));
        assert_eq!(output.status.code(), Some(3), "{verb}: {output:?}");
        let said = text(&output.stderr);
        assert!(said.contains("there is no job 9"), "{said}");
        assert!(said.contains("help: ferrite job list shows all jobs"), "{said}");
    }
    let unknown = lab.out("disk coalesce 5/xvda");
    assert_eq!(unknown.status.code(), Some(3), "{unknown:?}");
}

#[test]
fn a_terminal_sees_a_progress_bar() {
    let lab = Lab::new();
    lab.said("disk coalesce 1/xvda --background");
    wait_until("progress", || lab.said("job list").contains("/s "));
    let run = lab.host.paths().run;
    let line = format!("{} job wait 1 --run-dir {}", env!("CARGO_BIN_EXE_ferrite"), run.display());
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]).env("TERM", "xterm");
    let mut waiting = script.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut seen, mut bytes) = (String::new(), [0; 1024]);
    while let Ok(n @ 1..) = waiting.stdout.as_mut().unwrap().read(&mut bytes) {
        seen += &String::from_utf8_lossy(&bytes[..n]);
        if seen.contains("% ") && seen.contains(" left") && lab.files.has("hold-copy") {
            lab.files.unset("hold-copy");
        }
    }
    assert!(waiting.wait().unwrap().success(), "{seen}");
    assert!(!lab.files.has("hold-copy"), "{seen:?}");
    assert!(seen.trim_end().ends_with("job 1 is done"), "{seen:?}");
}
