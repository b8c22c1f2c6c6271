//! Several disks of one process, tested by command lines, signals, exit codes and messages. Guests and xenstore are the
//! loopback's.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferrite_host::process::take_given;
use ferrite_io::engines::test_engine;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_loopback::{BackendHandle, CopyWith, GuestOptions, Loopback, Machine};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::processes::{CHUNK, CHUNKS, Load};
use ferrite_testkit::{PATIENCE, images, stores, wait_until};
use ferrite_xen::hypervisor::DomId;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::*;

const WORDS: &str = "FERRITE_TEST_WORDS";
const RUN: &str = "FERRITE_TEST_RUN";
/// The environment variable with the handles to the guests and to xenstore, one for each connection.
const HANDLES: &str = "FERRITE_TEST_HANDLES";
/// The soft limit when the command starts.
const FEW_DESCRIPTORS: u32 = 40;

/// The command. It runs when this test program is started with that environment variable.
#[test]
fn process() {
    let Ok(handles) = std::env::var(HANDLES) else { return };
    let words = std::env::var(WORDS).unwrap();
    let run = PathBuf::from(std::env::var(RUN).unwrap());
    let loopback = Arc::new(Loopback::new(CopyWith::Memcpy));
    let (first, others) = handles.split_once('|').unwrap();
    // All connections have the same guests.
    let first = BackendHandle::from_arg(first).unwrap();
    first.guests.iter().for_each(|guest| loopback.add(guest).unwrap());
    let fd = |handle: &str| take_given(handle.split(';').next().unwrap().parse().unwrap()).unwrap();
    let fds = [first.store].into_iter().chain(others.split('|').map(fd));
    let stores: Mutex<Vec<Store>> = Mutex::new(fds.map(Store::from_fd).collect());
    crate::log::set_up(0, crate::SERVER_LOG, None);
    let cli = crate::pairs::parse(words.split(' ').map(OsString::from).collect()).unwrap();
    let args = cli.command.into_serve().unwrap();
    let host = Host {
        run: &run,
        connect: &|| Ok(stores.lock().unwrap().pop().expect("a connection for each disk")),
        hypervisor: &|_| loopback.clone(),
    };
    let code = match run_on(&args, &host) {
        Ok(()) => 0,
        Err(failure) => {
            let _ = failure.report();
            failure.code.number()
        }
    };
    std::process::exit(code.into());
}

struct World {
    machine: Machine,
    dir: TempDir,
}

/// A process with disks, and its output.
struct Served {
    child: Child,
    said: PathBuf,
}

impl World {
    fn new() -> World {
        let mut machine = Machine::new().unwrap();
        for _ in 0..2 {
            machine.add_guest(GuestOptions::default()).unwrap();
        }
        World { machine, dir: dir_in_memory() }
    }

    fn image(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        File::create_new(&path).unwrap().set_len(CHUNKS * CHUNK).unwrap();
        path
    }

    fn attach(&mut self, guest: u16, index: u32) -> DiskPaths {
        self.machine.attach_disk(DomId(guest), VirtualDisk::xvd(index)).unwrap()
    }

    fn run(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// `NAME` is the image of that name here.
    fn serve(&self, words: &str) -> Served {
        let here = self.dir.path().display();
        let word = |word: &str| match self.dir.path().join(word).symlink_metadata() {
            Ok(_) => format!("{here}/{word}"),
            Err(_) => word.to_owned(),
        };
        let words: Vec<_> = words.split(' ').map(word).collect();
        // Too few for several disks.
        let limited = format!("ulimit -Sn {FEW_DESCRIPTORS} && exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &limited]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "serve::tests::process", "--nocapture", "--test-threads=1"]);
        // One more than disks: a process with several disks first checks for stale directories.
        let handles = (0..=words.iter().filter(|word| *word == "--xen").count())
            .map(|_| self.machine.backend().unwrap().pass_to(&mut command));
        let handles: Vec<_> = handles.collect();
        command.env(HANDLES, handles.join("|")).env(RUN, self.run());
        command.env(WORDS, format!("ferrite serve {}", words.join(" "))).env_remove("RUST_LOG");
        let said = self.dir.path().join("said");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&said).unwrap());
        Served { child: command.spawn().unwrap(), said }
    }

    fn front(&self, disk: &DiskPaths) -> Frontend {
        connect(Frontend::new(self.machine.guest(disk.domid).unwrap(), disk.devid).unwrap())
    }

