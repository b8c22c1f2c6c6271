//! `ferrite-bench` as its users see it: results, and images that stay what they were.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ferrite_io::engines::{EngineChoice, test_engine};
use serde_json::Value;
use tempfile::TempDir;

fn bench(image: &str, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-bench"));
    command.args([image, "--seconds", "0.3"]).args(more).env_remove("RUST_LOG");
    if !more.contains(&"--engine") {
        command.args(["--engine", &EngineChoice::Only(test_engine()).to_string()]);
    }
    command.output().expect("it runs")
}

/// How often a measurement is done again on a machine that did something else meanwhile.
const TRIES: usize = 30;

/// One in which something was counted, and the backend at the same time as its guests.
#[track_caller]
fn result(image: &str, more: &[&str]) -> Value {
    let mut last = None;
    for _ in 0..TRIES {
        let output = bench(image, &[more, &["--json"]].concat());
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        if !errors.contains("no request ended within") {
            assert_eq!(output.status.code(), Some(0), "{errors}");
            assert!(errors.is_empty(), "{errors}");
            let r: Value =
                serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else");
            if r["late_us"].as_f64().unwrap() < 100_000.0 {
                return r;
            }
        }
        last = Some(output);
    }
    panic!("no measurement was left alone: {last:?}");
}

#[track_caller]
fn assert_refused(output: &Output, code: i32, why: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.starts_with("ferrite: ") && text.contains(why), "{text}");
    assert!(text.contains("\nhelp: ") && output.stdout.is_empty(), "{text}");
}

/// 4 MiB on tmpfs that are not zeros.
fn image() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("disk.img");
    fs::write(&path, vec![0xA5; 4 << 20]).unwrap();
    (dir, path)
}

fn is_untouched(path: &Path) -> bool {
    fs::read(path).unwrap() == vec![0xA5; 4 << 20]
}

#[test]
fn every_mode_gives_a_result_that_makes_sense() {
    let (_dir, path) = image();
    for image in ["null:", path.to_str().unwrap()] {
        for mode in ["read", "randread", "write", "randwrite", "randrw"] {
            let r = result(image, &["--mode", mode, "--depth", "8", "--force-overwrite"]);
            let number = |key: &str| r[key].as_f64().unwrap_or_else(|| panic!("{key} in {r}"));
            assert_eq!((number("schema"), number("errors")), (1.0, 0.0));
            assert!(number("ios") > 0.0 && number("backend_cpu_us_per_io") > 0.0);
            assert!((number("iops") - number("ios") / 0.3).abs() <= 0.5);
            assert!((number("mib_per_s") - number("ios") / 0.3 / 256.0).abs() < 0.01);
            let lat = |key: &str| r["lat_us"][key].as_f64().unwrap();
            assert!(0.0 < lat("p50") && lat("p50") <= lat("p99") && lat("p99") <= lat("max"));
            assert!(0.0 < lat("mean") && lat("mean") <= lat("max"));
            // Little's law: no more than so many can be in flight.
            assert!(number("iops") * lat("p50") / 1e6 < 2.0 * 8.0, "{r}");
            assert_eq!((&r["mode"], &r["image"]), (&mode.into(), &image.into()));
        }
    }
}

#[test]
fn flushes_and_discards_are_loads_too() {
    let (_dir, path) = image();
    let discards = |mode: &str| {
        fs::write(&path, vec![0xA5; 4 << 20]).unwrap();
        let options = ["--mode", mode, "--depth", "8", "--force-overwrite"];
        let r = result(path.to_str().unwrap(), &options);
        assert!(r["ios"].as_u64() > Some(0) && r["errors"] == 0, "{r}");
        r["counts"]["discard_parts"].as_u64().unwrap()
    };
    assert_eq!(discards("flush"), 0);
    assert!(!is_untouched(&path));
    assert!(discards("discard") > 0);
    assert!(fs::read(&path).unwrap()[..2 << 20].contains(&0));
    assert!(discards("storm") > 0);
    let left = fs::read(&path).unwrap();
    assert!(left[..2 << 20].iter().all(|b| *b == 0xA5) && left[2 << 20..].contains(&0));
}

#[test]
fn the_least_pipeline_moves_what_a_backend_would() {
    let (_dir, path) = image();
    for (mode, depth, poll_us) in
        [("randread", "1", "0"), ("write", "8", "200"), ("randrw", "5", "0")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-bench"));
        command.arg("bound").arg(&path).args(["--seconds", "0.5", "--mode", mode]);
        command.args(["--depth", depth, "--poll-us", poll_us, "--force-overwrite"]);
        let output = command.output().expect("it runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{errors}");
        let r: Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |key: &str| r[key].as_f64().unwrap_or_else(|| panic!("{key} in {r}"));
        assert!(number("ios") > 0.0 && number("cpu_us_per_io") > 0.0, "{r}");
        assert!(r["lat_us"]["p999"].as_f64() >= r["lat_us"]["p50"].as_f64(), "{r}");
        assert_eq!(is_untouched(&path), mode == "randread", "{mode}");
    }
    for (mode, why) in [("write", "overwrites"), ("discard", "reads and writes only")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-bench"));
        let output = command.arg("bound").arg(&path).args(["--mode", mode]).output().unwrap();
        assert_refused(&output, 1, why);
    }
}

