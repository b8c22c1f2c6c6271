//! The commands of docs/nbd.md, and those of README.md without Xen, as printed there.

use std::path::Path;
use std::process::Command;

use ferrite_testkit::places::dir_on_disk;
use ferrite_testkit::programs::peer;

const PAGE: &str = include_str!("../../../../docs/nbd.md");
const README: &str = include_str!("../../../../README.md");

/// The blocks of shell commands.
fn commands(text: &str) -> String {
    let blocks = text.split("```sh\n").skip(1);
    blocks.map(|block| block.split("```").next().unwrap()).collect()
}

#[test]
fn the_commands_in_the_documentation_work() {
    // Either both are installed or none.
    for program in ["nbdinfo", "qemu-io"] {
        if peer(program, &["--version"]).is_none() {
            return;
        }
    }
    let script = commands(PAGE);
    assert!(script.contains("ferrite export nbd ") && script.contains("nbdcopy "));
    run(&script, dir_on_disk().path());
}

/// The image is intact afterwards, and nothing listens any more.
#[test]
fn the_readme_serves_a_disk_without_xen() {
    if peer("nbdinfo", &["--version"]).is_none() {
        return;
    }
    let section = README.split_once("\n## Try it without Xen\n").expect("the section").1;
    let script = commands(section.split_once("\n## ").expect("the next one").0);
    assert!(script.contains("ferrite export nbd ") && script.contains("nbdinfo "));
    let dir = dir_on_disk();
    run(&script, dir.path());
    assert!(!dir.path().join("nbd.sock").exists());
    run("ferrite image info disk.img", dir.path());
}

/// Runs commands in a folder, with this program in PATH: each has to succeed.
fn run(commands: &str, dir: &Path) {
    // A server that remains after a failed command would keep this test's pipe open.
    let script = format!("trap 'kill $(jobs -p) || true' EXIT\n{commands}");
    let program = Path::new(env!("CARGO_BIN_EXE_ferrite"));
    let path =
        format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut sh = Command::new("bash");
    sh.args(["-eux", "-c", &script]).current_dir(dir);
    let output = sh.env("PATH", path).env_remove("RUST_LOG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}
