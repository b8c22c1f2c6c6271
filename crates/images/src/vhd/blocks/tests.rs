//! Memory and work of the bitmaps.

use std::sync::Arc;

use ferrite_disk_base::{Format, ImageName, OpenOptions};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{ImageTools, NewImage};
use ferrite_io::engines::test_engine;

use super::*;
use crate::Image;
use crate::image::Layer;
use crate::testing::Session;
use crate::vhd::Body;

const BLOCK: u64 = 4096;
/// Bitmaps that fit into the least memory.
const BUDGET: usize = 64;
/// The number of blocks: as many per bitmap in memory as a disk of 2 TiB has with the memory of one image.
const BLOCKS: u64 = 64 * BUDGET as u64;

fn open(name: &ImageName) -> Session {
    let wait_for_lock = Some(std::time::Duration::from_secs(10));
    let options = OpenOptions { metadata_bytes: 0, wait_for_lock, ..OpenOptions::default() };
    let disk = Arc::new(Image::open(name, &options).unwrap());
    Session::new(disk, |arena| test_engine().open(arena, 32)).unwrap()
}

fn with_state<T>(disk: &Image, look: impl FnOnce(&State) -> T) -> T {
    let image = disk;
    let Layer::Vhd(vhd) = &image.layers()[0] else { panic!("no VHD") };
    let Body::Sparse(sparse) = &vhd.body else { panic!("a fixed VHD") };
    look(&sparse.blocks.lock())
}

/// A parent with data, and a child with as much.
fn chain(dir: &std::path::Path) -> ImageName {
    let workshop = ImageTools {
        fixed_size: false,
        parents: ferrite_disk_base::Parents::default(),
        directory: &HostDirectory,
        unlocked: false,
        engine: &|arena| test_engine().open(arena, 32),
        state_dir: None,
        progress: &|_| true,
    };
    let mut parent = None;
    for name in ["parent.vhd", "child.vhd"] {
        let image = ImageName { format: Format::Vhd, path: dir.join(name) };
        let unit_bytes = Some(BLOCK as u32);
        let bytes = Some(BLOCKS * BLOCK);
        workshop
            .create(&image, &NewImage { bytes, parent, unit_bytes, ..NewImage::default() })
            .unwrap();
        let mut session = open(&image);
        let data = vec![7; 1 << 20];
        for at in (0..BLOCKS * BLOCK).step_by(data.len()) {
            session.write(at, &data).unwrap();
        }
        session.close().unwrap();
        parent = Some(image);
    }
    parent.unwrap()
}

#[test]
fn one_discard_of_a_whole_differencing_disk_keeps_to_the_memory_for_bitmaps() {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let name = chain(dir.path());
    let mut session = open(&name);
    session.discard(0, BLOCKS * BLOCK).unwrap();
    let (slots, steps) = with_state(session.disk(), |state| (state.owners.len(), state.steps));
    assert!(slots <= BUDGET, "{slots} slots for {BLOCKS} blocks");
    assert!(steps <= 16 * BLOCKS, "{steps} steps for {BLOCKS} blocks");
    session.close().unwrap();
    let mut bytes = [0; 512];
    open(&name).read((BLOCKS - 1) * BLOCK, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 512], "the parent's");
}

/// The state after more changes were recovered than there is memory for.
#[test]
fn no_slot_is_looked_for_where_all_are_dirty() {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let name = chain(dir.path());
    let session = open(&name);
    let image = session.disk();
    let Layer::Vhd(vhd) = &image.layers()[0] else { panic!("no VHD") };
    let Body::Sparse(sparse) = &vhd.body else { panic!("a fixed VHD") };
    let blocks = &sparse.blocks;
    let mut state = blocks.lock();
    for block in 0..BLOCKS as u32 {
        let slot = blocks.take_slot(&mut state, block);
        let entry = blocks.entry(block);
        blocks.mark_dirty(&mut state, block, entry.with_state(Where::Bits(slot)));
    }
    assert_eq!((state.steps, state.owners.len() as u64), (0, BLOCKS));
}
