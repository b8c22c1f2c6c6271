//! The `ferrite` program as its users see it: exit codes, messages, and nothing created.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

fn ferrite(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).env_remove("RUST_LOG").output().expect("ferrite runs")
}

fn serve(image: &Path, more: &[&str]) -> Output {
    let mut args = vec!["serve", image.to_str().unwrap(), "--xen", "32000/xvda"];
    args.extend(more);
    ferrite(&args)
}

/// Fails with this code, and prints on standard error only the reason and the next step.
#[track_caller]
fn assert_refused(output: &Output, code: i32, why: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].starts_with("ferrite: cannot open image ") && lines[0].contains(why),
        "{text}"
    );
    assert!(lines[1].starts_with("help: "), "{text}");
    assert!(output.stdout.is_empty());
}

fn image(dir: &TempDir, bytes: u64) -> std::path::PathBuf {
    let path = dir.path().join("disk.img");
    File::create_new(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn entries(dir: &TempDir) -> usize {
    fs::read_dir(dir.path()).unwrap().count()
}

#[test]
fn a_missing_image_is_not_found_and_not_created() {
    let dir = TempDir::new().unwrap();
    for more in [&[][..], &["--read-only"][..]] {
        assert_refused(&serve(&dir.path().join("no.img"), more), 3, "no such file");
        assert_refused(&serve(&dir.path().join("no/where.img"), more), 3, "no such file");
    }
    assert_eq!(entries(&dir), 0);
}

#[test]
fn a_directory_is_refused() {
    let dir = TempDir::new().unwrap();
    assert_refused(&serve(dir.path(), &[]), 1, "it is a directory");
}

#[test]
fn a_character_device_is_refused() {
    assert_refused(&serve(Path::new("/dev/null"), &[]), 1, "it is a character device");
}

#[test]
fn a_size_that_is_not_a_multiple_of_512_is_refused_and_stays() {
    let dir = TempDir::new().unwrap();
    let path = image(&dir, 1_000_000);
    assert_refused(&serve(&path, &[]), 1, "1000000 bytes, is not a multiple of 512");
    assert_eq!(fs::metadata(&path).unwrap().len(), 1_000_000);
}

#[test]
fn an_empty_image_is_refused() {
    let dir = TempDir::new().unwrap();
    assert_refused(&serve(&image(&dir, 0), &[]), 1, "it is empty");
}

#[test]
fn a_locked_image_is_busy_and_its_holder_named() {
    let dir = TempDir::new().unwrap();
    let path = image(&dir, 1 << 20);
    let holder = File::open(&path).unwrap();
    holder.lock().unwrap();
    let pid = format!("process {}", std::process::id());
    assert_refused(&serve(&path, &[]), 4, &pid);
    assert_refused(&serve(&path, &["--read-only"]), 4, "has locked it");
}

#[test]
fn a_good_image_gets_past_its_checks_to_xen() {
    if Path::new("/dev/xen/gntdev").exists() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let output = serve(&image(&dir, 1 << 20), &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("Xen") && text.contains("help: ") && !text.contains("image"), "{text}");
}

#[test]
fn wrong_usage_has_its_own_code() {
    for args in [
        &[][..],
        &["serve"],
        &["serve", "a.img"],
        &["serve", "a.img", "--xen", "guest/xvda"],
        &["serve", "a.img", "--xen", "3/xvda", "--queues", "0"],
        &["serve", "a.img", "--xen", "3/xvda", "--ring-order", "9"],
        &["serve", "a.img", "--xen", "3/xvda", "--memory", "much"],
        &["serve", "null:12", "--xen", "3/xvda"],
        &["serve", "null:x", "--xen", "3/xvda"],
        &["frobnicate"],
        &["doctor", "--frobnicate"],
    ] {
        let output = ferrite(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(!output.stderr.is_empty() && output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn help_and_version_succeed() {
    for args in [&["--help"][..], &["--version"], &["serve", "--help"], &["doctor", "-h"]] {
        let output = ferrite(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn doctor_runs_everywhere() {
    let output = ferrite(&["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for word in
        ["kernel", "io_uring", "Linux AIO", "huge pages", "xen", "xenstore", "On this machine"]
    {
        assert!(text.contains(word), "{word} is missing in\n{text}");
    }
}

#[test]
fn doctor_prints_json_for_programs() {
    let output = ferrite(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["schema"], 1);
    assert!(report["xen"].is_boolean());
    for check in report["checks"].as_array().unwrap() {
        assert!(["ok", "warn", "no"].contains(&check["state"].as_str().unwrap()), "{check}");
        assert!(check["name"].is_string() && check["found"].is_string(), "{check}");
    }
}

/// A server outlives the pipe that reads its messages.
#[test]
fn messages_that_nobody_reads_end_nothing() {
    let dir = TempDir::new().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    // An invalid value: that is a message.
    command.args(["image", "create", "disk.img", "1M"]).env("RUST_LOG", "=,=");
    let status = command.current_dir(dir.path()).stderr(writer).status().unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(fs::metadata(dir.path().join("disk.img")).unwrap().len(), 1 << 20);
}

#[test]
fn the_lab_is_the_program_beside_ours_with_all_words_and_its_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let ours = folder.path().join("ferrite");
    // A program that this process has open for writing cannot be executed, nor can one that a child of another test has
    // inherited so. So another process writes these.
    let copied = Command::new("cp")
        .args([env!("CARGO_BIN_EXE_ferrite").as_ref(), ours.as_os_str()])
        .status();
    assert!(copied.unwrap().success());
    let lab = |words: &[&str]| {
        Command::new(&ours).arg("lab").args(words).env("PATH", "/no/such/folder").output().unwrap()
    };
    let output = lab(&["list"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert!(errors.contains("help: build it from Ferrite's source"), "{errors}");
    let beside = folder.path().join("ferrite-lab");
    let write = "printf '#!/bin/sh\\necho \"$@\"\\nexit 7\\n' >\"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", write]).arg(&beside).status().unwrap().success());
    let output = lab(&["run", "--help", "-v", "polling"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "run --help -v polling\n");
    assert_eq!(output.status.code(), Some(7));
    let output = lab(&["--help"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "--help\n");
}
