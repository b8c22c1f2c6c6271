//! Jobs of the daemon, with a program that does their steps as the test tells it to.

mod host;
mod tool;

use std::os::unix::process::ExitStatusExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use ferrite_daemon::Step;
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{Job, JobList, JobPhase, PhaseName, code};
use ferrite_daemon::jobs::Means;
use ferrite_host::clock::unix_time_s;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::wait_until;
use host::{Host, connect, id};
use serde_json::{Value, json};
use tool::Files;

const MIB: u64 = 1 << 20;

/// Not a test: the daemon, if the environment asks for one.
#[test]
fn process_daemon() {
    host::be_a_daemon_as(host::in_process, |daemon| {
        let files = Files(std::env::var_os(tool::DIR).unwrap().into());
        daemon.with_jobs(files.means())
    });
}

/// Not a test: a step of a job, if the environment asks for one.
#[test]
fn process_tool() {
    tool::be_a_tool();
}

fn files(host: &Host) -> Files {
    Files::new(&host.dir.path().join("tool"))
}

fn start(host: &mut Host, means: Means) {
    let (config, connect) = (host.config(), connect(&host.store_socket()));
    host.start_as(config, connect, |daemon| daemon.with_jobs(means));
    wait_until("xenstore", || host.status().is_ok_and(|status| status.xen));
}

fn attach(host: &Host, domid: u16) -> DiskPaths {
    let image = host.make_image(&format!("{domid}.img"), MIB);
    host.attach(domid, 0, &format!("aio:{}", image.display()))
}

/// A host with a daemon and a served disk.
fn served() -> (Host, DiskPaths, Files) {
    let mut host = Host::new(2);
    let files = files(&host);
    start(&mut host, files.means());
    let disk = attach(&host, 1);
    host.wait_for_phase(&disk, PhaseName::Served);
    (host, disk, files)
}

fn coalesce(host: &Host, disk: &DiskPaths) -> Result<Job, ClientError> {
    host.call("disk.coalesce", &json!({ "disk": id(disk) }))
}

fn ask(host: &Host, method: &str, id: u64) -> Result<Job, ClientError> {
    host.call(method, &json!({ "id": id }))
}

/// Waits for the end of a job.
fn ended(host: &Host, id: u64) -> Job {
    host.call("job.wait", &json!({ "id": id, "timeout_s": 60 })).unwrap()
}

fn jobs(host: &Host) -> Vec<Job> {
    host.call::<JobList>("job.list", &json!({})).unwrap().jobs
}

fn code_of<T: std::fmt::Debug>(result: Result<T, ClientError>) -> (i64, String) {
    match result.unwrap_err() {
        ClientError::Refused(e) => (e.code, e.message),
        e => panic!("{e}"),
    }
}

const STEPS: [&str; 10] = [
    "plan",
    "plan is done",
    "copy",
    "copy is done",
    "pause 1/51712 by job 1",
    "relink",
    "relink is done",
    "resume 1/51712",
    "clean",
    "clean is done",
];

#[test]
fn a_job_does_its_steps_in_their_order_and_keeps_its_result() {
    let (host, disk, files) = served();
    files.set("hold-copy");
    let asked = json!({ "disk": id(&disk), "from": "/srv/b b", "force": true, "speed": 1000 });
    let job: Job = host.call("disk.coalesce", &asked).unwrap();
    assert_eq!((job.id, job.phase, job.step.as_str()), (1, JobPhase::Running, "plan"));
    wait_until("progress", || {
        let job = ask(&host, "job.show", 1).unwrap();
        job.done > 0 && job.all == 100 && job.rate > 0 && job.left_s.is_some()
    });
    files.unset("hold-copy");
    let job = ended(&host, 1);
    assert_eq!((job.phase, job.done, job.all), (JobPhase::Done, 100, 100));
    assert_eq!((job.rate, job.left_s, job.speed), (0, None, Some(1000)));
    assert!(job.ended.is_some_and(|ended| ended >= job.created));
    assert_eq!(files.calls(), STEPS);
    let image = host.image("1.img");
    let leaf = format!("raw:{}", image.display());
    // The lower end is known from the plan on.
    for (step, more) in [
        ("plan", "--force"),
        ("copy", "--to /srv/c --force --speeds --speed 1000"),
        ("relink", "--to /srv/c --force"),
        ("clean", "--to /srv/c --force"),
    ] {
        let arguments = std::fs::read_to_string(files.0.join(format!("arguments-{step}"))).unwrap();
        let expected = format!("merge-step {step} {leaf} --from /srv/b b {more} --json");
        assert_eq!(arguments, expected);
    }
    assert_eq!((job.from.as_deref(), job.to.as_deref()), (Some("/srv/b b"), Some("/srv/c")));
    assert_eq!(jobs(&host), [job]);
}

