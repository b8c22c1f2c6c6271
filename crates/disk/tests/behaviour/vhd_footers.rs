//! The footers of a VHD while it grows: at any moment one of them is whole, and none is a guest's.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ferrite_disk::open_medium;
use ferrite_disk::{Disk, OpenOptions};
use ferrite_images::vhd::{self, NewImage, Problem, Vhd};

use crate::common::vhd::{at, create, name, offline_files, options, parent, queue};
use crate::common::{MIB, Queue, dir_in_memory, dir_on_disk};
use ferrite_io::engine::Op;
use ferrite_io::engines::EngineChoice;
use ferrite_io::pool::Pool;
use ferrite_io::reactor::Reactor;
use ferrite_testkit::errno::ENOSPC;
use ferrite_testkit::faulty::{Faults, Kind, Ops};

const BYTES: u64 = 9 * MIB + 512;

fn change(path: &Path, offset: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

/// Another size, on an engine around the usual one.
fn resize(path: &Path, bytes: u64, faults: &Faults) {
    let image = Vhd::open(path, &options()).unwrap();
    let pool = Pool::with_scratch(2 << 20, 1, 256 << 10).unwrap();
    let kind = "uring".parse::<EngineChoice>().unwrap().decide().unwrap().kind;
    let engine = kind.open(pool.arena().clone(), 64).unwrap();
    let mut reactor = Reactor::new(faults.around(engine));
    let files = image.medium().files();
    let files = files.into_iter().map(|f| reactor.add_file(f).unwrap()).collect();
    let port = crate::common::port(&reactor, &pool, files);
    reactor.block_on(image.resize(&port, bytes)).unwrap().unwrap();
}

/// A queue on such an engine.
fn asking(path: &Path, faults: &Faults) -> Queue {
    let disk = Disk::open(&format!("vhd:{}", name(path)), &options()).unwrap();
    Queue::on(disk.into(), |inner| faults.around(inner))
}

fn size(path: &Path) -> Result<u64, ferrite_disk::DiskError> {
    Vhd::open(path, &options()).map(|image| image.bytes())
}

type Wrong = Arc<Mutex<Vec<String>>>;

/// Before each operation, notes errors of the image that others would see.
fn watch(path: &Path, sizes: &'static [u64]) -> (Faults, Wrong) {
    let wrong = Wrong::default();
    let (path, list) = (path.to_owned(), wrong.clone());
    let faults = Faults::none();
    faults.before_each(move |op: &Op| {
        let copy = path.with_extension("seen");
        fs::copy(&path, &copy).unwrap();
        match size(&copy) {
            Ok(bytes) if sizes.contains(&bytes) => {}
            other => list.lock().unwrap().push(format!("before {op:?}: {other:?}")),
        }
    });
    (faults, wrong)
}

/// The footer at the end goes with the first new block, so the copy has to be right by then: it
/// may be damaged, or say what the size was before.
#[test]
fn an_image_whose_copy_of_the_footer_is_damaged_or_old_grows_and_is_still_one_when_its_process_dies()
 {
    for old in [false, true] {
        let dir = dir_on_disk();
        let path = at(&dir, "a.vhd");
        create(&path, &NewImage::dynamic(BYTES)).unwrap();
        let before = fs::read(&path).unwrap()[..512].to_vec();
        resize(&path, 20 * MIB, &Faults::none());
        change(&path, 0, if old { &before } else { b"broken" });
        let (faults, wrong) = watch(&path, &[20 * MIB]);
        let mut disk = asking(&path, &faults);
        disk.write(15 * MIB, &[5; 512]).unwrap();
        disk.flush().unwrap();
        drop(disk);
        assert!(wrong.lock().unwrap().is_empty());
        assert_eq!(size(&path).unwrap(), 20 * MIB);
        assert_eq!(queue(&path).read(15 * MIB, 512).unwrap(), [5; 512]);
    }
}

/// The larger table takes the place of the footer at the end.
#[test]
fn an_image_whose_copy_of_the_footer_is_damaged_is_one_while_it_gets_a_larger_table() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage::dynamic(BYTES)).unwrap();
    let mut disk = queue(&path);
    disk.write(0, &[7; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    change(&path, 0, b"broken");
    let (faults, wrong) = watch(&path, &[BYTES, 900 * MIB]);
    resize(&path, 900 * MIB, &faults);
    assert!(wrong.lock().unwrap().is_empty());
    assert_eq!(size(&path).unwrap(), 900 * MIB);
}

/// A guest has written a footer into the last sector of its last block, and the file system has no
/// space for another.
#[test]
fn where_there_is_no_space_the_last_sector_of_a_file_is_no_guests_either() {
    let dir = dir_in_memory();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage { block_bytes: 4096, ..NewImage::dynamic(MIB) }).unwrap();
    create(&at(&dir, "other.vhd"), &NewImage::dynamic(MIB)).unwrap();
    let mut forged = vec![0; 4096];
    forged[3584..].copy_from_slice(&fs::read(at(&dir, "other.vhd")).unwrap()[..512]);
    let mut disk = queue(&path);
    disk.write(0, &forged).unwrap();
    disk.close().unwrap();
    drop(disk);
    let (faults, wrong) = watch(&path, &[MIB]);
    faults.set([Ops::from(Kind::Allocate).fail(ENOSPC)]);
    let mut disk = asking(&path, &faults);
    assert_eq!(disk.write(8192, &forged).unwrap_err().raw_os_error(), Some(ENOSPC));
    drop(disk);
    assert!(wrong.lock().unwrap().is_empty());
    assert!(queue(&path).read(0, 4096).unwrap() == forged);
}

