//! The commands of docs/network.md that need no Xen, the options that it names, and the hotplug script.

mod pages;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

const PAGE: &str = include_str!("../../../docs/network.md");

fn ferrite(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(words).env_remove("RUST_LOG").output().unwrap()
}

#[test]
fn the_commands_in_the_documentation_work() {
    let script = pages::commands(PAGE);
    assert_eq!(script.matches("net stat").count(), 3, "{script}");
    pages::run(&script);
}

#[test]
fn the_options_in_the_documentation_are_known() {
    let help = ferrite(&["net", "serve", "--help"]);
    let help = String::from_utf8(help.stdout).unwrap();
    for option in ["--switch", "--uplink", "--xl"] {
        assert!(PAGE.contains(option) && help.contains(option), "{option}: {help}");
    }
    assert!(help.contains("experimental"), "{help}");
}

#[test]
fn bad_words_are_refused_with_the_code_of_usage() {
    for words in [&["--switch", "a/b"][..], &[], &["--switch", "lan", "--queues", "0"]] {
        let refused = ferrite(&[&["net", "serve"], words].concat());
        assert_eq!(refused.status.code(), Some(2), "{words:?}");
    }
}

#[test]
fn counters_of_a_switch_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let file =
        r#"{"switch":"lan","interfaces":[{"domid":3,"handle":0,"counts":{"sent_packets":9}}]}"#;
    std::fs::write(dir.path().join("lan.json"), file).unwrap();
    let folder = dir.path().to_str().unwrap();
    let shown = String::from_utf8(ferrite(&["net", "stat", "--counters", folder]).stdout).unwrap();
    let line = shown.lines().nth(1).unwrap();
    assert!(line.starts_with("vif3.0") && line.contains(" 9 "), "{shown}");
    let json = ferrite(&["--json", "net", "stat", "--counters", folder]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["switches"][0]["interfaces"][0]["counts"]["sent_packets"], 9);
    // Nothing was sent between two reports.
    let words = ["--json", "net", "stat", "-i", "0.1", "-n", "2", "--counters", folder];
    let reports = String::from_utf8(ferrite(&words).stdout).unwrap();
    let json: serde_json::Value = serde_json::from_str(reports.lines().nth(1).unwrap()).unwrap();
    assert_eq!(json["per_second"][0]["interfaces"][0]["counts"]["sent_packets"], 0);
}

/// `xenstore-write` is a script that notes its words.
#[test]
fn the_hotplug_script_lets_the_guest_connect() {
    let dir = tempfile::tempdir().unwrap();
    let (noted, tool) = (dir.path().join("noted"), dir.path().join("xenstore-write"));
    std::fs::write(&tool, format!("#!/bin/sh\necho \"$@\" >>{}\n", noted.display())).unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/vif-ferrite");
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    let run = |word: &str| {
        let mut command = Command::new(&script);
        command.arg(word).env("PATH", &path).env("XENBUS_PATH", "backend/vif-ferrite/3/0");
        command.output().unwrap().status.code()
    };
    assert_eq!((run("online"), run("offline"), run("other")), (Some(0), Some(0), Some(2)));
    let written = std::fs::read_to_string(&noted).unwrap();
    assert_eq!(written, "backend/vif-ferrite/3/0/hotplug-status connected\n");
}

#[test]
fn the_way_of_packets_is_a_table_json_and_a_page() {
    use ferrite_net::trace::{End, Outcome, Record, STAGES, TraceRing};
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    let trace = |words: &[&str]| {
        ferrite(&[words, &["net", "trace", "--switch", "lan", "--counters", folder]].concat())
    };
    let missing = trace(&[]);
    assert_eq!(missing.status.code(), Some(3), "{missing:?}");
    let mut ring = TraceRing::create(&dir.path().join("lan.trace")).unwrap();
    let empty = String::from_utf8(trace(&[]).stdout).unwrap();
    assert!(empty.starts_with("0 packets of the switch lan\n"), "{empty}");
    let page = dir.path().join("page.html");
    let vif = |domid| End::Vif { domid, handle: 0, queue: 0 };
    for n in 1..=3_u64 {
        // Each stage comes 2 us after the one before, 4 us, 6 us; the last one never.
        let mut times_ns: [u64; STAGES] = std::array::from_fn(|i| 1_000_000 + i as u64 * n * 2000);
        times_ns[STAGES - 1] = 0;
        let ends = Record {
            from: vif(3),
            to: vif(4),
            outcome: Outcome::Received,
            together: 2,
            ..Record::default()
        };
        ring.push(&Record { bytes: 1000 + n as u32, times_ns, ..ends });
    }
    let table = String::from_utf8(trace(&[]).stdout).unwrap();
    let line = |name: &str| -> Vec<String> {
        let line = table.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line[name.len()..].split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(line("copied"), ["3", "4.0", "6.0", "6.0"], "{table}");
    assert_eq!(line("slot seen to sender answered"), ["3", "20.0", "30.0", "30.0"], "{table}");
    assert!(!table.contains("sender seen to consume"), "{table}");
    assert!(table.contains("in the mean 1002 bytes, 2.0 packets in a turn"), "{table}");
    let json: serde_json::Value = serde_json::from_slice(&trace(&["--json"]).stdout).unwrap();
    let first = &json["packets"][0];
    assert_eq!((&first["from"]["domid"], &first["bytes"]), (&3.into(), &1001.into()));
    assert_eq!(first["copied_ns"], 1_006_000);
    assert!(first["tx_consumed_ns"].is_null() && json["lost"] == 0, "{json}");
    // The page needs nothing else, and is for root only.
    let out = page.to_str().unwrap();
    let words = ["net", "trace", "--switch", "lan", "--counters", folder, "-o", out];
    assert!(ferrite(&words).status.success());
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.contains("<title>Packets of the switch lan</title>") && text.contains("<svg"));
    assert!(text.contains("vif3.0 to vif4.0: 1002 bytes"), "the packet in the middle");
    assert!(!text.contains("http") && !text.contains("<script"));
    let mode = std::fs::metadata(&page).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