#[test]
fn a_daemon_that_is_killed_at_any_point_of_a_job_is_followed_by_one_that_does_the_rest() {
    let points = ["plan", "copy", "relink", "paused", "changed", "resumed", "clean", "ended"];
    for point in points {
        let calls = killed_at(point, &[]);
        // A step whose successor was begun is not done again.
        let again = |points: &[&str]| if points.contains(&point) { 2 } else { 1 };
        for (step, times) in [
            ("plan", 1),
            ("copy", 1),
            ("relink", again(&["changed", "resumed"])),
            ("resume 1/51712", again(&["resumed"])),
            ("clean", 1),
        ] {
            assert_eq!(count(&calls, step), times, "{step} at {point}: {calls:?}");
        }
    }
    for point in ["grow", "paused", "changed", "resumed"] {
        let calls = killed_at(point, &["must-grow"]);
        let grown = if ["changed", "resumed"].contains(&point) { 2 } else { 1 };
        assert_eq!(count(&calls, "grow"), grown, "{point}: {calls:?}");
        for step in ["plan", "copy", "relink", "clean"] {
            assert_eq!(count(&calls, step), 1, "{step} at {point}: {calls:?}");
        }
    }
}

fn count(calls: &[String], call: &str) -> usize {
    calls.iter().filter(|have| *have == call).count()
}

/// A daemon is killed at this point of a job, and the next one ends the job. Returns all calls.
fn killed_at(point: &'static str, set: &[&str]) -> Vec<String> {
    killed_at_with(point, &|files| set.iter().for_each(|name| files.set(name)))
}

fn killed_at_with(point: &'static str, set: &dyn Fn(&Files)) -> Vec<String> {
    let host = Host::new(1);
    let files = files(&host);
    set(&files);
    let disk = attach(&host, 1);
    let environment = [(tool::DIR, files.0.to_str().unwrap())];
    let mut daemon = host.spawn_with(Some(Step::Job(point)), &environment);
    wait_until("a daemon", || host.status().is_ok_and(|status| status.served == 1));
    // At the first points it may die before the answer.
    let _ = coalesce(&host, &disk);
    assert_eq!(daemon.wait().unwrap().signal(), Some(9), "{point}");
    assert_eq!(files.has("paused 1"), ["paused", "changed"].contains(&point), "{point}");
    let daemon = host.spawn_with(None, &environment);
    wait_until("a daemon", || host.status().is_ok_and(|status| status.served == 1));
    assert_eq!(ended(&host, 1).phase, JobPhase::Done, "{point}");
    assert!(!files.has("paused 1"), "{point}");
    host.detach(&disk);
    host.wait_for_no_disks();
    kill(daemon);
    files.calls()
}

fn kill(mut daemon: std::process::Child) {
    daemon.kill().unwrap();
    assert_eq!(daemon.wait().unwrap().signal(), Some(9));
}

/// The leaf has 9 MiB, then a little more than is merged at once, and 1 MiB after the second round.
fn large_leaf(files: &Files) {
    files.set_to("bytes-plan", &format!("{}", 9 * MIB));
    files.set_to("bytes-leaf", &format!("{}\n{}", 8 * MIB + 1, MIB));
}

