//! Images with extended L2 entries, which QEMU writes by the subcluster: both programs write to them in turn.

use std::path::{Path, PathBuf};

use ferrite_disk::{OpenOptions, Session};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_testkit::places::dir_on_disk;
use ferrite_testkit::rounds;
use tempfile::TempDir;

use crate::common::vhd::peer;
use crate::model::{
    Model, SECTOR, check_clean, compare, open, pattern, qemu, session, wait_until_released,
};

const SECTORS: u64 = 2 << 11;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs commands of qemu-io on an image.
#[track_caller]
fn qemu_io(path: &Path, commands: &[String]) {
    wait_until_released(path);
    let each = commands.iter().flat_map(|command| ["-c", command]);
    let args: Vec<&str> =
        ["-f", "qcow2", "-d", "unmap"].into_iter().chain(each).chain([text(path)]).collect();
    let said = peer("qemu-io", &args).unwrap_or_default();
    assert!(!said.contains("failed"), "{args:?}: {said}");
}

/// The number that a sector has where qemu-io has written this byte.
fn full_of(byte: u64) -> u64 {
    u64::from_le_bytes([byte as u8; 8])
}

struct Both {
    dir: TempDir,
    image: PathBuf,
    options: OpenOptions,
    model: Model,
    random: SplitMix64,
    stamp: u64,
}

impl Both {
    /// A range of sectors, mostly a few subclusters long and about at their borders.
    fn range(&mut self) -> (u64, u64) {
        let mut below = |n: u64| self.random.next_u64() % n;
        let first = match below(3) {
            0 => below(SECTORS),
            _ => below(40) * 4,
        };
        let count = match below(4) {
            0 => 1 + below(300),
            1 => 128,
            2 => (1 + below(8)) * 4,
            _ => 1 + below(9),
        };
        (first, count.min(SECTORS - first))
    }

    fn ours(&mut self) {
        let mut disk = session(text(&self.image), &self.options).unwrap();
        for _ in 0..1 + self.random.next_u64() % 4 {
            let (first, count) = self.range();
            self.stamp += 1;
            match self.random.next_u64() % 6 {
                0 => {
                    disk.write_zeroes(first * SECTOR, count * SECTOR).unwrap();
                    self.model.zero(first, count);
                }
                1 => {
                    disk.discard(first * SECTOR, count * SECTOR).unwrap();
                    self.accept_discarded(&mut disk, first, count);
                }
                _ => {
                    disk.write(first * SECTOR, &pattern(first, count, self.stamp)).unwrap();
                    self.model.write(first, count, self.stamp);
                }
            }
        }
        compare(&mut disk, &self.model);
        // A killed process: the next one has its journal.
        if !self.random.next_u64().is_multiple_of(3) {
            disk.close().unwrap();
            check_clean(&self.image);
        }
    }

    /// Discarded sectors read as before or as zeros.
    fn accept_discarded(&mut self, disk: &mut Session, first: u64, count: u64) {
        for sector in first..first + count {
            let mut bytes = vec![0xEE; SECTOR as usize];
            disk.read(sector * SECTOR, &mut bytes).unwrap();
            if bytes.iter().all(|byte| *byte == 0) {
                self.model.zero(sector, 1);
            } else {
                assert!(bytes == self.model.bytes(sector, 1), "sector {sector} after a discard");
            }
        }
    }

    fn theirs(&mut self) {
        // The changes of a process that was killed are not in the image yet.
        let disk = session(text(&self.image), &self.options).unwrap();
        disk.close().unwrap();
        let mut commands = Vec::new();
        for _ in 0..4 {
            let (first, count) = self.range();
            let (at, len) = (first * SECTOR, count * SECTOR);
            self.stamp += 1;
            match self.random.next_u64() % 5 {
                0 => {
                    commands.push(format!("write -z {at} {len}"));
                    self.model.zero(first, count);
                }
                1 => {
                    commands.push(format!("write -z -u {at} {len}"));
                    self.model.zero(first, count);
                }
                _ => {
                    let byte = 1 + self.stamp % 255;
                    commands.push(format!("write -P {byte} {at} {len}"));
                    self.model.0.extend((first..first + count).map(|s| (s, full_of(byte))));
                }
            }
        }
        qemu_io(&self.image, &commands);
    }

    /// QEMU reads the same as this program.
    fn end(mut self) {
        let mut disk = session(text(&self.image), &self.options).unwrap();
        compare(&mut disk, &self.model);
        disk.close().unwrap();
        check_clean(&self.image);
        let raw = self.dir.path().join("out.raw");
        assert!(qemu(&["convert", "-f", "qcow2", "-O", "raw", text(&self.image), text(&raw)]));
        compare(&mut open(&format!("raw:{}", raw.display())), &self.model);
        self.theirs();
        compare(&mut open(text(&self.image)), &self.model);
    }
}

