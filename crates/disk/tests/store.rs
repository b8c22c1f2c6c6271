//! Volumes of a store as disks: which processes may open them, their durable data, and the errors of those that cannot
//! be opened.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::{MIB, Queue, dir_in_memory, work};
use ferrite_disk::{Allocation, Disk, DiskError, ErrorKind, Extent, ImageName, OpenOptions};
use ferrite_image_tools::Convert;
use ferrite_io::engine::Op;
use ferrite_io::engines::EngineChoice;
use ferrite_store::background::ServiceEngine;
use ferrite_store::journal::Name;
use ferrite_store::live::Operation;
use ferrite_testkit::faulty::Faults;
use ferrite_testkit::stores::{SMALLEST, create, handle, on_a_port_of, operate, options};

const BLOCK: usize = 4096;

fn name_of(store: &Path, volume: &str) -> String {
    format!("store:{}#{volume}", store.display())
}

fn open(store: &Path, volume: &str) -> Result<Disk, DiskError> {
    Disk::open(&name_of(store, volume), &options())
}

fn open_read_only(store: &Path, volume: &str) -> Result<Disk, DiskError> {
    Disk::open(&name_of(store, volume), &OpenOptions { read_only: true, ..options() })
}

fn name(name: &str) -> Name {
    Name::new(name).unwrap()
}

#[test]
fn a_volume_keeps_what_is_written_whatever_its_alignment() {
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("a", 256)]);
    let disk = open(&store, "a").unwrap();
    assert_eq!(
        (disk.sectors(), disk.block_bytes(), disk.physical_block_bytes()),
        (2048, 512, 4096)
    );
    assert_eq!(disk.map(0, 4096), Extent::Slow { len: 4096 });
    let mut queue = Queue::new(disk);
    queue.write(512, &[1; 9000]).unwrap();
    queue.write(200 * 4096, &[2; BLOCK]).unwrap();
    queue.discard(4096 + 512, 3 * 4096).unwrap();
    queue.write_zeroes(200 * 4096 + 512, 512).unwrap();
    let check = |queue: &mut Queue| {
        let found = queue.read(0, 4 * BLOCK).unwrap();
        // Of what is discarded whole blocks go.
        let expected = |at| if (512..2 * BLOCK).contains(&at) { 1 } else { 0 };
        assert!(found.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
        let found = queue.read(200 * 4096, BLOCK).unwrap();
        let expected = |at| if (512..1024).contains(&at) { 0 } else { 2 };
        assert!(found.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    };
    check(&mut queue);
    queue.flush().unwrap();
    queue.close().unwrap();
    drop(queue);
    check(&mut Queue::new(open(&store, "a").unwrap()));
}

#[test]
fn volumes_of_one_process_share_a_store_and_each_has_one_writer() {
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("a", 256), ("b", 256)]);
    // By another name it is the same.
    let link = dir.path().join("link");
    fs::hard_link(&store, &link).unwrap();
    let mut a = Queue::new(open(&store, "a").unwrap());
    let mut b = Queue::new(open(&link, "b").unwrap());
    a.write(0, &[5; BLOCK]).unwrap();
    b.write(4096, &[5; BLOCK]).unwrap();
    for refused in [open(&link, "a"), open_read_only(&store, "a")] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InUse, "{refused}");
    }
    a.close().unwrap();
    a.disk.unlock();
    // Others can use the closed volume, and the other volume goes on.
    let readers = [open_read_only(&store, "a").unwrap(), open_read_only(&store, "a").unwrap()];
    assert_eq!(open(&store, "a").unwrap_err().kind(), ErrorKind::InUse);
    drop(readers);
    let mut again = Queue::new(open(&store, "a").unwrap());
    assert_eq!(again.read(0, BLOCK).unwrap(), [5; BLOCK]);
    b.close().unwrap();
    b.disk.unlock();
    assert!(raw_is_locked(&store), "a volume is in use");
    again.close().unwrap();
    again.disk.unlock();
    assert!(!raw_is_locked(&store), "the last user has gone");
    assert_eq!(Queue::new(open(&store, "b").unwrap()).read(4096, BLOCK).unwrap(), [5; BLOCK]);
}

/// Threads of stores in this process.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
    tasks.filter_map(|task| name(task.unwrap()).ok()).filter(|name| name == "store\n").count()
}

