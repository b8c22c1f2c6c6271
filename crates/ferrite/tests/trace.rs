//! `ferrite trace` with a backend that serves a guest.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_seeing::trace::STAGES;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::programs::installed;
use ferrite_testkit::rig::{Plan, Rig};
use serde_json::Value;

const PAGE: &str = include_str!("../../../docs/trace.md");

fn rig() -> (Rig, Frontend) {
    let rig = Rig::new(Plan { bytes: 8 << 20, ..Plan::default() });
    let front = rig.connect(&FrontOptions::default());
    (rig, front)
}

/// Runs in the rig's folder, which has all run directories.
fn trace(rig: &Rig, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.arg("trace").args(args).current_dir(rig.dir.path()).env_remove("RUST_LOG");
    command.stdin(Stdio::null());
    command
}

fn name(rig: &Rig) -> String {
    rig.run_dir().file_name().unwrap().to_str().unwrap().to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn done(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout)
}

/// So many requests, and a pause in which the worker goes to sleep: with fast storage it would not otherwise.
const BURST: u64 = 128;
const PAUSE: Duration = Duration::from_millis(20);

/// Reads and writes of several sizes, several at a time, while `command` runs.
fn beside_work(front: &mut Frontend, mut command: Command) -> Output {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let output = scope.spawn(|| {
            let output = command.output();
            ended.store(true, Ordering::Relaxed);
            output.unwrap()
        });
        let buffer = front.space().buffer(64).unwrap();
        let mut n = 0;
        while !ended.load(Ordering::Relaxed) {
            for _ in 0..8 {
                let bytes = 4096 << (n % 4);
                match n % 3 {
                    0 => front.queues[0].write(64 * (n % 200), &buffer, 0, bytes).unwrap(),
                    _ => front.queues[0].read(64 * (n % 200), &buffer, 0, bytes).unwrap(),
                };
                n += 1;
            }
            front.queues[0].drain(PATIENCE).unwrap();
            if n.is_multiple_of(BURST) {
                std::thread::sleep(PAUSE);
            }
        }
        output.join().unwrap()
    })
}

/// A recording of so many requests.
fn recorded(rig: &Rig, front: &mut Frontend, requests: &str) -> String {
    let disk = name(rig);
    let args = ["record", &disk, "--run-dir", ".", "--requests", requests, "-o", "a.trace"];
    done(beside_work(front, trace(rig, &args)))
}

#[test]
fn a_disk_is_recorded_and_the_recording_is_exported_modelled_and_drawn() {
    let (rig, mut front) = rig();
    let said = recorded(&rig, &mut front, "500");
    assert!(said.starts_with(&format!("500 requests of {} in ", name(&rig))), "{said}");
    let csv = done(trace(&rig, &["export", "a.trace", "--format", "csv"]).output().unwrap());
    assert_eq!(csv.lines().count(), 501);
    assert!(csv.contains(",read,") && csv.contains(",write,"));
    let spans = done(trace(&rig, &["export", "a.trace", "--format", "spans"]).output().unwrap());
    assert!(
        spans.contains("\nblkif,0,worker,slept,") && spans.contains("\nblkif,0,guest,consumed,")
    );
    let json = done(trace(&rig, &["export", "a.trace", "--format", "perfetto"]).output().unwrap());
    let json: Value = serde_json::from_str(&json).unwrap();
    assert!(json["traceEvents"].as_array().unwrap().len() > 500 * 4);
    let model = done(trace(&rig, &["model", "a.trace", "--json"]).output().unwrap());
    let model: Value = serde_json::from_str(&model).unwrap();
    assert_eq!((&model["schema"], &model["requests"]), (&1.into(), &500.into()));
    let rows = model["rows"].as_array().unwrap();
    let all = rows.iter().find(|row| row["operation"] == "write" && row["stage"] == "all").unwrap();
    assert!(all["x_us"].is_f64() && all["y_ci95_us_per_kib"].is_f64(), "{model}");
    done(trace(&rig, &["report", "a.trace", "-o", "a.html"]).output().unwrap());
    let page = std::fs::read_to_string(rig.dir.path().join("a.html")).unwrap();
    assert!(page.contains(&name(&rig)) && page.len() > 100_000);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(rig.dir.path().join("a.trace")).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    drop(front);
}

