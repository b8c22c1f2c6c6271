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
        assert!(page(&format!("ferrite-image-{command}.1")).starts_with(".TH"), "{command}");
    }
    let hidden = fs::read_dir(dir.path().join("man")).unwrap();
    let names = hidden.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.into_iter().all(|name| !name.contains("guest") && !name.contains("generate")));
    for file in ["ferrite.bash", "_ferrite", "ferrite.fish"] {
        let text = fs::read_to_string(dir.path().join(file)).unwrap();
        assert!(text.contains("serve"), "{file}");
        for hidden in ["store-worker", "qemu-first", "toolstack-locks", "generate"] {
            assert!(!text.contains(hidden), "{file}: {hidden}");
        }
        for values in ["auto uring aio", "error wait", "copy map persistent"] {
            let quoted = values.split(' ').all(|value| text.contains(value));
            assert!(
                quoted && (file != "ferrite.bash" || text.contains(values)),
                "{file}: {values}"
            );
        }
    }
    let output = ferrite(&["generate", "/proc/no"]);
    assert_eq!(output.status.code(), Some(1));
}

/// The completions of a line by bash, with a program in place of ferrite.
fn completed(file: &Path, words: &[&str]) -> Vec<String> {
    let script = r#"
        ferrite() { echo "DISK     NAME"; echo "1/51712  web1/xvda  served"; echo "    why/it failed"; }
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"
        _ferrite_with_disks ferrite "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", script, "bash"]).arg(file).args(words);
    let output = bash.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_values_and_attached_disks() {
    let dir = tempfile::TempDir::new().unwrap();
    assert!(ferrite(&["generate", dir.path().to_str().unwrap()]).status.success());
    let file = dir.path().join("ferrite.bash");
    for (words, expected) in [
        (&["ferrite", "serve", "--engine", ""][..], &["auto", "uring", "aio"][..]),
        (&["ferrite", "export", "nbd", "--on-full", ""], &["error", "wait"]),
        (&["ferrite", "disk", "show", "w"], &["web1/xvda"]),
        (&["ferrite", "store", "scr"], &["scrub"]),
    ] {
        assert_eq!(completed(&file, words), expected, "{words:?}");
    }
    let upgrade = completed(&file, &["ferrite", "upgrade", ""]);
    assert!(upgrade.contains(&"web1/xvda".to_owned()) && !upgrade.contains(&"why/it".to_owned()));
    assert!(!completed(&file, &["ferrite", "disk", "show", "-"]).contains(&"web1/xvda".to_owned()));
}

/// All manual pages, by file name.
fn pages() -> Vec<(String, String)> {
    let dir = tempfile::TempDir::new().unwrap();
    assert!(ferrite(&["generate", dir.path().to_str().unwrap()]).status.success());
    let entries = fs::read_dir(dir.path().join("man")).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| {
            let text = fs::read_to_string(entry.path()).unwrap();
            (entry.file_name().into_string().unwrap(), text)
        })
        .collect()
}

/// The text of a section of a manual page, without the signs of its language.
fn section<'a>(page: &'a str, title: &str) -> Option<&'a str> {
    let (_, rest) = page.split_once(&format!(".SH \"{title}\"\n"))?;
    rest.split("\n.SH ").next()
}

#[test]
fn each_manual_page_says_what_it_is_in_a_line_and_what_follows_from_it() {
    let pages = pages();
    assert!(pages.len() > 40, "{}", pages.len());
    for (file, page) in &pages {
        let name = section(page, "NAME").unwrap().trim_end().replace("\\-", "-");
        assert!(name.len() <= 120 && name.lines().count() == 1, "{file}: {name}");
        let (stem, number) = file.rsplit_once('.').unwrap();
        assert!(name.starts_with(&format!("{stem} - ")), "{file}: {name}");
        assert!(page.lines().any(|line| line.contains(&format!("\" {number} \""))), "{file}");
        assert!(section(page, "SEE ALSO").is_some() && !page.contains("EXTRA"), "{file}");
        if number != "5" {
            assert!(section(page, "EXIT STATUS").is_some(), "{file}");
        }
        // Each page that a page names is there, or is another program's.
        for (other, _) in pages.iter().filter(|(other, _)| other != file) {
            let (stem, number) = other.rsplit_once('.').unwrap();
            let stem = stem.replace('-', "\\-");
            for wrong in ["1", "5", "8"].iter().filter(|wrong| **wrong != number) {
                assert!(!page.contains(&format!("{stem}({wrong})")), "{file}: {stem}({wrong})");
            }
        }
    }
    let page = |file: &str| &pages.iter().find(|(name, _)| name == file).unwrap().1;
    let synopsis = section(page("ferrite-export-nbd.1"), "SYNOPSIS").unwrap().to_owned();
    assert!(synopsis.contains("[OPTIONS] <IMAGE>..."), "{synopsis}");
    assert!(section(page("ferrite-daemon.8"), "FILES").unwrap().contains("ferrite.toml"));
    assert!(section(page("ferrite-disk-attach.1"), "EXAMPLES").unwrap().contains("xvdb"));
    let codes = section(page("ferrite-image-check.1"), "EXIT STATUS").unwrap();
    assert!(codes.contains("It is intact, but has space that nothing refers to."), "{codes}");
    assert!(page("tap-ctl.1").contains("block"), "{}", page("tap-ctl.1"));
}

/// ferrite.toml(5) has every key of the example that the package installs, each with an explanation.
#[test]
fn the_manual_page_of_the_configuration_has_every_key() {
    let pages = pages();
    let (_, page) = pages.iter().find(|(name, _)| name == "ferrite.toml.5").unwrap();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/ferrite.toml");
    let example = fs::read_to_string(example).unwrap();
    let (_, keys) = example.split_once("\n\n").unwrap();
    let mut seen = 0;
    for line in keys.lines().filter(|line| line.contains(" = ")) {
        let key = line.trim_start_matches('#').split(" = ").next().unwrap();
        let at = page.find(&format!(".TP\n\\fB{key} = ")).unwrap_or_else(|| panic!("no {key}"));
        let text = page[at..].lines().nth(2).unwrap();
        assert!(text.ends_with('.') && !text.starts_with('.'), "{key}: {text}");
        seen += 1;
    }
    assert!(seen > 20, "{seen}");
    for table in ["[host]", "[disks]", "[images."] {
        assert!(page.contains(&format!(".SH \"TABLE {table}")), "{table}");
    }
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

#[test]
fn the_service_of_a_pools_server_calls_the_program_as_it_is_called() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/ferrite-pool@.service");
    let unit = fs::read_to_string(path).unwrap();
    let mut line = setting(&unit, "ExecStart");
    // The values that the head of the unit shows.
    for key in ["NAME", "LISTEN"] {
        line = line.replace(&format!("${{{key}}}"), &setting(&unit.replace("#   ", ""), key));
    }
    let line = line.replace("${DIR}", "/no/where").replace("${POOL}", &"7".repeat(32));
    let line = line.replace("$OPTIONS", &setting(&unit.replace("#   ", ""), "OPTIONS"));
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = ferrite(&words[1..]);
    // There is no such folder, so the line was understood.
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("cannot serve /no/where"), "{said}");
    assert_eq!(setting(&unit, "RestartPreventExitStatus"), "2");
}
