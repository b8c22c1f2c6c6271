//! Each command on a terminal, where libraries behave differently from a pipe.

mod images;

use std::process::Command;

use images::{MIB, Place};

/// Runs a shell line on a terminal of its own; returns its exit code and the terminal's output.
fn on_terminal(place: &Place, line: &str) -> (i32, String) {
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", line, "/dev/null"]);
    script.current_dir(place.path(".")).env_remove("RUST_LOG").env("TERM", "xterm");
    let output = script.output().expect("script(1) of bsdutils runs");
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The output on standard error only; a progress bar that is cleared does not count.
fn errors(place: &Place, args: &str) -> (i32, String) {
    let program = env!("CARGO_BIN_EXE_ferrite");
    let (code, text) = on_terminal(place, &format!("{program} {args} >/dev/null"));
    let is_bar = |line: &str| ["\u{1b}", " left"].iter().any(|p| line.contains(p));
    let lines = text.split(['\r', '\n']).map(str::trim);
    let said: Vec<&str> = lines.filter(|line| !line.is_empty() && !is_bar(line)).collect();
    (code, said.join("\n"))
}

#[test]
fn commands_that_succeed_say_nothing_but_their_result() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    for args in [
        "--help",
        "image create b.vhd 4M",
        "image convert a.img c.vhd",
        "image info c.vhd",
        "image map c.vhd",
        "image du c.vhd",
        "image check c.vhd",
        "image repair c.vhd",
        "image compare a.img c.vhd",
        "image resize b.vhd 8M",
        "image snapshot c.vhd d.vhd",
        "image coalesce c.vhd",
        "image clone c.vhd e.vhd",
        "store create s --size 32M",
        "store create s#a 1G",
        "store snapshot s#a b",
        "store clone s#b c",
        "store rollback s#a b",
        "store rename s#c d",
        "store resize s#d 2G",
        "store grow s +32M --overcommit",
        "store delete s#d",
        "store list s",
        "store info s",
        "store stats s",
        "store gc s",
        "store compact s",
        "store check s",
        "store scrub s",
        "store repair s",
        "store send s#b | cat",
    ] {
        assert_eq!(errors(&place, args), (0, String::new()), "{args}");
    }
}

#[test]
fn commands_that_fail_begin_with_why() {
    let place = Place::new();
    for args in ["image info no.vhd", "store list no", "serve no.vhd --xen 32000/xvda"] {
        let (code, text) = errors(&place, args);
        let lines: Vec<&str> = text.lines().collect();
        assert!(code == 3 && lines.len() == 2, "{args}: {text}");
        assert!(lines[0].starts_with("ferrite: ") && lines[1].starts_with("help: "), "{text}");
    }
    let (_, text) = errors(&place, "doctor");
    assert!(text.is_empty() || text.starts_with("ferrite: "), "{text}");
}

#[test]
fn a_line_of_the_log_has_no_control_characters_on_a_terminal() {
    let place = Place::new();
    place.pattern("a.img", MIB, &[]);
    let line = format!("{} -vv image info a.img", env!("CARGO_BIN_EXE_ferrite"));
    let (code, text) = on_terminal(&place, &line);
    assert_eq!(code, 0, "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
}
