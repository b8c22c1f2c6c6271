//! The commands of docs/nbd.md, as they stand there.

use std::path::Path;
use std::process::Command;

use ferrite_testkit::places::dir_on_disk;
use ferrite_testkit::programs::peer;

const PAGE: &str = include_str!("../../../docs/nbd.md");

/// What stands in blocks of shell commands.
fn commands(text: &str) -> String {
    let blocks = text.split("```sh\n").skip(1);
    blocks.map(|block| block.split("```").next().unwrap()).collect()
}

#[test]
fn the_commands_in_the_documentation_work() {
    // They are there or not together.
    for program in ["nbdinfo", "qemu-io"] {
        if peer(program, &["--version"]).is_none() {
            return;
        }
    }
    // A server that is left by a command that fails would keep this test's pipe open.
    let script = format!("trap 'kill $(jobs -p) || true' EXIT\n{}", commands(PAGE));
    assert!(script.contains("ferrite export nbd ") && script.contains("nbdcopy "));
    let dir = dir_on_disk();
    let program = Path::new(env!("CARGO_BIN_EXE_ferrite"));
    let path =
        format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut sh = Command::new("bash");
    sh.args(["-eux", "-c", &script]).current_dir(dir.path());
    let output = sh.env("PATH", path).env_remove("RUST_LOG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}
