//! `tap-ctl`, the name under which scripts of toolstacks call this program.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::mpsc::{Receiver, channel};

use serde_json::{Value, json};

/// A daemon that sends these answers, one connection per request, and records the requests.
fn answering(dir: &Path, answers: Vec<(&'static str, Value)>) -> Receiver<(String, Value)> {
    let listener = UnixListener::bind(dir.join("control.sock")).unwrap();
    let (asked, was_asked) = channel();
    std::thread::spawn(move || {
        for (expected, result) in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            let mut request: Value = serde_json::from_str(&line).unwrap();
            let method = request["method"].as_str().unwrap().to_owned();
            // An unexpected request gets no answer.
            if method != expected {
                return;
            }
            asked.send((method, request["params"].take())).unwrap();
            let answer = match result.get("code") {
                Some(_) => json!({ "jsonrpc": "2.0", "id": 1, "error": result }),
                None => json!({ "jsonrpc": "2.0", "id": 1, "result": result }),
            };
            writeln!(stream, "{answer}").unwrap();
        }
    });
    was_asked
}

struct Program {
    dir: tempfile::TempDir,
}

impl Program {
    fn new() -> Program {
        let dir = tempfile::tempdir().unwrap();
        symlink(env!("CARGO_BIN_EXE_ferrite"), dir.path().join("tap-ctl")).unwrap();
        Program { dir }
    }

    fn call(&self, line: &str) -> Output {
        let mut command = Command::new(self.dir.path().join("tap-ctl"));
        command.args(line.split(' ')).env_remove("XENBUS_PATH");
        command.arg("--run-dir").arg(self.dir.path());
        command.output().unwrap()
    }

