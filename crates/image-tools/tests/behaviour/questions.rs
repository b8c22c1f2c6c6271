//! What the tools ask a file system about data and holes. It walks all extents of a run of data for the answer, so a
//! question for each cluster of an image takes time in proportion to the square of the number of extents.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use ferrite_disk_base::questions;
use ferrite_image_tools::Convert;
use ferrite_testkit::{images, is_night};

use crate::common::{MIB, Queue, dir_in_memory, dir_on_disk, open, work};

const CLUSTER: u64 = 64 << 10;
/// Data in each second cluster.
const CLUSTERS: u64 = 512;

/// How often a command on these images asks, for each command.
fn asked(path: &Path, copy: &Path) -> [(&'static str, u64); 3] {
    let (image, to) = (images::name(path), images::name(copy));
    let count = |name, work: &dyn Fn()| {
        let before = questions();
        work();
        (name, questions() - before)
    };
    [
        count("convert", &|| {
            work(None, |tools| tools.convert(&image, &to, &Convert::default())).unwrap();
        }),
        count("compare", &|| {
            let compared = work(None, |tools| tools.compare(&image, &to, false)).unwrap();
            assert!(compared.identical, "{compared:?}");
        }),
        count("map", &|| {
            work(None, |tools| tools.map(&image, |_| true)).unwrap();
        }),
    ]
}

#[test]
fn an_image_in_many_pieces_of_one_file_takes_few_questions() {
    let orders = ["anyhow", "forwards", "backwards"];
    for order in orders.into_iter().take(if is_night() { 3 } else { 1 }) {
        for format in ["qcow2", "chain.qcow2"] {
            let dir = dir_on_disk();
            let path = images::make(dir.path(), format, 2 * CLUSTERS * CLUSTER);
            let mut queue = Queue::new(open(&path).unwrap());
            for i in 0..CLUSTERS {
                let i = match order {
                    "forwards" => i,
                    "backwards" => CLUSTERS - 1 - i,
                    _ => i * 37 % CLUSTERS,
                };
                queue.write(2 * i * CLUSTER, &[i as u8 | 1; CLUSTER as usize]).unwrap();
            }
            queue.flush().unwrap();
            queue.close().unwrap();
            drop(queue);
            for (command, asked) in asked(&path, &dir.path().join("copy.img")) {
                // The copy of compare has a hole behind each piece of data.
                let copys = if command == "compare" { 4 * CLUSTERS + 64 } else { 64 };
                assert!(asked < copys, "{command} of {format} {order}: {asked} questions");
            }
        }
    }
}

#[test]
fn a_raw_file_takes_two_questions_for_each_of_its_parts() {
    for dir in [dir_on_disk(), dir_in_memory()] {
        let path = dir.path().join("disk.img");
        let file = File::create_new(&path).unwrap();
        file.set_len(64 * MIB).unwrap();
        for i in 0..64 {
            file.write_all_at(&[1; 8192], i * MIB).unwrap();
        }
        drop(file);
        for (command, asked) in asked(&path, &dir.path().join("copy.vhd")) {
            assert!(asked <= 64 * 2 * 2 + 200, "{command}: {asked} questions");
        }
    }
}
