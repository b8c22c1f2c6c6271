//! Images of a running disk's chain are merged by the daemon's jobs and the program's own steps, while its guest writes.

use ferrite_daemon::Step;
use ferrite_daemon::control::protocol::{Job, JobPhase};
use ferrite_testkit::{is_night, wait_until};
use serde_json::{Value, json};

use crate::host;
use crate::live::{KILLED_STEP, Lab, SMALL_LEAF};
use crate::load::Load;
use crate::roles::{keeper, worker};

/// The points of a job at which its daemon is killed, each in a merge of its own.
const POINTS: [&str; 7] = ["plan", "copy", "relink", "paused", "changed", "resumed", "clean"];
/// The points at which the daemon is killed in a merge of a large leaf. Each split pauses the guest.
const LEAF_POINTS: [&str; 5] = ["split", "changed", "copy", "clean", "leaf"];
/// The points at which the daemon is killed in a merge of a small leaf.
const SMALL_LEAF_POINTS: [&str; 3] = ["paused", "changed", "resumed"];

/// More than the guest writes, and less than the leaf has at the beginning: a snapshot of it is merged, and then the rest.
const ALL_BUT_STATIC: (&str, &str) = (SMALL_LEAF, "1048576");

fn names(count: usize, format: &str) -> Vec<String> {
    (0..count).map(|i| format!("i{i}.{format}")).collect()
}

