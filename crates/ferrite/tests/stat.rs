//! `ferrite stat` with a backend that serves a guest.

use std::io::{BufRead, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_serve::counters::{FOLDER, stats_file};
use ferrite_testkit::PATIENCE;
use ferrite_testkit::rig::{Plan, Rig};

fn stat(rig: &Rig, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["stat", "--stats"]).arg(folder(rig)).args(args).env_remove("RUST_LOG");
    command
}

fn folder(rig: &Rig) -> PathBuf {
    rig.dir.path().join(FOLDER)
}

fn out(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// So many writes of 4 KiB, and as many reads.
fn work(front: &mut Frontend, requests: u64) {
    let buffer = front.space().buffer(1).unwrap();
    for n in 0..requests {
        front.queues[0].write(8 * n, &buffer, 0, 4096).unwrap();
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        front.queues[0].read(8 * n, &buffer, 0, 4096).unwrap();
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    }
}

/// The cells of the only disk's line, with their titles.
fn cells(report: &str) -> Vec<(String, String)> {
    let lines: Vec<&str> = report.lines().collect();
    assert_eq!(lines.len(), 2, "{report}");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    words(lines[0]).into_iter().zip(words(lines[1])).collect()
}

fn json(line: &str) -> serde_json::Value {
    serde_json::from_str(line).unwrap()
}

#[test]
fn a_report_is_of_all_that_the_disk_has_done() {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    work(&mut front, 50);
    // The queue counts a moment after its guest has the answer; at its end it has counted all.
    front.close(PATIENCE).unwrap();
    let name = stats_file(rig.run_dir()).file_name().unwrap().to_str().unwrap().to_owned();
    let output = out(&mut stat(&rig, &[]));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let cells = cells(&text(&output.stdout));
    let cell = |title: &str| &cells.iter().find(|cell| cell.0 == title).unwrap().1;
    assert_eq!(
        (cell("disk").as_str(), cell("now").as_str(), cell("err").as_str()),
        ("1/xvda", "0", "0")
    );
    assert!(cell("p50").ends_with('s') && cell("cpu%") != "-" && cell("r/s") != "0", "{cells:?}");

    let output = out(&mut stat(&rig, &["--json", &name]));
    let report = json(&text(&output.stdout));
    let disk = &report["disks"][0];
    assert_eq!(report["schema"], 1);
    assert_eq!(disk["image"], rig.image.to_str().unwrap());
    assert_eq!((&disk["pid"], &disk["alive"]), (&std::process::id().into(), &true.into()));
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let done = |kind: &str| number(&disk[kind]["per_s"]) * number(&disk["seconds"]);
    assert_eq!((done("read").round(), done("write").round(), done("flush")), (50.0, 50.0, 0.0));
    let ratio = number(&disk["read"]["bytes_per_s"]) / number(&disk["read"]["per_s"]);
    assert_eq!(ratio.round(), 4096.0);
    assert!(number(&disk["data"]["p50_us"]) <= number(&disk["data"]["p999_us"]));
    rig.stop().unwrap();
}

#[test]
fn disks_that_are_not_there_are_an_error_or_waited_for() {
    let rig = Rig::without_backend(Plan { bytes: 1 << 20, ..Plan::default() });
    let output = out(&mut stat(&rig, &[]));
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stderr).contains("no disk has counters"), "{output:?}");
    assert_eq!(text(&output.stdout).lines().count(), 1);
    let output = out(&mut stat(&rig, &["7/xvda"]));
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("7/xvda cannot be shown"), "{output:?}");
    let output = out(&mut stat(&rig, &["-i", "0.1", "-n", "2", "7/xvda"]));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout).lines().filter(|line| line.starts_with("disk")).count(), 2);
    for wrong in [["-i", "0"], ["-n", "0"], ["-i", "x"], ["--", "../etc"]] {
        assert_eq!(out(&mut stat(&rig, &wrong)).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn what_is_no_disk_is_named_once_and_the_others_are_shown() {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let front = rig.connect(&FrontOptions::default());
    std::fs::write(folder(&rig).join("vbd-9-9"), b"FERSTA99").unwrap();
    std::fs::write(folder(&rig).join("x\u{1b}[31m"), b"").unwrap();
    let output = out(&mut stat(&rig, &["-i", "0.1", "-n", "3"]));
    let (shown, told) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(shown.lines().filter(|line| line.starts_with("1/xvda ")).count(), 3, "{shown}");
    assert_eq!(told.lines().count(), 2, "{told}");
    assert!(told.contains("vbd-9-9: it is too short: 8 bytes; it is skipped"), "{told}");
    assert!(!told.contains('\u{1b}'), "{told}");
    drop(front);
    rig.stop().unwrap();
}

/// A command that reports repeatedly, and its output.
fn endless(rig: &Rig) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut command = stat(rig, &["-i", "0.1", "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    (child, stdout)
}

fn line(stdout: &mut impl BufRead) -> serde_json::Value {
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    json(&line)
}

/// Its exit code and error output.
fn end(mut child: Child) -> (Option<i32>, String) {
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (child.wait().unwrap().code(), said)
}

#[test]
fn it_goes_on_until_it_is_told_to_end_or_nobody_reads() {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let (child, mut stdout) = endless(&rig);
        let first = line(&mut stdout);
        assert_eq!(first["disks"].as_array().unwrap().len(), 1);
        work(&mut front, 5);
        // The requests appear in some line, and later lines are without.
        while line(&mut stdout)["disks"][0]["write"]["per_s"] == 0.0 {}
        while line(&mut stdout)["disks"][0]["write"]["per_s"] != 0.0 {}
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, signal).unwrap();
        assert_eq!(end(child), (Some(0), String::new()));
    }
    let (child, mut stdout) = endless(&rig);
    line(&mut stdout);
    drop(stdout);
    assert_eq!(end(child), (Some(0), String::new()));
    drop(front);
    rig.stop().unwrap();
}

#[test]
fn disks_that_go_and_come_are_followed() {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let (mut child, mut stdout) = endless(&rig);
    let disks = |report: serde_json::Value| report["disks"].as_array().unwrap().len();
    assert_eq!(disks(line(&mut stdout)), 1);
    work(&mut front, 1);
    drop(front);
    rig.reboot();
    while disks(line(&mut stdout)) != 0 {}
    rig.start();
    let front = rig.connect(&FrontOptions::default());
    while disks(line(&mut stdout)) != 1 {}
    drop(front);
    rig.stop().unwrap();
    // The disk is not served now, and its counters stay for the next process.
    assert_eq!(disks(line(&mut stdout)), 1);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn the_commands_of_the_documentation_are_understood_and_its_columns_are_the_ones_there_are() {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let front = rig.connect(&FrontOptions::default());
    let page = include_str!("../../../docs/watching.md");
    let mut commands = 0;
    for line in page.lines().filter(|line| line.starts_with("ferrite stat") && !line.contains('['))
    {
        let words = line.split(" #").next().unwrap().split_whitespace().skip(2);
        // Once each, although it would continue.
        let args: Vec<&str> = words.chain(["--count", "1"]).collect();
        let args = match args.iter().position(|word| *word == "-n") {
            Some(at) => [&args[..at], &args[at + 2..]].concat(),
            None => args,
        };
        let code = out(&mut stat(&rig, &args)).status.code();
        assert_eq!(code, Some(if line.contains("3/xvda") { 3 } else { 0 }), "{line}");
        commands += 1;
    }
    assert_eq!(commands, 4);
    let shown = text(&out(&mut stat(&rig, &[])).stdout);
    let titles = shown.lines().next().unwrap();
    assert!(page.lines().any(|line| line == titles), "{titles}");
    for title in titles.split_whitespace().skip(1) {
        assert!(page.contains(&format!("`{title}`")), "{title}");
    }
    drop(front);
    rig.stop().unwrap();
}
