//! Ten guests on the volumes of one store, whose process is killed repeatedly while passes run.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_disk::{Disk, Session};
use ferrite_host::clock::{Random, SplitMix64, SystemClock};
use ferrite_host::process::take_given;
use ferrite_io::engines::test_engine;
use ferrite_loopback::front::FrontOptions;
use ferrite_loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_loopback::{BackendHandle, CopyWith, GuestOptions, Loopback, Machine};
use ferrite_serve::blkif::lifecycle::serve;
use ferrite_serve::path::device::Device;
use ferrite_serve::waker::Waker;
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::processes::{CHUNK, CHUNKS, Guest, env, go_on, open};
use ferrite_testkit::rig::config;
use ferrite_testkit::{PATIENCE, few_or_all, wait_until};
use ferrite_xen::store::Store;

const GUESTS: u32 = 10;
const DEVID: u32 = 202 << 8;
/// Kills with each commit, and those of `cargo xtask nightly --only rounds`.
const KILLS: (u32, u32) = (3, 30);

/// The environment variable with the handles to the guests and to xenstore, one for each connection.
const HANDLES: &str = "FERRITE_TEST_HANDLES";
/// The environment variable with the store, for its process.
const STORE: &str = "FERRITE_TEST_STORE";

fn ferrite(args: &[&str], store: &Path, name: &str) {
    let path = store.display().to_string();
    let args = args.iter().map(|arg| arg.replace("STORE", &path).replace("NAME", name));
    let output = Command::new(env!("CARGO_BIN_EXE_ferrite")).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

fn volume(store: &Path, guest: u32) -> PathBuf {
    format!("store:{}#guest-{guest}", store.display()).into()
}

/// The file with a byte for each completed pass, in any process.
fn passes_of(store: &Path) -> PathBuf {
    store.with_extension("passes")
}

fn count_passes(store: &Path) -> u64 {
    passes_of(store).metadata().map_or(0, |found| found.len())
}

/// The process of the store: a thread per guest, and one for passes.
#[test]
fn store_process() {
    let Ok(store) = std::env::var(STORE) else { return };
    let store = PathBuf::from(store);
    let disks: Vec<Disk> = (0..GUESTS).map(|i| open(&volume(&store, i))).collect();
    let handles = env(HANDLES);
    let (first, others) = handles.split_once('|').unwrap();
    // All connections have the same guests, which can be taken once.
    let first = BackendHandle::from_arg(first).unwrap();
    let fd = |handle: &str| take_given(handle.split(';').next().unwrap().parse().unwrap()).unwrap();
    let connections = [first.store].into_iter().chain(others.split('|').map(fd));
    let loopback = Loopback::new(CopyWith::Memcpy);
    first.guests.iter().for_each(|guest| loopback.add(guest).unwrap());
    std::thread::scope(|scope| {
        let loopback = &loopback;
        for ((guest, disk), connection) in first.guests.iter().zip(disks).zip(connections) {
            let paths = DiskPaths::new(guest.domid(), DEVID);
            let run_dir = store.with_extension(format!("run-{}", guest.domid().0));
            scope.spawn(move || {
                let device = Arc::new(Device::new(disk, SystemClock::shared()));
                let (mut xenstore, stop) = (Store::from_fd(connection), Waker::new().unwrap());
                let config = config(&paths, run_dir);
                serve(&mut xenstore, loopback, &device, &config, &stop).unwrap();
            });
        }
        scope.spawn(|| passes(&store));
    });
}

/// Runs passes one after the other, until this process is killed or no disk is served any more.
fn passes(path: &Path) {
    let name = format!("store:{}#passes", path.display());
    let disk = Arc::new(Disk::open(&name, &ferrite_disk::OpenOptions::default()).unwrap());
    let kind = test_engine();
    let mut session = Session::new(disk.clone(), |arena| kind.open(arena, 64)).unwrap();
    let port = session.port().clone();
    let Disk::Store(volume) = &*disk else { panic!("{name} is a volume") };
    let store = volume.store().clone();
    let is_served = || {
        (0..GUESTS)
            .any(|i| store.live().volume(&format!("guest-{i}")).is_some_and(|v| store.is_used(v)))
    };
    let mut count = File::options().create(true).append(true).open(passes_of(path)).unwrap();
    while is_served() {
        session.run(async { store.live().gc(&port).await }).unwrap().unwrap();
        count.write_all(&[1]).unwrap();
    }
    session.close().unwrap();
}

/// The machine of ten guests.
struct World {
    machine: Machine,
    disks: Vec<DiskPaths>,
    store: PathBuf,
}

impl World {
    fn new(dir: &Path) -> World {
        let store = dir.join("pool.store");
        ferrite(&["store", "create", "STORE", "--size", "512M"], &store, "");
        let bytes = (CHUNKS * CHUNK).to_string();
        for i in 0..GUESTS {
            ferrite(&["store", "create", "STORE#NAME", &bytes], &store, &format!("guest-{i}"));
        }
        ferrite(&["store", "create", "STORE#passes", "1M"], &store, "");
        let mut machine = Machine::new().unwrap();
        let disks = (0..GUESTS)
            .map(|_| {
                let domid = machine.add_guest(GuestOptions::default()).unwrap();
                machine.attach_disk(domid, VirtualDisk::xvd(0)).unwrap()
            })
            .collect();
        World { machine, disks, store }
    }

    fn spawn(&self) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "store_process", "--nocapture", "--test-threads=1"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).env(STORE, &self.store);
        let handles = (0..GUESTS).map(|_| self.machine.backend().unwrap().pass_to(&mut command));
        let handles: Vec<String> = handles.collect();
        Process(command.env(HANDLES, handles.join("|")).spawn().unwrap())
    }
}

