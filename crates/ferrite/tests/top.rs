//! `ferrite top` on a terminal, and without one.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use ferrite_serve::counters::{Counters, FOLDER};

const PROGRAM: &str = env!("CARGO_BIN_EXE_ferrite");
/// To the screen that was there before, and the cursor shows.
const LEAVES: &str = "\u{1b}[?1049l";
const CURSOR: &str = "\u{1b}[?25h";

/// A folder with the counters of one disk.
fn folder() -> tempfile::TempDir {
    let base = tempfile::tempdir().unwrap();
    Counters::default().keep_in(&base.path().join("vbd-3-51712"), "/a.vhd");
    base
}

/// Runs a shell line on a terminal of its own. As soon as it shows the disk, it gets these keys. Its exit
/// code, and what the terminal got.
fn on_terminal(line: &str, keys: &str) -> (i32, String) {
    let mut script = Command::new("script");
    // One that nobody has made larger has no room for anything.
    let line = format!("stty cols 160 rows 24; {line}");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    script.env_remove("RUST_LOG").env("TERM", "xterm").stdin(Stdio::piped());
    let mut child = script.stdout(Stdio::piped()).spawn().expect("script(1) of bsdutils runs");
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
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
        assert!(shown.contains("vbd-3-51712"), "{shown}");
        assert!(shown.contains(LEAVES) && shown.rfind(CURSOR) > shown.find("vbd-3"), "{shown:?}");
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