    /// Runs block-tap's next steps if no disk is found; returns its error message.
    fn create(&self, backend: &str) -> String {
        let script =
            "minor=$(tap-ctl allocate --run-dir $RUN) || { echo Could not allocate minor; exit; }
             minor=${minor#/run/blktap-control/tapdisk/tapdisk-}
             pid=$(tap-ctl spawn) || { tap-ctl free -m \"$minor\" || exit
             printf '%s\\n' \"Could not spawn tapdisk for $minor\"; }";
        let path = format!("{}:{}", self.dir.path().display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("PATH", path).env("RUN", self.dir.path());
        text(&command.env("XENBUS_PATH", backend).output().unwrap().stdout)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn disk(domid: u16, minor: u32, phase: &str, since: u64) -> Value {
    json!({
        "disk": { "domid": domid, "devid": 51712 }, "phase": phase, "since": since, "format": "vhd",
        "image": "/srv/a.vhd", "pid": 70 + minor, "minor": minor, "starts": 1,
    })
}

fn disks(disks: &[Value]) -> (&'static str, Value) {
    ("disk.list", json!({ "disks": disks }))
}

/// There are no taps.
fn taps() -> (&'static str, Value) {
    ("tap.list", json!({ "taps": [] }))
}

#[test]
fn served_disks_are_listed_and_the_one_that_was_attached_last_is_the_last() {
    let program = Program::new();
    let [first, last] = [disk(4, 1, "served", 100), disk(3, 2, "served", 200)];
    let resting = disk(2, 0, "resting", 300);
    let answers = [&last, &first, &resting].map(Clone::clone);
    let _asked =
        answering(program.dir.path(), (0..3).flat_map(|_| [taps(), disks(&answers)]).collect());
    let output = program.call("list -t vhd -f /srv/a.vhd");
    assert!(output.status.success());
    let lines = "pid=71 minor=1 state=0 args=vhd:/srv/a.vhd\n\
                 pid=72 minor=2 state=0 args=vhd:/srv/a.vhd\n";
    assert_eq!(text(&output.stdout), lines);
    assert_eq!(
        text(&program.call("list -p 71 -m 1").stdout),
        lines.split_inclusive('\n').next().unwrap()
    );
    assert_eq!(text(&program.call("list -t aio").stdout), "");
}

#[test]
fn taps_and_disks_come_by_one_question() {
    let program = Program::new();
    let rows = json!({ "taps": [{ "minor": 9 }], "disks": [disk(3, 2, "served", 1)] });
    let asked = answering(program.dir.path(), vec![("tap.list", rows)]);
    let lines = "minor=9\npid=72 minor=2 state=0 args=vhd:/srv/a.vhd\n";
    assert_eq!(text(&program.call("list").stdout), lines);
    assert_eq!(asked.iter().count(), 1);
}

#[test]
fn an_image_that_is_being_opened_is_waited_for() {
    let program = Program::new();
    let attached = json!({ "disk": disk(3, 2, "served", 1) });
    let asked = answering(
        program.dir.path(),
        vec![
            taps(),
            disks(&[disk(3, 2, "starting", 1)]),
            ("attach.wait", attached),
            disks(&[disk(3, 2, "served", 1)]),
        ],
    );
    let output = program.call("list -t vhd -f /srv/a.vhd");
    assert!(output.status.success());
    assert_eq!(text(&output.stdout), "pid=72 minor=2 state=0 args=vhd:/srv/a.vhd\n");
    let asked: Vec<_> = asked.iter().collect();
    assert_eq!(asked[2].1["backend"], "backend/vbd3/3/51712");
}

#[test]
fn an_image_that_cannot_be_opened_is_not_found_and_the_log_has_the_reason() {
    let program = Program::new();
    let failure =
        json!({ "code": -32002, "message": "no such image", "data": { "help": "make it" } });
    let failed = disks(&[disk(3, 2, "failed", 1)]);
    let _asked = answering(
        program.dir.path(),
        vec![taps(), failed.clone(), ("attach.wait", failure), failed],
    );
    let output = program.call("list -t vhd -f /srv/a.vhd");
    assert!(output.status.success() && output.stdout.is_empty());
    assert_eq!(text(&output.stderr), "disk 3/51712: no such image\n");
}

#[test]
fn xls_script_says_why_a_disk_is_not_served() {
    let program = Program::new();
    let mut failed = disk(3, 2, "failed", 1);
    failed["why"] = json!("cannot open /srv/a.vhd: it is in use\nby another");
    failed["help"] = json!("end that");
    let listed = disks(&[disk(4, 1, "served", 100), failed]);
    let _asked = answering(program.dir.path(), vec![listed; 3]);
    let said = program.create("backend/vbd3/3/51712");
    let why = "disk 3/51712: cannot open /srv/a.vhd: it is in use\\nby another; end that";
    assert_eq!(said, format!("Could not spawn tapdisk for {why}\n"));
    // There is no reason for a served disk, nor for another host's disk.
    for backend in ["backend/vbd3/4/51712", "backend/vbd3/5/51712", "backend/vbd/1"] {
        assert_eq!(program.create(backend), "Could not allocate minor\n", "{backend}");
    }
}

fn details(online: bool) -> (&'static str, Value) {
    let disk = disk(3, 2, "served", 1);
    let details = json!({
        "disk": disk, "backend_state": 5, "frontend_state": 4, "online": online,
        "read_only": false, "waits_for": "it",
    });
    ("disk.show", details)
}

#[test]
fn a_detached_disk_is_waited_for_and_one_that_is_attached_stays() {
    let listed = disks(&[disk(3, 2, "served", 1)]);
    let gone = ("disk.show", json!({ "code": -32001, "message": "not attached" }));
    for (answers, exit) in [
        (vec![disks(&[])], 0),
        (vec![listed.clone(), details(true)], 16),
        (vec![listed.clone(), details(false), listed.clone(), details(false), disks(&[])], 0),
        (vec![listed.clone(), gone], 0),
    ] {
        let program = Program::new();
        let answers = [vec![taps()], answers].concat();
        let questions = answers.len();
        let asked = answering(program.dir.path(), answers);
        let output = program.call("destroy -p 72 -m 2");
        assert_eq!(output.status.code(), Some(exit), "{}", text(&output.stderr));
        assert_eq!(asked.iter().count(), questions);
    }
    // Both numbers count: one of them may belong to another disk by now.
    for line in ["destroy -p 72 -m 3", "destroy -p 71 -m 2"] {
        let program = Program::new();
        let _asked = answering(program.dir.path(), vec![taps(), listed.clone()]);
        assert!(program.call(line).status.success(), "{line}");
    }
}

#[test]
fn the_exit_code_is_the_errno_of_what_went_wrong() {
    let program = Program::new();
    let output = program.call("list");
    assert_eq!(output.status.code(), Some(71), "no such socket");
    assert!(text(&output.stderr).contains("systemctl start ferrite"));
    drop(UnixListener::bind(program.dir.path().join("control.sock")).unwrap());
    assert_eq!(program.call("list").status.code(), Some(71), "no process listens");
    for line in ["list -p x", "destroy -p 1", "list --frobnicate", "open -p 1 -m 2"] {
        assert_eq!(program.call(line).status.code(), Some(22), "{line}");
    }
    // As tapdisk's program does.
    for line in ["frobnicate", "help", "list -h"] {
        let said = program.call(line);
        assert!(
            said.status.success() && text(&said.stdout).starts_with("usage: tap-ctl"),
            "{line}"
        );
    }
    fs::remove_file(program.dir.path().join("control.sock")).unwrap();
    let _asked = answering(program.dir.path(), vec![("none", json!({}))]);
    assert_eq!(program.call("list").status.code(), Some(71), "no answer");
    let worker = Command::new(env!("CARGO_BIN_EXE_ferrite")).arg("workr").output().unwrap();
    let said = text(&worker.stderr);
    assert!(
        said.contains("unrecognized subcommand 'workr'") && !said.contains("worker'"),
        "{said}"
    );
}