    /// A frontend of the guest that has `other`.
    fn front_beside(&self, other: &Frontend, disk: &DiskPaths) -> Frontend {
        let store = self.machine.guest_store(disk.domid).unwrap();
        connect(Frontend::on(other.space().clone(), store, disk.devid).unwrap())
    }

    /// The frontends of [`three`].
    fn fronts(&self, disks: &[DiskPaths; 3]) -> [Frontend; 3] {
        let a = self.front(&disks[0]);
        let b = self.front_beside(&a, &disks[1]);
        [a, b, self.front(&disks[2])]
    }

    fn unplug(&mut self, disk: &DiskPaths, mut front: Frontend) {
        front.close(PATIENCE).unwrap();
        self.machine.unplug(disk).unwrap();
        self.machine.wait_for_backend(disk, &[6], PATIENCE).unwrap();
    }
}

impl Served {
    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    fn end(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("its end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    #[track_caller]
    fn ends_with(&mut self, code: i32, why: &[&str]) {
        let status = self.end();
        let said = self.said();
        assert_eq!(status.code(), Some(code), "{said}");
        why.iter().for_each(|why| assert!(said.contains(why), "{why}: {said}"));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(mut front: Frontend) -> Frontend {
    // The load has requests of up to 64 segments.
    let options = FrontOptions { max_indirect: 64, ..FrontOptions::default() };
    front.connect(&options, PATIENCE).unwrap();
    front
}

fn write(front: &mut Frontend, byte: u8) {
    let buffer = front.space().buffer(1).unwrap();
    buffer.fill(0, 4096, byte);
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
}

#[track_caller]
fn reads(front: &mut Frontend, byte: u8) {
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].read(8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    assert_eq!(buffer.to_vec(0, 4096), [byte; 4096]);
}

const THREE: &str = "a.img --xen 1/xvda b.vhd --xen 1/xvdb --queues 2 c.qcow2 --xen 2/xvda";

/// Disks of one guest and of two, in three formats.
fn three() -> (World, [DiskPaths; 3]) {
    let mut world = World::new();
    for (name, format) in [("a.img", "raw"), ("b.vhd", "vhd"), ("c.qcow2", "qcow2")] {
        let made = ferrite_testkit::images::make(world.dir.path(), format, CHUNKS * CHUNK);
        fs::rename(made, world.dir.path().join(name)).unwrap();
    }
    let disks = [world.attach(1, 0), world.attach(1, 1), world.attach(2, 0)];
    (world, disks)
}

#[test]
fn each_disk_of_a_process_has_all_that_a_disk_has_and_a_signal_ends_them_in_order() {
    let (world, disks) = three();
    let mut served = world.serve(THREE);
    let mut fronts = world.fronts(&disks);
    for (byte, front) in (1..).zip(&mut fronts) {
        write(front, byte);
    }
    for (byte, front) in (1..).zip(&mut fronts) {
        reads(front, byte);
    }
    let of = |disk: &DiskPaths| world.run().join(run_dir_name(disk.domid, disk.devid));
    for disk in &disks {
        for name in ["inflight", "trace-0"] {
            assert!(of(disk).join(name).exists(), "{name} of {}", disk.backend);
        }
        assert!(ferrite_serve::counters::stats_file(&of(disk)).exists());
        let line = format!("disk{{id={}/{}}}", disk.domid, disk.devid);
        assert!(served.said().lines().any(|l| l.contains(&line) && l.contains("opened")));
    }
    served.signal(Signal::TERM);
    served.ends_with(0, &[]);
    assert!(disks.iter().all(|disk| of(disk).join(STOPPED).exists()));
    // The images are complete: other programs may open them.
    let raw = fs::read(world.dir.path().join("a.img")).unwrap();
    assert_eq!(raw[4096..8192], [1; 4096]);
    // The same command takes over all disks.
    let mut served = world.serve(THREE);
    for (byte, front) in (1..).zip(&mut fronts) {
        reads(front, byte);
    }
    served.signal(Signal::INT);
    served.ends_with(0, &[]);
}

#[test]
fn the_end_of_one_disk_is_not_that_of_another() {
    let (mut world, disks) = three();
    let mut served = world.serve(THREE);
    let [mut a, b, mut c] = world.fronts(&disks);
    world.unplug(&disks[1], b);
    write(&mut a, 1);
    write(&mut c, 3);
    assert!(!world.run().join("vbd-1-51728").exists());
    world.unplug(&disks[0], a);
    reads(&mut c, 3);
    assert!(served.child.try_wait().unwrap().is_none());
    world.unplug(&disks[2], c);
    served.ends_with(0, &[]);
}

#[test]
fn a_disk_that_fails_is_named_at_once_and_the_others_are_served() {
    let mut world = World::new();
    world.image("a.img");
    let locked = File::open(world.image("locked.img")).unwrap();
    locked.lock().unwrap();
    let disks = [world.attach(1, 0), world.attach(1, 1), world.attach(2, 0)];
    let mut served = world.serve("no.img --xen 1/xvdb a.img --xen 1/xvda");
    let front = world.front(&disks[0]);
    wait_until("the failure", || served.said().contains("disk 1/51728: cannot open image no.img"));
    world.unplug(&disks[0], front);
    served.ends_with(3, &["1 of 2 disks ended with a failure: 1/51728"]);
    let mut served = world.serve("locked.img --xen 1/xvdb a.img --xen 2/xvda");
    let front = world.front(&disks[2]);
    world.unplug(&disks[2], front);
    served.ends_with(4, &["disk 1/51728: cannot open image"]);
    // Different codes become the general code of a failure.
    let mut served = world.serve("no.img --xen 1/xvda locked.img --xen 1/xvdb");
    served.ends_with(1, &["2 of 2 disks", "1/51712, 1/51728"]);
}

/// Only reads of what is damaged fail.
#[test]
fn a_damaged_image_is_served_if_it_is_only_read() {
    let mut world = World::new();
    let image = images::make(world.dir.path(), "vhd", 8 << 20);
    let disk = Disk::open_image(&images::name(&image), &OpenOptions::default()).unwrap();
    let mut session = images::session(disk);
    session.write(4096, &[7; 4096]).unwrap();
    session.close().unwrap();
    // The second block's entry in the table.
    let file = File::options().write(true).open(&image).unwrap();
    file.write_all_at(&[0x10, 0, 0, 0], 1536 + 4).unwrap();
    let mut served = world.serve("disk.vhd --xen 1/xvda");
    served.ends_with(5, &["--read-only"]);
    let attached = world.attach(1, 0);
    let mut served = world.serve("--read-only disk.vhd --xen 1/xvda");
    let mut front = world.front(&attached);
    reads(&mut front, 7);
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].read(4096, &buffer, 0, 4096).unwrap();
    assert!(!front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    reads(&mut front, 7);
    let said = served.said();
    assert!(
        said.contains("WARN") && said.contains("the block at byte 2097152 of the disk"),
        "{said}"
    );
    world.unplug(&attached, front);
    served.ends_with(0, &[]);
}

#[test]
fn the_same_disk_or_image_twice_is_refused_before_anything_is_opened() {
    let world = World::new();
    let (a, _b) = (world.image("a.img"), world.image("b.img"));
    symlink(&a, world.dir.path().join("link")).unwrap();
    fs::hard_link(&a, world.dir.path().join("name")).unwrap();
    // Opening this image would give another exit code.
    let locked = File::open(&a).unwrap();
    locked.lock().unwrap();
    for (words, why) in [
        ("a.img --xen 1/xvda b.img --xen 1/51712", "cannot serve 1/51712: it is named twice"),
        ("a.img --xen 1/xvda a.img --xen 1/xvdb", "as 1/51728: 1/51712 has the same image"),
        ("a.img --xen 1/xvda link --xen 2/xvda", "has the same image"),
        ("b.img --xen 1/xvdb name --read-only --xen 1/xvda a.img --xen 2/xvda", "the same image"),
    ] {
        world.serve(words).ends_with(2, &[why, "help: "]);
    }
    assert!(!world.run().exists());
    locked.unlock().unwrap();
    // Two read-only disks may share an image.
    let mut served = world.serve("--read-only a.img --xen 1/xvda link --xen 2/xvda");
    wait_until("both", || served.said().matches("waiting for backend").count() == 2);
    served.signal(Signal::TERM);
    served.ends_with(0, &[]);
}

/// Answered writes of two disks of one process are in their images after any number of kills.
#[test]
fn disks_of_a_process_that_is_killed_come_back_together() {
    let mut world = World::new();
    let images = ["a.img", "b.img"].map(|name| world.image(name));
    let disks = [world.attach(1, 0), world.attach(2, 0)];
    let words = "a.img --xen 1/xvda b.img --xen 2/xvda";
    let mut served = world.serve(words);
    let mut fronts = disks.each_ref().map(|disk| world.front(disk));
    let stop = AtomicBool::new(false);
    let progress = [(); 2].map(|()| AtomicU64::new(0));
    let loads = std::thread::scope(|scope| {
        let threads: Vec<_> = (7..)
            .zip(fronts.iter_mut().zip(&progress))
            .map(|(seed, (front, progress))| {
                let queue = front.queues.pop().unwrap();
                let load = Load::on(front, queue, 0..CHUNKS, seed);
                let stop = &stop;
                scope.spawn(move || load.run(stop, progress))
            })
            .collect();
        let both_answer = || {
            let before = progress.each_ref().map(|progress| progress.load(Ordering::Relaxed));
            wait_until("answers of both disks", || {
                let mut now = progress.iter().zip(before);
                now.all(|(now, before)| now.load(Ordering::Relaxed) > before + 20)
            });
        };
        for kill in 0..4 {
            both_answer();
            std::thread::sleep(Duration::from_millis(7 * kill));
            served.child.kill().unwrap();
            served.child.wait().unwrap();
            served = world.serve(words);
        }
        // A process that answers handles signals. A process that has just started is ended by them.
        both_answer();
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<Load>>()
    });
    served.signal(Signal::TERM);
    served.ends_with(0, &[]);
    for (image, load) in images.iter().zip(&loads) {
        load.check(&fs::read(image).unwrap());
    }
}

/// The contents of a volume.
fn volume(store: &Path, name: &str) -> Vec<u8> {
    let disk =
        Disk::open(&format!("store:{}#{name}", store.display()), &stores::options()).unwrap();
    let mut all = vec![0; (disk.sectors() * 512) as usize];
    let open = |arena| test_engine().open(arena, RECOVERY_ENTRIES);
    let mut session = Session::new(Arc::new(disk), open).unwrap();
    for (piece, at) in all.chunks_mut(1 << 20).zip((0..).step_by(1 << 20)) {
        session.read(at, piece).unwrap();
    }
    all
}

fn store_command(words: &[&str]) -> Result<(), Failure> {
    let words = ["ferrite", "store"].iter().chain(words).map(OsString::from).collect();
    match crate::pairs::parse(words).unwrap().command {
        crate::cli::Command::Store(args) => crate::store::run(&args),
        _ => unreachable!(),
    }
}

/// Two guests on two volumes of one store, and commands at the same time. After each kill, answered writes are there,
/// and each command is done completely or not at all.
#[test]
fn volumes_of_a_store_come_back_together_with_what_commands_have_done() {
    let mut world = World::new();
    let store = world.dir.path().join("s");
    let blocks = CHUNKS * CHUNK / 4096;
    stores::create(&store, 256 << 20, &[("a", blocks), ("b", blocks)]);
    let here = store.to_str().unwrap();
    let disks = [world.attach(1, 0), world.attach(2, 0)];
    let words = format!("store:{here}#a --xen 1/xvda store:{here}#b --xen 2/xvda");
    let mut served = world.serve(&words);
    let mut fronts = disks.each_ref().map(|disk| world.front(disk));
    let stop = AtomicBool::new(false);
    let progress = [(); 2].map(|()| AtomicU64::new(0));
    let loads = std::thread::scope(|scope| {
        let threads: Vec<_> = (7..)
            .zip(fronts.iter_mut().zip(&progress))
            .map(|(seed, (front, progress))| {
                let queue = front.queues.pop().unwrap();
                let load = Load::on(front, queue, 0..CHUNKS, seed);
                let stop = &stop;
                scope.spawn(move || load.run(stop, progress))
            })
            .collect();
        for round in 0..4 {
            let before = progress.each_ref().map(|progress| progress.load(Ordering::Relaxed));
            wait_until("answers of both disks", || {
                let mut now = progress.iter().zip(before);
                now.all(|(now, before)| now.load(Ordering::Relaxed) > before + 20)
            });
            store_command(&["snapshot", &format!("{here}#a"), &format!("a{round}")]).unwrap();
            store_command(&["gc", here]).unwrap();
            store_command(&["clone", &format!("{here}#b"), &format!("b{round}")]).unwrap();
            store_command(&["stats", here]).unwrap();
            // This command is running when the process dies.
            let last = scope.spawn(|| store_command(&["gc", here]));
            std::thread::sleep(Duration::from_millis(5 * round));
            served.child.kill().unwrap();
            served.child.wait().unwrap();
            let _ = last.join().unwrap();
            store_command(&["check", here, "--deep"]).unwrap();
            for made in [format!("{here}#a{round}"), format!("{here}#b{round}")] {
                store_command(&["info", &made]).unwrap();
            }
            served = world.serve(&words);
        }
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<Load>>()
    });
    served.signal(Signal::TERM);
    served.ends_with(0, &[]);
    for (name, load) in ["a", "b"].iter().zip(&loads) {
        load.check(&volume(&store, name));
    }
}
