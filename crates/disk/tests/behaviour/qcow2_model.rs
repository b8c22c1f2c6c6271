//! qcow2 against a model: random operations, in images of all kinds, with the process dying and
//! coming back between them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::model::{Model, check_clean, compare, pattern, qemu, qemu_img, session};
use ferrite_disk::{OpenOptions, Session};
use ferrite_io::engines::test_engine;
use ferrite_testkit::rounds;
use proptest::prelude::*;
use tempfile::TempDir;

const SECTORS: u64 = 6 << 11;

#[derive(Clone, Debug)]
enum Op {
    Write {
        first: u64,
        count: u64,
    },
    Zero {
        first: u64,
        count: u64,
    },
    Discard {
        first: u64,
        count: u64,
    },
    Read {
        first: u64,
        count: u64,
    },
    Flush,
    /// Closed in good order, checked and opened again.
    Close,
    /// The process dies and the kernel keeps what it was given.
    Die,
    /// Closed; QEMU makes a snapshot inside of it, or deletes the one that is there.
    Snapshot,
}

fn op() -> impl Strategy<Value = Op> {
    // Mostly at few places, so that things happen to the same cluster.
    let first = prop_oneof![0..SECTORS, 0u64..300, SECTORS - 200..SECTORS];
    let range = (first, prop_oneof![1u64..9, 1u64..600, Just(128)]).prop_map(|(first, count)| {
        let first = if count == 128 { first / 128 * 128 } else { first };
        (first, count.min(SECTORS - first))
    });
    prop_oneof![
        8 => range.clone().prop_map(|(first, count)| Op::Write { first, count }),
        2 => range.clone().prop_map(|(first, count)| Op::Zero { first, count }),
        2 => range.clone().prop_map(|(first, count)| Op::Discard { first, count }),
        2 => range.prop_map(|(first, count)| Op::Read { first, count }),
        2 => Just(Op::Flush),
        1 => Just(Op::Close),
        2 => Just(Op::Die),
        1 => Just(Op::Snapshot),
    ]
}

struct Machine {
    dir: TempDir,
    image: PathBuf,
    options: OpenOptions,
    session: Option<Session>,
    model: Model,
    /// The content of the snapshot.
    snapshot: Option<Model>,
    /// A process died that may have copied what a snapshot shares: the counts that it would have
    /// lowered next are too high, which is harmless.
    leaks: bool,
    stamp: u64,
}

impl Machine {
    fn new(dir: TempDir, image: PathBuf, model: Model) -> Machine {
        let state_dir = Some(dir.path().join("state"));
        // The kernel lets go of a dead ring's files some time later.
        let wait_for_lock = Some(Duration::from_secs(10));
        let metadata_bytes = 256 << 10;
        let options =
            OpenOptions { state_dir, wait_for_lock, metadata_bytes, ..OpenOptions::default() };
        let mut machine = Machine {
            dir,
            image,
            options,
            session: None,
            model,
            snapshot: None,
            leaks: false,
            stamp: 1,
        };
        machine.open();
        machine
    }

    fn open(&mut self) {
        self.session = Some(session(self.image.to_str().unwrap(), &self.options).unwrap());
    }

    fn run(&mut self, op: &Op) {
        let session = self.session.as_mut().unwrap();
        match *op {
            Op::Write { first, count } => {
                self.stamp += 1;
                session.write(first * 512, &pattern(first, count, self.stamp)).unwrap();
                self.model.write(first, count, self.stamp);
            }
            Op::Zero { first, count } => {
                session.write_zeroes(first * 512, count * 512).unwrap();
                self.model.zero(first, count);
            }
            Op::Discard { first, count } => {
                session.discard(first * 512, count * 512).unwrap();
                self.accept_discarded(first, count);
            }
            Op::Read { first, count } => {
                let mut bytes = vec![0xEE; (count * 512) as usize];
                session.read(first * 512, &mut bytes).unwrap();
                assert!(bytes == self.model.bytes(first, count));
            }
            Op::Flush => session.flush().unwrap(),
            Op::Close => {
                self.session.take().unwrap().close().unwrap();
                self.check();
                self.open();
            }
            Op::Die => {
                self.session = None;
                self.leaks |= self.snapshot.is_some();
                self.open();
            }
            Op::Snapshot => {
                self.session.take().unwrap().close().unwrap();
                let how = match self.snapshot.take() {
                    Some(model) => {
                        self.compare_snapshot(&model);
                        "-d"
                    }
                    None => {
                        self.snapshot = Some(self.model.clone());
                        "-c"
                    }
                };
                assert!(qemu(&["snapshot", how, "kept", self.image.to_str().unwrap()]));
                self.open();
            }
        }
    }

