//! The files of packages that come from the program, and from the folder dist/.

use std::fs;
use std::path::Path;
use std::process::Command;

fn ferrite(args: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_ferrite")).args(args).output().unwrap()
}

#[test]
fn each_command_has_a_manual_page_and_each_shell_completions() {
    let dir = tempfile::TempDir::new().unwrap();
    let output = ferrite(&["generate", dir.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = |name: &str| fs::read_to_string(dir.path().join("man").join(name)).unwrap();
    assert!(page("ferrite-serve.1").contains("\\-\\-xen"), "{}", page("ferrite-serve.1"));
    for command in ["create", "info", "rebase", "check"] {
        assert!(page(&format!("ferrite-image-{command}.1")).starts_with(".ie"), "{command}");
    }
    let hidden = fs::read_dir(dir.path().join("man")).unwrap();
    let names = hidden.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.into_iter().all(|name| !name.contains("guest") && !name.contains("generate")));
    for file in ["ferrite.bash", "_ferrite", "ferrite.fish"] {
        assert!(fs::read_to_string(dir.path().join(file)).unwrap().contains("serve"), "{file}");
    }
    let output = ferrite(&["generate", "/proc/no"]);
    assert_eq!(output.status.code(), Some(1));
}

/// A line of the unit.
fn setting(unit: &str, key: &str) -> String {
    let found = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("no {key}")).to_owned()
}

#[test]
fn the_service_calls_the_program_as_it_is_called() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/ferrite@.service");
    let unit = fs::read_to_string(path).unwrap();
    let line = setting(&unit, "ExecStart").replace("$OPTIONS", "--queues 2");
    let line = line.replace("${IMAGE}", "vhd:/no/where.vhd").replace("${GUEST}", "32000/xvdb");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[0], "/usr/bin/ferrite");
    let output = ferrite(&words[1..]);
    // The image is missing, so the line was understood.
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    // Usage errors are not retried; a killed server is recovered.
    assert_eq!(setting(&unit, "RestartPreventExitStatus"), "2 3 5");
    assert_eq!(setting(&unit, "Restart"), "on-failure");
}
