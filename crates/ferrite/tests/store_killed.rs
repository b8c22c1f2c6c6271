//! Ten guests on the volumes of one store, whose process is killed again and again while passes run.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_disk::{Disk, Session};
use ferrite_io::clock::{Random, SplitMix64, SystemClock};
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
use ferrite_testkit::{PATIENCE, scale};
use ferrite_xen::store::Store;

const GUESTS: u32 = 10;
const DEVID: u32 = 202 << 8;
/// Kills with each commit.
const KILLS: u32 = 12;

/// What the backend of a guest is reached by.
const HANDLE: &str = "FERRITE_TEST_HANDLE";
/// The store, if this is its process.
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

/// The process that has the store: a thread a guest, and one for passes.
#[test]
fn store_process() {
    let Ok(store) = std::env::var(STORE) else { return };
    let store = PathBuf::from(store);
    let disks: Vec<Disk> = (0..GUESTS).map(|i| open(&volume(&store, i))).collect();
    let handles: Vec<BackendHandle> = (0..GUESTS)
        .map(|i| BackendHandle::from_arg(&env(&format!("{HANDLE}_{i}"))).unwrap())
        .collect();
    std::thread::scope(|scope| {
        for (i, (disk, handle)) in disks.into_iter().zip(handles).enumerate() {
            let run_dir = store.with_extension(format!("run-{i}"));
            scope.spawn(move || {
                let loopback = Loopback::new(CopyWith::Memcpy);
                loopback.add(&handle.guests[i]).unwrap();
                let paths = DiskPaths::new(handle.guests[i].domid(), DEVID);
                let device = Arc::new(Device::new(disk, SystemClock::shared()));
                let (mut xenstore, stop) = (Store::from_fd(handle.store), Waker::new().unwrap());
                let config = config(&paths, run_dir);
                serve(&mut xenstore, &loopback, &device, &config, &stop).unwrap();
            });
        }
        scope.spawn(|| passes(&store));
    });
}

/// One after the other, until this process is killed or nothing is served any more.
fn passes(store: &Path) {
    let name = format!("store:{}#passes", store.display());
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
    while is_served() {
        session.run(async { store.live().gc(&port).await }).unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(5));
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

    fn spawn(&self) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "store_process", "--nocapture", "--test-threads=1"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).env(STORE, &self.store);
        for i in 0..GUESTS {
            let handle = self.machine.backend().unwrap().pass_to(&mut command);
            command.env(format!("{HANDLE}_{i}"), handle);
        }
        command.spawn().unwrap()
    }
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert!(!status.success() && status.code().is_none(), "it ended by itself: {status}");
}

#[test]
fn ten_guests_on_one_store_have_what_they_were_answered_whenever_it_is_killed() {
    if std::env::var_os(STORE).is_some() {
        return;
    }
    let dir = dir_in_memory();
    let world = World::new(dir.path());
    let kills = KILLS * scale();
    let mut random = SplitMix64::new(14);
    let mut child = world.spawn();
    let options = FrontOptions::default();
    let guests: Vec<Guest> = world
        .disks
        .iter()
        .zip(1..)
        .map(|(disk, seed)| Guest::of(&world.machine, disk, &options, seed))
        .collect();
    let progress =
        || guests.iter().map(|guest| guest.progress.load(Ordering::Relaxed)).sum::<u64>();
    for at in 0..kills {
        if random.below(4) > 0 {
            let before = progress();
            guests[random.below(u64::from(GUESTS)) as usize].wait_for(1);
            assert!(progress() > before);
        }
        std::thread::sleep(Duration::from_micros(random.below(80_000)));
        kill(&mut child);
        if at % 4 == 0 {
            // Before anything else opens it.
            ferrite(&["store", "check", "STORE"], &world.store, "");
        }
        child = world.spawn();
    }
    guests.iter().for_each(|guest| guest.wait_for(20));
    let stopped: Vec<_> = guests.into_iter().map(Guest::stop).collect();
    kill(&mut child);
    ferrite(&["store", "check", "--deep", "STORE"], &world.store, "");
    for (i, (_, loads)) in (0..).zip(&stopped) {
        let contents = contents(&volume(&world.store, i));
        loads.iter().for_each(|load| load.check(&contents));
    }
    // The last one serves on, and ends when all disks have.
    let mut last = world.spawn();
    let World { mut machine, disks, store } = world;
    let fronts: Vec<_> = stopped.into_iter().map(|(front, loads)| go_on(front, loads)).collect();
    for (mut front, disk) in fronts.into_iter().zip(&disks) {
        front.close(PATIENCE).unwrap();
        machine.unplug(disk).unwrap();
    }
    assert!(last.wait().unwrap().success());
    ferrite(&["store", "check", "--deep", "STORE"], &store, "");
}

/// All that a volume has.
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
