//! The lines of the log where standard error is systemd's journal.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use ferrite_testkit::programs::skipped;

const PROGRAM: &str = env!("CARGO_BIN_EXE_ferrite");
/// The environment variable of the process that has a /run of its own.
const INSIDE: &str = "FERRITE_TEST_JOURNAL";
/// The socket that systemd connects standard error to.
const JOURNAL: &str = "/run/systemd/journal/stdout";

/// Runs this test file once more, in a mount namespace.
#[test]
fn each_line_for_the_journal_begins_with_its_priority() {
    let mut inside = Command::new("unshare");
    inside.args(["--mount", "--map-root-user", "sh", "-c"]);
    inside.arg("mount -t tmpfs none /run && mkdir -p /run/systemd/journal && exec \"$0\" \"$@\"");
    inside.arg(std::env::current_exe().unwrap()).args(["--exact", "inside", "--nocapture"]);
    let done = inside.env(INSIDE, "1").output().expect("unshare(1) of util-linux runs");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    if said.contains("unshare: ") || said.contains("mount: ") {
        return skipped("no mount namespace");
    }
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stdout));
}

#[test]
fn inside() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    let listener = UnixListener::bind(JOURNAL).unwrap();
    let to_journal = UnixStream::connect(JOURNAL).unwrap();
    let mut lines = String::new();
    let mut ferrite = Command::new(PROGRAM);
    // Its first words: this setting is no filter.
    ferrite.args(["export", "nbd", "/no/such.raw", "--socket", "/run/s"]).env("RUST_LOG", "a=b=c");
    ferrite.stdin(Stdio::null()).stderr(OwnedFd::from(to_journal));
    ferrite.status().unwrap();
    drop(ferrite);
    listener.accept().unwrap().0.read_to_string(&mut lines).unwrap();
    assert!(lines.contains("<4>RUST_LOG is not understood"), "{lines:?}");
}
