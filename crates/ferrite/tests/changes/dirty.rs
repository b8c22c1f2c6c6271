//! The dirty maps of a running disk name all that its guest writes, whichever process dies or is replaced.

use std::ops::Range;

use ferrite_daemon::Step;
use ferrite_disk::{Disk, ImageName, OpenOptions};
use rustix::process::{Pid, Signal, kill_process};

use crate::live::Lab;
use crate::load::Load;
use crate::roles::{keeper, worker};

/// The unit that is compared: of the bits in memory.
const BLOCK: usize = 64 << 10;

/// What a map of the image names: with what is in memory, or after a power cut.
fn named(lab: &Lab, map: &str, memory: bool) -> Vec<Range<usize>> {
    let name = ImageName::parse(&lab.image(&lab.leaf)).unwrap();
    let options = OpenOptions { read_only: true, unlocked: true, ..OpenOptions::default() };
    let disk = Disk::open_image(&name, &options).unwrap();
    let state = lab.host.paths().run.join("images");
    let seen = disk.maps(memory.then_some(&*state)).unwrap().unwrap();
    assert_eq!(seen.void, None);
    let map = seen.maps.iter().find(|seen| seen.name == map).expect("such a map");
    map.changed.iter().map(|part| part.start as usize..part.end as usize).collect()
}

/// The blocks in which the disk differs from what it had, all of which the map names.
#[track_caller]
fn names_all(named: &[Range<usize>], before: &[u8], after: &[u8]) -> usize {
    let blocks = before.chunks(BLOCK).zip(after.chunks(BLOCK)).enumerate();
    let differing: Vec<usize> = blocks.filter(|(_, (a, b))| a != b).map(|(i, _)| i).collect();
    for block in &differing {
        let at = block * BLOCK;
        assert!(named.iter().any(|part| part.contains(&at)), "block {block}: {named:?}");
    }
    differing.len()
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn a_map_names_all_writes_although_worker_keeper_and_daemon_die_and_are_replaced() {
    let mut lab = Lab::not_served(&["a.qcow2"]);
    lab.does(&["image", "dirty", "add", &lab.image("a.qcow2"), "all"]);
    let before = lab.contents(&lab.image("a.qcow2"));
    lab.start(None);
    let load = Load::start(&lab.host, &lab.disk);
    load.wait_for_progress();
    kill(worker(keeper(&lab.host, &lab.disk)).unwrap());
    load.wait_for_progress();
    // Another map is begun and cleared: the words of the first one go on.
    lab.does(&["disk", "dirty", "add", "web1/xvda", "late"]);
    load.wait_for_progress();
    kill(keeper(&lab.host, &lab.disk));
    load.wait_for_progress();
    let program = lab.host.dir.path().join("other");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    lab.does(&["upgrade", "web1/xvda", "--binary", program.to_str().unwrap()]);
    load.wait_for_progress();
    // The daemon dies when the image is closed for the change of a map. The disk goes on with the old maps.
    lab.restart(Some(Step::Paused));
    assert!(!lab.run(&["disk", "dirty", "clear", "web1/xvda", "late"]).status.success());
    lab.is_dead("clear");
    lab.start(None);
    load.wait_for_progress();
    lab.does(&["disk", "dirty", "clear", "web1/xvda", "late"]);
    load.wait_for_progress();
    kill(worker(keeper(&lab.host, &lab.disk)).unwrap());
    load.wait_for_progress();
    load.end();
    lab.detach();
    let after = lab.contents(&lab.image("a.qcow2"));
    for memory in [true, false] {
        let all = named(&lab, "all", memory);
        assert!(names_all(&all, &before, &after) > 0);
        assert!(!named(&lab, "late", memory).is_empty());
    }
}
