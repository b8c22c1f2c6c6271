//! A thin disk stays thin: zeros take no space, and nor does the rest of a block that was never written.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_image_tools::{Convert, NewImage};
use ferrite_testkit::bytes::{are_all, first_difference, runs};
use ferrite_testkit::images;
use tempfile::TempDir;

use crate::common::{MIB, Queue, dir_in_memory, dir_on_disk, open, work};

fn space(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// An empty image, a raw one too.
fn empty(dir: &TempDir, format: &str, bytes: u64) -> PathBuf {
    let Some(extension) = format.strip_prefix("fixed.") else {
        return images::make(dir.path(), format, bytes);
    };
    let path = dir.path().join(format!("disk.{extension}"));
    let new = NewImage { bytes: Some(bytes), fixed: true, ..NewImage::default() };
    work(None, |tools| tools.create(&images::name(&path), &new)).unwrap();
    path
}

#[test]
fn zeros_take_no_space_and_give_space_back() {
    for format in ["raw", "vhd", "qcow2", "chain.vhd", "chain.qcow2", "fixed.vhd"] {
        let dir = dir_on_disk();
        let path = empty(&dir, format, 64 * MIB);
        let mut queue = Queue::new(open(&path).unwrap());
        for mib in 8..16 {
            queue.write(mib * MIB, &[7; MIB as usize]).unwrap();
        }
        queue.flush().unwrap();
        queue.discard(10 * MIB, 4 * MIB).unwrap();
        // Blocks with data, discarded ones, and ones that were never written.
        queue.write_zeroes(0, 64 * MIB).unwrap();
        queue.write_zeroes(9 * MIB, 2 * MIB).unwrap();
        queue.flush().unwrap();
        for mib in 0..64 {
            assert!(are_all(&queue.read(mib * MIB, MIB as usize).unwrap(), 0));
        }
        queue.close().unwrap();
        drop(queue);
        assert!(space(&path) < MIB, "{format}: {} bytes", space(&path));
    }
}

#[test]
fn a_disk_that_is_to_keep_its_space_keeps_it_where_zeros_are_written() {
    for dir in [dir_on_disk(), dir_in_memory()] {
        let path = dir.path().join("disk.img");
        fs::write(&path, vec![7; 8 * MIB as usize]).unwrap();
        let before = space(&path);
        let options = OpenOptions { keep_allocated: true, ..OpenOptions::default() };
        let mut queue = Queue::new(Disk::open(&path, &options).unwrap());
        assert_eq!(queue.disk.discard_limits(), None);
        let refused = queue.discard(0, MIB).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::Unsupported);
        queue.write_zeroes(0, 8 * MIB).unwrap();
        queue.flush().unwrap();
        for mib in 0..8 {
            assert!(are_all(&queue.read(mib * MIB, MIB as usize).unwrap(), 0));
        }
        assert!(space(&path) >= before && before >= 8 * MIB, "{} of {before}", space(&path));
    }
}

const BLOCKS: u64 = 16;
const BLOCK: u64 = 2 * MIB;

/// The content: half of each block has something.
fn halves() -> Vec<u8> {
    let byte = |n: usize| if n.is_multiple_of((BLOCK / MIB) as usize) { 7 } else { 0 };
    runs((BLOCKS * BLOCK) as usize, MIB as usize, byte)
}

fn reads_as_half_of_each_block(path: &Path) {
    let found = images::contents(path);
    assert_eq!(first_difference(&found, &halves()), None, "{}", path.display());
}

#[test]
fn the_rest_of_a_block_that_a_guest_has_never_written_takes_no_space() {
    for format in ["vhd", "chain.vhd", "qcow2"] {
        for dir in [dir_on_disk(), dir_in_memory()] {
            let path = match format {
                "qcow2" => {
                    let path = dir.path().join("disk.qcow2");
                    let (bytes, unit_bytes) = (Some(BLOCKS * BLOCK), Some(BLOCK as u32));
                    let new = NewImage { bytes, unit_bytes, ..NewImage::default() };
                    work(None, |tools| tools.create(&images::name(&path), &new)).unwrap();
                    path
                }
                _ => empty(&dir, format, BLOCKS * BLOCK),
            };
            let mut queue = Queue::new(open(&path).unwrap());
            let before = space(&path);
            for block in 0..BLOCKS {
                queue.write(block * BLOCK, &[7; MIB as usize]).unwrap();
            }
            queue.flush().unwrap();
            queue.close().unwrap();
            drop(queue);
            // A table of qcow2 takes a whole cluster.
            let took = space(&path) - before;
            assert!((BLOCKS * MIB..(BLOCKS + 10) * MIB).contains(&took), "{format}: {took} bytes");
            reads_as_half_of_each_block(&path);
            images::check(&path);
        }
    }
}

#[test]
fn a_copy_takes_space_for_its_data_alone_whatever_the_unit_is() {
    let dir = dir_on_disk();
    let source = dir.path().join("source.img");
    fs::write(&source, halves()).unwrap();
    for (to, unit_bytes) in [("vhd", None), ("qcow2", Some(BLOCK as u32)), ("raw", None)] {
        let path = dir.path().join("copy").with_extension(to);
        let how = Convert { unit_bytes, ..Convert::default() };
        let (from, to) = (images::name(&source), images::name(&path));
        work(None, |tools| tools.convert(&from, &to, &how)).unwrap();
        assert!(space(&path) < (BLOCKS + 10) * MIB, "{}: {}", path.display(), space(&path));
        reads_as_half_of_each_block(&path);
    }
}