fn lab_of(names: &[String], environment: &[(&'static str, &str)]) -> Lab {
    Lab::with(&names.iter().map(String::as_str).collect::<Vec<_>>(), environment)
}

/// What `disk.coalesce` is asked for: a merge of the leaf, or of its parent.
fn asked(lab: &Lab, leaf: bool) -> Value {
    let from = leaf.then(|| lab.image(&lab.leaf));
    json!({ "disk": host::id(&lab.disk), "from": from })
}

fn ended(lab: &Lab, id: usize) -> Job {
    lab.host.call("job.wait", &json!({ "id": id, "timeout_s": 60 })).unwrap()
}

#[test]
fn the_recipe_of_the_manual_merges_old_snapshots_while_the_guest_writes() {
    let days = ["sunday", "monday", "tuesday", "wednesday", "web1"];
    let names = days.map(|day| format!("{day}.qcow2"));
    let lab = lab_of(&names, &[]);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    lab.follows("Merge old snapshots", |_| load.wait_for_progress());
    assert_eq!(lab.chain(), ["web1.qcow2"]);
    load.end();
    lab.end();
}

/// Merges of which each one's daemon dies at another point.
fn daemons_die(
    format: &str,
    leaf: bool,
    points: &[&'static str],
    environment: &[(&'static str, &str)],
) {
    let names = names(points.len() + 2, format);
    let mut lab = lab_of(&names, environment);
    let load = Load::start(&lab.host, &lab.disk);
    for (i, point) in points.iter().copied().enumerate() {
        lab.restart(Some(Step::Job(point)));
        load.wait_for_progress();
        // It may die before the answer.
        let _ = lab.host.call::<Job>("disk.coalesce", &asked(&lab, leaf));
        lab.is_dead(point);
        lab.start(None);
        let job = ended(&lab, i + 1);
        assert_eq!((job.phase, &job.why), (JobPhase::Done, &None), "{point}");
        load.wait_for_progress();
        assert_eq!(lab.chain().len(), names.len() - 1 - i, "{point}");
    }
    assert_eq!(lab.chain()[0], lab.leaf);
    load.end();
    lab.end();
}

#[test]
fn a_merge_goes_on_after_the_death_of_the_daemon_at_each_step_and_the_guest_sees_nothing() {
    let points = if is_night() { &POINTS[..] } else { &["copy", "changed", "clean"] };
    daemons_die("qcow2", false, points, &[]);
}

#[test]
fn a_merge_of_the_leaf_goes_on_after_the_death_of_the_daemon_at_each_step() {
    let points = if is_night() { &LEAF_POINTS[..] } else { &["changed", "leaf"] };
    daemons_die("qcow2", true, points, &[ALL_BUT_STATIC]);
}

#[test]
fn a_merge_of_a_small_leaf_goes_on_after_the_death_of_the_daemon_at_each_step() {
    let points = if is_night() { &SMALL_LEAF_POINTS[..] } else { &["changed"] };
    daemons_die("vhd", true, points, &[]);
}

#[test]
fn a_merge_of_the_leaf_goes_on_after_the_death_of_worker_or_keeper_at_each_step() {
    let points = if is_night() { &["changed", "copy", "leaf"][..] } else { &["changed"] };
    let names = names(points.len() * 2 + 1, "vhd");
    let lab = lab_of(&names, &[ALL_BUT_STATIC]);
    let load = Load::start(&lab.host, &lab.disk);
    let victims = lab.host.dir.path().join("victim");
    for (i, point) in points.iter().flat_map(|point| [*point; 2]).enumerate() {
        let kept = keeper(&lab.host, &lab.disk);
        let victim = if i % 2 == 0 { worker(kept).unwrap() } else { kept };
        host::kill_at(&victims, Step::Job(point), victim);
        let _: Job = lab.host.call("disk.coalesce", &asked(&lab, true)).unwrap();
        let job = ended(&lab, i + 1);
        assert_eq!((job.phase, &job.why), (JobPhase::Done, &None), "{point}");
        assert!(!victims.exists(), "{point}");
        load.wait_for_progress();
    }
    assert_eq!(lab.chain().len(), 1);
    load.end();
    lab.end();
}

#[test]
fn a_merge_of_the_leaf_whose_program_dies_fails_and_the_chain_is_as_before() {
    let names = names(3, "qcow2");
    let mut lab = lab_of(&names, &[ALL_BUT_STATIC]);
    let load = Load::start(&lab.host, &lab.disk);
    let steps = ["copy", "relink", "plan", "split", "leaf"];
    let steps = steps.into_iter().take(if is_night() { 5 } else { 2 });
    for (i, step) in steps.enumerate() {
        lab.restart_with(&[ALL_BUT_STATIC, (KILLED_STEP, step)]);
        load.wait_for_progress();
        let _: Job = lab.host.call("disk.coalesce", &asked(&lab, true)).unwrap();
        let job = ended(&lab, i + 1);
        assert_eq!(job.phase, JobPhase::Failed, "{step}");
        let why = job.why.unwrap();
        assert_eq!(why, format!("the step {step} was ended by signal 9"));
        assert_eq!(lab.chain(), ["i2.qcow2", "i1.qcow2", "i0.qcow2"], "{step}");
        load.wait_for_progress();
    }
    load.end();
    lab.end();
}

#[test]
fn a_merge_of_the_leaf_that_is_cancelled_is_undone_or_leaves_a_longer_chain() {
    let mut lab = lab_of(&names(2, "vhd"), &[ALL_BUT_STATIC]);
    let load = Load::start(&lab.host, &lab.disk);
    for small in [ALL_BUT_STATIC, (SMALL_LEAF, "1024")] {
        lab.restart_with(&[small]);
        let slow = json!({ "from": lab.image(&lab.leaf), "speed": 1, "disk": host::id(&lab.disk) });
        let id = lab.host.call::<Job>("disk.coalesce", &slow).unwrap().id;
        let ask = |method: &str| lab.host.call::<Job>(method, &json!({ "id": id })).unwrap();
        wait_until("the copy", || ask("job.show").step == "copy");
        assert_eq!(lab.chain().len(), 3);
        load.wait_for_progress();
        let said = lab.does(&["job", "cancel", &id.to_string()]);
        let job = ended(&lab, id as usize);
        assert_eq!(job.phase, JobPhase::Cancelled);
        load.wait_for_progress();
        match small == ALL_BUT_STATIC {
            true => {
                assert_eq!((job.why, said), (None, format!("job {id} was cancelled\n")));
                assert_eq!(lab.chain(), ["i1.vhd", "i0.vhd"]);
                lab.has_no_litter();
            }
            false => {
                let snapshot = format!("i1.ferrite-job-{id}-1.vhd");
                assert!(said.contains(&format!("{snapshot}, which is not merged back")), "{said}");
                assert_eq!(lab.chain(), ["i1.vhd", &snapshot, "i0.vhd"]);
            }
        }
    }
    // As the help of the last one says.
    lab.does(&["disk", "coalesce", "web1/xvda"]);
    assert_eq!(lab.chain(), ["i1.vhd", "i0.vhd"]);
    load.end();
    lab.end();
}
