//! Damaged images that are open for reading: reads of damaged ranges fail, all other reads are right, and writes are
//! refused.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use ferrite_disk::{Disk, ErrorKind, OnDamage, OpenOptions};
use ferrite_image_tools::NewImage;

use crate::common::{MIB, Queue, dir_on_disk};
use crate::model::{name, peek, poke, tools};

const UNIT: u64 = 64 << 10;

/// An image full of data, each unit with a byte of its own.
fn made(dir: &Path, format: &str) -> PathBuf {
    let path = dir.join(format!("a.{format}"));
    let unit_bytes = Some(UNIT as u32);
    let new = NewImage { bytes: Some(MIB), unit_bytes, ..NewImage::default() };
    tools(|tools| tools.create(&name(&path), &new)).unwrap();
    let mut disk = Queue::new(Disk::open_image(&name(&path), &OpenOptions::default()).unwrap());
    (0..16).for_each(|unit| disk.write(unit * UNIT, &[unit as u8 + 1; UNIT as usize]).unwrap());
    disk.close().unwrap();
    path
}

/// Damages units 5 and 9.
fn damage(path: &Path, format: &str) {
    for unit in [5, 9] {
        match format {
            "vhd" => File::options()
                .write(true)
                .open(path)
                .unwrap()
                .write_all_at(&0x0010_0000u32.to_be_bytes(), 1536 + unit * 4)
                .unwrap(),
            _ => {
                let table = peek(path, peek(path, 40)) & !(1 << 63);
                // Its own L1 table.
                let target = if unit == 5 { 1 << 40 } else { peek(path, 40) };
                poke(path, table + unit * 8, |_| target | 1 << 63);
            }
        }
    }
}

fn opened(path: &Path, read_only: bool) -> Result<Disk, ferrite_disk::DiskError> {
    let options = OpenOptions { read_only, on_damage: OnDamage::Serve, ..OpenOptions::default() };
    Disk::open_image(&name(path), &options)
}

#[test]
fn reads_of_what_is_damaged_fail_and_all_others_are_right() {
    for format in ["vhd", "qcow2"] {
        let dir = dir_on_disk();
        let path = made(dir.path(), format);
        damage(&path, format);
        let before = fs::read(&path).unwrap();
        let mut disk = Queue::new(opened(&path, true).unwrap());
        for unit in 0..16 {
            match disk.read(unit * UNIT, UNIT as usize) {
                Ok(bytes) => assert!(bytes == [unit as u8 + 1; UNIT as usize], "{format}: {unit}"),
                Err(e) => {
                    assert!([5, 9].contains(&unit), "{format}: {unit}: {e}");
                    assert_eq!(e.kind(), io::ErrorKind::InvalidData);
                }
            }
        }
        // Beside the damage, and over its edge.
        assert!(disk.read(5 * UNIT - 512, 512).is_ok() && disk.read(6 * UNIT, 512).is_ok());
        assert!(disk.read(5 * UNIT - 512, 1024).is_err());
        assert!(disk.read(5 * UNIT, 512).is_err() && disk.read(10 * UNIT - 512, 512).is_err());
        assert!(disk.write(0, &[0; 512]).is_err());
        drop(disk);
        assert!(fs::read(&path).unwrap() == before, "{format}");
    }
}

#[test]
fn a_writer_is_refused_and_told_how_the_rest_can_be_had() {
    let dir = dir_on_disk();
    let vhd = made(dir.path(), "vhd");
    damage(&vhd, "vhd");
    let qcow2 = made(dir.path(), "qcow2");
    poke(&qcow2, peek(&qcow2, 48), |_| 1 << 40);
    for path in [vhd, qcow2] {
        let refused = opened(&path, false).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Damaged);
        let help = refused.help();
        assert!(help.contains("--read-only") && help.contains("convert --salvage"), "{help}");
        opened(&path, true).unwrap();
    }
}

/// The image may be intact: other programs leave it so.
#[test]
fn an_image_that_ends_within_its_last_cluster_is_served_with_zeros() {
    let dir = dir_on_disk();
    let path = made(dir.path(), "qcow2");
    let table = peek(&path, peek(&path, 40)) & !(1 << 63);
    let last = peek(&path, table + 15 * 8) & !(1 << 63);
    File::options().write(true).open(&path).unwrap().set_len(last + 4096).unwrap();
    let mut disk = Queue::new(opened(&path, true).unwrap());
    assert!(disk.read(15 * UNIT, 4096).unwrap() == [16; 4096]);
    assert!(disk.read(15 * UNIT + 4096, 4096).unwrap() == [0; 4096]);
}
