//! A disk of a pool while packets are lost, in a network of its own, by the kernel's filter (package nftables).

mod pooled;

use std::process::Command;
use std::time::{Duration, Instant};

use ferrite_testkit::nbd_client::Client;
use ferrite_testkit::programs::installed;
use pooled::{MIB, Model, Pool};

/// Set in the process that has a network of its own.
const INSIDE: &str = "FERRITE_TEST_NETWORK";

/// The servers and owners: each is this program.
#[test]
fn another_process() {
    pooled::be_other();
}

fn run(program: &str, words: &[&str]) {
    let status = Command::new(program).args(words).status().unwrap();
    assert!(status.success(), "{program} {words:?}");
}

fn turns(model: &mut Model, client: &mut Client, time: Duration) {
    let began = Instant::now();
    while began.elapsed() < time {
        model.turn(client);
    }
}

fn nft(command: &str) {
    run("nft", &command.split(' ').collect::<Vec<_>>());
}

/// Goes on in a network of its own. False: it was done there.
fn is_inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        run("ip", &["link", "set", "lo", "up"]);
        return true;
    }
    if installed("nft", Command::new("nft").arg("--version").output()).is_none() {
        return false;
    }
    let mut inside = Command::new("unshare");
    inside.arg("-n").arg(std::env::current_exe().unwrap()).env(INSIDE, "yes");
    let status = inside.args([test, "--exact", "--ignored", "--nocapture"]).status().unwrap();
    assert!(status.success());
    false
}

#[test]
#[ignore = "nightly: a minute of lost packets"]
fn a_server_that_is_cut_off_one_way_or_both_leaves_and_returns() {
    if !is_inside("a_server_that_is_cut_off_one_way_or_both_leaves_and_returns") {
        return;
    }
    let Some(pool) = Pool::new("cut", 2) else { panic!("etcd is not installed") };
    pool.create("d", 16 * MIB, 2, 1);
    let owner = pool.own("d", false).unwrap();
    let mut client = owner.client();
    let mut model = Model::new(16 * MIB);
    nft("add table ip t");
    nft("add chain ip t in { type filter hook input priority 0 ; }");
    let server = "127.0.0.2";
    let cases = [
        vec![format!("ip daddr {server} drop")],
        vec![format!("ip saddr {server} drop")],
        vec![format!("ip daddr {server} drop"), format!("ip saddr {server} drop")],
    ];
    for case in cases {
        turns(&mut model, &mut client, Duration::from_millis(300));
        for rule in &case {
            nft(&format!("add rule ip t in {rule}"));
        }
        model.longest = Duration::ZERO;
        turns(&mut model, &mut client, Duration::from_secs(6));
        println!("{case:?}: the longest turn took {:?}", model.longest);
        assert_eq!(pool.record("d", 0).out, [1].into(), "{case:?}");
        nft("flush chain ip t in");
        turns(&mut model, &mut client, Duration::from_millis(300));
        pool.until_whole("d");
        model.is_on(&mut client);
    }
    // One packet of twenty is lost, of all.
    nft("add rule ip t in numgen random mod 100 < 5 drop");
    turns(&mut model, &mut client, Duration::from_secs(15));
    nft("flush chain ip t in");
    pool.until_whole("d");
    model.is_on(&mut client);
    client.flush();
    drop(client);
    owner.process.end();
    pool.files_are("d", &model.content);
}
