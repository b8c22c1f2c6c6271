//! Copies of a pool's disks on a LUN that several hosts see, by real processes of two hosts. The LUN is a model in a file, since
//! this kernel need not have one; the real one is in the tests on Xen.

mod pooled;

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use ferrite_host::fence::model::{FileLun, Model};
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::wait_until;
use pooled::{Pool, end, pattern, write_file};
use rustix::process::{Pid, Signal, kill_process};

const MIB: usize = 1 << 20;
/// The first copy's data: behind the LUN's header, and its own.
const DATA: usize = 2 * MIB;
/// NBD's `EIO`.
const IO: u32 = 5;

/// A pool, and a LUN that two hosts see.
struct World {
    pool: Pool,
}

/// A host: its name tells it apart, and it has a folder of keys and a port at the LUN.
#[derive(Clone, Copy)]
struct Host(&'static str, u32);

const A: Host = Host("one", 1);
const B: Host = Host("two", 2);

impl World {
    fn new(servers: &[&str], persists: bool) -> Option<World> {
        let world = World { pool: Pool::start(servers)? };
        let image = fs::File::create(world.lun()).unwrap();
        image.set_len(64 << 20).unwrap();
        FileLun::at(&world.lun(), 0).make(&Model::new(persists)).unwrap();
        let table = fs::read_to_string(world.pool.config()).unwrap();
        for Host(name, _) in [A, B] {
            let folder = world.path(&format!("state-{name}"));
            let text = format!("state_folder = {folder:?}\n{table}");
            fs::write(world.path(&format!("{name}.toml")), text).unwrap();
            fs::write(world.path(&format!("{name}.hostname")), name).unwrap();
        }
        Some(world)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.pool.dir.path().join(name)
    }

    fn lun(&self) -> PathBuf {
        self.path("lun.img")
    }

    fn shown(&self) -> String {
        self.lun().display().to_string()
    }

    fn holder(&self) -> Option<u64> {
        FileLun::at(&self.lun(), 0).with(|lun| lun.holder()).unwrap()
    }

    /// What is at this place of the LUN.
    fn at(&self, start: usize, len: usize) -> Vec<u8> {
        fs::read(self.lun()).unwrap()[start..start + len].to_vec()
    }

    /// The program, as a host runs it.
    fn on(&self, Host(name, port): Host, args: &[&str]) -> Command {
        let hostname = self.path(&format!("{name}.hostname"));
        let script = format!(
            "mount -t tmpfs t /run; mount --bind {} /etc/hostname; exec \"$@\"",
            hostname.display()
        );
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-ec", &script, "sh", env!("CARGO_BIN_EXE_ferrite")]).args(args);
        command.env("FERRITE_CONFIG", self.path(&format!("{name}.toml")));
        command.env(FileLun::PORT, port.to_string()).env_remove("RUST_LOG");
        command
    }

    fn run(&self, host: Host, args: &[&str]) -> Output {
        self.on(host, args).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, host: Host, args: &[&str]) -> String {
        let output = self.run(host, args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn refused(&self, host: Host, args: &[&str]) -> String {
        let output = self.run(host, args);
        assert!(!output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn add_lun(&self) {
        self.ok(A, &["pool", "add-lun", "lab", "san1", &self.shown()]);
    }

    fn export(&self, host: Host, name: &str) -> Export {
        let socket = self.path(&format!("{}.sock", host.0));
        let mut command = self.on(host, &["export", "nbd", name, "--socket"]);
        let child = command.arg(&socket).stdout(Stdio::null()).spawn().unwrap();
        wait_until("the export", || UnixStream::connect(&socket).is_ok());
        Export { child, socket }
    }
}

/// An export, which is killed with this.
struct Export {
    child: Child,
    socket: PathBuf,
}

impl Export {
    fn client(&self) -> Client {
        let mut client = Client::over(UnixStream::connect(&self.socket).unwrap());
        client.go(false);
        client
    }

    fn signal_owner(&self, signal: Signal) {
        let owner = || {
            let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
            let lists =
                tasks.filter_map(|it| fs::read_to_string(it.unwrap().path().join("children")).ok());
            lists.flat_map(|list| list.split(' ').find_map(|n| n.parse().ok())).next()
        };
        wait_until("an owner", || owner().is_some());
        let owner: i32 = owner().unwrap();
        kill_process(Pid::from_raw(owner).unwrap(), signal).unwrap();
        // Its threads stop one by one. Until then they may carry out a write.
        let is_stopped = || {
            let tasks = fs::read_dir(format!("/proc/{owner}/task")).unwrap();
            let states = tasks.map(|it| fs::read_to_string(it.unwrap().path().join("stat")));
            states.flatten().all(|stat| stat.rsplit(") ").next().unwrap().starts_with('T'))
        };
        if signal == Signal::STOP {
            wait_until("the owner stands still", is_stopped);
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

#[test]
#[ignore = "nightly: a server leaves and returns"]
fn a_disk_has_a_copy_on_a_lun_and_one_on_a_server_and_either_may_go() {
    let Some(mut world) = World::new(&["a"], true) else { return };
    world.add_lun();
    let said = world.refused(B, &["pool", "add-lun", "lab", "san2", &world.shown()]);
    assert!(said.contains("has it reserved"), "{said}");
    world.ok(A, &["pool", "create", "lab/web1", "16M", "--on", "san1,a"]);
    let data = pattern(16 * MIB, 7);
    let file = write_file(world.pool.dir.path(), "first", &data);
    world.ok(A, &["image", "convert", "-n", &file, "pool:lab/web1"]);
    assert!(world.at(DATA, 16 * MIB) == data, "the LUN has something else");
    assert!(world.pool.copy("a") == data, "the server has something else");
    let status = world.ok(A, &["pool", "status", "lab"]);
    assert!(status.contains("of web1, copies: 1") && status.contains("in sync"), "{status}");
    // It is one disk's.
    let said = world.refused(A, &["pool", "create", "lab/web2", "1M", "--on", "san1,a"]);
    assert!(said.contains("more hosts are needed"), "{said}");
    let said = world.refused(A, &["pool", "remove-lun", "lab", "san1"]);
    assert!(said.contains("has copies of web1"), "{said}");

    // The server goes, and comes back with all of it.
    let export = world.export(A, "pool:lab/web1");
    let mut client = export.client();
    world.pool.kill("a");
    client.write(0, &[1; 4096]);
    client.flush();
    let in_sync =
        |world: &World| world.ok(A, &["pool", "status", "lab/web1"]).matches("in sync").count();
    assert_eq!(in_sync(&world), 1);
    world.pool.serve("a");
    wait_until("both copies", || in_sync(&world) == 2);
    // An administrator takes the LUN by hand. The pool names the owner of the disk, so the owner takes it back.
    let stolen = world.holder();
    world.ok(B, &["fence", "--records", "/dev/shm/none", "steal", &world.shown()]);
    assert_ne!(world.holder(), stolen);
    client.write(4096, &[2; 4096]);
    client.flush();
    wait_until("both copies", || in_sync(&world) == 2);
    // Its growth is on the LUN, too.
    drop((client, export));
    world.ok(A, &["pool", "resize", "lab/web1", "24M"]);
    let more = pattern(24 * MIB, 8);
    let file = write_file(world.pool.dir.path(), "second", &more);
    world.ok(B, &["pool", "steal", "lab/web1"]);
    world.ok(B, &["image", "convert", "-n", &file, "pool:lab/web1"]);
    assert!(world.at(DATA, 16 * MIB) == more[..16 * MIB], "the LUN has something else");
    assert!(world.at(DATA + 17 * MIB, 8 * MIB) == more[16 * MIB..], "the second range");
}

#[test]
fn nothing_of_an_owner_that_was_stopped_lands_on_the_lun_behind_its_successor() {
    let Some(world) = World::new(&[], true) else { return };
    world.add_lun();
    world.ok(A, &["pool", "create", "lab/web1", "16M", "--replicas", "1", "--on", "san1"]);
    let export = world.export(A, "pool:lab/web1?reconnect_s=1");
    let mut client = export.client();
    client.write(0, &[1; 4096]);
    client.flush();
    export.signal_owner(Signal::STOP);
    for block in 0..16 {
        client.send(command::WRITE, 0, block * 4096, 4096, &[2; 4096]);
    }
    let data = pattern(16 * MIB, 9);
    let file = write_file(world.pool.dir.path(), "other", &data);
    let said = world.refused(B, &["image", "convert", "-n", &file, "pool:lab/web1?reconnect_s=1"]);
    assert!(said.contains("in use by another host"), "{said}");
    world.ok(B, &["pool", "steal", "lab/web1"]);
    // This one has ended when the old one goes on.
    world.ok(B, &["image", "convert", "-n", &file, "pool:lab/web1"]);
    export.signal_owner(Signal::CONT);
    for _ in 0..16 {
        assert_eq!(client.reply().error, IO);
    }
    assert!(world.at(DATA, 16 * MIB) == data, "a write of an old owner");
    // The first host may have it again. Then it is taken from it while it does nothing: it reads nothing that its successor does
    // not know of.
    drop((client, export));
    let export = world.export(A, "pool:lab/web1?reconnect_s=1");
    let mut client = export.client();
    assert!(client.read(0, MIB as u32) == data[..MIB]);
    world.ok(B, &["pool", "steal", "lab/web1"]);
    world.ok(B, &["image", "compare", &file, "pool:lab/web1"]);
    assert_eq!(client.call(command::READ, 0, 0, 4096, &[]).error, IO);
}

#[test]
#[ignore = "nightly: four owners in turn"]
fn the_successor_of_a_killed_owner_has_what_was_written_without_a_flush() {
    let Some(world) = World::new(&[], true) else { return };
    world.add_lun();
    world.ok(A, &["pool", "create", "lab/web1", "16M", "--replicas", "1", "--on", "san1"]);
    let export = world.export(A, "pool:lab/web1");
    let mut client = export.client();
    for round in 0..4u8 {
        client.write(u64::from(round) * MIB as u64, &vec![round + 1; MIB]);
        export.signal_owner(Signal::KILL);
        for done in 0..=round {
            let found = client.read(u64::from(done) * MIB as u64, MIB as u32);
            assert!(found.iter().all(|byte| *byte == done + 1), "{round}");
        }
    }
}

#[test]
#[ignore = "nightly: a disk is opened in vain for seconds"]
fn a_lun_that_cannot_be_used_is_refused_with_what_to_do() {
    let Some(world) = World::new(&["a"], false) else { return };
    let add = |more: &[&str]| {
        let lun = world.shown();
        world.run(A, &[&["pool", "add-lun", "lab", "san1", &lun], more].concat())
    };
    let said = |output: Output| {
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let forgets = said(add(&[]));
    assert!(forgets.contains("forgets reservations"), "{forgets}");
    fs::write(world.lun(), vec![7; 8 * MIB]).unwrap();
    let full = said(add(&["--weak"]));
    assert!(full.contains("--erase"), "{full}");
    // Being refused leaves nothing at the LUN.
    assert_eq!(world.holder(), None);
    assert!(add(&["--weak", "--erase"]).status.success());
    assert!(world.ok(A, &["pool", "status", "lab"]).contains("WEAK"));
    assert_eq!(world.at(4096, 8 * MIB - 4096), vec![0; 8 * MIB - 4096], "it is zero");
    let no = world.refused(
        A,
        &["pool", "add-lun", "lab", "san2", &world.path("one.toml").display().to_string()],
    );
    assert!(no.contains("no block device"), "{no}");
    // Another LUN has come in its place.
    world.ok(A, &["pool", "create", "lab/web1", "1M", "--replicas", "1", "--on", "san1"]);
    fs::write(world.lun(), vec![7; 8 * MIB]).unwrap();
    let other = world.refused(A, &["image", "info", "pool:lab/web1?reconnect_s=1"]);
    assert!(other.contains("does not say that it is this pool's"), "{other}");
    assert_eq!(world.at(0, 8 * MIB), vec![7; 8 * MIB], "what is not the pool's is not written");
    world.ok(A, &["pool", "delete", "lab/web1", "--force"]);
    let gone = world.ok(A, &["pool", "remove-lun", "lab", "san1"]);
    assert!(gone.contains("its header stays"), "{gone}");
}
