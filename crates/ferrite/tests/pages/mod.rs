//! The commands and tables of documentation pages.

// Each test program uses some of it.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

/// The blocks of shell commands.
pub(crate) fn commands(text: &str) -> String {
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

/// Runs commands, one after the other, in a folder of their own. All have to succeed.
pub(crate) fn run(script: &str) {
    let dir = TempDir::new().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_ferrite"));
    let path =
        format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    // A server that remains after a failed command would keep this test's pipe open.
    let script = format!("trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{script}");
    let mut sh = Command::new("bash");
    sh.args(["-eux", "-c", &script]).current_dir(dir.path());
    let output = sh.env("PATH", path).env_remove("RUST_LOG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

/// The texts between backticks.
pub(crate) fn quoted(text: &str) -> impl Iterator<Item = String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned)
}

/// The rows of the tables in a part of a page, by cells; the first one is empty.
pub(crate) fn rows<'a>(page: &'a str, title: &str) -> Vec<Vec<&'a str>> {
    let (_, section) = page.split_once(&format!("\n## {title}\n")).unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let rows = section.lines();
    rows.filter_map(|line| Some(line.strip_prefix('|')?.split('|').collect())).collect()
}

/// All names of fields.
pub(crate) fn add_names(value: &Value, to: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            to.insert(name.clone());
            add_names(value, to);
        }),
        Value::Array(values) => values.iter().for_each(|value| add_names(value, to)),
        _ => {}
    }
}