/// The steps of the program, and pauses.
fn steps(files: &Files) -> Vec<String> {
    let calls = files.calls().into_iter();
    let calls = calls.filter(|call| !call.contains(" is done") && !call.contains("resume"));
    calls.map(|call| call.split(' ').next().unwrap().to_owned()).collect()
}

const ROUND: [&str; 6] = ["pause", "split", "copy", "pause", "relink", "clean"];
const LEAF: [&str; 2] = ["pause", "leaf"];

#[test]
fn a_leaf_is_merged_as_it_was_until_what_its_guest_has_written_since_is_little() {
    let (host, disk, files) = served();
    large_leaf(&files);
    let id = coalesce(&host, &disk).unwrap().id;
    assert_eq!(ended(&host, id).phase, JobPhase::Done);
    let all = [&["plan"][..], &ROUND, &LEAF, &ROUND, &LEAF].concat();
    assert_eq!(steps(&files), all);
    // A small one is merged at once.
    files.set_to("bytes-plan", &format!("{}", 8 * MIB));
    files.set_to("calls", "");
    let id = coalesce(&host, &disk).unwrap().id;
    assert_eq!(ended(&host, id).phase, JobPhase::Done);
    assert_eq!(steps(&files), ["plan", "pause", "leaf"]);
    let leaf = format!("raw:{}", host.image("1.img").display());
    let snapshot = leaf.replace("1.img", "1.ferrite-job-1-2.img");
    let arguments = |step: &str| std::fs::read_to_string(files.0.join(format!("arguments-{step}")));
    for (step, more) in [
        ("split", format!("--from {snapshot}")),
        ("copy", format!("--from {snapshot} --to /srv/c --speeds --speed 0")),
        ("relink", format!("--from {snapshot} --to /srv/c")),
        ("leaf", "--to /srv/c --most 8388608".to_owned()),
    ] {
        assert_eq!(arguments(step).unwrap(), format!("merge-step {step} {leaf} {more} --json"));
    }
}

#[test]
fn a_leaf_that_does_not_become_smaller_is_merged_if_its_guest_waits_a_moment_only() {
    let (host, disk, files) = served();
    files.set_to("bytes-plan", &format!("{}", 9 * MIB));
    // The second round leaves more than the first one.
    files.set_to("bytes-leaf", &[20, 21, 22].map(|mib| (mib * MIB).to_string()).join("\n"));
    let id = coalesce(&host, &disk).unwrap().id;
    assert_eq!(ended(&host, id).phase, JobPhase::Done);
    assert_eq!(files.count("split"), 2);
    let arguments = std::fs::read_to_string(files.0.join("arguments-leaf")).unwrap();
    assert!(arguments.contains(&format!("--most {}", 128 * MIB)), "{arguments}");
    // There is an end to rounds that leave less and less.
    files.set_to("calls", "");
    files.set_to("bytes-plan", &format!("{}", 9 * MIB));
    let left: Vec<String> = (0..9).map(|i| ((200 - i) * MIB).to_string()).collect();
    files.set_to("bytes-leaf", &left.join("\n"));
    let id = coalesce(&host, &disk).unwrap().id;
    let job = ended(&host, id);
    assert_eq!(job.phase, JobPhase::Failed);
    let why = job.why.unwrap();
    assert!(why.contains("it has 195 MiB again, and at most 128 MiB are merged"), "{why}");
    assert_eq!((files.count("split"), files.count("undo")), (6, 0));
}

