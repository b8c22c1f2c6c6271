//! Walks over a disk, by the operations that they take.

use ferrite_disk::{Disk, OpenOptions};
use ferrite_image_tools::{ImageTools, NewImage};
use ferrite_simio::SimWorld;

use crate::common::vhd::at;
use crate::common::{MIB, Queue, dir_in_memory, work};
use crate::tools::name;

/// A table of a qcow2 image is for 512 MiB of its disk, and a page of it for 32 MiB.
#[test]
fn a_map_of_a_qcow2_image_reads_each_of_its_tables_at_once() {
    let dir = dir_in_memory();
    let image = name("qcow2", &at(&dir, "a.qcow2"));
    let new = NewImage { bytes: Some(1024 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    let mut disk = Queue::new(Disk::open_image(&image, &OpenOptions::default()).unwrap());
    for page in 0..32 {
        disk.write(page * 32 * MIB, &[7; 512]).unwrap();
    }
    disk.close().unwrap();
    drop(disk);
    let world = SimWorld::new(1);
    let before = world.step();
    let mut extents = 0;
    work(None, |tools| {
        let engine = |arena| Ok(world.engine(arena));
        let parents = tools.parents.clone();
        let tools = ImageTools { engine: &engine, parents, state_dir: None, ..*tools };
        tools.map(&image, |_| {
            extents += 1;
            true
        })
    })
    .unwrap();
    assert!(extents >= 64, "{extents}");
    let reads = world.step() - before;
    assert!(reads <= 4, "{reads} operations for two tables");
}