#[test]
fn the_result_says_how_it_was_measured() {
    let (_dir, path) = image();
    let path = path.to_str().unwrap();
    let more = ["--block", "8K", "--depth", "40", "--indirect", "32", "--guest-poll", "7"];
    let r = result(path, &[&more[..], &["--copy-with", "process-vm", "--engine", "aio"]].concat());
    let said: [(&str, Value); 15] = [
        ("where", "loopback, not Xen".into()),
        ("mover", "copy".into()),
        ("copy_with", "process-vm".into()),
        ("mode", "randread".into()),
        ("engine", "aio".into()),
        ("direct", false.into()),
        ("block_bytes", 8192.into()),
        ("guests", 1.into()),
        ("queues", 1.into()),
        ("depth", 40.into()),
        ("ring_order", 1.into()),
        ("indirect", 32.into()),
        ("memory_bytes", (8 << 20).into()),
        ("guest_poll_us", 7.into()),
        ("seconds", 0.3.into()),
    ];
    for (key, value) in said {
        assert_eq!(r[key], value, "{key}");
    }
    assert!(r["disk"].as_str().unwrap().contains("4 MiB"));
    assert!(r["guest_cpu_us_per_io"].as_f64().unwrap() > 0.0);
}

#[test]
fn guests_and_queues_share_an_image_with_either_copy() {
    let (_dir, path) = image();
    for copy_with in ["memcpy", "process-vm"] {
        let more = ["--guests", "2", "--queues", "2", "--mode", "randrw", "--force-overwrite"];
        let r = result(path.to_str().unwrap(), &[&more[..], &["--copy-with", copy_with]].concat());
        assert_eq!((&r["guests"], &r["queues"], &r["errors"]), (&2.into(), &2.into(), &0.into()));
        assert!(r["ios"].as_u64().unwrap() > 0);
    }
}

#[test]
fn a_batch_is_on_the_ring_at_once_and_the_next_comes_after_its_last_answer() {
    let r = result("null:", &["--batch", "--depth", "8"]);
    assert_eq!((&r["batch"], &r["errors"]), (&true.into(), &0.into()));
    let count = |key: &str| r["counts"][key].as_u64().unwrap_or_else(|| panic!("{key} in {r}"));
    // The backend sees all of a batch or nothing; where the counted time begins and ends, it may
    // be in the middle of one.
    let (requests, sweeps) = (count("requests"), count("sweeps"));
    assert!(sweeps > 0 && requests.abs_diff(8 * sweeps) <= 8, "{r}");
}

#[test]
fn queues_without_work_are_connected_all_the_same() {
    let r = result("null:", &["--queues", "4", "--load-queues", "1", "--idle", "0.2"]);
    assert_eq!((&r["queues"], &r["load_queues"], &r["errors"]), (&4.into(), &1.into(), &0.into()));
    assert_eq!(r["idle"]["seconds"], Value::from(0.2));
    assert!(r["idle"]["context_switches"].is_u64(), "{r}");
    // Each request is one segment, and a sweep takes no more than the ring holds.
    let copied = r["segments_per_copy"].as_f64().unwrap();
    assert!((1.0..=32.0).contains(&copied), "{r}");
}

#[test]
fn copies_alone_are_measured_with_either_copy() {
    for copy_with in ["memcpy", "process-vm"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-bench"));
        command.args(["bare", copy_with, "--pages", "8", "--batch", "3", "--seconds", "0.1"]);
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let r: Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |key: &str| r[key].as_f64().unwrap();
        assert!((number("pages_per_s") * number("us_per_page") / 1e6 - 1.0).abs() < 0.01, "{r}");
        assert!(0.0 < number("cpu_us_per_page"), "{r}");
        assert_eq!((&r["pages"], &r["batch"]), (&8.into(), &3.into()));
    }
}

#[test]
fn large_requests_are_indirect_ones() {
    let (_dir, path) = image();
    let r = result(path.to_str().unwrap(), &["--block", "1M", "--mode", "read"]);
    assert_eq!((&r["block_bytes"], &r["errors"]), (&(1 << 20).into(), &0.into()));
}

#[test]
fn a_disk_at_rest_is_small() {
    let (_dir, path) = image();
    let limits = ["--queues", "4", "--ring-order", "4", "--indirect", "256", "--memory", "8M"];
    let r = result(path.to_str().unwrap(), &limits);
    // The program of a test is not optimised, and three times as large as what is installed.
    let (all, program) =
        (r["idle_rss_kib"].as_u64().unwrap(), r["idle_file_kib"].as_u64().unwrap());
    let kib = all - program;
    assert!((256..=3 << 10).contains(&kib), "{kib} KiB besides {program} of the program");
}

