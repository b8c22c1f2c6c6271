//! `ferrite top` on a terminal, and without one.

use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};

use ferrite_serve::counters::{Counters, FOLDER};
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};

const PROGRAM: &str = env!("CARGO_BIN_EXE_ferrite");
/// The sequence that switches to the alternate screen.
const ENTERS: &str = "\u{1b}[?1049h";
/// The sequence that switches back to the former screen.
const LEAVES: &str = "\u{1b}[?1049l";
const CURSOR: &str = "\u{1b}[?25h";

/// A folder with the counters of one disk.
fn folder() -> tempfile::TempDir {
    let base = tempfile::tempdir().unwrap();
    Counters::default().keep_in(&base.path().join("vbd-3-51712"), "/a.vhd");
    base
}

/// Starts a shell line on a terminal of its own, which is written to and read.
fn start(line: &str) -> (Child, ChildStdin, ChildStdout) {
    let mut script = Command::new("script");
    // A terminal without a size has no room for anything.
    let line = format!("stty cols 160 rows 24; {line}");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    script.env_remove("RUST_LOG").env("TERM", "xterm").stdin(Stdio::piped());
    let mut child = script.stdout(Stdio::piped()).spawn().expect("script(1) of bsdutils runs");
    let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    (child, stdin, stdout)
}

/// Runs a shell line on a terminal of its own. As soon as it shows the disk, it gets these keys. Returns its exit code,
/// and the terminal's output.
fn on_terminal(line: &str, keys: &str) -> (i32, String) {
    let (mut child, mut stdin, mut stdout) = start(line);
    let (mut shown, mut bytes, mut is_told) = (Vec::new(), [0; 4096], false);
    loop {
        let n = stdout.read(&mut bytes).unwrap();
        if n == 0 {
            break;
        }
        shown.extend_from_slice(&bytes[..n]);
        if !is_told && String::from_utf8_lossy(&shown).contains("scroll") {
            stdin.write_all(keys.as_bytes()).unwrap();
            is_told = true;
        }
    }
    drop(stdin);
    (child.wait().unwrap().code().unwrap(), String::from_utf8_lossy(&shown).into_owned())
}

#[test]
fn a_terminal_is_left_as_it_was_by_keys_and_by_signals() {
    let base = folder();
    let top = format!("{PROGRAM} top --stats {}", base.path().join(FOLDER).display());
    for (line, keys, code) in [
        (format!("timeout --foreground 30 {top}"), ">rq", 0),
        (format!("timeout --foreground 30 {top}"), "\u{3}", 0),
        (format!("timeout --foreground -s TERM 1 {top}"), "", 124),
        (format!("timeout --foreground -s HUP 1 {top}"), "", 124),
    ] {
        let (ended, shown) = on_terminal(&line, keys);
        assert_eq!(ended, code, "{shown}");
        assert!(shown.contains("3/xvda"), "{shown}");
        assert!(shown.contains(LEAVES) && shown.rfind(CURSOR) > shown.find("3/xvda"), "{shown:?}");
    }
}

/// The state of a process, by the kernel's letter.
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[test]
fn stopped_it_leaves_the_screen_and_comes_back_when_it_goes_on() {
    let base = folder();
    let pid_file = base.path().join("pid");
    let top = format!("{PROGRAM} top --stats {}", base.path().join(FOLDER).display());
    let line =
        format!("sh -c 'echo $$ >{}; exec timeout --foreground 60 {top}'", pid_file.display());
    // timeout(1) keeps running; its child is the process to stop.
    let (mut child, mut stdin, mut stdout) = start(&line);
    let shown = Arc::new(Mutex::new(String::new()));
    let all = shown.clone();
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = stdout.read(&mut bytes) {
            all.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..n]));
        }
    });
    let times = |what: &str| shown.lock().unwrap().matches(what).count();
    wait_until("the disk", || times("scroll") > 0);
    let timeout: i32 = std::fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    let children = std::fs::read_to_string(format!("/proc/{timeout}/task/{timeout}/children"));
    let pid: i32 = children.unwrap().trim().parse().unwrap();
    let signal = |signal| kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    for round in 1..3 {
        // Stopped by another process, then by its key.
        match round {
            1 => signal(Signal::TSTP),
            _ => stdin.write_all(b"\x1a").unwrap(),
        }
        wait_until("its stop", || state(pid) == Some('T'));
        wait_until("its leave", || times(LEAVES) >= round);
        let drawn = times("scroll");
        signal(Signal::CONT);
        wait_until("its return", || times(ENTERS) > round && times("scroll") > drawn);
    }
    stdin.write_all(b"q").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    reader.join().unwrap();
    let shown = shown.lock().unwrap();
    assert!(shown.rfind(LEAVES) > shown.rfind(ENTERS), "{shown:?}");
}

/// Whether SIGHUP is delivered or, as under nohup, ignored.
#[test]
fn it_ends_with_its_terminal() {
    for before in ["", "trap '' HUP; "] {
        let base = folder();
        let pid_file = base.path().join("pid");
        let top = format!("{PROGRAM} top --stats {}", base.path().join(FOLDER).display());
        // Without a shell or timeout(1) between, which would end it.
        let line = format!("{before}echo $$ >{}; exec {top}", pid_file.display());
        let (mut child, _stdin, mut stdout) = start(&line);
        let (mut shown, mut bytes) = (String::new(), [0; 4096]);
        while !shown.contains("scroll") {
            let n = stdout.read(&mut bytes).unwrap();
            assert!(n > 0, "{shown}");
            shown.push_str(&String::from_utf8_lossy(&bytes[..n]));
        }
        let pid = std::fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        let _end = KillAtEnd(Pid::from_raw(pid).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        wait_until("the end of the program", || matches!(state(pid), None | Some('Z')));
    }
}

/// Kills a program that a failed test would leave behind: it takes a processor.
struct KillAtEnd(Pid);

impl Drop for KillAtEnd {
    fn drop(&mut self) {
        // A test that has passed has seen its end, and the number may be another process's.
        if std::thread::panicking() {
            let _ = kill_process(self.0, Signal::KILL);
        }
    }
}

#[test]
fn without_a_terminal_it_says_what_to_use() {
    let base = folder();
    let mut top = Command::new(PROGRAM);
    top.args(["top", "--stats"]).arg(base.path()).stdin(Stdio::null());
    let output = top.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("ferrite stat -i 1") && output.stdout.is_empty(), "{said}");
}
