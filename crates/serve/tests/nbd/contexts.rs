//! Dirty maps as contexts of NBD: what BLOCK_STATUS tells of them, to clients that send exactly what a test says.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_image_tools::{DirtyMaps, MapChange};
use ferrite_serve::nbd::Options;
use ferrite_serve::path::device::Device;
use ferrite_testkit::nbd::{ACK, Client, Served, command, contexts, option, options};
use ferrite_testkit::{PATIENCE, images, places};
use tempfile::TempDir;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const BYTES: u64 = 24 * MIB;
const EIO: u32 = 5;
const META_CONTEXT: u32 = 4;
const REQ_ONE: u16 = 1 << 3;

fn change(image: &Path, change: MapChange) {
    let state = images::state_dir(image);
    images::work(Some(&state), |tools| tools.change_maps(&images::name(image), &change)).unwrap();
}

fn begin(name: &str) -> MapChange {
    MapChange::Begin(name.to_owned())
}

/// The maps as `ferrite image dirty list` tells them.
fn listed(image: &Path) -> DirtyMaps {
    let state = images::state_dir(image);
    images::work(Some(&state), |tools| tools.dirty_maps(&images::name(image))).unwrap()
}

fn open(image: &Path, read_only: bool) -> Disk {
    let state_dir = Some(images::state_dir(image));
    Disk::open(image, &OpenOptions { read_only, state_dir, ..OpenOptions::default() }).unwrap()
}

/// An image with the map `m`, and one that serves it.
struct Mapped {
    served: Option<Served>,
    image: PathBuf,
    _dir: TempDir,
}

impl Mapped {
    fn new(format: &str) -> Mapped {
        let dir = places::dir_in_memory();
        let image = images::make(dir.path(), format, BYTES);
        change(&image, begin("m"));
        Mapped { served: None, image, _dir: dir }
    }

    fn serve(&mut self, read_only: bool) -> &Served {
        self.stop();
        let device = Arc::new(Device::new(open(&self.image, read_only), SystemClock::shared()));
        let options = Options { read_only, ..options() };
        self.served.insert(Served::of(places::dir_in_memory(), device, options))
    }

    /// Ends the server, and closes the image in good order.
    fn stop(&mut self) {
        let Some(mut served) = self.served.take() else { return };
        served.stop();
        let (disk, away) = served.device.park(PATIENCE).unwrap();
        close(disk);
        drop(away);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

fn close(disk: Disk) {
    images::session(disk).close().unwrap();
}

/// Chooses these contexts; returns the numbers of those that there are.
#[track_caller]
fn choose(client: &mut Client, names: &[&str]) -> Vec<u32> {
    let answers = client.option(option::SET_META_CONTEXT, &contexts("", names));
    assert_eq!(answers.last().unwrap().0, ACK);
    let told = answers.iter().filter(|(kind, _)| *kind == META_CONTEXT);
    told.map(|(_, data)| u32::from_be_bytes(data[..4].try_into().unwrap())).collect()
}

/// A client with these contexts, and their numbers.
#[track_caller]
fn client(served: &Served, names: &[&str]) -> (Client, Vec<u32>) {
    let mut client = served.connect();
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]), [(ACK, vec![])]);
    let numbers = choose(&mut client, names);
    client.go(false);
    (client, numbers)
}

/// The changed parts of a disk by one context, as offsets and lengths in KiB.
#[track_caller]
fn changed(client: &mut Client, number: u32, bytes: u64) -> Vec<(u64, u64)> {
    let (mut at, mut parts) = (0, Vec::<(u64, u64)>::new());
    while at < bytes {
        let len = (bytes - at).min(1 << 30) as u32;
        let reply = client.call(command::BLOCK_STATUS, 0, at, len, &[]);
        assert_eq!(reply.error, 0);
        let (_, extents) = reply.contexts.iter().find(|(context, _)| *context == number).unwrap();
        for (len, state) in extents {
            let (start, count) = (at / KIB, len / KIB);
            match parts.last_mut() {
                _ if *state == 0 => {}
                Some(last) if last.0 + last.1 == start => last.1 += count,
                _ => parts.push((start, count)),
            }
            at += len;
        }
    }
    parts
}

fn parts_of(maps: &DirtyMaps, map: usize) -> Vec<(u64, u64)> {
    let parts = maps.maps[map].changed.iter();
    parts.map(|part| (part.start_bytes / KIB, part.length_bytes / KIB)).collect()
}

