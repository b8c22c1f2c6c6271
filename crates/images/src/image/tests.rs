//! Compares the shortcut with the layers themselves.

use std::path::Path;
use std::sync::Arc;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{ImageTools, NewImage};
use ferrite_io::engines::test_engine;

use super::*;
use crate::Image;
use crate::testing::Session;

const KIB: u64 = 1024;

fn options(metadata_bytes: usize) -> OpenOptions {
    let wait_for_lock = Some(std::time::Duration::from_secs(10));
    OpenOptions { metadata_bytes, wait_for_lock, ..OpenOptions::default() }
}

fn session(name: &ImageName, metadata_bytes: usize) -> Session {
    let disk = Arc::new(Image::open(name, &options(metadata_bytes)).unwrap());
    let kind = test_engine();
    Session::new(disk, |arena| kind.open(arena, 32)).unwrap()
}

/// A layer of each kind and more, each longer than its parent, none ending at a page boundary, with writes of single
/// sectors, pages and many pages in each.
fn chain(dir: &Path, random: &mut SplitMix64) -> ImageName {
    let kind = test_engine();
    let workshop = ImageTools {
        fixed_size: false,
        parents: ferrite_disk_base::Parents::default(),
        directory: &HostDirectory,
        unlocked: false,
        engine: &move |arena| kind.open(arena, 32),
        state_dir: None,
        progress: &|_| true,
    };
    let (mut bytes, mut parent) = (2500 * KIB + 512, None);
    let units = [0, 64 * KIB, 2048 * KIB, 4 * KIB, 64 * KIB, 512, 4 * KIB];
    for (i, unit) in units.into_iter().enumerate() {
        let format = ["raw", "vhd", "vhd", "qcow2", "qcow2", "qcow2", "qcow2"][i];
        let name = ImageName::parse(&format!("{format}:{}/{i}", dir.display())).unwrap();
        let unit_bytes = (unit > 0).then_some(unit as u32);
        let new = NewImage { bytes: Some(bytes), parent, unit_bytes, ..NewImage::default() };
        workshop.create(&name, &new).unwrap();
        let mut open = session(&name, 1 << 20);
        for _ in 0..80 {
            let sectors = [1, 8, 8, 8, 24, 100][random.below(6) as usize];
            let first = random.below(bytes / SECTOR_BYTES - sectors);
            let first = if sectors % 8 == 0 { first / 8 * 8 } else { first };
            let data = vec![i as u8 + 1; (sectors * SECTOR_BYTES) as usize];
            match random.below(8) {
                0 => open.write_zeroes(first * SECTOR_BYTES, data.len() as u64).unwrap(),
                _ => open.write(first * SECTOR_BYTES, &data).unwrap(),
            }
        }
        open.close().unwrap();
        bytes += 77 * KIB + 512;
        parent = Some(name);
    }
    parent.unwrap()
}

/// The place of each sector of a range, `None` for zeros; no result if that takes I/O.
fn sectors(
    map: impl Fn(u64, u64) -> Extent,
    offset: u64,
    len: u64,
) -> Option<Vec<Option<(usize, u64)>>> {
    let mut all = Vec::new();
    let mut at = 0;
    while at < len {
        let (len, place) = match map(offset + at, len - at) {
            Extent::Data { file, offset, len } => (len, Some((file, offset))),
            Extent::Zeros { len } => (len, None),
            Extent::Slow { .. } => return None,
        };
        let count = len / SECTOR_BYTES;
        let place = |i| place.map(|(file, offset)| (file, offset + i * SECTOR_BYTES));
        all.extend((0..count).map(place));
        at += len;
    }
    Some(all)
}

#[test]
fn the_shortcut_says_what_the_layers_say() {
    // One budget has room for all pages. The other has room for few, so entries replace each other.
    for (seed, metadata_bytes) in [(1, 16 << 20), (2, 16 << 20), (3, 0)] {
        let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let mut random = SplitMix64::new(seed);
        let name = chain(dir.path(), &mut random);
        let mut open = session(&name, metadata_bytes);
        let disk = open.disk().clone();
        let image = &*disk;
        let shortcut = image.shortcut.as_ref().unwrap();
        let all = image.sectors();
        let (mut compared, mut known) = (0, [0; 3]);
        for _ in 0..6000 {
            let first = random.below(all);
            let in_page = (8 - first % 8).min(all - first);
            let len = (1 + random.below(in_page)) * SECTOR_BYTES;
            let offset = first * SECTOR_BYTES;
            // The read loads the metadata, for a while at least.
            open.read(offset, &mut vec![0; len as usize]).unwrap();
            let quick = sectors(|offset, len| image.map(offset, len), offset, len);
            let slow = sectors(|o, len| find(&image.layers, 0, o, len), offset, len);
            if let (Some(quick), Some(slow)) = (quick, slow) {
                assert_eq!(quick, slow, "bytes {offset}+{len}");
                compared += 1;
            }
            match shortcut.get(first / 8) {
                Some(Owner::Layer(_)) => known[0] += 1,
                Some(Owner::Nobody) => known[1] += 1,
                Some(Owner::Ask) => known[2] += 1,
                None => {}
            }
            if random.below(100) == 0 {
                open.write(offset, &vec![0xFF; len as usize]).unwrap();
            }
        }
        assert!(compared > 5000 && known.iter().all(|n| *n > 40), "{compared}, {known:?}");
        open.close().unwrap();
    }
}
