//! A program that does steps of jobs as files tell it to, and pauses that are files.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several tests, not all of which use all"
)]

use std::fs;
use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ferrite_daemon::Failure;
use ferrite_daemon::jobs::{Means, Pausing, Tools};
use ferrite_daemon::state::DiskId;

/// The variable with the folder of the files.
pub const DIR: &str = "FERRITE_TEST_TOOL";
const ARGUMENTS: &str = "FERRITE_TEST_TOOL_ARGUMENTS";

/// The folder of the files: `calls` has a line for each event; while there is a file `hold-STEP`,
/// that step goes on; a step fails with the text of `fail-STEP`; `bytes-STEP` has a line for each
/// call of a step, with the data that it finds in the leaf; with `linger` a program takes a while to
/// end.
#[derive(Clone)]
pub struct Files(pub PathBuf);

impl Files {
    pub fn new(dir: &Path) -> Files {
        fs::create_dir_all(dir).unwrap();
        Files(dir.to_owned())
    }

    pub fn set(&self, name: &str) {
        self.set_to(name, "");
    }

    pub fn set_to(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }

    pub fn unset(&self, name: &str) {
        fs::remove_file(self.0.join(name)).unwrap();
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.join(name).exists()
    }

    /// Notes an event.
    pub fn note(&self, event: &str) {
        let mut calls = fs::OpenOptions::new();
        let mut calls = calls.create(true).append(true).open(self.0.join("calls")).unwrap();
        calls.write_all(format!("{event}\n").as_bytes()).unwrap();
    }

    pub fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.0.join("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    pub fn count(&self, event: &str) -> usize {
        self.calls().iter().filter(|call| *call == event).count()
    }

    /// What jobs of a daemon get.
    pub fn means(&self) -> Means {
        let this = Arc::new(self.clone());
        Means::default().with_tools(this.clone()).with_pausing(this)
    }
}

impl Tools for Files {
    /// The test `process_tool` of this program. The harness would not take the step's arguments.
    fn image(&self) -> Command {
        let run = format!("{ARGUMENTS}=\"$*\" exec \"$0\" --exact process_tool --nocapture");
        let mut command = Command::new("sh");
        command.arg("-c").arg(run).arg(std::env::current_exe().unwrap()).env(DIR, &self.0);
        command
    }
}

impl Pausing for Files {
    fn pause(&self, disk: DiskId, by: &str) -> Result<(), Failure> {
        if self.has("fail-pause") {
            self.unset("fail-pause");
            self.note("not paused");
            return Err(Failure { why: "not now".to_owned(), help: "wait".to_owned() });
        }
        self.set(&format!("paused {}", disk.domid));
        self.note(&format!("pause {disk} by {by}"));
        Ok(())
    }

    fn resume(&self, disk: DiskId, _: &str) -> Result<(), Failure> {
        self.unset(&format!("paused {}", disk.domid));
        self.note(&format!("resume {disk}"));
        Ok(())
    }
}

/// The value of an option.
fn option<'a>(arguments: &'a str, name: &str) -> Option<&'a str> {
    arguments.split(' ').skip_while(|word| *word != name).nth(1)
}

/// Takes the first line of a file, a number.
fn take_number(files: &Files, name: &str) -> Option<u64> {
    let text = fs::read_to_string(files.0.join(name)).ok()?;
    let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
    files.set_to(name, rest);
    first.parse().ok()
}

/// Does to files what a step of a merge of a leaf does. Returns the data in the leaf, if the step looks
/// for that, and whether it is merged.
fn leaf(files: &Files, step: &str, arguments: &str) -> (Option<u64>, bool) {
    let snapshot = option(arguments, "--from").and_then(|name| name.strip_prefix("raw:"));
    let found = take_number(files, &format!("bytes-{step}"));
    let most = option(arguments, "--most").map(|most| most.parse().unwrap());
    let bytes = found.or(most.map(|_| 0));
    let merged = most.is_some_and(|most| bytes.unwrap() <= most);
    match (step, snapshot) {
        ("split", Some(path)) => fs::write(path, "").unwrap(),
        ("clean" | "undo", Some(path)) if step == "clean" || merged => {
            fs::remove_file(path).unwrap()
        }
        _ => {}
    }
    (bytes, merged)
}

fn progress(done: u64) -> String {
    format!("{{\"progress\":{{\"done_bytes\":{done},\"total_bytes\":100}}}}")
}

/// Does a step, if the environment asks for one.
pub fn be_a_tool() {
    let Some(arguments) = std::env::var_os(ARGUMENTS) else { return };
    let files = Files(std::env::var_os(DIR).unwrap().into());
    let arguments = arguments.into_string().unwrap();
    let step = arguments.split(' ').nth(1).unwrap().to_owned();
    files.set_to(&format!("arguments-{step}"), &arguments);
    files.note(&step);
    let (of_input, input) = (files.clone(), step.clone());
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            of_input.note(&format!("{input} gets {}", line.unwrap()));
        }
        if of_input.has("linger") {
            std::thread::sleep(Duration::from_millis(200));
        }
        of_input.note(&format!("{input} ends early"));
        std::process::exit(1);
    });
    if let Ok(text) = fs::read_to_string(files.0.join(format!("fail-{step}"))) {
        eprintln!("{text}");
        std::process::exit(1);
    }
    // A daemon that was killed reads no more.
    let say = |line: &str| drop(writeln!(std::io::stdout(), "{line}"));
    // Lines that are no progress.
    say(&format!("\n{{\"progress\":\n{}\n[1]", "x".repeat(100_000)));
    let mut done = 0;
    while files.has(&format!("hold-{step}")) {
        done += 1;
        say(&progress(done.min(50)));
        std::thread::sleep(Duration::from_millis(10));
    }
    say(&progress(100));
    let (leaf_bytes, merged) = leaf(&files, &step, &arguments);
    let result = serde_json::json!({
        "child": "/srv/a", "images": ["/srv/b b"], "to": "/srv/c", "must_grow": files.has("must-grow"),
        "leaf_bytes": leaf_bytes, "merged": merged,
    });
    say(&serde_json::json!({ "result": result }).to_string());
    files.note(&format!("{step} is done"));
    std::process::exit(0);
}
