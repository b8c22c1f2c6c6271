//! The order of steps on taps, and each step failing or its answer lost, with a model of taps. The calls of the plug-in
//! with real taps are in `tests/smapi.rs`.

use super::super::model::{Model, Process, Wrong};
use super::*;

/// The plug-in on the model.
impl Model {
    fn datapath(&self) -> Datapath<'_> {
        Datapath { taps: self, disks: Disks::of(self.dir.path()), run_dir: self.dir.path() }
    }

    fn call(&self, name: &str, domain: &str) -> Result<Value, Fault> {
        let (datapath, params) =
            (self.datapath(), DomainParams { uri: self.uri(), domain: domain.to_owned() });
        match name {
            "attach" => datapath.attach(&params),
            "activate" => datapath.activate(&params, Access::All).map(|_| Value::Null),
            "deactivate" => datapath.deactivate(&params),
            _ => {
                datapath.detach(&params);
                Ok(Value::Null)
            }
        }
    }

    /// Whether anything is left of a disk.
    fn is_clean(&self) -> bool {
        let world = self.world.borrow();
        let is_empty =
            |folder: PathBuf| fs::read_dir(folder).is_ok_and(|entries| entries.count() == 0);
        world.processes.is_empty()
            && world.minors.is_empty()
            && is_empty(self.dir.path().join("smapi"))
            && is_empty(self.sockets().join("nbd/ferrite"))
    }

    fn link(&self) -> PathBuf {
        fs::read_link(self.datapath().link(&id_of(&self.uri()))).unwrap()
    }
}

#[test]
fn a_disk_is_opened_between_activate_and_deactivate_and_each_call_may_be_repeated() {
    let taps = Model::new();
    let mut answers = Vec::new();
    for (call, first) in [
        ("attach", "allocate spawn attach"),
        ("activate", "open"),
        ("attach", ""),
        ("deactivate", "close"),
        ("activate", "open"),
        ("deactivate", "close"),
        ("attach", ""),
        ("detach", "detach free"),
    ] {
        for steps in [first, ""] {
            let answer = taps.call(call, "3").unwrap();
            assert_eq!(taps.steps(), steps, "{call}");
            match call {
                "attach" => answers.push(answer),
                _ => assert_eq!(answer, Value::Null),
            }
        }
    }
    assert!(taps.is_clean());
    answers.dedup();
    let [answer] = answers.as_slice() else { panic!("{answers:?}") };
    let link = taps.datapath().link(&id_of(&taps.uri())).display().to_string();
    assert!(link.contains("/blktap-control/nbd/ferrite/") && !link.contains(' '), "{link}");
    assert_eq!(answer["implementations"][0][1]["params"], json!(link));
    let name = link.rsplit('/').next().unwrap();
    let uri = format!("nbd:unix:{link}:exportname={name}");
    assert_eq!(answer["implementations"][1], json!(["Nbd", { "uri": uri }]));
}

#[test]
fn two_domains_share_a_tap_until_both_have_left() {
    let taps = Model::new();
    let answer = taps.call("attach", "3").unwrap();
    assert_eq!(taps.call("attach", "u0-copy").unwrap(), answer);
    assert_eq!(taps.steps(), "allocate spawn attach");
    for (call, domain, steps) in [
        ("activate", "3", "open"),
        ("activate", "u0-copy", ""),
        ("deactivate", "3", ""),
        ("deactivate", "3", ""),
        ("detach", "3", ""),
        ("activate", "u0-copy", ""),
        ("deactivate", "u0-copy", "close"),
        ("detach", "u0-copy", "detach free"),
    ] {
        taps.call(call, domain).unwrap();
        assert_eq!(taps.steps(), steps, "{call} {domain}");
    }
    assert!(taps.is_clean());
    assert_eq!(taps.call("activate", "3").unwrap_err().kind, Kind::Invalid);
}

