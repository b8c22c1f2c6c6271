//! `ferrite export nbd --control`: the disk is changed while a client writes to it, by the commands for the daemon's
//! disks, and its processes are killed.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use ferrite_testkit::devices::Freezable;
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const BYTES: usize = 8 << 20;
const BLOCK: usize = 4096;

/// An export with a control folder, and what its client has written.
struct World {
    dir: tempfile::TempDir,
    export: Option<Child>,
    model: Vec<u8>,
    stamp: u8,
}

impl World {
    /// Serves this image, which is made.
    fn new(image: &str) -> World {
        let mut world = World::empty();
        world.does(&["image", "create", image, "8M"]);
        world.start(image);
        world
    }

    fn empty() -> World {
        World { dir: dir_in_memory(), export: None, model: vec![0; BYTES], stamp: 0 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn program(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(words).current_dir(self.dir.path()).env_remove("RUST_LOG");
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut command = self.program(words);
        if ["disk", "job"].contains(&words[0]) {
            command.args(["--run-dir", "control"]);
        }
        command.output().unwrap()
    }

    #[track_caller]
    fn does(&self, words: &[&str]) -> String {
        let done = self.run(words);
        assert!(done.status.success(), "{words:?}: {done:?}\n{}", self.log());
        String::from_utf8(done.stdout).unwrap()
    }

    #[track_caller]
    fn fails(&self, words: &[&str], why: &str) {
        let done = self.run(words);
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains(why), "{words:?}: {done:?}");
    }

    fn export(&self, image: &str) -> Command {
        let mut command = self.program(&["export", "nbd", "--socket", "nbd.sock", image]);
        command.args(["--control", "control"]).stdout(Stdio::null());
        command
    }

    fn start(&mut self, image: &str) {
        let log = fs::File::create(self.path("log")).unwrap();
        self.export = Some(self.export(image).stderr(log).spawn().unwrap());
        wait_until("it listens", || self.log().contains("listening at"));
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Ends the export in good order, and checks that nothing is left of it.
    fn stop(&mut self) {
        let mut export = self.export.take().unwrap();
        kill_process(Pid::from_child(&export), Signal::TERM).unwrap();
        assert!(export.wait().unwrap().success(), "{}", self.log());
        for name in ["control", "nbd.sock"] {
            assert!(self.path(name).symlink_metadata().is_err(), "{name} is left");
        }
        wait_until("no process", || self.processes().is_empty());
    }

    fn shown(&self) -> Value {
        serde_json::from_str(&self.does(&["disk", "show", "tap/0", "--json"])).unwrap()
    }

    /// The numbers of keeper and worker.
    fn served_by(&self) -> (i32, i32) {
        let mut found = None;
        wait_until("a keeper with a worker", || {
            let shown = self.run(&["disk", "show", "tap/0", "--json"]);
            let shown: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
            let keeper = shown["disk"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
            let is_served = shown["disk"]["phase"] == json!("served");
            found = keeper.filter(|_| is_served).and_then(|keeper| {
                let worker = self.processes().into_iter().find(|(_, role)| role == "worker");
                Some((keeper, worker?.0))
            });
            found.is_some()
        });
        found.unwrap()
    }

    /// The numbers of keeper and worker, by the list of processes.
    fn served_by_now(&self) -> (i32, i32) {
        let all = self.processes();
        let of = |role: &str| all.iter().find(|(_, other)| other == role).unwrap().0;
        (of("keeper"), of("worker"))
    }

    /// The processes whose environment or arguments name the control folder.
    fn processes(&self) -> Vec<(i32, String)> {
        let control = self.path("control");
        let has = |text: &[u8]| {
            let name = control.as_os_str().as_encoded_bytes();
            text.windows(name.len()).any(|part| part == name)
        };
        let all = fs::read_dir("/proc").unwrap().flatten();
        let of_process = |process: fs::DirEntry| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let words = fs::read(process.path().join("cmdline")).ok()?;
            let environment = fs::read(process.path().join("environ")).unwrap_or_default();
            let role = words.split(|byte| *byte == 0).nth(1).unwrap_or_default();
            let role = String::from_utf8_lossy(role).into_owned();
            (role != "export" && (has(&words) || has(&environment))).then_some((pid, role))
        };
        all.filter_map(of_process).collect()
    }

    fn client(&self) -> Client {
        let mut stream = None;
        wait_until("a server", || {
            stream = UnixStream::connect(self.path("nbd.sock")).ok();
            stream.is_some()
        });
        let mut client = Client::over(stream.unwrap());
        client.go(true);
        client
    }

    /// Writes all over the disk, and reads back what was written before.
    #[track_caller]
    fn works(&mut self, client: &mut Client) {
        self.stamp += 1;
        for i in 0..32 {
            let at = (i * 61 + usize::from(self.stamp) * 7) % (BYTES / BLOCK) * BLOCK;
            let read = client.send(command::READ, 0, at as u64, BLOCK as u32, &[]);
            let reply = client.reply();
            assert_eq!((reply.cookie, reply.error), (read, 0), "{}", self.log());
            assert!(reply.data == self.model[at..at + BLOCK], "other data at {at}");
            let data = [self.stamp; BLOCK];
            let written = client.send(command::WRITE, 0, at as u64, BLOCK as u32, &data);
            let reply = client.reply();
            assert_eq!((reply.cookie, reply.error), (written, 0));
            self.model[at..at + BLOCK].copy_from_slice(&data);
        }
    }

    /// The contents of an image at rest, or of one below a running disk's leaf.
    fn contents(&self, image: &str) -> Vec<u8> {
        self.does(&["image", "convert", "-U", "-O", "raw", image, "contents.raw"]);
        let bytes = fs::read(self.path("contents.raw")).unwrap();
        fs::remove_file(self.path("contents.raw")).unwrap();
        bytes
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(mut export) = self.export.take() {
            let _ = export.kill();
            let _ = export.wait();
        }
        for (pid, _) in self.processes() {
            let _ = kill(pid);
        }
    }
}

fn kill(pid: i32) -> rustix::io::Result<()> {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL)
}

#[test]
fn an_exported_disk_is_changed_while_its_client_writes() {
    let mut world = World::new("a.qcow2");
    let mut client = world.client();
    world.works(&mut client);
    world.does(&["disk", "pause", "tap/0"]);
    assert_eq!(world.shown()["disk"]["phase"], json!("paused"));
    // Another program may have the image.
    world.does(&["image", "check", "a.qcow2"]);
    let waiting = client.send(command::READ, 0, 0, 512, &[]);
    world.does(&["disk", "resume", "tap/0"]);
    assert_eq!(client.reply().cookie, waiting);
    let monday = world.model.clone();
    world.does(&["disk", "snapshot", "tap/0", "monday.qcow2"]);
    world.works(&mut client);
    world.does(&["disk", "snapshot", "tap/0", "tuesday.qcow2"]);
    world.works(&mut client);
    assert!(world.contents("monday.qcow2") == monday);
    world.fails(&["disk", "snapshot", "tap/0", "tuesday.qcow2"], "exists");
    world.fails(&["disk", "snapshot", "tap/0", "/root/x.qcow2"], "in none of the folders");
    world.does(&["disk", "coalesce", "tap/0", "--from", "tuesday.qcow2", "--to", "monday.qcow2"]);
    world.works(&mut client);
    assert!(!world.path("tuesday.qcow2").exists());
    world.does(&["disk", "resize", "tap/0", "+4M"]);
    assert_eq!(world.client_size(), (BYTES + (4 << 20)) as u64);
    world.model.resize(BYTES + (4 << 20), 0);
    // It knows the old size, and is disconnected when the image is closed.
    let mut client = world.client();
    world.does(&["disk", "limit", "tap/0", "--iops", "5000"]);
    assert!(world.does(&["disk", "show", "tap/0"]).contains("iops=5000"));
    world.does(&["disk", "limit", "tap/0", "--none"]);
    world.does(&["disk", "pause", "tap/0"]);
    world.does(&["image", "convert", "a.qcow2", "b.vhd"]);
    world.does(&["disk", "resume", "tap/0"]);
    world.does(&["disk", "switch", "tap/0", "b.vhd", "--compare"]);
    world.works(&mut client);
    world.stop();
    assert!(world.log().contains("b.vhd by now"), "{}", world.log());
    assert!(world.contents("b.vhd")[..world.model.len()] == world.model[..]);
    world.does(&["image", "check", "--chain", "a.qcow2"]);
}

impl World {
    /// The size that a new client is told.
    fn client_size(&self) -> u64 {
        let mut client = Client::over(UnixStream::connect(self.path("nbd.sock")).unwrap());
        client.go(true).0
    }
}

/// The commands of the page, with this test's folder.
#[test]
fn the_recipe_of_the_manual_works_while_a_client_writes() {
    let page = include_str!("../../../docs/operations.md");
    let (_, recipe) = page.split_once("## Change a disk that is served by hand\n").unwrap();
    let recipe = recipe.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let mut lines = recipe.lines();
    let served = "ferrite export nbd /srv/web1.qcow2 --socket /srv/nbd.sock --control /srv/control";
    assert_eq!(lines.next(), Some(served));
    let mut world = World::new("web1.qcow2");
    let mut client = world.client();
    world.works(&mut client);
    for line in lines {
        let line = line.replace("/srv/", &format!("{}/", world.dir.path().display()));
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let done = world.program(&words).output().unwrap();
        assert!(done.status.success(), "{line}: {done:?}");
        if !line.contains(" pause ") {
            let mut client = world.client();
            world.works(&mut client);
        }
        if line.contains(" resize ") {
            world.model.resize(BYTES + (2 << 20), 0);
        }
    }
    world.stop();
}

#[test]
fn a_client_goes_on_whichever_process_of_the_export_is_killed_in_a_change() {
    let mut world = World::new("a.vhd");
    for round in 0..6 {
        let mut client = world.client();
        world.works(&mut client);
        let (keeper, worker) = world.served_by();
        let name = format!("s{round}.vhd");
        let words = ["disk", "snapshot", "tap/0", &name, "--run-dir", "control"];
        let mut change = world.program(&words).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(4 * round));
        match round % 3 {
            0 => kill(worker).unwrap(),
            1 => kill(keeper).unwrap(),
            _ => {
                let mut export = world.export.take().unwrap();
                export.kill().unwrap();
                export.wait().unwrap();
                // Clients are served on, and the same command goes on with the disk.
                world.start("a.vhd");
            }
        }
        change.wait().unwrap();
        world.served_by();
        let mut client = if round % 3 == 1 { world.client() } else { client };
        world.works(&mut client);
    }
    world.does(&["disk", "coalesce", "tap/0"]);
    world.stop();
    world.does(&["image", "check", "--chain", "a.vhd"]);
    assert!(world.contents("a.vhd") == world.model);
}