    fn check(&self) {
        if !self.leaks {
            return check_clean(&self.image);
        }
        let check = ["check", "-f", "qcow2", self.image.to_str().unwrap()];
        let Some((clean, text)) = qemu_img(&check) else { return };
        let errors = text.lines().any(|line| line.starts_with("ERROR"));
        assert!(clean || (!errors && text.contains("leaked clusters were found")), "{text}");
    }

    /// Compares the bytes that QEMU reads of the snapshot with the model.
    fn compare_snapshot(&self, model: &Model) {
        let (image, raw) = (self.image.to_str().unwrap(), self.dir.path().join("kept.raw"));
        let from = ["convert", "-l", "snapshot.name=kept", "-f", "qcow2", "-O", "raw", image];
        assert!(qemu(&[&from[..], &[raw.to_str().unwrap()]].concat()));
        compare(&mut crate::model::open(&format!("raw:{}", raw.display())), model);
        std::fs::remove_file(raw).unwrap();
    }

    /// Discarded sectors read as before or as zeros, each by itself, and stay so.
    fn accept_discarded(&mut self, first: u64, count: u64) {
        let mut bytes = vec![0xEE; (count * 512) as usize];
        self.session.as_mut().unwrap().read(first * 512, &mut bytes).unwrap();
        for (i, sector) in bytes.chunks(512).enumerate() {
            let at = first + i as u64;
            if sector.iter().all(|b| *b == 0) {
                self.model.zero(at, 1);
            } else {
                assert!(sector == self.model.bytes(at, 1), "sector {at} after a discard");
            }
        }
    }

    fn end(mut self) {
        compare(self.session.as_mut().unwrap(), &self.model);
        self.session.take().unwrap().close().unwrap();
        self.check();
        if let Some(model) = self.snapshot.take() {
            self.compare_snapshot(&model);
        }
        self.open();
        compare(self.session.as_mut().unwrap(), &self.model);
        drop(self.session);
        let left = std::fs::read_dir(self.dir.path().join("state")).unwrap().count();
        assert_eq!(left, 1, "only the journal of the image that is open");
    }
}

fn make(dir: &Path, name: &str, args: &[&str]) -> Option<PathBuf> {
    let path = dir.join(name);
    let size = (SECTORS * 512).to_string();
    let mut all = vec!["create", "-q", "-f", "qcow2"];
    all.extend(args);
    all.extend([path.to_str().unwrap(), &size]);
    qemu(&all).then_some(path)
}

fn tmpfs() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap()
}

fn run(options: &str, ops: &[Op]) {
    let dir = tmpfs();
    let Some(image) = make(dir.path(), "a.qcow2", &["-o", options]) else { return };
    let mut machine = Machine::new(dir, image, Model::default());
    ops.iter().for_each(|op| machine.run(op));
    machine.end();
}

/// A parent with something in it, and a child of it.
fn run_child(parent: &str, child: &str, ops: &[Op]) {
    let dir = tmpfs();
    let mut model = Model::default();
    let base = if parent == "raw" {
        let base = dir.path().join("base.img");
        std::fs::File::create(&base).unwrap().set_len(SECTORS / 2 * 512).unwrap();
        base
    } else {
        let Some(base) = make(dir.path(), "base.qcow2", &["-o", parent]) else { return };
        base
    };
    let mut session = crate::model::open(base.to_str().unwrap());
    for (first, count) in [(0, 5), (100, 300), (SECTORS / 2 - 70, 70)] {
        session.write(first * 512, &pattern(first, count, 7)).unwrap();
        model.write(first, count, 7);
    }
    session.close().unwrap();
    let format = if parent == "raw" { "raw" } else { "qcow2" };
    let backing = ["-b", base.to_str().unwrap(), "-F", format, "-o", child];
    let Some(image) = make(dir.path(), "a.qcow2", &backing) else { return };
    let before = std::fs::read(&base).unwrap();
    let mut machine = Machine::new(dir, image, model);
    ops.iter().for_each(|op| machine.run(op));
    assert!(before == std::fs::read(&base).unwrap(), "the parent has changed");
    machine.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: rounds(24), failure_persistence: None, ..Default::default() })]

    #[test]
    fn an_image_behaves_as_a_disk(ops in proptest::collection::vec(op(), 1..60)) {
        run("cluster_size=64k", &ops);
    }

    #[test]
    fn an_image_with_small_clusters_behaves_as_a_disk(ops in proptest::collection::vec(op(), 1..40)) {
        run("cluster_size=512", &ops);
    }

    #[test]
    fn an_image_of_version_2_behaves_as_a_disk(ops in proptest::collection::vec(op(), 1..40)) {
        run("compat=0.10,cluster_size=4k", &ops);
    }

    #[test]
    fn an_image_with_subclusters_behaves_as_a_disk(ops in proptest::collection::vec(op(), 1..30)) {
        run("extended_l2=on,cluster_size=16k", &ops);
    }

    #[test]
    fn a_child_behaves_as_a_disk(ops in proptest::collection::vec(op(), 1..60)) {
        run_child("cluster_size=64k", "cluster_size=64k", &ops);
    }

    #[test]
    fn a_child_of_a_raw_disk_behaves_as_a_disk(ops in proptest::collection::vec(op(), 1..40)) {
        run_child("raw", "cluster_size=16k", &ops);
    }

    #[test]
    fn a_child_of_version_2_behaves_as_a_disk(ops in proptest::collection::vec(op(), 1..40)) {
        run_child("compat=0.10", "compat=0.10,cluster_size=128k", &ops);
    }
}

