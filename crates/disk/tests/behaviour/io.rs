//! Reading, writing, discarding and zeroing against a model: a plain vector of bytes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::common::{Loop, MIB, Queue, dir_in_memory, dir_on_disk, image, open};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const DISK_BYTES: u64 = MIB;

/// One operation on sectors of 512 bytes.
#[derive(Clone, Debug)]
enum Step {
    Read { at: u64, n: u64 },
    Write { at: u64, n: u64, byte: u8 },
    Discard { at: u64, n: u64 },
    Zero { at: u64, n: u64 },
    Flush,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let sectors = DISK_BYTES / 512;
    let range = (0..sectors).prop_flat_map(move |at| (Just(at), 1..=(sectors - at).min(300)));
    prop_oneof![
        5 => range.clone().prop_map(|(at, n)| Step::Read { at, n }),
        8 => (range.clone(), any::<u8>()).prop_map(|((at, n), byte)| Step::Write { at, n, byte }),
        3 => range.clone().prop_map(|(at, n)| Step::Discard { at, n }),
        3 => range.prop_map(|(at, n)| Step::Zero { at, n }),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ]
}

/// The range of a step in bytes, widened to blocks, as everything above this crate does it.
fn blocks(at: u64, n: u64, block: u64) -> (usize, usize) {
    let start = at * 512 / block * block;
    let end = ((at + n) * 512).next_multiple_of(block);
    (start as usize, (end - start) as usize)
}

/// Bytes that differ from sector to sector.
fn pattern(byte: u8, start: usize, len: usize) -> Vec<u8> {
    (start..start + len).map(|i| byte ^ (i / 512) as u8 ^ (i % 512 / 4) as u8).collect()
}

/// Does one step to the disk and to the model. `exact`: a discarded range reads as zeros.
fn apply(queue: &mut Queue, model: &mut [u8], step: &Step, exact: bool) {
    let block = u64::from(queue.disk.block_bytes());
    match *step {
        Step::Read { at, n } => {
            let (start, len) = blocks(at, n, block);
            assert!(queue.read(start as u64, len).unwrap() == model[start..start + len]);
        }
        Step::Write { at, n, byte } => {
            let (start, len) = blocks(at, n, block);
            let bytes = pattern(byte, start, len);
            queue.write(start as u64, &bytes).unwrap();
            model[start..start + len].copy_from_slice(&bytes);
        }
        Step::Discard { at, n } => {
            let (start, len) = ((at * 512) as usize, (n * 512) as usize);
            queue.discard(start as u64, len as u64).unwrap();
            if exact {
                model[start..start + len].fill(0);
            } else {
                check_discarded(queue, model, start, len);
            }
        }
        Step::Zero { at, n } => {
            let (start, len) = blocks(at, n, block);
            queue.write_zeroes(start as u64, len as u64).unwrap();
            model[start..start + len].fill(0);
        }
        Step::Flush => queue.flush().unwrap(),
        Step::Reopen => {}
    }
}

/// Each sector of a discarded range is zeros or as before; the model takes what it finds.
fn check_discarded(queue: &mut Queue, model: &mut [u8], start: usize, len: usize) {
    let all = queue.read(0, model.len()).unwrap();
    for at in (start..start + len).step_by(512) {
        let now = &all[at..at + 512];
        assert!(now == &model[at..at + 512] || now.iter().all(|b| *b == 0), "sector {}", at / 512);
        model[at..at + 512].copy_from_slice(now);
    }
}

/// Random steps on `path`, a medium of [`DISK_BYTES`] that may be overwritten.
fn behaves_like_a_vector(path: &Path, exact: bool) {
    let mut runner =
        TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(24) });
    let steps = prop::collection::vec(step(), 1..60);
    runner
        .run(&steps, |steps| {
            let mut queue = Queue::new(patient_open(path));
            queue.write_zeroes(0, DISK_BYTES).unwrap();
            let mut model = vec![0; DISK_BYTES as usize];
            for step in &steps {
                if matches!(step, Step::Reopen) {
                    drop(queue);
                    queue = Queue::new(patient_open(path));
                }
                apply(&mut queue, &mut model, step, exact);
            }
            prop_assert!(queue.read(0, model.len()).unwrap() == model);
            Ok(())
        })
        .unwrap();
}

