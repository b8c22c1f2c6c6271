//! `ferrite-lab` as its users see it.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use ferrite_testkit::is_night;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use serde_json::Value;
use tempfile::TempDir;

const LAB: &str = env!("CARGO_BIN_EXE_ferrite-lab");

/// The lab in a folder of its own. `ferrite` is of another package and may not be beside it: it is named as missing.
fn lab(folder: &Path, words: &[&str]) -> Output {
    Command::new(LAB).args(words).current_dir(folder).output().expect("it runs")
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The names of all experiments, as the list has them.
fn names() -> Vec<String> {
    let (code, list, _) = said(&lab(Path::new("/"), &["list"]));
    assert_eq!(code, Some(0));
    list.lines().filter(|line| !line.starts_with(' ')).map(str::to_owned).collect()
}

/// Those that run without Xen.
fn names_here() -> Vec<String> {
    let (_, list, _) = said(&lab(Path::new("/"), &["list"]));
    let of_one = |name: &String| {
        let at = list.find(&format!("{name}\n  ")).unwrap();
        list[at..].lines().skip(1).take_while(|line| line.starts_with(' ')).collect::<String>()
    };
    names().into_iter().filter(|name| !of_one(name).contains("On Xen: ")).collect()
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page() -> String {
    fs::read_to_string(repository().join("docs/lab.md")).unwrap()
}

/// Folders of images of that process.
fn images(pid: u32) -> Vec<PathBuf> {
    let ours = format!("ferrite-lab-{pid}-");
    let entries = fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.path());
    entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(&ours)).collect()
}

/// Each commit runs the two experiments that the manual names, and the night all of them.
#[test]
fn every_command_of_the_manual_runs_and_every_experiment_gives_figures() {
    let folder = TempDir::new().unwrap();
    let text = page();
    let block = text.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    for line in block.lines() {
        let command = line.split('#').next().unwrap();
        let mut words: Vec<&str> = command.split_whitespace().collect();
        assert_eq!(&words[..2], ["ferrite", "lab"], "{line}");
        if !is_night() && (words.contains(&"--all") || words[2] == "peers") {
            continue;
        }
        if ["run", "peers"].contains(&words[2]) {
            words.push("--quick");
        }
        let (code, out, errors) = said(&lab(folder.path(), &words[2..]));
        assert_eq!((code, errors.as_str()), (Some(0), ""), "{line}: {out}");
    }
    let report = fs::read_to_string(folder.path().join("lab-results/report.html")).unwrap();
    let mut files = fs::read_dir(folder.path().join("lab-results")).unwrap().count();
    let names = match is_night() {
        true => names_here(),
        false => vec!["polling".to_owned(), "queue-length".to_owned()],
    };
    for name in names {
        let file = folder.path().join(format!("lab-results/{name}.json"));
        let found: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        assert_eq!((&found["schema"], &found["experiment"]), (&1.into(), &name.as_str().into()));
        let rows = found["rows"].as_array().unwrap();
        let missing = found["missing"].as_array().unwrap();
        assert!(found["quick"] == true && !(rows.is_empty() && missing.is_empty()), "{found}");
        for row in rows {
            assert!(row["mean"].is_f64() && row["ci95"].is_f64() && row["n"].is_u64(), "{row}");
            assert_eq!(row["target"].is_null(), row["met"].is_null(), "{row}");
            for key in ["name", "unit", "stddev", "published"] {
                assert!(row.get(key).is_some(), "{key} is missing in {row}");
            }
        }
        assert!(report.contains(&format!("<section id=\"{name}\">")), "{name}");
        files -= 1;
    }
    assert_eq!(files, 1, "besides the results there is the report alone");
}

#[test]
fn the_manual_has_every_experiment_and_no_other() {
    let text = page();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let table: Vec<&str> =
        rows.map(|(name, _)| name).take_while(|name| *name != "schema").collect();
    assert_eq!(table, names());
}

