//! `fence = reservation`, by real processes: keeper, worker and commands of two hosts on one LUN. The LUN is a model in a file
//! beside the image, since this kernel need not have one; the real one is in the tests on Xen.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ferrite_host::fence::model::{FileLun, Model};
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Two hosts: each has an image file of its own, and both files are the same LUN.
struct World {
    dir: tempfile::TempDir,
}

/// One of them, which serves the LUN.
struct Host<'a> {
    world: &'a World,
    name: &'static str,
    export: Option<Child>,
}

impl World {
    fn new(persists: bool) -> World {
        let world = World { dir: dir_in_memory() };
        for name in ["a", "b"] {
            let image = fs::File::create(world.path(&format!("{name}.img"))).unwrap();
            image.set_len(4 << 20).unwrap();
        }
        world.lun().make(&Model::new(persists)).unwrap();
        symlink("a.img.lun", world.path("b.img.lun")).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn lun(&self) -> FileLun {
        FileLun::at(&self.path("a.img"), 0)
    }

    fn holder(&self) -> Option<u64> {
        self.lun().with(|lun| lun.holder()).unwrap()
    }

    fn keys(&self) -> Vec<u64> {
        self.lun().with(|lun| lun.keys()).unwrap()
    }

    fn host(&self, name: &'static str) -> Host<'_> {
        Host { world: self, name, export: None }
    }
}

impl Host<'_> {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(words).current_dir(self.world.dir.path()).env_remove("RUST_LOG");
        let port = u32::from(self.name.as_bytes()[0]).to_string();
        command.env(FileLun::PORT, port);
        command
    }

    fn control(&self) -> String {
        format!("control-{}", self.name)
    }

    fn image(&self) -> String {
        format!("{}.img", self.name)
    }

    /// Runs `ferrite fence`.
    fn fence(&self, words: &[&str]) -> Output {
        // A command makes the folder: an export would take it for that of another process.
        let records = match self.world.path(&self.control()).exists() {
            true => format!("{}/state/fences", self.control()),
            false => format!("records-{}", self.name),
        };
        let image = self.image();
        let words = [&["--json", "fence"], words, &[&image, "--records", &records]].concat();
        self.command(&words).output().unwrap()
    }

    /// The LUN's state as this host is told it.
    fn status(&self) -> Value {
        let done = self.fence(&["status"]);
        assert!(done.status.success(), "{done:?}");
        serde_json::from_slice(&done.stdout).unwrap()
    }

    fn begin(&mut self, fence: &str) {
        let log = fs::File::create(self.path("log")).unwrap();
        let (control, image, socket) =
            (self.control(), self.image(), format!("{}.sock", self.name));
        let words =
            ["export", "nbd", "--socket", &socket, "--control", &control, "--fence", fence, &image];
        let mut command = self.command(&words);
        self.export = Some(command.stdout(Stdio::null()).stderr(log).spawn().unwrap());
    }

    fn serve(&mut self, fence: &str) {
        self.begin(fence);
        wait_until("it serves", || self.log().contains("listening at"));
        wait_until("a client can use it", || self.works());
    }

    /// Begins to serve in vain: what it says.
    fn is_refused(&mut self, fence: &str, why: &str) {
        self.begin(fence);
        wait_until(why, || self.log().contains(why));
        let mut export = self.export.take().unwrap();
        let _ = kill_process(Pid::from_child(&export), Signal::TERM);
        let _ = export.wait();
        self.kill("keeper");
    }

    fn path(&self, end: &str) -> PathBuf {
        self.world.path(&format!("{}.{end}", self.name))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Whether a new client can write and read.
    fn works(&self) -> bool {
        let Ok(stream) = UnixStream::connect(self.path("sock")) else { return false };
        let mut client = Client::over(stream);
        client.go(true);
        client.send(command::WRITE, 0, 4096, 4096, &[7; 4096]);
        let written = client.reply();
        client.send(command::READ, 0, 4096, 4096, &[]);
        let read = client.reply();
        (written.error, read.error) == (0, 0) && read.data == [7; 4096]
    }

    /// Ends the export in good order.
    fn stop(&mut self) {
        let mut export = self.export.take().unwrap();
        kill_process(Pid::from_child(&export), Signal::TERM).unwrap();
        assert!(export.wait().unwrap().success(), "{}", self.log());
        wait_until("no process", || self.processes("keeper").is_empty());
    }

    /// The processes of this host with that role.
    fn processes(&self, role: &str) -> Vec<Pid> {
        let control = self.world.path(&self.control());
        let has = |text: &[u8]| {
            let name = control.as_os_str().as_encoded_bytes();
            text.windows(name.len()).any(|part| part == name)
        };
        let of_process = |process: fs::DirEntry| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let words = fs::read(process.path().join("cmdline")).ok()?;
            let environment = fs::read(process.path().join("environ")).unwrap_or_default();
            let is_one = words.split(|byte| *byte == 0).nth(1)? == role.as_bytes();
            (is_one && (has(&words) || has(&environment))).then(|| Pid::from_raw(pid))?
        };
        fs::read_dir("/proc").unwrap().flatten().filter_map(of_process).collect()
    }

