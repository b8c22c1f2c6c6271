//! `ferrite pool` against a real etcd. The servers of the pool are their keys alone. The commands are those of
//! docs/distributed.md.

#[path = "../../etcd/tests/peers/mod.rs"]
mod peers;

use std::process::{Command, Output};

use ferrite_etcd::{Revision, Transaction};
use peers::Servers;
use serde_json::Value;

const PAGE: &str = include_str!("../../../docs/distributed.md");
const URL: &str = "http://127.0.0.1:2379";

fn ferrite(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferrite")).args(words).output().unwrap()
}

/// The commands of the page, each with what stands behind `ferrite`.
fn lines(url: &str) -> Vec<String> {
    let (_, section) = PAGE.split_once("\n## A pool of servers (experimental)\n").unwrap();
    let block = section.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    let words = block.lines().map(|line| line.strip_prefix("ferrite ").unwrap());
    words.map(|line| line.replace(URL, url)).collect()
}

fn ok(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let output = ferrite(&words);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(line: &str) -> Value {
    serde_json::from_str(&ok(&format!("{line} --json"))).unwrap()
}

#[track_caller]
fn fails(line: &str, code: i32, why: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let output = ferrite(&words);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
    assert!(errors.contains(why), "{line}: {errors}");
}

/// Announces servers of 40 GiB, each a host of its own.
fn announce(etcd: &Servers, pool: &str, names: &[&str]) {
    let cluster = etcd.client();
    for (i, name) in names.iter().enumerate() {
        let key = format!("ferrite/{pool}/servers/{name}");
        let bytes = 40u64 << 30;
        let address = format!("127.0.0.{}:10809", i + 1);
        let value =
            serde_json::json!({"address": address, "free": bytes, "total": bytes, "boot": "1"});
        let put = Transaction::when(&key, Revision::ABSENT).put(&key, value.to_string().into());
        cluster.commit(&put).unwrap();
    }
}

#[test]
fn the_commands_of_the_page_do_what_it_says() {
    let Some(etcd) = Servers::start("page", 1) else { return };
    etcd.client();
    let lines = lines(&etcd.urls[0]);
    let [init, create, status, resize, replace, drain, list, delete] = &lines[..] else {
        panic!("{lines:?}")
    };
    let made = json(init);
    fails(init, 1, "is there already");
    fails(create, 1, "more hosts are needed");
    announce(&etcd, made["id"].as_str().unwrap(), &["a", "b", "c", "d"]);

    let disk = json(create);
    assert_eq!((disk["bytes"].as_u64(), disk["whole"].as_bool()), (Some(10 << 30), Some(true)));
    assert_eq!(json(status), disk);
    let servers = |disk: &Value| -> Vec<String> {
        let sets = disk["sets"].as_array().unwrap().iter();
        let copies = sets.flat_map(|set| set["copies"].as_array().unwrap().iter());
        copies.map(|copy| copy["server"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(servers(&disk), ["a", "b"]);
    // The growth goes to the servers that are empty.
    assert_eq!(servers(&json(resize)), ["a", "b", "c", "d"]);
    let moved = json(replace);
    assert_eq!((&moved[0]["to"], &moved[0]["done"]), (&"c".into(), &true.into()));
    ok(drain);
    // The one that was replaced before is not drained, and the emptiest.
    assert_eq!(servers(&json(status)), ["c", "a", "c", "d"]);
    assert!(ok(list).starts_with("web1 "));
    ok(delete);
    assert_eq!(ok(list), "no disks\n");
    fails(status, 3, "has no disk web1");
}

#[test]
fn what_cannot_be_done_is_refused_with_a_cure() {
    let options = "--etcd http://127.0.0.1:1 --etcd-plain --experimental";
    fails("pool list lab --etcd http://127.0.0.1:1 --etcd-plain", 2, "--experimental");
    fails("pool list lab --experimental", 2, "--etcd");
    fails(&format!("pool list lab {options}"), 1, "see whether etcd runs");
    fails(&format!("pool list ../x {options}"), 2, "a-z");
    fails(&format!("pool create lab 1G {options}"), 2, "POOL/DISK");
    fails(&format!("pool create lab/a 1G --replicas 4 {options}"), 1, "1 to 3 copies");
    fails(&format!("pool create lab/a 1G --stripe-size 3M {options}"), 1, "power of two");
    fails("pool list lab --etcd http://127.0.0.1:1 --experimental", 1, "plain");
}

#[test]
fn the_configuration_says_where_a_pool_is_and_that_it_may_be_used() {
    let Some(etcd) = Servers::start("configured", 1) else { return };
    etcd.client();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ferrite.toml");
    let run = |words: &str, more: &str| {
        let text = format!("[pool.lab]\netcd = [{:?}]\nplain = true\n{more}\n", etcd.urls[0]);
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(words.split(' ')).env("FERRITE_CONFIG", &file);
        let output = command.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    };
    let allowed = "experimental = true";
    for (words, more, code, says) in [
        ("pool init lab", "", 2, "experimental = true below [pool.lab]"),
        ("pool init lab", allowed, 0, "pool lab: "),
        ("pool list lab --experimental", "", 0, "no disks"),
        ("pool list lab", "experimental = 3", 2, "true or false"),
        ("pool list lab", "tls = \"/t\"", 2, "plain out"),
        ("pool list other --experimental", allowed, 2, "add [pool.other]"),
        // The options of the command line count alone.
        ("pool list lab --etcd http://127.0.0.1:1 --etcd-plain", allowed, 1, "see whether etcd"),
    ] {
        let (got, said) = run(words, more);
        assert!(got == Some(code) && said.contains(says), "{words}, {more}: {got:?} {said}");
    }
}