#[test]
fn a_store_in_service_has_a_thread_until_its_last_disk_goes() {
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("a", 2048), ("b", 256)]);
    let (a, b) = (open(&store, "a").unwrap(), open(&store, "b").unwrap());
    assert_eq!(threads(), 0, "who only opens a store has none");
    let engine: ServiceEngine = std::sync::Arc::new(|arena, entries| {
        EngineChoice::Auto.decide()?.kind.open(arena, entries)
    });
    a.begin_service(&engine).unwrap();
    b.begin_service(&engine).unwrap();
    // A thread gives itself its name.
    for _ in 0..10_000 {
        if threads() == 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    assert_eq!(threads(), 1);
    let (mut a, mut b) = (Queue::new(a), Queue::new(b));
    b.write(0, &[5; BLOCK]).unwrap();
    // Twice what there is room for: it has something to do meanwhile.
    for round in 0..2u64 {
        for block in 0..2048u64 {
            let content: Vec<u8> = (1 + round * 2048 + block).to_le_bytes().repeat(BLOCK / 8);
            a.write(block * BLOCK as u64, &content).unwrap();
        }
    }
    b.close().unwrap();
    b.disk.unlock();
    assert_eq!(threads(), 1, "a disk is there");
    a.close().unwrap();
    a.disk.unlock();
    assert_eq!(threads(), 0);
    assert!(!raw_is_locked(&store));
    let mut a = Queue::new(open(&store, "a").unwrap());
    assert_eq!(a.read(5 * BLOCK as u64, 8).unwrap(), (1u64 + 2048 + 5).to_le_bytes());
    assert_eq!(threads(), 0);
}

fn raw_is_locked(store: &Path) -> bool {
    let opened = Disk::open(&format!("raw:{}", store.display()), &OpenOptions::default());
    opened.is_err_and(|e| e.kind() == ErrorKind::InUse)
}

#[test]
fn a_store_of_another_owner_is_in_use() {
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("a", 256)]);
    let owner = Disk::open(&format!("raw:{}", store.display()), &OpenOptions::default()).unwrap();
    for refused in [open(&store, "a"), open_read_only(&store, "a")] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InUse);
    }
    drop(owner);
    open(&store, "a").unwrap();
}

#[test]
fn what_cannot_be_opened_says_why_and_what_to_do() {
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("a", 256)]);
    operate(&store, Operation::Snapshot(name("then"), 0));
    let foreign = dir.path().join("foreign");
    File::create_new(&foreign).unwrap().set_len(SMALLEST).unwrap();
    let damaged = dir.path().join("damaged");
    fs::copy(&store, &damaged).unwrap();
    let file = File::options().write(true).open(&damaged).unwrap();
    for at in [100, 4096 + 100, SMALLEST - 4096 + 100, SMALLEST - 8192 + 100] {
        file.write_all_at(&[0xAA], at).unwrap();
    }
    for (path, volume, kind, why) in [
        (&store, "b", ErrorKind::NotFound, "no such volume"),
        (&store, "then", ErrorKind::Permission, "snapshot"),
        (&foreign, "a", ErrorKind::Unsuitable, "no store"),
        (&damaged, "a", ErrorKind::Damaged, "damaged"),
        (&dir.path().join("none"), "a", ErrorKind::NotFound, "no such file"),
    ] {
        let error = open(path, volume).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.why().contains(why) && !error.help().is_empty(), "{error}");
        assert!(error.what().contains(path.to_str().unwrap()), "{error}");
    }
    assert!(open_read_only(&store, "then").is_ok());
    let options = OpenOptions { metadata_bytes: 300 << 10, ..options() };
    let error = Disk::open(&name_of(&store, "a"), &options).unwrap_err();
    assert!(error.why().contains("metadata memory"), "{error}");
    // A guest would write over all volumes.
    let error = Disk::open(&store, &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsuitable, "{error}");
    assert!(error.help().contains("store:"), "{error:?}");
}

#[test]
fn a_disk_is_copied_into_a_volume_and_out_of_it() {
    let dir = dir_in_memory();
    let (store, image) = (dir.path().join("s"), dir.path().join("a.img"));
    create(&store, SMALLEST, &[("used", 16)]);
    let file = File::create_new(&image).unwrap();
    file.set_len(4 * MIB + 512).unwrap();
    file.write_all_at(&[9; 100_000], 70_000).unwrap();
    file.write_all_at(&[8; 512], 4 * MIB).unwrap();
    let image = ImageName::parse(image.to_str().unwrap()).unwrap();
    let volume = ImageName::parse(&name_of(&store, "copy")).unwrap();
    let back = ImageName::parse(dir.path().join("b.qcow2").to_str().unwrap()).unwrap();
    let how = Convert::default();
    work(None, |tools| {
        let done = tools.convert(&image, &volume, &how).unwrap();
        assert_eq!((done.format, done.virtual_bytes), ("store", 4 * MIB + 4096));
        assert!(tools.compare(&image, &volume, false).unwrap().identical);
        assert_eq!(tools.convert(&image, &volume, &how).unwrap_err().kind(), ErrorKind::Refused);
        tools.convert(&volume, &back, &how).unwrap();
        assert!(tools.compare(&image, &back, false).unwrap().identical);
        let info = tools.info(&volume).unwrap();
        assert_eq!((info.virtual_bytes, info.chain[0].format), (4 * MIB + 4096, "store"));
        // Also beside a volume that this process serves.
        let other = ImageName::parse(&name_of(&store, "other")).unwrap();
        let used = open(&store, "used").unwrap();
        tools.convert(&back, &other, &how).unwrap();
        drop(used);
        assert!(tools.compare(&other, &volume, true).unwrap().identical);
    });
    let live = handle(&store).unwrap();
    let live = live.store().live();
    assert_eq!(live.volume("copy.partial"), None);
}