#[test]
fn what_cannot_be_run_or_reported_is_said_with_the_next_step() {
    let folder = TempDir::new().unwrap();
    for (words, code, why, help) in [
        (&["run", "no-such"][..], 2, "no experiment of that name", "ferrite-lab list"),
        (&["run", "xen"], 2, "it needs a Xen host", "cargo xtask bench xen"),
        (&["report"], 3, "no result in lab-results", "run --all"),
    ] {
        let (found, out, errors) = said(&lab(folder.path(), words));
        assert_eq!((found, out.as_str()), (Some(code), ""), "{errors}");
        let (first, second) = errors.split_once('\n').unwrap();
        assert!(first.starts_with("ferrite: ") && first.contains(why), "{errors}");
        assert!(second.starts_with("help: ") && second.contains(help), "{errors}");
    }
    fs::create_dir(folder.path().join("lab-results")).unwrap();
    fs::write(folder.path().join("lab-results/polling.json"), "{}").unwrap();
    let (code, _, errors) = said(&lab(folder.path(), &["report"]));
    assert!(code == Some(1) && errors.contains("polling.json is no result"), "{errors}");
}

#[test]
fn one_experiment_that_fails_does_not_keep_the_others_from_running() {
    let folder = TempDir::new().unwrap();
    // Images on a disk cannot be made there, and polling needs none.
    let words = ["run", "request-size", "polling", "--quick", "--disk", "/proc"];
    let (code, out, errors) = said(&lab(folder.path(), &words));
    assert!(code == Some(1) && out.starts_with("polling: "), "{out}{errors}");
    assert!(errors.contains("cannot run request-size: cannot make a folder in /proc"), "{errors}");
    assert!(errors.contains("1 of 2 experiments failed: cannot run request-size"), "{errors}");
    assert!(folder.path().join("lab-results/polling.json").is_file());
}

#[test]
fn ctrl_c_leaves_no_process_and_no_image() {
    let folder = TempDir::new().unwrap();
    let mut command = Command::new("env");
    // Whatever runs the tests may ignore signals; this does not. It leads a group, as from a shell.
    command.args(["--default-signal=INT,TERM", LAB, "run", "polling", "--seconds", "60"]);
    command.current_dir(folder.path()).process_group(0);
    let mut lab = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = lab.id();
    let bench = || {
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = fs::read_to_string(children).unwrap_or_default();
        !children.trim().is_empty()
    };
    while images(pid).is_empty() || !bench() {
        assert!(lab.try_wait().unwrap().is_none(), "it ended");
        thread::sleep(Duration::from_millis(1));
    }
    let group = Pid::from_child(&lab);
    kill_process_group(group, Signal::INT).unwrap();
    let pid = lab.id();
    let output = lab.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{errors}");
    assert!(errors.contains("cannot run polling: interrupted"), "{errors}");
    assert!(test_kill_process_group(group).is_err(), "a process of the group lives");
    assert_eq!(images(pid), [] as [PathBuf; 0]);
    assert_eq!(fs::read_dir(folder.path().join("lab-results")).unwrap().count(), 0);
}

