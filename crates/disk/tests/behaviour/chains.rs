//! Chains of images with writes in each layer, against a copy of what was written.

use std::path::Path;

use ferrite_disk::{Disk, ImageName, OpenOptions, Session};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::NewImage;
use ferrite_testkit::images::{self, tools};

const BYTES: usize = 8 << 20;
const SECTOR: usize = 512;

fn name(dir: &Path, file: &str) -> ImageName {
    ImageName::parse(dir.join(file).to_str().unwrap()).unwrap()
}

fn session(name: &ImageName) -> Session {
    let options = OpenOptions::default();
    images::session(Disk::open_image(name, &options).unwrap())
}

/// A place and a length in bytes, whole sectors: one, a page, part of a page, or many pages.
fn range(random: &mut SplitMix64) -> std::ops::Range<usize> {
    let sectors = [1, 8, 3, 200][random.below(4) as usize];
    let first = random.below((BYTES / SECTOR - sectors) as u64) as usize;
    let first = if sectors == 8 { first / 8 * 8 } else { first };
    first * SECTOR..(first + sectors) * SECTOR
}

fn scribble(session: &mut Session, random: &mut SplitMix64, copy: &mut [u8], times: u32) {
    for _ in 0..times {
        let range = range(random);
        copy[range.clone()].fill(random.next_u64() as u8);
        session.write(range.start as u64, &copy[range]).unwrap();
    }
}

fn compare(session: &mut Session, random: &mut SplitMix64, copy: &[u8], times: u32) {
    for _ in 0..times {
        let range = range(random);
        let mut found = vec![0xEE; range.len()];
        session.read(range.start as u64, &mut found).unwrap();
        assert!(found == copy[range.clone()], "bytes {range:?} are not what was written");
    }
}

fn against_a_copy(format: &str) {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let tools = tools(&HostDirectory);
    let leaf = name(dir.path(), &format!("disk.{format}"));
    let new = NewImage { bytes: Some(BYTES as u64), ..NewImage::default() };
    tools.create(&leaf, &new).unwrap();
    let (mut random, mut copy) = (SplitMix64::new(7), vec![0; BYTES]);
    for layer in 0..6 {
        let mut open = session(&leaf);
        scribble(&mut open, &mut random, &mut copy, 60);
        compare(&mut open, &mut random, &copy, 300);
        open.close().unwrap();
        tools.snapshot(&leaf, &name(dir.path(), &format!("layer{layer}.{format}"))).unwrap();
    }
    let mut open = session(&leaf);
    // The second time round, most of it is known; then some of it changes.
    for _ in 0..3 {
        compare(&mut open, &mut random, &copy, 3000);
        scribble(&mut open, &mut random, &mut copy, 40);
    }
    compare(&mut open, &mut random, &copy, 3000);
    open.close().unwrap();
}

#[test]
fn a_chain_of_vhds_reads_as_what_was_written_last() {
    against_a_copy("vhd");
}

#[test]
fn a_chain_of_qcow2_images_reads_as_what_was_written_last() {
    against_a_copy("qcow2");
}
