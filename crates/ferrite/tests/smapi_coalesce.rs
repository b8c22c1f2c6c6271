//! Hidden images of XAPI's folder (SMAPIv3) on which a single image is left are merged: at rest, and below a guest.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::programs::installed;
use ferrite_testkit::wait_until;
use rustix::fs::{FlockOperation, flock};
use serde_json::json;

#[allow(dead_code, reason = "a module of several tests, not all of which use all")]
mod xapi;

use xapi::{Daemon, Host, MIB, Repository, key, set};

impl Host {
    /// The images of the folder.
    fn count(&self) -> usize {
        self.files().iter().filter(|name| !name.starts_with(".smapi/")).count()
    }
}

/// Prints why images were not merged, if a test fails.
struct Told<'a>(&'a Host);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["images/.smapi/coalesce.log", "log"] {
                eprintln!("{name}: {}", fs::read_to_string(self.0.path(name)).unwrap_or_default());
            }
            eprintln!("{:?}", self.0.files());
        }
    }
}

impl Repository<'_> {
    /// A volume with two snapshots, each of which reads as the byte before it: the volume, and the snapshots.
    fn chain(&self) -> (String, [String; 2]) {
        let disk = self.create("web", 4 * MIB);
        let snapshots = [1, 2].map(|byte| {
            self.write(&disk, byte);
            key(&self.on("Volume.snapshot", &disk).unwrap())
        });
        self.write(&disk, 3);
        (disk, snapshots)
    }
}

#[test]
fn what_a_destroyed_snapshot_has_left_is_merged_and_all_volumes_read_as_before() {
    for format in ["vhd", "qcow2"] {
        let host = Host::new();
        let configuration = json!({ "path": host.images(), "format": format });
        let repository = host.repository_of(&configuration);
        let (disk, [first, second]) = repository.chain();
        assert_eq!(host.count(), 5);
        repository.on("Volume.destroy", &first).unwrap();
        wait_until("a merge of hidden images", || host.count() == 3);
        assert_eq!((repository.read(&disk), repository.read(&second)), (3, 2));
        repository.on("Volume.destroy", &second).unwrap();
        wait_until("a merge of the volume", || host.count() == 1);
        wait_until("the end of records", || host.files().len() == 3);
        assert_eq!(repository.read(&disk), 3);
        assert_eq!(repository.stat(&disk)["read_write"], json!(true));
        repository.write(&disk, 4);
        assert_eq!(repository.read(&disk), 4);
        let checked = host.ferrite(&["image", "check", &repository.image(&disk)]);
        assert_eq!(checked.0, Some(0), "{checked:?}");
        repository.on("Volume.destroy", &disk).unwrap();
        assert_eq!(host.files(), set([".smapi/sr.json"]));
    }
}

#[test]
fn nothing_is_merged_while_a_call_waits_or_where_that_is_turned_off() {
    let host = Host::new();
    let repository = host.repository_of(&json!({ "path": host.images() }));
    let (disk, [first, _]) = repository.chain();
    let waiting = File::options().append(true).open(host.images().join(".smapi/lock.waiting"));
    let waiting = waiting.unwrap();
    flock(&waiting, FlockOperation::LockShared).unwrap();
    repository.on("Volume.destroy", &first).unwrap();
    for _ in 0..5 {
        assert_eq!((host.count(), repository.read(&disk)), (4, 3));
    }
    drop(waiting);
    wait_until("a merge", || host.count() == 3);
    let host = Host::new();
    let repository = host.repository();
    let (disk, [first, _]) = repository.chain();
    repository.on("Volume.destroy", &first).unwrap();
    for _ in 0..5 {
        assert_eq!((host.count(), repository.read(&disk)), (4, 3));
    }
}

/// A client of an active volume.
fn client(host: &Host) -> Client {
    let links = host.path("run/blktap-control/nbd/ferrite");
    let link = fs::read_dir(links).unwrap().next().unwrap().unwrap().path();
    let mut client = Client::over(UnixStream::connect(link.canonicalize().unwrap()).unwrap());
    client.go(true);
    client
}

fn write(client: &mut Client, offset: u64, byte: u8) {
    let cookie = client.send(command::WRITE, 0, offset, 4096, &[byte; 4096]);
    assert_eq!(client.reply().cookie, cookie);
}

fn read(client: &mut Client, offset: u64) -> u8 {
    client.send(command::READ, 0, offset, 4096, &[]);
    client.reply().data[0]
}