/// The serving process, which is killed when this is dropped.
struct Process(Child);

impl Process {
    fn kill(mut self) {
        self.0.kill().unwrap();
        let status = self.0.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "it ended by itself: {status}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ten_guests_on_one_store_have_what_they_were_answered_whenever_it_is_killed() {
    if std::env::var_os(STORE).is_some() {
        return;
    }
    let dir = dir_in_memory();
    let world = World::new(dir.path());
    let kills = few_or_all(KILLS.0, KILLS.1);
    let mut random = SplitMix64::new(14);
    let mut child = world.spawn();
    // A request is up to half of a chunk.
    let options = FrontOptions { max_indirect: 64, ..FrontOptions::default() };
    let guests: Vec<Guest> = world
        .disks
        .iter()
        .zip(1..)
        .map(|(disk, seed)| Guest::of(&world.machine, disk, &options, seed))
        .collect();
    let progress =
        || guests.iter().map(|guest| guest.progress.load(Ordering::Relaxed)).sum::<u64>();
    let mut served = 0;
    for at in 0..kills {
        // The others are killed before they serve, during the replay.
        if random.below(4) > 0 {
            let (before, passes) = (progress(), count_passes(&world.store));
            guests[random.below(u64::from(GUESTS)) as usize].wait_for(1);
            assert!(progress() > before);
            wait_until("a pass", || count_passes(&world.store) > passes);
            served += 1;
        }
        std::thread::sleep(Duration::from_micros(random.below(80_000)));
        child.kill();
        if at % 4 == 0 {
            // Before any other process opens it.
            ferrite(&["store", "check", "STORE"], &world.store, "");
        }
        child = world.spawn();
    }
    assert!(served > kills / 2 && count_passes(&world.store) >= u64::from(served));
    guests.iter().for_each(|guest| guest.wait_for(few_or_all(5, 20).into()));
    let stopped: Vec<_> = guests.into_iter().map(Guest::stop).collect();
    child.kill();
    ferrite(&["store", "check", "--deep", "STORE"], &world.store, "");
    for (i, (_, loads)) in (0..).zip(&stopped) {
        let contents = contents(&volume(&world.store, i));
        loads.iter().for_each(|load| load.check(&contents));
    }
    // The last one serves on, and ends after all disks.
    let mut last = world.spawn();
    let World { mut machine, disks, store } = world;
    let fronts: Vec<_> = stopped.into_iter().map(|(front, loads)| go_on(front, loads)).collect();
    for (mut front, disk) in fronts.into_iter().zip(&disks) {
        front.close(PATIENCE).unwrap();
        machine.unplug(disk).unwrap();
    }
    assert!(last.0.wait().unwrap().success());
    ferrite(&["store", "check", "--deep", "STORE"], &store, "");
}

/// The contents of a volume.
fn contents(volume: &Path) -> Vec<u8> {
    let disk = Arc::new(open(volume));
    let kind = test_engine();
    let mut session = Session::new(disk.clone(), |arena| kind.open(arena, 64)).unwrap();
    let mut bytes = vec![0; (CHUNKS * CHUNK) as usize];
    for (i, part) in bytes.chunks_mut(64 << 10).enumerate() {
        session.read((i as u64) * (64 << 10), part).unwrap();
    }
    session.close().unwrap();
    disk.unlock();
    bytes
}