#[test]
fn a_disk_is_recorded_on_when_another_process_serves_it() {
    let (mut rig, mut front) = rig();
    let disk = name(&rig);
    let args = ["record", &disk, "--run-dir", ".", "--seconds", "600", "--requests", "20"];
    let mut command = trace(&rig, &[&args[..], &["-o", "a.trace"]].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let buffer = front.space().buffer(1).unwrap();
    let mut write = |sector| {
        front.queues[0].write(sector, &buffer, 0, 4096).unwrap();
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    };
    // All requests after its message are recorded.
    let mut said = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, format!("recording {disk}; Ctrl-C ends it\n"));
    (0..10).for_each(|_| write(8));
    rig.stop().unwrap();
    rig.start();
    (0..10).for_each(|_| write(16));
    assert!(child.wait().unwrap().success());
    let csv = done(trace(&rig, &["export", "a.trace", "--format", "csv"]).output().unwrap());
    let of = |sector: u64| {
        let is = |line: &&str| line.split(',').nth(4) == Some(&sector.to_string());
        csv.lines().filter(is).count()
    };
    assert_eq!((of(8), of(16)), (10, 10), "{csv}");
    drop(front);
}

#[test]
fn what_is_not_there_and_what_is_no_recording_is_said() {
    let (rig, front) = rig();
    let told = |args: &[&str], code: i32, words: &str| {
        let output = trace(&rig, args).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
    };
    let disk = name(&rig);
    told(&["model", "no.trace"], 3, "cannot read no.trace");
    told(&["model", "9/xvda", "--run-dir", "."], 3, "there is no trace of it");
    std::fs::write(rig.dir.path().join("odd"), b"FERTRF99 and more").unwrap();
    told(&["report", "odd", "-o", "a.html"], 1, "it is of version \"99\"");
    told(&["record", &disk, "--run-dir", ".", "-o", "no/such"], 1, "cannot write no/such");
    told(&["record", &disk, "--requests", "0", "-o", "x"], 2, "requests");
    told(&["record", &disk, "--seconds", "0", "-o", "x"], 2, "seconds");
    drop(front);
}

#[test]
fn the_commands_of_the_documentation_work() {
    let (rig, mut front) = rig();
    let mut commands = 0;
    for line in PAGE.lines().filter(|line| line.starts_with("ferrite trace ")) {
        let words = line.split(" #").next().unwrap().split_whitespace().skip(2);
        let disk = name(&rig);
        let mut args: Vec<&str> =
            words.map(|word| if word == "3/xvda" { &disk } else { word }).collect();
        if let Some(at) = args.iter().position(|word| *word == "--seconds") {
            args[at + 1] = "0.3";
            args.extend(["--run-dir", "."]);
        }
        done(beside_work(&mut front, trace(&rig, &args)));
        commands += 1;
    }
    assert_eq!(commands, 8);
    for stage in STAGES {
        assert!(PAGE.contains(&format!("| {stage} |")), "{stage}");
    }
    for file in ["slow.trace", "slow.html", "slow.json", "slow.csv", "spans.csv", "now.html"] {
        assert!(std::fs::metadata(rig.dir.path().join(file)).unwrap().len() > 100, "{file}");
    }
    drop(front);
}

/// The page as rendered by a browser.
fn rendered(page: &Path, more: &[&str]) -> Option<String> {
    let profile = page.with_extension("profile");
    let mut chromium = Command::new("chromium");
    chromium.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
    chromium.args(["--window-size=1300,1600", "--virtual-time-budget=3000"]).args(more);
    chromium.arg(format!("--user-data-dir={}", profile.display()));
    chromium.arg("--dump-dom").arg(format!("file://{}", page.display()));
    let output = installed("chromium", chromium.stdin(Stdio::null()).output())?;
    Some(done(output))
}

#[test]
fn a_browser_draws_the_page_without_an_error() {
    let (rig, mut front) = rig();
    recorded(&rig, &mut front, "300");
    done(trace(&rig, &["report", "a.trace", "-o", "a.html"]).output().unwrap());
    for more in [&[][..], &["--blink-settings=preferredColorScheme=0"]] {
        let Some(dom) = rendered(&rig.dir.path().join("a.html"), more) else { return };
        let root = dom.split_once("<html").unwrap().1.split_once('>').unwrap().0;
        assert!(root.contains("data-state=\"ready\"") && !root.contains("data-error"), "{root}");
        assert!(root.contains("data-requests=\"300\"") && root.contains("data-plots=\"4\""));
        assert!(dom.contains("300 of the first 300 requests"), "{root}");
        assert_eq!(dom.matches("class=\"u-wrap\"").count(), 4);
    }
    drop(front);
}
