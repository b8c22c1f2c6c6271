//! VHDs against a model of their sectors: any operations, in any order, with the image closed or
//! its process dead in between.

mod common;

use std::fs;
use std::path::PathBuf;

use common::vhd::{self, at, create, parent};
use common::{MIB, Queue, dir_on_disk, dir_on_tmpfs};
use ferrite_disk::vhd::{NewImage, NewParent, Uuid};
use ferrite_disk::{Disk, OpenOptions};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tempfile::TempDir;

/// Sectors of the disk: its last block is not whole.
const SECTORS: u64 = 5 * 2048 + 3;

/// One operation on sectors of 512 bytes.
#[derive(Clone, Debug)]
enum Step {
    Read {
        at: u64,
        n: u64,
    },
    Write {
        at: u64,
        n: u64,
        byte: u8,
    },
    Discard {
        at: u64,
        n: u64,
    },
    Zero {
        at: u64,
        n: u64,
    },
    Flush,
    /// In good order, then opened again.
    Reopen,
    /// Like kill -9, then opened again.
    Die,
}

fn step() -> impl Strategy<Value = Step> {
    let range =
        (0..SECTORS, prop_oneof![1u64..9, 1u64..600]).prop_map(|(at, n)| (at, n.min(SECTORS - at)));
    prop_oneof![
        6 => range.clone().prop_map(|(at, n)| Step::Read { at, n }),
        10 => (range.clone(), 1u8..255).prop_map(|((at, n), byte)| Step::Write { at, n, byte }),
        2 => range.clone().prop_map(|(at, n)| Step::Discard { at, n }),
        2 => range.prop_map(|(at, n)| Step::Zero { at, n }),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
        1 => Just(Step::Die),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Base {
    None,
    Vhd,
    Raw,
}

/// Each sector is full of one byte.
struct Model {
    below: Vec<u8>,
    now: Vec<u8>,
    /// Discarded, and not written since: as before, as below, or zeros.
    loose: Vec<bool>,
}

impl Model {
    fn check(&self, at: u64, bytes: &[u8], step: usize) {
        for (i, sector) in bytes.chunks(512).enumerate() {
            let s = at as usize + i;
            let byte = sector[0];
            assert!(sector.iter().all(|b| *b == byte), "step {step}: sector {s} is torn");
            let allowed =
                byte == self.now[s] || (self.loose[s] && (byte == 0 || byte == self.below[s]));
            assert!(allowed, "step {step}: sector {s} is {byte}, not {}", self.now[s]);
        }
    }

    fn set(&mut self, at: u64, n: u64, byte: u8) {
        self.now[at as usize..(at + n) as usize].fill(byte);
        self.loose[at as usize..(at + n) as usize].fill(false);
    }
}

struct World {
    leaf: PathBuf,
    options: OpenOptions,
    queue: Option<Queue>,
    model: Model,
}

impl World {
    fn new(dir: &TempDir, state: &TempDir, block_bytes: u32, base: Base, small: bool) -> World {
        let leaf = at(dir, "leaf.vhd");
        let mut new = NewImage { block_bytes, ..NewImage::dynamic(SECTORS * 512) };
        let mut below = vec![0; SECTORS as usize];
        if base != Base::None {
            // Shorter than the child, and not all of it written.
            for s in (0..4 * 2048).filter(|s| s % 7 < 3) {
                below[s] = 200 + (s % 50) as u8;
            }
        }
        let filled: Vec<u8> = below.iter().flat_map(|byte| [*byte; 512]).collect();
        match base {
            Base::None => {}
            Base::Raw => {
                let path = at(dir, "base.img");
                fs::write(&path, &filled[..4 * MIB as usize]).unwrap();
                new.parent = Some(NewParent {
                    uuid: Uuid::NIL,
                    bytes: 4 * MIB,
                    modified_unix_s: 0,
                    path: path.canonicalize().unwrap(),
                });
            }
            Base::Vhd => {
                let path = at(dir, "base.vhd");
                let footer = create(&path, &NewImage::dynamic(4 * MIB)).unwrap();
                let mut queue = vhd::queue(&path);
                for mib in 0..4 {
                    let part = &filled[(mib * MIB) as usize..((mib + 1) * MIB) as usize];
                    queue.write(mib * MIB, part).unwrap();
                }
                queue.close().unwrap();
                new.parent = Some(parent(&path, &footer));
            }
        }
        create(&leaf, &new).unwrap();
        let options = OpenOptions {
            state_dir: Some(state.path().into()),
            metadata_bytes: if small { 0 } else { 16 << 20 },
            ..vhd::options()
        };
        let loose = vec![false; SECTORS as usize];
        let model = Model { now: below.clone(), below, loose };
        let mut world = World { leaf, options, queue: None, model };
        world.open();
        world
    }

    fn open(&mut self) {
        let stat = || fs::metadata(&self.leaf).map(|m| (m.len(), m.modified().unwrap())).unwrap();
        let before = stat();
        let disk = Disk::open(self.leaf.to_str().unwrap(), &self.options).unwrap();
        assert_eq!(before, stat(), "opening has written");
        self.queue = Some(Queue::new(disk));
    }

    fn step(&mut self, number: usize, step: &Step) {
        let queue = self.queue.as_mut().unwrap();
        match *step {
            Step::Read { at, n } => {
                let bytes = queue.read(at * 512, n as usize * 512).unwrap();
                self.model.check(at, &bytes, number);
            }
            Step::Write { at, n, byte } => {
                queue.write(at * 512, &vec![byte; n as usize * 512]).unwrap();
                self.model.set(at, n, byte);
            }
            Step::Discard { at, n } => {
                queue.discard(at * 512, n * 512).unwrap();
                self.model.loose[at as usize..(at + n) as usize].fill(true);
            }
            Step::Zero { at, n } => {
                queue.write_zeroes(at * 512, n * 512).unwrap();
                self.model.set(at, n, 0);
            }
            Step::Flush => queue.flush().unwrap(),
            Step::Reopen => {
                queue.close().unwrap();
                self.queue = None;
                assert_eq!(
                    fs::read_dir(self.options.state_dir.as_ref().unwrap()).unwrap().count(),
                    0
                );
                self.open();
            }
            Step::Die => {
                self.queue = None;
                self.open();
            }
        }
    }

    fn check_all(&mut self, number: usize) {
        for at in (0..SECTORS).step_by(2048) {
            self.step(number, &Step::Read { at, n: 2048.min(SECTORS - at) });
        }
    }
}

fn run(dir: impl Fn() -> TempDir, cases: u32) {
    let kinds = prop_oneof![Just(Base::None), Just(Base::Vhd), Just(Base::Raw)];
    let blocks = prop_oneof![Just(512u32), Just(4096), Just(65536), Just(2 << 20)];
    let all = (kinds, blocks, any::<bool>(), proptest::collection::vec(step(), 1..60));
    let mut runner = TestRunner::new(Config { cases, ..Config::default() });
    runner
        .run(&all, |(base, block_bytes, small, steps)| {
            let (dir, state) = (dir(), dir_on_tmpfs());
            let mut world = World::new(&dir, &state, block_bytes, base, small);
            for (i, step) in steps.iter().enumerate() {
                world.step(i, step);
            }
            for last in [Step::Die, Step::Reopen] {
                world.step(steps.len(), &last);
                world.check_all(steps.len());
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn an_image_on_disk_is_what_its_model_says() {
    run(dir_on_disk, 24);
}

#[test]
fn an_image_in_memory_is_what_its_model_says() {
    run(dir_on_tmpfs, 120);
}

#[test]
fn an_image_without_a_place_for_its_journal_keeps_what_was_flushed() {
    let dir = dir_on_disk();
    let path = at(&dir, "a.vhd");
    create(&path, &NewImage::dynamic(SECTORS * 512)).unwrap();
    let mut queue = vhd::queue(&path);
    queue.write(512, &[1; 512]).unwrap();
    queue.flush().unwrap();
    queue.write(4 * MIB, &[2; 512]).unwrap();
    drop(queue);
    let mut queue = vhd::queue(&path);
    assert_eq!(queue.read(512, 512).unwrap(), [1; 512]);
    assert_eq!(queue.read(4 * MIB, 512).unwrap(), [0; 512]);
    // What the dead process had set aside is used again, and reads as zeros.
    queue.write(4 * MIB + 512, &[3; 512]).unwrap();
    assert_eq!(queue.read(4 * MIB, 512).unwrap(), [0; 512]);
}