/// A page of the repository.
fn document(name: &str) -> String {
    fs::read_to_string(repository().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn the_report_of_the_repository_is_whole_and_the_manual_shows_it() {
    let (readme, report) = (document("README.md"), document("docs/lab-report.html"));
    assert!(readme.contains("](docs/lab-report.html)"));
    let manual = page();
    let pictures: Vec<&str> =
        manual.split("](pictures/").skip(1).map(|rest| rest.split_once(')').unwrap().0).collect();
    assert_eq!(pictures.len(), 2, "{pictures:?}");
    for picture in pictures {
        let text = document(&format!("docs/pictures/{picture}"));
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"), "{picture}");
        assert!(text.len() < 32 << 10, "{picture} has {} bytes", text.len());
    }
    for name in names_here() {
        assert!(report.contains(&format!("<section id=\"{name}\">")), "{name} is not in it");
        assert!(figures(&manual).contains(&format!("\n| `{name}` |")), "no figures of {name}");
    }
    assert!(!report.contains("class=\"quick\">"), "figures of a quick look");
    for outside in ["http:", "https:", "<script", "url(", "@import", "<link", "src="] {
        assert!(!report.contains(outside), "{outside}");
    }
}

/// The table that `ferrite lab report --table` writes into a page.
fn figures(page: &str) -> &str {
    let begin = page.split_once("<!-- figures of the lab: begin -->").unwrap().1;
    begin.split_once("<!-- figures of the lab: end -->").unwrap().0
}

#[test]
fn the_figures_in_the_manual_are_of_experiments_in_the_report() {
    let (manual, report) = (page(), document("docs/lab-report.html"));
    let names = figures(&manual).lines().filter_map(|row| row.strip_prefix("| `"));
    let names: Vec<&str> = names.map(|row| row.split('`').next().unwrap()).collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        assert!(report.contains(&format!("<section id=\"{name}\">")), "{name} is not in it");
    }
}

/// The figures of a row's interval: its middle, and the half of its width.
fn interval(cell: &str) -> Option<(f64, f64)> {
    let (middle, half) = cell.split_once(" ± ")?;
    Some((middle.trim().parse().ok()?, half.trim().parse().ok()?))
}

#[test]
fn every_claim_of_speed_in_the_readme_names_its_experiment_and_is_judged_by_its_interval() {
    let readme = document("README.md");
    let section = readme.split_once("## Speed\n").unwrap().1.split_once("\n## ").unwrap().0;
    let rows = section.lines().filter(|line| line.starts_with("| ")).skip(1);
    let mut seen = 0;
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, _, _, _, ratio, aim, command] = cells[..] else { panic!("{row}") };
        let words: Vec<&str> = command.trim_matches('`').split(' ').collect();
        let is_known = match words[..] {
            ["cargo", "xtask", "bench", part, ..] => {
                document("docs/performance.md").contains(&format!("`{part}`"))
            }
            ["ferrite", "lab", name] => names().iter().any(|known| known == name),
            _ => false,
        };
        assert!(is_known, "{command:?} is no experiment: {row}");
        if let (Some((middle, half)), Some((aim, verdict))) =
            (interval(ratio), aim.split_once(", "))
        {
            let aim: f64 = aim.parse().unwrap();
            let right = match (middle - aim).abs() <= half {
                true => "unclear",
                false if middle >= aim => "met",
                false => "missed",
            };
            assert_eq!(verdict, right, "{row}");
        }
        seen += 1;
    }
    assert_eq!(seen, 5);
}

#[test]
fn the_report_makes_pictures_and_puts_the_table_into_a_document() {
    let folder = TempDir::new().unwrap();
    let run = lab(folder.path(), &["run", "polling", "--quick"]);
    assert_eq!(said(&run).0, Some(0), "{run:?}");
    fs::create_dir(folder.path().join("pictures")).unwrap();
    fs::write(folder.path().join("page.md"), page()).unwrap();
    let words = ["report", "-o", "r.html", "--pictures", "pictures", "--table", "page.md"];
    let (code, out, errors) = said(&lab(folder.path(), &words));
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert_eq!(out, "r.html\npictures/polling.svg\npage.md\n");
    let written = fs::read_to_string(folder.path().join("page.md")).unwrap();
    let table = figures(&written);
    assert!(table.contains("\n| `polling` |") && !table.contains("`aggregate`"), "{table}");
    assert_eq!(written.replace(table, ""), page().replace(figures(&page()), ""));
    assert!(fs::metadata(folder.path().join("pictures/polling.svg")).unwrap().len() > 1000);
    fs::write(folder.path().join("page.md"), "no place").unwrap();
    let (code, _, errors) = said(&lab(folder.path(), &words));
    assert!(code == Some(1) && errors.contains("it lacks the lines"), "{errors}");
}

#[test]
fn a_folder_that_cannot_be_written_to_is_named_before_anything_runs() {
    let folder = TempDir::new().unwrap();
    for option in ["--results", "--disk"] {
        let (code, out, errors) =
            said(&lab(folder.path(), &["run", "polling", "--quick", option, "/proc/none"]));
        assert_eq!((code, out.as_str()), (Some(1), ""));
        assert!(errors.contains("the folder /proc/none") && errors.contains(option), "{errors}");
    }
}

#[test]
fn it_has_a_manual_page_and_each_shell_completions() {
    let folder = TempDir::new().unwrap();
    let (code, _, errors) = said(&lab(folder.path(), &["generate", "."]));
    assert_eq!(code, Some(0), "{errors}");
    for (file, word) in [
        ("man/ferrite-lab.1", "list"),
        ("man/ferrite-lab-run.1", "rounds"),
        ("ferrite-lab.bash", "rounds"),
        ("_ferrite-lab", "rounds"),
        ("ferrite-lab.fish", "rounds"),
    ] {
        assert!(fs::read_to_string(folder.path().join(file)).unwrap().contains(word), "{file}");
    }
}
