//! The commands of docs/images.md, as they stand there.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// What stands in blocks of shell commands.
fn commands(text: &str) -> String {
    let mut inside = false;
    let mut out = String::new();
    for line in text.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            line if inside => out = out + line + "\n",
            _ => {}
        }
    }
    out
}

#[test]
fn the_commands_in_the_documentation_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = commands(&std::fs::read_to_string(root.join("docs/images.md")).unwrap());
    for command in ["create", "info", "snapshot", "clone", "convert", "check", "repair", "resize"]
        .into_iter()
        .chain(["coalesce", "map", "compare", "du"])
    {
        assert!(script.contains(&format!("ferrite image {command} ")), "{command} has no example");
    }
    let dir = TempDir::new().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_ferrite"));
    let path =
        format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut sh = Command::new("sh");
    sh.args(["-eux", "-c", &script]).current_dir(dir.path());
    let output = sh.env("PATH", path).env_remove("RUST_LOG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}