#[test]
#[ignore = "it takes long: cargo xtask nightly --only changes"]
fn each_change_waits_for_storage_that_hangs_and_other_commands_are_answered() {
    let mut world = World::empty();
    let Some(storage) = Freezable::mount(&world.path("hangs")) else { return };
    world.does(&["image", "create", "hangs/a.qcow2", "8M"]);
    world.start("hangs/a.qcow2");
    let mut client = world.client();
    world.works(&mut client);
    world.does(&["disk", "snapshot", "tap/0", "hangs/b.qcow2"]);
    world.works(&mut client);
    world.does(&["disk", "snapshot", "tap/0", "hangs/c.qcow2"]);
    let changes: [&[&str]; 5] = [
        &["snapshot", "tap/0", "hangs/d.qcow2"],
        &["resize", "tap/0", "+1M"],
        &["coalesce", "tap/0"],
        &["switch", "tap/0", "hangs/e.vhd"],
        &["pause", "tap/0"],
    ];
    for change in changes {
        let mut client = world.client();
        world.works(&mut client);
        if change[0] == "switch" {
            world.does(&["disk", "pause", "tap/0"]);
            world.does(&["image", "convert", "hangs/a.qcow2", "hangs/e.vhd"]);
            world.does(&["disk", "resume", "tap/0"]);
        }
        storage.freeze();
        // A client that knew the old size ends with the growth, and does not hear whether this was done. The image
        // that a disk is switched to has the same data.
        let is_told = change[0] != "resize";
        let stamp =
            if ["resize", "switch"].contains(&change[0]) { world.model[0] } else { world.stamp };
        let hangs = client.send(command::WRITE, 0, 0, BLOCK as u32, &[stamp; BLOCK]);
        world.model[..BLOCK].fill(stamp);
        let why = "have not ended within 1 s; the disk goes on as before";
        world.fails(&["disk", "pause", "tap/0", "--timeout", "1"], why);
        let words = [&["disk"], change, &["--run-dir", "control"]].concat();
        let mut changing = world.program(&words).stdout(Stdio::null()).spawn().unwrap();
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(20));
            assert!(world.does(&["disk", "list"]).contains("tap/0"));
            world.does(&["job", "list"]);
        }
        assert!(changing.try_wait().unwrap().is_none(), "{change:?} does not wait");
        storage.thaw();
        assert!(changing.wait().unwrap().success(), "{change:?}: {}", world.log());
        if change[0] == "pause" {
            world.does(&["disk", "resume", "tap/0"]);
        }
        if is_told {
            assert_eq!(client.reply().cookie, hangs, "{change:?}");
        }
        let mut client = world.client();
        world.works(&mut client);
        if change[0] == "resize" {
            world.model.resize(BYTES + (1 << 20), 0);
        }
    }
    world.stop();
    assert!(world.contents("hangs/e.vhd")[..world.model.len()] == world.model[..]);
    drop(storage);
}