#[test]
fn guests_are_served_by_workers_without_rights_that_are_small_at_rest() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let (_dir, path) = image();
    let options = ["--kept", "--guests", "2", "--queues", "4", "--depth", "8", "--rest", "6"];
    let r = result(path.to_str().unwrap(), &options);
    assert_eq!((&r["errors"], &r["kept"]), (&0.into(), &true.into()));
    let requests = r["counts"]["requests"].as_u64().unwrap();
    assert!(requests > 0 && r["backend_cpu_us_per_io"].as_f64().unwrap() >= 0.0, "{r}");
    // The program of a test is not optimised, and only two disks share it.
    let kib = r["rest_pss_kib"].as_u64().unwrap() / 2;
    assert!((256..=8 << 10).contains(&kib), "{kib} KiB a disk");
}

#[test]
fn the_text_says_that_it_is_not_xen() {
    let output = (0..TRIES)
        .map(|_| bench("null:", &[]))
        .find(|output| output.status.success())
        .expect("a measurement in which a request ended");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("loopback, not Xen\n"), "{text}");
    for word in ["IOPS", "p99", "memcpy", "null disk", "errors   0"] {
        assert!(text.contains(word), "{word} is missing in\n{text}");
    }
    assert!(output.stderr.is_empty(), "no progress where there is no terminal");
}

#[test]
fn nothing_is_overwritten_unless_that_is_asked_for() {
    let (_dir, path) = image();
    for mode in ["write", "randwrite", "randrw"] {
        let output = bench(path.to_str().unwrap(), &["--mode", mode]);
        assert_refused(&output, 2, "overwrites what the image holds");
        assert!(String::from_utf8_lossy(&output.stderr).contains("--force-overwrite"));
    }
    for mode in ["read", "randread"] {
        result(path.to_str().unwrap(), &["--mode", mode, "--force-overwrite"]);
    }
    assert!(is_untouched(&path));
    let r = result(path.to_str().unwrap(), &["--mode", "write", "--force-overwrite"]);
    assert!(!is_untouched(&path), "{r}");
}

#[test]
fn a_wrong_image_is_refused_as_everywhere() {
    let (dir, path) = image();
    assert_refused(&bench("/dev/shm/no/such.img", &[]), 3, "no such file");
    assert_refused(&bench(dir.path().to_str().unwrap(), &[]), 1, "it is a directory");
    assert_refused(&bench("null:12", &[]), 2, "multiple of 512");
    let holder = fs::File::open(&path).unwrap();
    holder.lock().unwrap();
    assert_refused(&bench(path.to_str().unwrap(), &[]), 4, "has locked it");
    drop(holder);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn what_cannot_be_measured_is_wrong_usage() {
    for more in [
        &["--block", "1000"][..],
        &["--block", "2M"],
        &["--block", "64K", "--indirect", "8"],
        &["--depth", "64", "--ring-order", "0"],
        &["--guests", "0"],
        &["--queues", "65"],
        &["--queues", "2", "--load-queues", "3"],
        &["--seconds", "-1"],
        &["--seconds", "nan"],
        &["--mode", "verify"],
        &["--copy-with", "magic"],
        &["--mover", "magic"],
    ] {
        let output = bench("null:1M", more);
        assert_eq!(output.status.code(), Some(2), "{more:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{more:?}");
    }
}

#[test]
fn a_guest_without_its_backend_says_what_is_wrong() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-bench"));
    let output = command.args(["guest", "1/2/3", "{}"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("failed"));
}

#[test]
fn nothing_is_left_behind() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-bench"));
    command.args(["null:", "--seconds", "0.3", "--queues", "2"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let ours = format!("ferrite-bench-{}-", child.id());
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    // Whether anything could be measured does not matter here.
    assert!(output.status.success() || errors.contains("no request ended"), "{errors}");
    for dir in ["/dev/shm", "/run"] {
        let mut names = fs::read_dir(dir).unwrap().flatten().map(|e| e.file_name());
        assert!(!names.any(|n| n.to_string_lossy().starts_with(&ours)), "in {dir}");
    }
}

#[test]
fn it_has_a_manual_page_and_each_shell_completions() {
    let dir = TempDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-bench"));
    let output = command.arg("generate").arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let pages = fs::read_dir(dir.path().join("man")).unwrap();
    let pages: Vec<_> = pages.map(|page| page.unwrap().file_name()).collect();
    assert_eq!(pages, ["ferrite-bench.1"], "hidden commands have no page");
    for file in
        ["man/ferrite-bench.1", "ferrite-bench.bash", "_ferrite-bench", "ferrite-bench.fish"]
    {
        assert!(fs::read_to_string(dir.path().join(file)).unwrap().contains("depth"), "{file}");
    }
}