#[test]
fn what_was_flushed_is_told_behind_the_flush() {
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("a", 256)]);
    let mut queue = Queue::new(open(&store, "a").unwrap());
    queue.write(0, &[7; BLOCK]).unwrap();
    queue.flush().unwrap();
    let Disk::Store(volume) = &*queue.disk else { panic!("a volume is a store's") };
    let (port, volume) = (queue.port(), volume.store().clone());
    // As the thread of a store in service does.
    queue
        .reactor
        .block_on(async { volume.live().run_durability_work(&port).await })
        .unwrap()
        .unwrap();
    drop((volume, port, queue));
    // No checkpoint has it: the journal says that it was durable, so it is not looked at, and this is rot.
    let bytes = fs::read(&store).unwrap();
    let at = bytes.chunks(BLOCK).position(|block| block.iter().all(|byte| *byte == 7)).unwrap();
    let file = File::options().write(true).open(&store).unwrap();
    file.write_all_at(&[6], (at * BLOCK) as u64).unwrap();
    let read = Queue::new(open(&store, "a").unwrap()).read(0, BLOCK);
    assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::InvalidData);
}

/// The writes for a snapshot of a large volume, for one of a small one, and for clones: their journal blocks.
#[test]
fn a_snapshot_or_clone_of_a_tebibyte_writes_what_one_of_a_small_volume_does() {
    const TIB: u64 = 1 << 28;
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, 4 * SMALLEST, &[("large", TIB), ("small", 64)]);
    let mut large = Queue::new(open(&store, "large").unwrap());
    // Leaves and inner pages all over it.
    for part in 0..500 {
        large.write(part * (TIB / 500) * BLOCK as u64, &[(part % 251) as u8 + 1; BLOCK]).unwrap();
    }
    let handle = handle(&store).unwrap();
    let live = handle.store().live();
    let faults = Faults::none();
    let written = |operation: fn(Name, u32) -> Operation, of: &str, called: &str| {
        faults.list();
        let of = live.volume(of).unwrap();
        on_a_port_of(&faults, handle.store().files(), async |port| {
            live.operate(port, operation(name(called), of)).await.unwrap();
        });
        let writes = faults.take_list().into_iter();
        writes.map(|op| if let Op::Write { buf, .. } = op { buf.len() } else { 0 }).sum::<usize>()
    };
    let of_small = written(Operation::Snapshot, "small", "of-small");
    assert!((1..64 << 10).contains(&of_small), "{of_small} bytes");
    assert_eq!(written(Operation::Snapshot, "large", "of-large"), of_small);
    assert_eq!(written(Operation::Clone, "large", "clone"), of_small);
    assert_eq!(written(Operation::Clone, "of-large", "another"), of_small);
    let last = 499 * (TIB / 500) * BLOCK as u64;
    let mut clone = Queue::new(open(&store, "another").unwrap());
    assert_eq!(clone.read(last, BLOCK).unwrap(), [249; BLOCK]);
}

/// mkfs and blkdiscard discard all of a new disk.
#[test]
fn what_was_never_written_of_a_volume_is_discarded_at_once() {
    const BYTES: u64 = 1 << 40;
    let dir = dir_in_memory();
    let store = dir.path().join("s");
    create(&store, SMALLEST, &[("a", BYTES / BLOCK as u64)]);
    let mut queue = Queue::new(open(&store, "a").unwrap());
    let parts = |queue: &mut Queue| {
        let (port, disk) = (queue.port(), queue.disk.clone());
        let all = async move {
            let (mut parts, mut done) = (0, 0);
            while done < BYTES {
                done += disk.discard_part(&port, done, BYTES - done).await.unwrap();
                parts += 1;
            }
            assert_eq!(done, BYTES);
            let zeros = disk.allocation(&port, 0, BYTES).await.unwrap();
            (parts, zeros)
        };
        queue.reactor.block_on(all).unwrap()
    };
    assert_eq!(parts(&mut queue), (1, Allocation { len: BYTES, zeros: true, depth: 1 }));
    queue.write(BYTES / 2, &[7; BLOCK]).unwrap();
    queue.write(BYTES - BLOCK as u64, &[8; BLOCK]).unwrap();
    // The range without a leaf, and each leaf.
    assert_eq!(parts(&mut queue).0, 4);
    assert_eq!(queue.read(BYTES / 2, BLOCK).unwrap(), [0; BLOCK]);
    assert_eq!(queue.read(BYTES - BLOCK as u64, BLOCK).unwrap(), [0; BLOCK]);
    queue.write(3 * BLOCK as u64, &[9; BLOCK]).unwrap();
    queue.write_zeroes(4 * BLOCK as u64, BYTES - 4 * BLOCK as u64).unwrap();
    assert_eq!(queue.read(3 * BLOCK as u64, BLOCK).unwrap(), [9; BLOCK]);
}