#[test]
fn a_paused_export_is_paused_still_when_all_of_its_processes_were_killed() {
    let mut world = World::new("a.qcow2");
    let mut client = world.client();
    world.works(&mut client);
    world.does(&["disk", "pause", "tap/0", "--by", "backup"]);
    let mut export = world.export.take().unwrap();
    export.kill().unwrap();
    export.wait().unwrap();
    world.processes().iter().for_each(|(pid, _)| kill(*pid).unwrap());
    wait_until("their end", || world.processes().is_empty());
    world.start("a.qcow2");
    let paused = world.shown()["disk"]["paused"]["by"].clone();
    assert_eq!(paused, json!("backup"));
    world.does(&["image", "check", "a.qcow2"]);
    world.does(&["disk", "resume", "tap/0"]);
    let mut client = world.client();
    world.works(&mut client);
    world.stop();
    assert!(world.contents("a.qcow2") == world.model);
}

#[test]
fn the_next_program_reads_what_was_answered_before_all_processes_were_killed() {
    let mut world = World::new("a.qcow2");
    let mut client = world.client();
    world.works(&mut client);
    let mut export = world.export.take().unwrap();
    export.kill().unwrap();
    export.wait().unwrap();
    // The keeper first: it would start another worker.
    let (keeper, worker) = world.served_by_now();
    [keeper, worker].iter().for_each(|pid| kill(*pid).unwrap());
    wait_until("their end", || world.processes().is_empty());
    // Its tables are in the journal, which is the host's and not the folder's.
    world.does(&["image", "convert", "-O", "raw", "a.qcow2", "contents.raw"]);
    assert!(fs::read(world.path("contents.raw")).unwrap() == world.model);
}

#[test]
fn a_control_folder_is_that_of_one_disk_and_one_process() {
    let world = World::new("a.qcow2");
    let said = |image: &str, control: &Path| {
        let mut command = world.program(&["export", "nbd", image, "--socket", "other.sock"]);
        let done = command.arg("--control").arg(control).output().unwrap();
        assert!(!done.status.success());
        String::from_utf8(done.stderr).unwrap()
    };
    let control = world.path("control");
    assert!(said("a.qcow2", &control).contains("another process serves it"));
    world.does(&["image", "create", "b.qcow2", "8M"]);
    assert!(said("b.qcow2", &control).contains("is the control folder of qcow2:"));
    assert!(said("b.qcow2", world.dir.path()).contains("has other things in it"));
    let new = world.path("new");
    assert!(said("a.qcow2", &new).contains("has locked it"));
    assert!(!new.exists(), "nothing is left of an export that has not begun");
    world.fails(&["disk", "detach", "tap/0"], "is served by one process");
    let listed = world.does(&["disk", "list"]);
    assert!(listed.contains("tap/0"), "{listed}");
}