/// Each thread has every fourth sector of the disk, so all write to the same clusters at once.
fn several_queues(image: &Path, metadata_bytes: usize, model: &mut Model) {
    const THREADS: u64 = 4;
    let options = OpenOptions { metadata_bytes, ..OpenOptions::default() };
    let name = ferrite_disk::ImageName::parse(image.to_str().unwrap()).unwrap();
    let disk = Arc::new(ferrite_disk::Disk::open_image(&name, &options).unwrap());
    let session = |disk: &Arc<ferrite_disk::Disk>| {
        Session::new(disk.clone(), |arena| test_engine().open(arena, 64)).unwrap()
    };
    let work = |thread: u64| {
        let mut session = session(&disk);
        let mut part = Model::default();
        for i in 0..400u64 {
            let sector = (i / 3 * 7919 + i % 3 * 4) % (SECTORS / THREADS) * THREADS + thread;
            session.write(sector * 512, &pattern(sector, 1, i + 1)).unwrap();
            part.write(sector, 1, i + 1);
            let mut bytes = [0; 512];
            session.read(sector * 512, &mut bytes).unwrap();
            assert!(bytes[..] == part.bytes(sector, 1), "sector {sector} just after its write");
            if i % 97 == thread * 20 {
                session.flush().unwrap();
            }
        }
        part
    };
    let work = &work;
    let parts: Vec<Model> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|t| scope.spawn(move || work(t))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    parts.into_iter().for_each(|part| model.0.extend(part.0));
    let mut last = session(&disk);
    compare(&mut last, model);
    last.close().unwrap();
    drop(disk);
    check_clean(image);
    let options = OpenOptions { wait_for_lock: Some(Duration::from_secs(10)), ..options };
    compare(&mut crate::model::session(image.to_str().unwrap(), &options).unwrap(), model);
}

#[test]
fn several_queues_write_to_the_same_clusters_at_once() {
    for (options, metadata_bytes) in [
        ("cluster_size=64k", 16 << 20),
        ("cluster_size=4k", 0),
        ("extended_l2=on", 0),
        ("cluster_size=512", 0),
    ] {
        let dir = tmpfs();
        let Some(image) = make(dir.path(), "a.qcow2", &["-o", options]) else { return };
        several_queues(&image, metadata_bytes, &mut Model::default());
    }
}

#[test]
fn several_queues_copy_the_same_clusters_at_once() {
    for (options, metadata_bytes) in [("cluster_size=64k", 16 << 20), ("cluster_size=4k", 0)] {
        let dir = tmpfs();
        let Some(base) = make(dir.path(), "base.qcow2", &["-o", options]) else { return };
        let mut model = Model::default();
        let mut session = crate::model::open(base.to_str().unwrap());
        for first in (0..SECTORS - 256).step_by(512) {
            session.write(first * 512, &pattern(first, 256, 77)).unwrap();
            model.write(first, 256, 77);
        }
        session.close().unwrap();
        let backing = ["-b", base.to_str().unwrap(), "-F", "qcow2", "-o", options];
        let Some(image) = make(dir.path(), "a.qcow2", &backing) else { return };
        several_queues(&image, metadata_bytes, &mut model);
    }
}
