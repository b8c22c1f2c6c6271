//! A bench on a terminal, where its progress is shown.

use std::process::Command;

/// Runs the program on a terminal of its own: its exit code, and what it shows on standard error
/// besides a bar that comes and goes.
fn errors(args: &str) -> (i32, String) {
    let line = format!("{} {args} >/dev/null", env!("CARGO_BIN_EXE_ferrite-bench"));
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    let output = script.env_remove("RUST_LOG").env("TERM", "xterm").output();
    let output = output.expect("script(1) of bsdutils runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let is_bar =
        |line: &str| ["\u{1b}", " left", " are connected"].iter().any(|p| line.contains(p));
    let lines = text.split(['\r', '\n']).map(str::trim);
    let said: Vec<&str> = lines.filter(|line| !line.is_empty() && !is_bar(line)).collect();
    (output.status.code().unwrap(), said.join("\n"))
}

#[test]
fn what_succeeds_says_nothing_but_its_result() {
    for args in ["--help", "null: --seconds 0.2", "bare memcpy --pages 8 --batch 3 --seconds 0.1"] {
        // A machine that is busy with something else may measure nothing in so short a time.
        let mut ends = std::iter::repeat_with(|| errors(args)).take(30);
        let end = ends.find(|(code, _)| *code == 0);
        assert_eq!(end, Some((0, String::new())), "{args}: {:?}", errors(args));
    }
}

#[test]
fn what_fails_begins_with_why() {
    let (code, text) = errors("no.vhd");
    let lines: Vec<&str> = text.lines().collect();
    assert!(code == 3 && lines.len() == 2, "{text}");
    assert!(lines[0].starts_with("ferrite: ") && lines[1].starts_with("help: "), "{text}");
}
