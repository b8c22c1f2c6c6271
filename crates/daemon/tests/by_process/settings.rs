//! Limits and settings of running disks outlive every process that has to do with them.

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{Limited, SetDone, Source, Upgraded};
use ferrite_daemon::state::States;
use ferrite_loopback::machine::DiskPaths;
use ferrite_serve::counters::{snapshot, stats_file};
use ferrite_testkit::wait_until;
use serde_json::{Value, json};

use crate::host::{self, Host, id};
use crate::load::Load;
use crate::roles::{attach, end, is_alive, keeper, kill, kill_keeper, kill_pid, worker};

fn limit(host: &Host, disk: &DiskPaths, limits: &Value) -> Result<Limited, ClientError> {
    host.call("disk.limit", &json!({ "disk": id(disk), "limits": limits }))
}

/// Waits until a worker serves the disk with this many requests and written bytes in a second.
fn is_limited(host: &Host, disk: &DiskPaths, iops: u64, bytes_write: u64) {
    let stats = stats_file(&host.paths().run.join(id(disk).file_name()));
    wait_until("a worker with the limits", || {
        let seen = snapshot::read(&stats).unwrap();
        seen.process().is_some() && seen.limits == [iops, 0, 0, 0, 0, bytes_write]
    });
}

/// The value of a setting of the disk, and whether it was set while the disk was running.
fn setting(host: &Host, disk: &DiskPaths, key: &str) -> (String, bool) {
    let details = host.show(disk).unwrap();
    let setting = details.settings.into_iter().find(|setting| setting.key == key).unwrap();
    (setting.value, setting.from == Source::Running)
}

#[test]
fn a_limit_outlives_worker_keeper_daemon_and_program_and_ends_with_the_disk() {
    let host = Host::new(1);
    let mut daemon = host.spawn(None);
    let disk = attach(&host, 1);
    let load = Load::start(&host, &disk);
    let first = keeper(&host, &disk);
    assert_eq!(setting(&host, &disk, "limit"), ("none".to_owned(), false));
    let limits = json!({ "iops": { "per_s": 90_000 }, "bytes_write": { "per_s": 1_000_000_000 } });
    limit(&host, &disk, &limits).unwrap();
    is_limited(&host, &disk, 90_000, 1_000_000_000);
    let said = ("iops=90000,bytes_write=1000000000".to_owned(), true);
    assert_eq!(setting(&host, &disk, "limit"), said);
    let old = worker(first).unwrap();
    load.wait_for_progress();
    assert!(is_alive(old) && worker(first) == Some(old), "the same worker goes on");

    let goes_on = || {
        load.wait_for_progress();
        is_limited(&host, &disk, 90_000, 1_000_000_000);
    };
    kill_pid(old);
    goes_on();
    kill(daemon);
    kill_pid(worker(first).unwrap());
    goes_on();
    daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|status| status.served == 1));
    goes_on();
    kill_keeper(keeper(&host, &disk));
    goes_on();
    let program = host.dir.path().join("program");
    host::copy_program(&std::env::current_exe().unwrap(), &program);
    let keeper = keeper(&host, &disk);
    let done: Upgraded = host.call("upgrade", &json!({ "binary": program })).unwrap();
    assert_eq!(done.failed, []);
    goes_on();
    assert_eq!(setting(&host, &disk, "limit"), said);

    limit(&host, &disk, &json!({})).unwrap();
    is_limited(&host, &disk, 0, 0);
    let state = States::peek(&host.paths().states(), id(&disk)).unwrap();
    assert!(state.tune.limits.is_some_and(|limits| limits.is_none()));
    load.end();
    end(&host, std::slice::from_ref(&disk), &[keeper]);
    assert_eq!(States::peek(&host.paths().states(), id(&disk)), None);
    kill(daemon);
}

#[test]
fn settings_are_made_on_the_running_disk_and_what_is_wrong_changes_nothing() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let disk = attach(&host, 1);
    let load = Load::start(&host, &disk);
    let of_disk = keeper(&host, &disk);
    let old = worker(of_disk);
    let set = |params: &Value| {
        let mut all = json!({ "disk": id(&disk) });
        let fields = params.as_object().unwrap().clone();
        all.as_object_mut().unwrap().extend(fields);
        host.call::<SetDone>("disk.set", &all)
    };
    let done = set(&json!({ "on_full": "wait", "poll_us": "30", "cpu": 300 })).unwrap();
    let made: Vec<_> = done.settings.iter().map(|s| (s.key.as_str(), s.value.as_str())).collect();
    assert_eq!(made, [("on_full", "wait"), ("poll_us", "30"), ("cpu", "300")]);
    let done = set(&json!({ "cpu": 0 })).unwrap();
    assert_eq!((done.settings.len(), done.settings[2].value.as_str()), (3, "-"));
    load.wait_for_progress();
    kill_pid(old.unwrap());
    load.wait_for_progress();
    assert_eq!(setting(&host, &disk, "on_full"), ("wait".to_owned(), true));
    assert_eq!(setting(&host, &disk, "merge"), ("true".to_owned(), false));

    let before = States::peek(&host.paths().states(), id(&disk)).unwrap();
    for wrong in [json!({ "cpu": 6401 }), json!({ "on_full": "stop" }), json!({ "queues": 2 })] {
        assert!(set(&wrong).is_err(), "{wrong}");
    }
    for wrong in [json!({ "iops": { "per_s": 0 } }), json!({ "bytes": { "per_s": 65535 } })] {
        assert!(limit(&host, &disk, &wrong).is_err(), "{wrong}");
    }
    assert_eq!(States::peek(&host.paths().states(), id(&disk)), Some(before));
    load.end();
    end(&host, std::slice::from_ref(&disk), &[of_disk]);
    let e = limit(&host, &disk, &json!({})).unwrap_err();
    assert!(e.is_no_disk(), "{e}");
    kill(daemon);
}