    fn kill(&self, role: &str) -> Vec<Pid> {
        let all = self.processes(role);
        for pid in &all {
            let _ = kill_process(*pid, Signal::KILL);
        }
        wait_until("their end", || self.processes(role).iter().all(|pid| !all.contains(pid)));
        all
    }
}

impl Drop for Host<'_> {
    fn drop(&mut self) {
        if let Some(mut export) = self.export.take() {
            let _ = export.kill();
            let _ = export.wait();
        }
        for role in ["keeper", "worker", "relay"] {
            for pid in self.processes(role) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

#[test]
fn a_lun_is_one_hosts_through_the_deaths_of_its_processes_until_it_is_given_back_or_taken() {
    let world = World::new(true);
    let (mut a, mut b) = (world.host("a"), world.host("b"));
    a.serve("reservation");
    let key = world.holder().unwrap();
    assert_eq!(world.keys(), [key]);
    assert_eq!(a.status()["is_this_host"], json!(true));
    assert_eq!(b.status()["holder"], json!(format!("{key:016x}")));
    b.is_refused("reservation", "another host has it reserved");
    // Being refused leaves nothing, and a disk that is served is not taken under its guest.
    assert_eq!(world.keys(), [key]);
    let said = a.fence(&["steal"]);
    assert!(
        String::from_utf8_lossy(&said.stderr).contains("a process of this host has it open"),
        "{said:?}"
    );
    for role in ["worker", "keeper"] {
        assert!(!a.kill(role).is_empty());
        wait_until("the next one", || a.works());
        assert_eq!(world.keys(), [key], "the same key after the end of the {role}");
    }
    // Another host takes it. The worker that is there is refused by the LUN alone; the next one is told why.
    let said = b.fence(&["steal"]);
    assert!(said.status.success(), "{said:?}");
    assert_ne!(world.holder(), Some(key));
    // The export's own folder of records is new, so the command's key is another host's for it.
    let said = b.fence(&["release"]);
    assert!(said.status.success() && world.keys().is_empty(), "{said:?}");
    b.serve("reservation");
    let next = world.holder().unwrap();
    a.kill("worker");
    let why = format!("another host (key {next:016x}) has taken it while this disk had it");
    wait_until("the reason", || a.log().contains(&why));
    a.stop();
    assert_eq!(world.keys(), [next], "what a host gives back is its own");
    b.stop();
    assert!(world.keys().is_empty());
    assert!(!b.log().contains("stays reserved"), "{}", b.log());
}

#[test]
fn a_disk_whose_processes_all_died_is_had_again_by_its_host_and_released_by_hand() {
    let world = World::new(true);
    let mut a = world.host("a");
    a.serve("reservation");
    let key = world.holder().unwrap();
    let mut export = a.export.take().unwrap();
    export.kill().unwrap();
    export.wait().unwrap();
    for role in ["keeper", "worker", "relay"] {
        a.kill(role);
    }
    assert_eq!(world.holder(), Some(key));
    a.serve("reservation");
    assert_eq!(world.keys(), [key]);
    let mut export = a.export.take().unwrap();
    export.kill().unwrap();
    export.wait().unwrap();
    for role in ["keeper", "worker", "relay"] {
        a.kill(role);
    }
    let said = a.fence(&["release"]);
    assert!(said.status.success(), "{said:?}");
    assert!(world.keys().is_empty());
}

#[test]
fn a_target_that_forgets_reservations_is_refused_unless_weak_ones_are_asked_for() {
    let world = World::new(false);
    let mut a = world.host("a");
    a.is_refused("reservation", "forgets reservations when it starts again");
    assert!(world.keys().is_empty());
    assert_eq!(a.status()["keeps_reservations"], json!(false));
    a.serve("weak-reservation");
    assert!(a.log().contains("two hosts may write to it then"), "{}", a.log());
    a.stop();
    assert!(world.keys().is_empty());
}

#[test]
fn what_is_no_lun_is_refused() {
    let world = World::new(true);
    fs::remove_file(world.path("a.img.lun")).unwrap();
    let mut a = world.host("a");
    a.is_refused("reservation", "it cannot be reserved: it is no block device");
    assert!(Path::new(&world.path("a.img")).exists());
}