#[test]
fn a_step_that_fails_or_whose_answer_is_lost_can_be_repeated_and_leaves_nothing() {
    for wrong in [Wrong::Refused, Wrong::Lost] {
        for step in 0.. {
            let taps = Model::new();
            taps.world.borrow_mut().wrong = Some((step, wrong));
            let mut failed = false;
            for call in ["attach", "activate", "deactivate", "detach"] {
                let at = format!("{wrong:?}, step {step}, {call}");
                if taps.call(call, "3").is_err() {
                    failed = true;
                    taps.call(call, "3").unwrap_or_else(|e| panic!("{at}: {e:?}"));
                }
                let is_open = taps.list().unwrap().iter().any(Row::is_open);
                assert_eq!(is_open, call == "activate", "{at}");
            }
            let steps = taps.world.borrow().steps.len();
            // The next call, whatever it is, removes the rest that a detach could not remove.
            taps.call("detach", "4").unwrap();
            // No file records a process or number whose answer was lost.
            let is_unknown = wrong == Wrong::Lost && step < 2;
            assert!(taps.is_clean() != is_unknown, "{wrong:?}, step {step}: {}", taps.steps());
            if step >= steps {
                assert!(step > 5 && !failed);
                break;
            }
        }
    }
}

#[test]
fn a_close_that_does_not_end_fails_deactivate_and_the_domain_stays_active() {
    let taps = Model::new();
    taps.call("attach", "3").unwrap();
    taps.call("activate", "3").unwrap();
    taps.steps();
    taps.world.borrow_mut().wrong = Some((0, Wrong::Refused));
    assert_eq!(taps.call("deactivate", "3").unwrap_err().kind, Kind::Failed);
    assert!(taps.list().unwrap()[0].is_open());
    taps.world.borrow_mut().wrong = None;
    taps.call("deactivate", "3").unwrap();
    assert_eq!(taps.steps(), "close close");
    taps.call("detach", "3").unwrap();
}

#[test]
fn a_process_that_died_is_started_again_under_the_same_name() {
    let taps = Model::new();
    let answer = taps.call("attach", "3").unwrap();
    assert_eq!(taps.link(), taps.sockets().join("nbd1.0"));
    taps.call("activate", "3").unwrap();
    taps.world.borrow_mut().processes.clear();
    taps.steps();
    taps.call("activate", "3").unwrap();
    assert_eq!(taps.steps(), "spawn attach open");
    assert_eq!(taps.call("attach", "3").unwrap(), answer);
    assert_eq!(taps.link(), taps.sockets().join("nbd2.0"));
    taps.world.borrow_mut().processes.clear();
    taps.call("deactivate", "3").unwrap();
    taps.call("detach", "3").unwrap();
    assert!(taps.is_clean());
}

#[test]
fn a_pause_that_nobody_ended_ends_with_the_next_activate() {
    let taps = Model::new();
    taps.call("attach", "3").unwrap();
    taps.call("activate", "3").unwrap();
    taps.pause(Tap { pid: 1, minor: 0 }).unwrap();
    taps.steps();
    taps.call("activate", "3").unwrap();
    assert_eq!(taps.steps(), "unpause");
    taps.pause(Tap { pid: 1, minor: 0 }).unwrap();
    taps.call("deactivate", "3").unwrap();
    taps.call("detach", "3").unwrap();
    assert!(taps.is_clean());
}

#[test]
fn a_number_that_is_another_disks_by_now_is_left_alone() {
    let taps = Model::new();
    taps.call("attach", "3").unwrap();
    let other = Process { minor: Some(0), state: 0, args: Some("vhd:/other.vhd".to_owned()) };
    taps.world.borrow_mut().processes.insert(1, other.clone());
    taps.call("deactivate", "3").unwrap();
    taps.steps();
    taps.call("activate", "3").unwrap();
    assert_eq!(taps.steps(), "allocate spawn attach open");
    taps.call("detach", "3").unwrap();
    let world = taps.world.borrow();
    assert_eq!((world.processes.len(), world.minors.as_slice()), (1, &[0][..]));
    assert_eq!(world.processes[&1].args, other.args);
}

#[test]
fn an_image_that_must_not_change_is_opened_for_reading() {
    use std::os::unix::fs::PermissionsExt as _;
    let taps = Model::new();
    let image = taps.dir.path().join("a.vhd");
    fs::set_permissions(&image, fs::Permissions::from_mode(0o440)).unwrap();
    taps.call("attach", "3").unwrap();
    taps.call("activate", "3").unwrap();
    assert!(taps.steps().ends_with("open-R"));
    taps.call("deactivate", "3").unwrap();
    fs::remove_file(image).unwrap();
    taps.call("activate", "3").unwrap();
    taps.call("detach", "3").unwrap();
    assert_eq!(taps.call("attach", "3").unwrap_err().kind, Kind::VolumeDoesNotExist);
}