#[test]
fn a_merge_of_a_leaf_that_is_cancelled_or_fails_takes_its_snapshot_back_or_says_that_it_stays() {
    let (host, disk, files) = served();
    for (i, written) in [0, 9 * MIB].into_iter().enumerate() {
        large_leaf(&files);
        files.set_to("bytes-undo", &written.to_string());
        files.set("hold-copy");
        let id = coalesce(&host, &disk).unwrap().id;
        wait_until("a step", || files.count("copy") == 2 * i + 1);
        ask(&host, "job.cancel", id).unwrap();
        let job = ended(&host, id);
        assert_eq!((job.phase, job.step.as_str()), (JobPhase::Cancelled, "undo"));
        files.unset("hold-copy");
        let stays =
            |job: &Job| match job.why.as_deref().unwrap_or("").split_once("its disk's chain") {
                None => assert_eq!(written, 0, "{job:?}"),
                Some((_, why)) => {
                    assert!(why.contains("-1.img, which is not merged back"), "{why}");
                    assert!(why.ends_with("the guest has written 9 MiB since"), "{why}");
                    assert!(job.help.as_deref().unwrap().contains("ferrite disk coalesce 1/51712"));
                    assert_eq!(written, 9 * MIB);
                }
            };
        stays(&job);
        large_leaf(&files);
        files.set_to("bytes-undo", &written.to_string());
        files.set_to("fail-copy", r#"{"what":"cannot merge","why":"no room","help":"make room"}"#);
        let id = coalesce(&host, &disk).unwrap().id;
        let job = ended(&host, id);
        assert_eq!(job.phase, JobPhase::Failed);
        assert!(job.why.as_deref().unwrap().starts_with("cannot merge: no room"), "{job:?}");
        stays(&job);
        files.unset("fail-copy");
    }
    assert_eq!((files.count("undo"), files.count("leaf")), (4, 0));
    assert!(!files.has("paused 1"));
}

#[test]
fn a_merge_of_a_leaf_goes_on_or_back_after_the_death_of_its_daemon_at_each_point() {
    let points =
        ["plan", "split", "paused", "changed", "resumed", "copy", "relink", "clean", "leaf"];
    for point in points {
        let calls = killed_at_with(point, &|files| {
            large_leaf(files);
            // After the first round the leaf is small.
            files.set_to("bytes-leaf", "1");
        });
        let again = if ["changed", "resumed"].contains(&point) { 2 } else { 1 };
        assert_eq!(count(&calls, "split"), again, "{point}: {calls:?}");
        for step in ["plan", "copy", "relink", "clean", "leaf"] {
            assert_eq!(count(&calls, step), 1, "{step} at {point}: {calls:?}");
        }
    }
    // A failure is undone by the next daemon, with the reason of the first one.
    let host = Host::new(1);
    let files = files(&host);
    large_leaf(&files);
    files.set_to("fail-copy", r#"{"what":"cannot merge","why":"no room","help":"make room"}"#);
    let disk = attach(&host, 1);
    let environment = [(tool::DIR, files.0.to_str().unwrap())];
    let mut daemon = host.spawn_with(Some(Step::Job("undo")), &environment);
    wait_until("a daemon", || host.status().is_ok_and(|status| status.served == 1));
    let _ = coalesce(&host, &disk);
    assert_eq!(daemon.wait().unwrap().signal(), Some(9));
    let daemon = host.spawn_with(None, &environment);
    wait_until("a daemon", || host.status().is_ok_and(|status| status.served == 1));
    let job = ended(&host, 1);
    assert_eq!(job.why.as_deref(), Some("cannot merge: no room"));
    assert_eq!(files.count("undo"), 1);
    host.detach(&disk);
    host.wait_for_no_disks();
    kill(daemon);
}

#[test]
fn a_step_of_a_killed_daemon_ends_before_the_next_daemon_starts_it_again() {
    let host = Host::new(1);
    let files = files(&host);
    let disk = attach(&host, 1);
    let environment = [(tool::DIR, files.0.to_str().unwrap())];
    ["hold-copy", "linger"].iter().for_each(|name| files.set(name));
    let daemon = host.spawn_with(None, &environment);
    wait_until("a daemon", || host.status().is_ok_and(|status| status.served == 1));
    coalesce(&host, &disk).unwrap();
    wait_until("a step", || files.count("copy") == 1);
    kill(daemon);
    let daemon = host.spawn_with(None, &environment);
    wait_until("the step again", || files.count("copy") == 2);
    assert_eq!(files.calls(), ["plan", "plan is done", "copy", "copy ends early", "copy"]);
    files.unset("hold-copy");
    assert_eq!(ended(&host, 1).phase, JobPhase::Done);
    host.detach(&disk);
    host.wait_for_no_disks();
    kill(daemon);
}

#[test]
fn a_daemon_that_ends_in_order_leaves_its_jobs_to_the_next() {
    let (mut host, disk, files) = served();
    files.set("hold-copy");
    coalesce(&host, &disk).unwrap();
    wait_until("a step", || files.count("copy") == 1);
    ask(&host, "job.pause", 1).unwrap();
    host.stop();
    start(&mut host, files.means());
    let job = ask(&host, "job.show", 1).unwrap();
    assert_eq!((job.phase, job.step.as_str()), (JobPhase::Paused, "copy"));
    host.wait_for_phase(&disk, PhaseName::Served);
    assert_eq!(files.count("copy"), 1, "a paused job does not begin");
    files.unset("hold-copy");
    assert_eq!(ask(&host, "job.resume", 1).unwrap().phase, JobPhase::Running);
    assert_eq!(ended(&host, 1).phase, JobPhase::Done);
    // The next number is new.
    let job = coalesce(&host, &disk).unwrap();
    assert_eq!(job.id, 2);
    ended(&host, 2);
}

#[test]
fn one_job_at_a_time_changes_a_disk_or_an_image() {
    let (host, disk, files) = served();
    files.set("hold-copy");
    coalesce(&host, &disk).unwrap();
    let (code, message) = code_of(coalesce(&host, &disk));
    assert_eq!((code, message.as_str()), (code::IN_USE, "job 1 changes this disk already"));
    // Other disks do not mind.
    let other = attach(&host, 2);
    host.wait_for_phase(&other, PhaseName::Served);
    assert_eq!(coalesce(&host, &other).unwrap().id, 2);
    files.unset("hold-copy");
    for id in [1, 2] {
        assert_eq!(ended(&host, id).phase, JobPhase::Done);
    }
    assert_eq!(coalesce(&host, &disk).unwrap().id, 3);
    ended(&host, 3);
}

#[test]
fn a_job_is_cancelled_until_its_result_shows() {
    let (host, disk, files) = served();
    files.set("hold-copy");
    coalesce(&host, &disk).unwrap();
    wait_until("a step", || files.count("copy") == 1);
    let job = ask(&host, "job.cancel", 1).unwrap();
    assert_eq!((job.phase, job.why), (JobPhase::Cancelled, None));
    assert_eq!(files.count("relink"), 0);
    let (code, message) = code_of(ask(&host, "job.cancel", 1));
    assert_eq!((code, message.as_str()), (code::FAILED, "job 1 has ended: it was cancelled"));
    // One that rests before its step.
    files.set("hold-clean");
    files.unset("hold-copy");
    coalesce(&host, &disk).unwrap();
    wait_until("the last step", || files.count("clean") == 1);
    let (code, message) = code_of(ask(&host, "job.cancel", 2));
    assert_eq!(code, code::FAILED);
    assert!(message.contains("its step clean has begun"), "{message}");
    files.unset("hold-clean");
    assert_eq!(ended(&host, 2).phase, JobPhase::Done);
}

#[test]
fn a_running_job_is_paused_resumed_and_limited() {
    let (host, disk, files) = served();
    files.set("hold-copy");
    coalesce(&host, &disk).unwrap();
    wait_until("a step", || files.count("copy") == 1);
    let limit = |speed: Value| -> Job {
        host.call("job.limit", &json!({ "id": 1, "speed": speed })).unwrap()
    };
    assert_eq!(limit(json!(5000)).speed, Some(5000));
    wait_until("a limit", || files.count("copy gets 5000") == 1);
    let job = ask(&host, "job.pause", 1).unwrap();
    assert_eq!((job.phase, job.rate, job.left_s), (JobPhase::Paused, 0, None));
    wait_until("a rest", || files.count("copy gets 1") == 1);
    // A limit does not end the rest.
    limit(json!(6000));
    assert_eq!(ask(&host, "job.show", 1).unwrap().phase, JobPhase::Paused);
    assert_eq!(ask(&host, "job.resume", 1).unwrap().phase, JobPhase::Running);
    wait_until("its end", || files.count("copy gets 6000") == 1);
    assert_eq!(limit(json!(0)).speed, None);
    wait_until("no limit", || files.count("copy gets 0") == 1);
    assert_eq!(limit(Value::Null).speed, None);
    // A job that is paused in a step does not begin the next one.
    ask(&host, "job.pause", 1).unwrap();
    files.unset("hold-copy");
    wait_until("the step's end", || files.count("copy is done") == 1);
    std::thread::sleep(host::A_WHILE);
    assert_eq!(files.calls().last().unwrap(), "copy is done");
    ask(&host, "job.resume", 1).unwrap();
    assert_eq!(ended(&host, 1).phase, JobPhase::Done);
}

#[test]
fn waiting_has_an_end_and_unknown_jobs_are_refused() {
    let (host, disk, files) = served();
    files.set("hold-copy");
    coalesce(&host, &disk).unwrap();
    let waited = host.call::<Job>("job.wait", &json!({ "id": 1, "timeout_s": 0 }));
    assert_eq!(code_of(waited), (code::TIMEOUT, "job 1 has not ended in time".to_owned()));
    for verb in ["show", "wait", "cancel", "pause", "resume", "limit"] {
        let (code, message) = code_of(ask(&host, &format!("job.{verb}"), 7));
        assert_eq!((code, message.as_str()), (code::NO_JOB, "there is no job 7"), "{verb}");
    }
    let relative = json!({ "disk": id(&disk), "from": "b.vhd" });
    assert_eq!(code_of(host.call::<Job>("disk.coalesce", &relative)).0, code::INVALID_PARAMS);
    let unlimited = json!({ "disk": id(&disk), "speed": 0 });
    assert_eq!(code_of(host.call::<Job>("disk.coalesce", &unlimited)).0, code::INVALID_PARAMS);
    let unknown = json!({ "disk": { "domid": 9, "devid": 1 } });
    assert_eq!(code_of(host.call::<Job>("disk.coalesce", &unknown)).0, code::NO_DISK);
    let missing = host.attach(2, 0, "aio:/srv/none.img");
    host.wait_for_phase(&missing, PhaseName::Failed);
    let (code, message) = code_of(coalesce(&host, &missing));
    assert_eq!((code, message.as_str()), (code::FAILED, "disk 2/51712 is not served"));
    ask(&host, "job.cancel", 1).unwrap();
}

#[test]
fn an_ended_job_is_kept_for_a_day() {
    let mut host = Host::new(1);
    let (files, now) = (files(&host), Arc::new(AtomicU64::new(unix_time_s())));
    let time = |now: &Arc<AtomicU64>| {
        let now = now.clone();
        move || UNIX_EPOCH + Duration::from_secs(now.load(Ordering::Relaxed))
    };
    start(&mut host, files.means().with_time(time(&now)));
    let disk = attach(&host, 1);
    host.wait_for_phase(&disk, PhaseName::Served);
    coalesce(&host, &disk).unwrap();
    ended(&host, 1);
    now.fetch_add(24 * 3600 - 1, Ordering::Relaxed);
    host.stop();
    start(&mut host, files.means().with_time(time(&now)));
    assert_eq!(jobs(&host)[0].phase, JobPhase::Done);
    host.wait_for_phase(&disk, PhaseName::Served);
    files.set("hold-copy");
    coalesce(&host, &disk).unwrap();
    // One that has not ended is kept, however old it is.
    now.fetch_add(48 * 3600, Ordering::Relaxed);
    let left: Vec<u64> = jobs(&host).iter().map(|job| job.id).collect();
    assert_eq!(left, [2]);
    assert!(!host.paths().jobs().join("1.json").exists());
    files.unset("hold-copy");
    ended(&host, 2);
}

#[test]
fn files_that_make_no_sense_are_set_aside_and_other_jobs_go_on() {
    let (mut host, disk, files) = served();
    files.set("hold-copy");
    coalesce(&host, &disk).unwrap();
    wait_until("a step", || files.count("copy") == 1);
    host.stop();
    let folder = host.paths().jobs();
    let good = std::fs::read_to_string(folder.join("1.json")).unwrap();
    for (name, text) in [("2", good.clone()), ("3", good.replace("copy", "burn"))] {
        std::fs::write(folder.join(format!("{name}.json")), text).unwrap();
    }
    files.unset("hold-copy");
    start(&mut host, files.means());
    assert_eq!(ended(&host, 1).phase, JobPhase::Done);
    assert_eq!(jobs(&host).len(), 1);
    assert!(folder.join("2.odd").exists() && folder.join("3.odd").exists());
    host.wait_for_phase(&disk, PhaseName::Served);
    assert_eq!(coalesce(&host, &disk).unwrap().id, 4);
    ended(&host, 4);
}

#[test]
fn a_step_that_fails_says_what_why_and_what_to_do() {
    let (host, disk, files) = served();
    let failure = r#"{"what":"cannot merge","why":"no room","help":"make room","code":1}"#;
    files.set_to("fail-copy", &format!("a word before it\n{failure}"));
    let id = coalesce(&host, &disk).unwrap().id;
    let job = ended(&host, id);
    assert_eq!((job.phase, job.step.as_str()), (JobPhase::Failed, "copy"));
    assert_eq!(job.why.as_deref(), Some("cannot merge: no room"));
    assert_eq!(job.help.as_deref(), Some("make room"));
    assert_eq!(files.count("relink"), 0);
    // One that says nothing that can be understood.
    files.set_to("fail-copy", "thread panicked");
    let id = coalesce(&host, &disk).unwrap().id;
    let why = ended(&host, id).why.unwrap();
    assert_eq!(why, "the step copy has ended with the code 1: thread panicked");
    files.unset("fail-copy");
    // A disk does not stay paused.
    files.set_to("fail-relink", failure);
    let id = coalesce(&host, &disk).unwrap().id;
    let job = ended(&host, id);
    assert_eq!((job.phase, job.step.as_str()), (JobPhase::Failed, "relink"));
    assert!(!files.has("paused 1"));
    assert_eq!(files.count("clean"), 0);
    assert_eq!(files.calls().last().unwrap(), "resume 1/51712");
    files.unset("fail-relink");
    // A step that fails once and works then is no failure.
    files.set("fail-pause");
    let id = coalesce(&host, &disk).unwrap().id;
    assert_eq!(ended(&host, id).phase, JobPhase::Done);
    assert_eq!(files.count("not paused"), 1);
}

#[test]
fn a_job_follows_its_image_to_the_guest_that_has_it_now() {
    let (host, disk, files) = served();
    files.set("hold-copy");
    coalesce(&host, &disk).unwrap();
    wait_until("a step", || files.count("copy") == 1);
    host.detach(&disk);
    let again = host.attach(2, 0, &format!("aio:{}", host.image("1.img").display()));
    host.wait_for_phase(&again, PhaseName::Served);
    // The first disk has closed its image, and is known until its thread has ended.
    wait_until("the end of the first disk", || host.disks().len() == 1);
    // The image is still the job's.
    assert_eq!(code_of(coalesce(&host, &again)).0, code::IN_USE);
    files.unset("hold-copy");
    assert_eq!(ended(&host, 1).phase, JobPhase::Done);
    assert_eq!(files.count("pause 2/51712 by job 1"), 1);
    assert_eq!(files.count("resume 2/51712"), 1);
}

#[test]
fn a_daemon_without_programs_for_jobs_says_so() {
    let mut host = Host::new(1);
    host.start();
    let disk = attach(&host, 1);
    host.wait_for_phase(&disk, PhaseName::Served);
    let id = coalesce(&host, &disk).unwrap().id;
    let job = ended(&host, id);
    assert_eq!(job.why.as_deref(), Some("this daemon has no programs for jobs"));
}