fn made(dir: &TempDir, options: &str, parent: Option<&str>, model: &mut Model) -> Option<PathBuf> {
    let (base, image) = (dir.path().join("base"), dir.path().join("a.qcow2"));
    let size = (SECTORS * SECTOR).to_string();
    let mut args = vec!["create", "-q", "-f", "qcow2", "-o", options];
    if let Some(format) = parent {
        // Shorter than its child.
        let half = (SECTORS / 2 * SECTOR).to_string();
        let more = if format == "qcow2" { "extended_l2=on" } else { "preallocation=off" };
        if !qemu(&["create", "-q", "-f", format, "-o", more, text(&base), &half]) {
            return None;
        }
        let mut disk = open(&format!("{format}:{}", text(&base)));
        for (first, count) in [(0, 5), (40, 300), (SECTORS / 2 - 70, 70)] {
            disk.write(first * SECTOR, &pattern(first, count, 7)).unwrap();
            model.write(first, count, 7);
        }
        disk.close().unwrap();
        args.extend(["-b", text(&base), "-F", format]);
    }
    args.extend([text(&image), &size]);
    qemu(&args).then_some(image)
}

#[test]
fn both_programs_write_to_images_with_subclusters_in_turn() {
    let kinds = [
        ("extended_l2=on,cluster_size=64k", None),
        ("extended_l2=on,cluster_size=16k", Some("qcow2")),
        ("extended_l2=on,cluster_size=64k", Some("raw")),
        ("extended_l2=on,cluster_size=256k", Some("qcow2")),
    ];
    for seed in 0..rounds(24) {
        let (options, parent) = kinds[seed as usize % kinds.len()];
        let dir = dir_on_disk();
        let mut model = Model::default();
        let Some(image) = made(&dir, options, parent, &mut model) else { return };
        let state_dir = Some(dir.path().join("state"));
        let wait_for_lock = Some(std::time::Duration::from_secs(10));
        let options = OpenOptions { state_dir, wait_for_lock, ..OpenOptions::default() };
        let random = SplitMix64::new(u64::from(seed));
        let mut both = Both { dir, image, options, model, random, stamp: 0 };
        for step in 0..6 {
            both.theirs();
            both.ours();
            if step == 2 {
                let disk = session(text(&both.image), &both.options).unwrap();
                disk.close().unwrap();
                assert!(qemu(&["snapshot", "-c", "kept", text(&both.image)]));
            }
        }
        assert!(qemu_is_clean_but_for_leaks(&both), "seed {seed}");
        both.end();
    }
}

/// A process that was killed may leave what a snapshot shares with counts that are too high: the leaks go.
fn qemu_is_clean_but_for_leaks(both: &Both) -> bool {
    let disk = session(text(&both.image), &both.options).unwrap();
    disk.close().unwrap();
    qemu(&["check", "-q", "-r", "leaks", "-f", "qcow2", text(&both.image)])
}

/// A write of all of a mixed cluster, of a part, and discards of both.
#[test]
fn a_cluster_of_which_some_subclusters_are_data_is_written_and_discarded() {
    let dir = dir_on_disk();
    let mut model = Model::default();
    let options = "extended_l2=on,cluster_size=64k";
    let Some(image) = made(&dir, options, Some("raw"), &mut model) else { return };
    // In each of four clusters: zeros, data, and the parent's.
    let commands: Vec<String> = (0..4u64)
        .flat_map(|cluster| {
            let at = cluster * 65536;
            [format!("write -z {at} 4k"), format!("write -P 9 {} 6k", at + 8192)]
        })
        .collect();
    qemu_io(&image, &commands);
    for cluster in 0..4u64 {
        model.zero(cluster * 128, 8);
        model.0.extend((cluster * 128 + 16..cluster * 128 + 28).map(|s| (s, full_of(9))));
    }
    let mut disk = open(text(&image));
    compare(&mut disk, &model);
    for (first, count) in [(0, 128), (128 + 20, 30)] {
        disk.write(first * SECTOR, &pattern(first, count, 3)).unwrap();
        model.write(first, count, 3);
    }
    disk.discard(2 * 65536, 65536).unwrap();
    model.zero(2 * 128, 128);
    compare(&mut disk, &model);
    disk.write_zeroes(3 * 65536 + 2048, 8192).unwrap();
    model.zero(3 * 128 + 4, 16);
    compare(&mut disk, &model);
    disk.close().unwrap();
    check_clean(&image);
    compare(&mut open(text(&image)), &model);
}