#[test]
fn a_block_over_the_footer_at_the_end_is_refused() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage { block_bytes: 4096, ..NewImage::dynamic(MIB) }).unwrap();
    let mut disk = queue(&path);
    disk.write(0, &[7; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let mut place = [0; 4];
    File::open(&path).unwrap().read_exact_at(&mut place, 1536).unwrap();
    let next = u32::from_be_bytes(place) + 1;
    change(&path, 1536, &next.to_be_bytes());
    let error = size(&path).unwrap_err();
    assert!(error.to_string().contains("outside"), "{error}");
    let raw = open_medium(&path, &OpenOptions { read_only: true, ..options() }).unwrap();
    let found = vhd::check(&raw).unwrap().findings;
    assert!(found.iter().any(|f| f.problem == Problem::Place));
}

/// An administrator who makes the device of an open image larger need not copy the footer.
#[test]
fn the_footer_follows_the_end_of_a_device_that_grows_below_an_open_image() {
    for dies in [true, false] {
        let dir = dir_on_disk();
        let path = at(&dir, "device");
        File::create_new(&path).unwrap().set_len(8 * MIB).unwrap();
        let device = OpenOptions { fixed_size: true, ..options() };
        let raw = open_medium(&path, &device).unwrap();
        let new = NewImage::dynamic(64 * MIB);
        crate::common::vhd::offline(&[&raw], async |port| new.create(&port, &raw).await).unwrap();
        drop(raw);
        let open = || Queue::new(Disk::open(&format!("vhd:{}", name(&path)), &device).unwrap());
        let mut disk = open();
        File::options().write(true).open(&path).unwrap().set_len(24 * MIB).unwrap();
        if dies {
            (0..8).for_each(|i| disk.write(i * 2 * MIB, &[1 + i as u8; 512]).unwrap());
            disk.flush().unwrap();
        } else {
            disk.close().unwrap();
        }
        drop(disk);
        let mut disk = open();
        assert_eq!(disk.read(14 * MIB, 512).unwrap(), [if dies { 8 } else { 0 }; 512]);
    }
}

/// One that was growing when its process died has its footer behind where it will end. An image that was made on its
/// child finds the child's identity in it.
#[test]
fn a_fixed_parent_with_space_behind_its_disk_gets_the_childs_identity_where_its_footer_is() {
    let dir = dir_on_disk();
    let (base, child, leaf) = (at(&dir, "base.vhd"), at(&dir, "child.vhd"), at(&dir, "leaf.vhd"));
    let first = create(&base, &NewImage { fixed: true, ..NewImage::dynamic(MIB) }).unwrap();
    let second = create(&child, &NewImage::differencing(MIB, parent(&base, &first))).unwrap();
    create(&leaf, &NewImage::differencing(MIB, parent(&child, &second))).unwrap();
    let bytes = fs::read(&base).unwrap();
    change(&base, 3 * MIB, &bytes[MIB as usize..]);
    change(&base, 4096, &[7; 512]);
    let small = Vhd::open(&child, &OpenOptions { read_only: true, ..options() }).unwrap();
    let merging = OpenOptions { even_parent: true, ..options() };
    let image = Vhd::open(&base, &merging).unwrap();
    let files = image.medium().files();
    offline_files(files, async |port| image.take_identity(&port, &small).await).unwrap();
    drop(small);
    fs::rename(&base, &child).unwrap();
    assert_eq!(queue(&leaf).read(4096, 512).unwrap(), [7; 512]);
}
