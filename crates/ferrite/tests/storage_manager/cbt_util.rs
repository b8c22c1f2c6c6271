//! `cbt-util` with numbers and files that are none, and without room.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

use ferrite_testkit::places::Small;

const MIB: u64 = 1 << 20;

/// The program, and a folder with logs.
struct Logs(tempfile::TempDir);

impl Logs {
    fn new() -> Logs {
        let logs = Logs(tempfile::tempdir().unwrap());
        symlink(env!("CARGO_BIN_EXE_ferrite"), logs.path("cbt-util")).unwrap();
        fs::create_dir(logs.path("folder")).unwrap();
        logs
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn call(&self, line: &str) -> Output {
        let mut command = Command::new(self.path("cbt-util"));
        command.args(line.split(' ')).current_dir(self.0.path()).output().unwrap()
    }

    fn says(&self, line: &str, expected: &str) {
        let output = self.call(line);
        assert!(output.status.success() && output.stderr.is_empty(), "{line}: {output:?}");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "{line}");
    }

    fn fails(&self, line: &str, errno: i32) {
        let output = self.call(line);
        assert_eq!(output.status.code(), Some(errno), "{line}");
        assert!(output.stdout.is_empty() && output.stderr.starts_with(b"cbt-util: "), "{line}");
    }

    /// The blocks that have changed.
    fn bits(&self, name: &str) -> Vec<usize> {
        let bits = self.call(&format!("get -n {name} -b")).stdout;
        (0..bits.len() * 8).filter(|bit| bits[bit / 8] >> (bit % 8) & 1 != 0).collect()
    }

    fn is_consistent(&self, name: &str) -> bool {
        self.call(&format!("get -n {name} -f")).stdout == b"1\n"
    }
}

#[test]
fn numbers_and_files_that_are_none_are_refused_and_a_full_file_system_spoils_no_log() {
    let logs = Logs::new();
    logs.says(&format!("create -n log -s {}", 4 * MIB), "");
    logs.says("set -n log -f 1", "");
    let (fifo, mode) =
        (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
    rustix::fs::mknodat(rustix::fs::CWD, logs.path("pipe"), fifo, mode, 0).unwrap();
    std::os::unix::fs::symlink("loop", logs.path("loop")).unwrap();
    for (line, errno) in [
        ("create -n new -s -1", 22),
        ("create -n new -s 1.5", 22),
        ("create -n new -s 70368744177665", 22),
        ("create -n new -s 18446744073709551616", 22),
        ("create -n pipe -s 1048576", 22),
        ("create -n /dev/null -s 1048576", 22),
        ("create -n loop -s 1048576", 40),
        ("set -n log -s 0", 22),
        ("set -n log -s 70368744177665", 22),
        ("set -n log -f -1", 22),
        ("set -n log -f 4294967296", 22),
        ("set -n log -p 8d4b5c62-9c1e-4f0e-a2c5-00000000000g", 22),
        ("set -n log -p +d4b5c62-9c1e-4f0e-a2c5-000000000001", 22),
        ("set -n pipe -f 1", 22),
        ("get -n pipe -b", 22),
        ("get -n /dev/zero -b", 22),
        ("coalesce -p pipe -c log", 22),
        ("coalesce -p log -c none", 2),
    ] {
        logs.fails(line, errno);
    }
    assert!(!logs.path("new").exists());
    // With itself it is as it was.
    let mut bytes = fs::read(logs.path("log")).unwrap();
    bytes[48] = 1;
    fs::write(logs.path("log"), &bytes).unwrap();
    logs.says("coalesce -p log -c log", "");
    assert_eq!((logs.bits("log"), logs.is_consistent("log")), (vec![0], true));
    // One that cannot grow has the size and the bits that it had.
    let Some(_small) = Small::mount(&logs.path("folder"), "size=64k") else { return };
    fs::copy(logs.path("log"), logs.path("folder/log")).unwrap();
    logs.fails(&format!("set -n folder/log -s {} -f 0", 64_u64 << 30), 28);
    logs.says("get -n folder/log -s", &format!("{}\n", 4 * MIB));
    assert_eq!((logs.bits("folder/log"), logs.is_consistent("folder/log")), (vec![0], true));
    // One that is made anew there without room never counts as consistent.
    logs.fails(&format!("create -n folder/log -s {}", 64_u64 << 30), 28);
    assert!(!logs.is_consistent("folder/log"));
}