#[test]
fn a_clients_contexts_say_what_has_changed_until_it_asks() {
    for format in ["raw", "vhd", "qcow2", "chain.qcow2"] {
        let mut mapped = Mapped::new(format);
        let served = mapped.serve(false);
        let names = ["ferrite:dirty-m", "qemu:dirty-bitmap:m", "base:allocation"];
        let (mut asks, numbers) = client(served, &names);
        let [_, ours, theirs] = numbers[..] else { panic!("{numbers:?}") };
        assert_eq!(changed(&mut asks, ours, BYTES), []);
        let mut writes = served.client();
        writes.write(64 * KIB, &[7; 512]);
        writes.write(9 * MIB - 512, &[7; 1024]);
        let expected = [(64, 64), (9 * 1024 - 64, 128)];
        for number in [ours, theirs] {
            assert_eq!(changed(&mut asks, number, BYTES), expected, "{format}");
        }
        assert_eq!(asks.call(command::WRITE_ZEROES, 0, 20 * MIB, 4096, &[]).error, 0);
        assert_eq!(asks.call(command::TRIM, 0, 23 * MIB, MIB as u32, &[]).error, 0);
        let expected = changed(&mut asks, theirs, BYTES);
        assert_eq!(expected[2..], [(20 * 1024, 64), (23 * 1024, 1024)], "{format}");
        // The same is told at rest, to a server that only reads.
        mapped.stop();
        assert_eq!(parts_of(&listed(&mapped.image), 0), expected, "{format}");
        let (mut reads, numbers) = client(mapped.serve(true), &names);
        assert_eq!(numbers[1..], [ours, theirs]);
        assert_eq!(changed(&mut reads, ours, BYTES), expected, "{format}");
    }
}

#[test]
fn an_answer_covers_exactly_what_was_asked_for() {
    let mut mapped = Mapped::new("qcow2");
    let served = mapped.serve(false);
    let (mut asks, numbers) = client(served, &["qemu:dirty-bitmap:m"]);
    asks.write(128 * KIB, &[7; 512]);
    let number = numbers[0];
    let mut told = |flags, offset, len| {
        let reply = asks.call(command::BLOCK_STATUS, flags, offset, len, &[]);
        assert_eq!((reply.error, reply.contexts.len(), reply.contexts[0].0), (0, 1, number));
        reply.contexts[0].1.clone()
    };
    assert_eq!(told(0, 1, 128 * KIB as u32), [(128 * KIB - 1, 0), (1, 1)]);
    assert_eq!(told(0, 128 * KIB + 7, 3), [(3, 1)]);
    assert_eq!(told(REQ_ONE, 100 * KIB, MIB as u32), [(28 * KIB, 0)]);
    assert_eq!(told(0, 100 * KIB, MIB as u32).len(), 3);
    assert_eq!(asks.call(command::BLOCK_STATUS, 0, BYTES - 1, 2, &[]).error, 22);
    // With extended heads, the whole disk at once.
    let mut long = served.connect();
    long.go_extended(&["ferrite:dirty-m"]);
    let reply = long.call_long(command::BLOCK_STATUS, 0, 0, BYTES);
    assert_eq!(reply.contexts[0].1, [(128 * KIB, 0), (64 * KIB, 1), (BYTES - 192 * KIB, 0)]);
}

#[test]
fn a_map_that_was_begun_anew_fails_for_those_who_had_the_old_one() {
    let mut mapped = Mapped::new("raw");
    let image = mapped.image.clone();
    let served = mapped.serve(false);
    let names = ["base:allocation", "ferrite:dirty-m"];
    let (mut asks, before) = client(served, &names);
    asks.write(0, &[7; 512]);
    let exchange = |next: Option<MapChange>| {
        let (disk, away) = served.device.park(PATIENCE).unwrap();
        close(disk);
        next.into_iter().for_each(|next| change(&image, next));
        away.go_on_with(open(&image, false)).map_err(|refused| refused.unfit).unwrap();
    };
    // The same maps, and with one more of another name.
    exchange(None);
    assert_eq!(changed(&mut asks, before[1], BYTES), [(0, 64)]);
    exchange(Some(begin("a")));
    assert_eq!(changed(&mut asks, before[1], BYTES), [(0, 64)]);
    exchange(Some(MapChange::Clear("m".to_owned())));
    assert_eq!(asks.call(command::BLOCK_STATUS, 0, 0, 4096, &[]).error, EIO);
    // All else goes on, also for it.
    assert_eq!(asks.read(0, 512), [7; 512]);
    asks.write(MIB, &[7; 512]);
    let (mut newer, after) = client(served, &names);
    assert_ne!(after[1], before[1]);
    assert_eq!(changed(&mut newer, after[1], BYTES), [(1024, 64)]);
    exchange(Some(MapChange::End("m".to_owned())));
    assert_eq!(newer.call(command::BLOCK_STATUS, 0, 0, 4096, &[]).error, EIO);
    assert_eq!(client(served, &names).1, [1]);
}