/// The ring of a closed queue lets go of the file a moment later.
fn patient_open(path: &Path) -> ferrite_disk::Disk {
    let options = ferrite_disk::OpenOptions {
        wait_for_lock: Some(std::time::Duration::from_secs(30)),
        ..Default::default()
    };
    ferrite_disk::Disk::open(path.to_str().unwrap(), &options).unwrap()
}

#[test]
fn a_file_on_disk_behaves_like_a_vector_of_bytes() {
    let dir = dir_on_disk();
    behaves_like_a_vector(&image(&dir, DISK_BYTES), true);
}

#[test]
fn a_file_on_tmpfs_behaves_like_a_vector_of_bytes() {
    let dir = dir_in_memory();
    behaves_like_a_vector(&image(&dir, DISK_BYTES), true);
}

#[test]
fn a_block_device_of_512_byte_sectors_behaves_like_a_vector_of_bytes() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image(&dir, DISK_BYTES), 512) else { return };
    behaves_like_a_vector(&device.0, false);
}

#[test]
fn a_block_device_of_4096_byte_sectors_behaves_like_a_vector_of_bytes() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&image(&dir, DISK_BYTES), 4096) else { return };
    assert_eq!(open(&device.0).unwrap().block_bytes(), 4096);
    behaves_like_a_vector(&device.0, false);
}

#[test]
fn discard_gives_space_back_and_touches_no_neighbour() {
    for dir in [dir_on_disk(), dir_in_memory()] {
        let path = image(&dir, 4 * MIB);
        let mut queue = Queue::new(open(&path).unwrap());
        for at in 0..4 {
            queue.write(at * MIB, &vec![0xAB; MIB as usize]).unwrap();
        }
        queue.flush().unwrap();
        let blocks = || fs::metadata(&path).unwrap().blocks();
        assert!(blocks() >= 4 * MIB / 512);
        queue.discard(MIB + 512, 2 * MIB).unwrap();
        queue.flush().unwrap();
        assert!(blocks() <= 2 * MIB / 512 + 64, "{} blocks are left", blocks());
        let around = queue.read(MIB, 4096).unwrap();
        assert!(around[..512].iter().all(|b| *b == 0xAB) && around[512..].iter().all(|b| *b == 0));
        let around = queue.read(3 * MIB, 4096).unwrap();
        assert!(around[..512].iter().all(|b| *b == 0) && around[512..].iter().all(|b| *b == 0xAB));
        assert_eq!(fs::metadata(&path).unwrap().len(), 4 * MIB);
    }
}

#[test]
fn a_discard_of_a_huge_disk_ends() {
    let dir = dir_in_memory();
    let path = image(&dir, 1 << 42);
    let mut queue = Queue::new(open(&path).unwrap());
    queue.write((1 << 41) + 4096, &[1; 4096]).unwrap();
    queue.discard(0, 1 << 42).unwrap();
    assert_eq!(queue.read((1 << 41) + 4096, 4096).unwrap(), vec![0; 4096]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 42);
}

#[test]
fn ranges_outside_of_the_disk_are_refused_and_do_not_lengthen_it() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let mut queue = Queue::new(open(&path).unwrap());
    for (offset, len) in [(MIB, 512), (MIB - 512, 1024), (0, MIB + 512), (u64::MAX - 511, 512)] {
        let kind = std::io::ErrorKind::InvalidInput;
        assert_eq!(queue.discard(offset, len).unwrap_err().kind(), kind);
        assert_eq!(queue.write_zeroes(offset, len).unwrap_err().kind(), kind);
    }
    assert_eq!(queue.write_zeroes(256, 512).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    queue.discard(MIB, 0).unwrap();
    queue.write_zeroes(0, 0).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB);
}

#[test]
fn an_image_that_was_cut_off_gives_errors_only_where_it_is_gone() {
    let dir = dir_in_memory();
    let path = image(&dir, MIB);
    let mut queue = Queue::new(open(&path).unwrap());
    queue.write(0, &[5; 4096]).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    let kind = queue.read(MIB / 2, 4096).unwrap_err().kind();
    assert_eq!(kind, std::io::ErrorKind::UnexpectedEof);
    assert_eq!(queue.read(0, 4096).unwrap(), vec![5; 4096]);
}

#[test]
#[should_panic(expected = "unchecked range")]
fn mapping_an_unchecked_range_is_a_bug() {
    let dir = dir_in_memory();
    let disk = open(&image(&dir, MIB)).unwrap();
    disk.reserve(MIB, 512);
}