#[test]
fn images_of_a_volume_in_use_are_merged_while_its_guest_works() {
    let host = Host::new();
    let _told = Told(&host);
    let daemon = Daemon::start(&host);
    let repository = host.repository_of(&json!({ "path": host.images() }));
    let (disk, [first, second]) = repository.chain();
    let of_uri = json!({ "uri": repository.stat(&disk)["uri"][0], "domain": "3" });
    let on = |call: &str| host.datapath(call, of_uri.clone()).unwrap();
    on("Datapath.attach");
    on("Datapath.activate");
    let mut client = client(&host);
    write(&mut client, MIB, 7);
    repository.on("Volume.destroy", &first).unwrap();
    wait_until("a merge of hidden images", || host.count() == 3);
    write(&mut client, 2 * MIB, 8);
    repository.on("Volume.destroy", &second).unwrap();
    wait_until("a merge of the leaf", || {
        write(&mut client, 3 * MIB, 9);
        host.count() == 1
    });
    let expected = [3, 7, 8, 9];
    assert_eq!([0, 1, 2, 3].map(|at| read(&mut client, at * MIB)), expected);
    assert_eq!(repository.ls(), set([&disk]));
    // Calls that follow at once find the disk as they expect it.
    let third = key(&repository.on("Volume.snapshot", &disk).unwrap());
    write(&mut client, 0, 4);
    repository.on("Volume.destroy", &third).unwrap();
    let fourth = key(&repository.on("Volume.snapshot", &disk).unwrap());
    assert_eq!((read(&mut client, 0), read(&mut client, MIB)), (4, 7));
    assert_eq!(repository.read(&fourth), 4);
    drop(client);
    on("Datapath.deactivate");
    on("Datapath.detach");
    repository.on("Volume.destroy", &fourth).unwrap();
    wait_until("the last merge", || host.count() == 1);
    assert_eq!(repository.read(&disk), 4);
    drop(daemon);
}

#[test]
fn an_image_is_opened_and_closed_only_when_a_merge_has_ended() {
    let host = Host::new();
    let daemon = Daemon::start(&host);
    let repository = host.repository();
    let disk = repository.create("web", 4 * MIB);
    let of_uri = json!({ "uri": repository.stat(&disk)["uri"][0], "domain": "3" });
    host.datapath("Datapath.attach", of_uri.clone()).unwrap();
    let ours = host.images().join(".smapi");
    let open =
        |name: &str| File::options().append(true).create(true).open(ours.join(name)).unwrap();
    let run_dir = host.path("run/ferrite");
    let list = ["compat", "tap-ctl", "list", "--run-dir", run_dir.to_str().unwrap()];
    let is_open = || host.ferrite(&list).1.contains("state=0 args=");
    for (call, before) in [("Datapath.activate", false), ("Datapath.deactivate", true)] {
        // The process that merges has this lock, and looks at the other one.
        let merging = open("lock");
        flock(&merging, FlockOperation::LockExclusive).unwrap();
        std::thread::scope(|scope| {
            let called = scope.spawn(|| host.datapath(call, of_uri.clone()).unwrap());
            wait_until("a call that waits", || {
                flock(open("lock.waiting"), FlockOperation::NonBlockingLockExclusive).is_err()
            });
            assert_eq!((is_open(), called.is_finished()), (before, false), "{call}");
            drop(merging);
            called.join().unwrap();
        });
        assert_eq!(is_open(), !before, "{call}");
    }
    host.datapath("Datapath.detach", of_uri).unwrap();
    drop(daemon);
}

/// Runs the process that merges, and kills it at the step of this number among the system calls of one name.
fn killed_at(host: &Host, syscall: &str, step: u32) -> Option<i32> {
    let mut command = host.command("strace");
    command.args(["-f", "-qq", "-o", "/dev/null", "-e"]).arg(format!("trace={syscall}"));
    command.arg("-e").arg(format!("inject={syscall}:signal=KILL:when={step}"));
    command.args(["ferrite", "compat", "smapi-volume", "SR.coalesce", "--run-dir"]);
    command.arg(host.path("run/ferrite")).arg(host.images());
    host.run(&mut command, "").0
}

fn copy_folder(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
}

#[test]
fn a_merge_that_is_killed_at_any_step_leaves_all_volumes_and_is_done_by_the_next() {
    let strace = Command::new("strace").arg("-V").output();
    if installed("strace", strace).is_none() {
        return;
    }
    let host = Host::new();
    let repository = host.repository();
    let (disk, [first, second]) = repository.chain();
    repository.on("Volume.destroy", &first).unwrap();
    let whole = host.path("whole");
    copy_folder(&host.images(), &whole);
    let mut killed = 0;
    for syscall in ["rename", "linkat", "unlink", "fdatasync"] {
        for step in 1.. {
            copy_folder(&whole, &host.images());
            let code = killed_at(&host, syscall, step);
            let at = format!("{syscall} {step}");
            assert_eq!(repository.ls(), set([&disk, &second]), "{at}");
            assert_eq!((repository.read(&disk), repository.read(&second)), (3, 2), "{at}");
            if code == Some(0) {
                break;
            }
            killed += 1;
            let (run, images) = (host.path("run/ferrite"), host.images());
            let [run, images] = [&run, &images].map(|path| path.to_str().unwrap());
            let again = ["compat", "smapi-volume", "SR.coalesce", "--run-dir", run, images];
            assert_eq!(host.ferrite(&again).0, Some(0), "{at}");
            assert_eq!((host.count(), host.files().len()), (3, 7), "{at}: {:?}", host.files());
            assert_eq!((repository.read(&disk), repository.read(&second)), (3, 2), "{at}");
        }
    }
    assert!(killed >= 4, "{killed}");
}
