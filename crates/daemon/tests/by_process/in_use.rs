//! The headers of an image are changed and read through the worker that a guest uses it by.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{Attached, Change, Facts, ImageAnswer, Images, PhaseName};
use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_image_tools::NewImage;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::{few_or_all, images, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::host::{self, Host};
use crate::load::Load;
use crate::roles::{MIB, end, is_alive, keeper, kill_keeper, worker};

/// A guest that uses a leaf, which stands on one of two empty images.
struct Story {
    host: Host,
    daemon: Child,
    disk: DiskPaths,
    load: Load,
    leaf: PathBuf,
    parents: [PathBuf; 2],
}

impl Story {
    fn new() -> Story {
        let host = Host::new(2);
        let folder = host.image("sr");
        std::fs::create_dir(&folder).unwrap();
        let parents = ["a.vhd", "b.vhd"].map(|file| folder.join(file));
        let leaf = folder.join("leaf.vhd");
        for parent in &parents {
            make(parent, None);
        }
        make(&leaf, Some(&parents[0]));
        let daemon = host.spawn(None);
        // The toolstack names it by a link.
        let link = host.image("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        let disk = host.attach(1, 0, &format!("vhd:{}/leaf.vhd", link.display()));
        let load = Load::start(&host, &disk);
        load.wait_for_progress();
        Story { host, daemon, disk, load, leaf, parents }
    }

    fn change(&self, path: &Path, change: &Change) -> Result<ImageAnswer, ClientError> {
        self.host.call("image.change", &json!({ "path": path, "change": change }))
    }

    /// Changes the leaf's headers.
    fn changed(&self, change: &Change) -> Facts {
        let answer = self.change(&self.leaf, change).unwrap();
        answer.facts.unwrap_or_else(|| panic!("{:?}", answer.refused))
    }

    fn query(&self, paths: &[&Path]) -> Images {
        self.host.call("image.query", &json!({ "paths": paths })).unwrap()
    }

    /// A change to this one of the parents.
    fn link(&self, i: usize) -> Change {
        let name = self.parents[i].file_name().unwrap().to_str().unwrap();
        let footer = std::fs::read(&self.parents[i]).unwrap();
        let uuid = footer[68..84].iter().map(|byte| format!("{byte:02x}")).collect();
        Change::Parent { uuid, modified: 1_800_000_000, relative: format!("./{name}") }
    }

    /// The hidden mark and the parent that another program finds in the file now.
    fn seen(&self) -> (u8, PathBuf) {
        seen(&self.leaf)
    }

    fn end(mut self) -> (u8, PathBuf) {
        self.load.wait_for_progress();
        let kept = keeper(&self.host, &self.disk);
        self.load.end();
        end(&self.host, std::slice::from_ref(&self.disk), &[kept]);
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
        images::check(&self.leaf);
        seen(&self.leaf)
    }
}

fn seen(leaf: &Path) -> (u8, PathBuf) {
    let options = OpenOptions { read_only: true, unlocked: true, ..OpenOptions::default() };
    let facts = Disk::open(leaf, &options).unwrap().header_facts().unwrap().unwrap();
    (facts.hidden, facts.parent.unwrap())
}

fn make(path: &Path, parent: Option<&Path>) {
    let bytes = parent.is_none().then_some(4 * MIB);
    let new = NewImage { bytes, parent: parent.map(images::name), ..NewImage::default() };
    images::work(None, |tools| tools.create(&images::name(path), &new)).unwrap();
}

#[test]
fn headers_change_under_a_guests_load_and_stay_when_its_disk_is_closed() {
    let story = Story::new();
    assert_eq!(story.seen(), (0, story.parents[0].clone()));
    let facts = story.changed(&Change::Hidden(1));
    assert_eq!((facts.hidden, facts.bytes, facts.blocks), (1, 4 * MIB, Some(1)));
    assert_eq!(story.seen(), (1, story.parents[0].clone()));
    // The table on the medium may be two seconds older, and the file has a reserve.
    let told = story.query(&[&story.parents[0], &story.leaf, Path::new("/none")]).images;
    assert_eq!((told.len(), told[0].path.as_str()), (1, story.leaf.to_str().unwrap()));
    assert_eq!(told[0].facts.as_ref(), Some(&facts));
    assert!(
        facts.end > 2 * MIB && facts.end + 8 * MIB < std::fs::metadata(&story.leaf).unwrap().len()
    );
    let facts = story.changed(&story.link(1));
    assert!(facts.parent.unwrap().ends_with("link/b.vhd"));
    assert_eq!(story.seen(), (1, story.parents[1].clone()));
    story.load.wait_for_progress();
    let last = story.parents[1].clone();
    assert_eq!(story.end(), (1, last));
}

#[test]
fn what_no_worker_writes_to_is_left_to_the_caller_and_what_cannot_be_is_refused() {
    let story = Story::new();
    let hidden = Change::Hidden(1);
    for path in [&story.parents[0], &story.leaf.with_extension("none")] {
        assert_eq!(story.change(path, &hidden).unwrap(), ImageAnswer::default());
    }
    // A disk that only reads an image does not write to its headers, either.
    let params = format!("vhd:{}", story.parents[1].display());
    let reads = story.host.attach_with(2, 0, &params, &[("mode", "r")]);
    story.host.wait_for_phase(&reads, PhaseName::Served);
    assert_eq!(story.change(&story.parents[1], &hidden).unwrap(), ImageAnswer::default());
    story.host.detach(&reads);
    for (change, errno) in [(Change::Size(4 * MIB + 1), 22), (Change::Size(1 << 40), 22)] {
        let answer = story.change(&story.leaf, &change).unwrap();
        assert_eq!(answer.refused.map(|refused| refused.errno), Some(errno), "{change:?}");
    }
    let wrong = Change::Parent { uuid: "x".into(), modified: 0, relative: "./a.vhd".into() };
    let answer = story.change(&story.leaf, &wrong).unwrap();
    assert_eq!(answer.refused.unwrap().errno, 22);
    // No worker has the image of a paused disk open, so it may be replaced.
    let disk = host::id(&story.disk);
    let pause = json!({ "disk": disk, "by": "a test" });
    let _: Attached = story.host.call("disk.pause", &pause).unwrap();
    assert_eq!(story.change(&story.leaf, &hidden).unwrap(), ImageAnswer::default());
    assert_eq!(story.query(&[&story.leaf]).images, []);
    let _: Attached = story.host.call("disk.resume", &json!({ "disk": disk })).unwrap();
    assert_eq!(story.changed(&hidden).hidden, 1);
    story.end();
}

/// The next worker is asked again: the caller learns what has become of it.
#[test]
fn a_worker_killed_while_it_changes_headers_leaves_the_old_or_the_new_and_the_next_goes_on() {
    let story = Story::new();
    let kept = keeper(&story.host, &story.disk);
    let mut random = SplitMix64::new(7);
    for round in 0..few_or_all(4, 40) {
        let change = match round % 2 {
            0 => story.link(round as usize / 2 % 2),
            _ => Change::Hidden(round as u8),
        };
        let before = story.seen();
        let victim = worker(kept);
        let pause = Duration::from_micros(random.below(4000));
        let facts = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(pause);
                let victim = victim.and_then(Pid::from_raw);
                let _ = victim.map(|pid| kill_process(pid, Signal::KILL));
            });
            story.changed(&change)
        });
        let now = match &change {
            Change::Hidden(hidden) => (*hidden, before.1),
            _ => (before.0, Path::new(facts.parent.as_ref().unwrap()).canonicalize().unwrap()),
        };
        assert_eq!((facts.hidden, story.seen()), (now.0, now.clone()), "round {round}");
        let is_next = || worker(kept).is_some_and(|now| Some(now) != victim && is_alive(now));
        wait_until("the next worker", is_next);
        story.load.wait_for_progress();
    }
    story.end();
}

#[test]
fn a_daemon_that_has_just_come_waits_until_it_knows_the_disk() {
    let mut story = Story::new();
    story.daemon.kill().unwrap();
    story.daemon.wait().unwrap();
    story.daemon = story.host.spawn(None);
    let is_there = || story.host.status().is_ok_and(|status| status.disks == 1);
    wait_until("the daemon", is_there);
    assert_eq!(story.changed(&Change::Hidden(1)).hidden, 1);
    kill_keeper(keeper(&story.host, &story.disk));
    story.load.wait_for_progress();
    assert_eq!(story.changed(&Change::Hidden(2)).hidden, 2);
    assert_eq!(story.end().0, 2);
}
