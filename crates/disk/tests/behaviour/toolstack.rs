//! Images whose toolstack does the locking, and what it does to those that are read.

use std::path::{Path, PathBuf};

use ferrite_disk::{Disk, DiskError, ErrorKind, ImageName, Locking, OpenOptions};
use ferrite_image_tools::NewImage;
use ferrite_images::Image;
use ferrite_testkit::images;
use tempfile::TempDir;

use crate::common::vhd::at;
use crate::common::{MIB, Queue, dir_in_memory, work};

const BLOCK: u64 = 2 * MIB;
const BLOCKS: u64 = 6;

fn theirs() -> OpenOptions {
    OpenOptions { locking: Locking::Toolstack, ..OpenOptions::default() }
}

/// Makes a chain of VHDs, the lowest first; its images.
fn chain(dir: &TempDir, files: &[&str]) -> Vec<PathBuf> {
    let paths: Vec<PathBuf> = files.iter().map(|file| at(dir, file)).collect();
    for (i, path) in paths.iter().enumerate() {
        let parent = i.checked_sub(1).map(|below| images::name(&paths[below]));
        let bytes = parent.is_none().then_some(BLOCKS * BLOCK);
        let new = NewImage { bytes, parent, ..NewImage::default() };
        work(None, |tools| tools.create(&images::name(path), &new)).unwrap();
    }
    paths
}

fn open(path: &Path, options: &OpenOptions) -> Result<Disk, DiskError> {
    Disk::open(path, options)
}

#[test]
fn a_parent_that_others_read_is_written_and_read_on() {
    let dir = dir_in_memory();
    let [a, b] = chain(&dir, &["a.vhd", "b.vhd"]).try_into().unwrap();
    // Another process reads it, as the parent of its disk.
    let mut above = Queue::new(open(&b, &theirs()).unwrap());
    let refused = open(&a, &OpenOptions::default()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Permission, "{refused}");
    let even = OpenOptions { even_parent: true, ..OpenOptions::default() };
    assert_eq!(open(&a, &even).unwrap_err().kind(), ErrorKind::InUse);
    let mut below = Queue::new(open(&a, &theirs()).unwrap());
    below.write(0, &[1; 4096]).unwrap();
    // A reader comes while it is written.
    let mut later = Queue::new(open(&b, &OpenOptions { read_only: true, ..theirs() }).unwrap());
    assert_eq!(later.read(BLOCK, 512).unwrap(), [0; 512]);
    assert_eq!(above.read(BLOCK, 512).unwrap(), [0; 512]);
    below.close().unwrap();
}

#[test]
fn a_second_writer_is_let_in_only_where_the_toolstack_does_the_locking() {
    let dir = dir_in_memory();
    let [a] = chain(&dir, &["a.vhd"]).try_into().unwrap();
    let state = dir_in_memory();
    let state_dir = Some(state.path().to_owned());
    let _first = open(&a, &OpenOptions { state_dir: state_dir.clone(), ..theirs() }).unwrap();
    assert_eq!(open(&a, &OpenOptions::default()).unwrap_err().kind(), ErrorKind::InUse);
    let second = open(&a, &OpenOptions { state_dir, ..theirs() }).unwrap();
    let mut second = Queue::new(second);
    second.write(0, &[1; 512]).unwrap();
    second.flush().unwrap();
}

/// The toolstack's coalesce writes the blocks of an image into its parent, while leaves above read both.
#[test]
fn a_leaf_reads_the_same_while_its_parent_is_merged_into_the_one_below() {
    let dir = dir_in_memory();
    let [a, b, leaf] = chain(&dir, &["a.vhd", "b.vhd", "leaf.vhd"]).try_into().unwrap();
    let mut model = vec![0; (BLOCKS * BLOCK) as usize];
    // Blocks of A alone, of both (with sectors of each), of B alone, and of none.
    let parts = [
        (&a, vec![(0, 1), (BLOCK, 2), (BLOCK + 8192, 3), (4 * BLOCK, 4)]),
        (&b, vec![(BLOCK + 4096, 5), (BLOCK + 8192, 6), (2 * BLOCK + 512, 7), (3 * BLOCK, 8)]),
    ];
    for (path, writes) in &parts {
        let mut queue = Queue::new(open(path, &theirs()).unwrap());
        for (at, byte) in writes {
            queue.write(*at, &[*byte; 4096]).unwrap();
            model[*at as usize..][..4096].fill(*byte);
        }
        queue.close().unwrap();
    }
    let mut guest = Queue::new(open(&leaf, &theirs()).unwrap());
    let same = |guest: &mut Queue, model: &[u8]| {
        for at in (0..BLOCKS * BLOCK).step_by(512 << 10) {
            let read = guest.read(at, 512 << 10).unwrap();
            assert!(read == model[at as usize..][..512 << 10], "at {at}");
            // Single pages are found in another way.
            assert!(guest.read(at, 4096).unwrap() == model[at as usize..][..4096]);
        }
    };
    // The cached tables of the parents come from before.
    for at in [0, BLOCK, 2 * BLOCK] {
        guest.read(at, 8192).unwrap();
    }
    let below = Image::open_alone(&images::name(&a), &theirs()).unwrap();
    let mut below = Queue::new(Disk::Image(below));
    for (at, byte) in &parts[1].1 {
        below.write(*at, &[*byte; 4096]).unwrap();
        same(&mut guest, &model);
        below.flush().unwrap();
        same(&mut guest, &model);
        guest.write(5 * BLOCK + at % 65536, &[*byte; 512]).unwrap();
        model[(5 * BLOCK + at % 65536) as usize..][..512].fill(*byte);
    }
    below.close().unwrap();
    drop(below);
    same(&mut guest, &model);
    // One that is opened now finds the larger parent.
    let reads = OpenOptions { read_only: true, ..theirs() };
    let mut second = Queue::new(open(&b, &reads).unwrap());
    assert!(second.read(2 * BLOCK + 512, 4096).unwrap() == [7; 4096]);
    guest.close().unwrap();
    let name = ImageName::parse(leaf.to_str().unwrap()).unwrap();
    assert!(open(&name.path, &theirs()).is_ok());
}

#[test]
fn what_a_living_writer_of_a_parent_has_in_its_journal_is_not_copied_into_the_leaf() {
    let dir = dir_in_memory();
    let [a, b] = chain(&dir, &["a.vhd", "b.vhd"]).try_into().unwrap();
    let state = dir_in_memory();
    let options = OpenOptions { state_dir: Some(state.path().to_owned()), ..theirs() };
    let mut below = Queue::new(open(&a, &options).unwrap());
    below.write(0, &[1; 4096]).unwrap();
    let leaf = open(&b, &options).unwrap();
    assert!(!leaf.is_unrecovered());
    // Its writer dies: now they are all that is left of its answers.
    drop((below, leaf));
    let leaf = open(&b, &options).unwrap();
    assert!(leaf.is_unrecovered());
}