#[test]
fn void_maps_are_not_offered() {
    let mut mapped = Mapped::new("raw");
    let copy = mapped.image.with_file_name("copy.raw");
    std::fs::copy(&mapped.image, &copy).unwrap();
    let maps = |image: &Path| PathBuf::from(format!("{}.ferrite-dirty", image.display()));
    std::fs::copy(maps(&mapped.image), maps(&copy)).unwrap();
    let names = ["base:allocation", "ferrite:dirty-m", "qemu:dirty-bitmap:m"];
    assert_eq!(client(mapped.serve(true), &names).1.len(), 3);
    mapped.image.clone_from(&copy);
    for read_only in [true, false] {
        let served = mapped.serve(read_only);
        let (mut asks, numbers) = client(served, &names);
        assert_eq!(numbers, [1]);
        assert_eq!(asks.call(command::BLOCK_STATUS, 0, 0, 4096, &[]).error, 0);
        // A file that comes later lacks what was written before.
        let _ = std::fs::remove_file(maps(&copy));
        change(&copy.with_file_name("disk.raw"), begin(if read_only { "x" } else { "y" }));
        std::fs::copy(maps(&copy.with_file_name("disk.raw")), maps(&copy)).unwrap();
        assert_eq!(client(served, &names).1, [1]);
    }
}

#[test]
fn all_contexts_of_all_maps_fit_into_one_answer() {
    let mut mapped = Mapped::new("raw");
    for i in 1..16 {
        change(&mapped.image, begin(&format!("m{i}")));
    }
    let served = mapped.serve(false);
    let mut writes = served.client();
    // Every other block.
    for block in (0..BYTES / KIB / 64).step_by(2) {
        writes.write(block * 64 * KIB, &[7; 512]);
    }
    let names: Vec<String> = ["m".to_owned()]
        .into_iter()
        .chain((1..16).map(|i| format!("m{i}")))
        .flat_map(|name| [format!("ferrite:dirty-{name}"), format!("qemu:dirty-bitmap:{name}")])
        .chain(["base:allocation".to_owned(), "qemu:allocation-depth".to_owned()])
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (mut asks, numbers) = client(served, &names);
    assert_eq!(numbers.len(), 34);
    let reply = asks.call(command::BLOCK_STATUS, 0, 0, BYTES as u32, &[]);
    assert_eq!((reply.error, reply.contexts.len()), (0, 34));
    let extents: usize = reply.contexts.iter().map(|(_, extents)| extents.len()).sum();
    assert!(extents <= 1024, "{extents}");
    // It tells the beginning, and the rest when it is asked again.
    let expected: Vec<_> = (0..BYTES / KIB / 64).step_by(2).map(|block| (block * 64, 64)).collect();
    for number in &numbers[2..6] {
        assert_eq!(changed(&mut asks, *number, BYTES), expected);
    }
}

#[test]
fn without_blocks_in_memory_whole_regions_have_changed() {
    let dir = places::dir_in_memory();
    let image = images::make(dir.path(), "raw", BYTES);
    change(&image, begin("m"));
    let device = |read_only| {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        let disk = Disk::open(&image, &options).unwrap();
        Arc::new(Device::new(disk, SystemClock::shared()))
    };
    let served = Served::of(places::dir_in_memory(), device(false), options());
    let (mut asks, numbers) = client(&served, &["ferrite:dirty-m"]);
    asks.write(5 * MIB, &[7; 512]);
    assert_eq!(changed(&mut asks, numbers[0], BYTES), [(4096, 4096)]);
    let (disk, away) = served.device.park(PATIENCE).unwrap();
    close(disk);
    drop(away);
    drop((served, asks));
    let served = Served::of(places::dir_in_memory(), device(true), options());
    let (mut asks, numbers) = client(&served, &["ferrite:dirty-m"]);
    assert_eq!(changed(&mut asks, numbers[0], BYTES), [(4096, 4096)]);
}
