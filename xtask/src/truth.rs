//! Compares a store with an independent count: images of Debian in it, and the number of their different blocks.
//!
//! The count uses nothing of the product. So it detects a store that shares too little, and one that reports less than
//! it has.

use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::programs::Programs;
use ferrite_xenhost::packages::as_root;
use ferrite_xenhost::root::{self, Suite};
use ferrite_xenhost::steps::{self, fresh_log, output, run_logged, say};

const BLOCK_BYTES: usize = 4096;
/// The largest ratio of the store's content to the independent count.
const STORED_AT_MOST: f64 = 1.01;
/// The largest ratio of its metadata to the content of the images. A clone adds none.
const METADATA_AT_MOST: f64 = 0.02;

/// The changes of a copy of a system: programs are removed, others added, a large file grows.
const CHANGES: &str = "rm /usr/bin/perl\nrm /usr/bin/fio\nwrite /bin/bash /srv/shell\n\
                       write /proc/self/exe /srv/program\n";

#[derive(Deserialize)]
struct Stats {
    mapped_bytes: u64,
    distinct_bytes: u64,
    stored_bytes: u64,
    metadata_bytes: u64,
}

/// Puts images of these releases into a store, with the same files on another file system, a clone and a changed copy
/// of the first, and compares the used space with a count.
pub(crate) fn test(suites: &[Suite]) -> Result<()> {
    let dir = steps::target_dir().join("truth");
    // Files of an earlier run that was killed.
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir)?;
    let done = in_dir(&dir, suites);
    std::fs::remove_dir_all(&dir)?;
    done
}

fn in_dir(dir: &Path, suites: &[Suite]) -> Result<()> {
    let log = fresh_log("truth")?;
    let mut images = Vec::new();
    for suite in suites {
        images.push((suite.name, root::ensure(*suite)?.image()));
    }
    let first = images[0].1.clone();
    images.push(("again", made_anew(dir, &first, &log)?));
    images.push(("changed", changed(dir, &first, &log)?));

    let program = Programs::build(&[])?.binary("ferrite", "ferrite")?;
    let store = dir.join("truth.store").display().to_string();
    let ferrite = |arguments: &[&str]| run_logged(Command::new(&program).args(arguments), &log);
    let volume = |name: &str| format!("{store}#{name}");
    ferrite(&["store", "create", &store, "--size", "32G"])?;
    for (name, image) in &images {
        let from = format!("raw:{}", image.display());
        ferrite(&["image", "convert", &from, &format!("store:{}", volume(name))])?;
    }
    ferrite(&["store", "clone", &volume(images[0].0), "clone"])?;
    // The second pass frees what the first one has kept.
    ferrite(&["store", "gc", &store])?;
    ferrite(&["store", "gc", &store])?;
    for (name, image) in &images {
        let from = format!("raw:{}", image.display());
        ferrite(&["image", "compare", &from, &format!("store:{}", volume(name))])?;
    }
    ferrite(&["store", "check", &store])?;
    let stats = output(Command::new(&program).args(["store", "stats", "--json", &store]))?;
    let stats: Stats = serde_json::from_str(&stats).context("what ferrite store stats says")?;
    judge(&stats, &count(&images)?)
}

/// The same files on a file system with other parameters, as on another guest's disk.
fn made_anew(dir: &Path, image: &Path, log: &Path) -> Result<PathBuf> {
    let (tree, anew) = (dir.join("tree"), dir.join("again.raw"));
    std::fs::create_dir_all(&tree)?;
    let dump = format!("rdump /usr {}", tree.display());
    run_logged(as_root("debugfs").args(["-R", &dump]).arg(image), log)?;
    run_logged(Command::new("truncate").args(["-s", "4G"]).arg(&anew), log)?;
    let mut make = as_root("mkfs.ext4");
    make.args(["-q", "-b", "4096", "-N", "200000", "-L", "again", "-d"]).arg(&tree).arg(&anew);
    run_logged(&mut make, log)?;
    run_logged(as_root("rm").arg("-rf").arg(&tree), log)?;
    Ok(anew)
}

/// A copy with changes.
fn changed(dir: &Path, image: &Path, log: &Path) -> Result<PathBuf> {
    let (copy, script) = (dir.join("changed.raw"), dir.join("changes"));
    run_logged(Command::new("cp").arg("--sparse=always").arg(image).arg(&copy), log)?;
    std::fs::write(&script, CHANGES)?;
    run_logged(as_root("debugfs").args(["-w", "-f"]).arg(&script).arg(&copy), log)?;
    Ok(copy)
}

/// The result of an independent count.
#[derive(Default)]
struct Count {
    /// Nonzero blocks of the images.
    of_images: u64,
    /// Nonzero blocks of the images and of the clone, which has the first image's blocks.
    mapped: u64,
    /// Different nonzero blocks.
    distinct: u64,
}

fn count(images: &[(&str, PathBuf)]) -> Result<Count> {
    let mut known = HashSet::new();
    let (mut of_images, mut mapped) = (0, 0);
    for (i, (_, image)) in images.iter().enumerate() {
        let volumes = if i == 0 { 2 } else { 1 };
        let file = File::open(image).with_context(|| format!("cannot read {}", image.display()))?;
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut block = [0; BLOCK_BYTES];
        while whole(&mut file, &mut block)? {
            if block.iter().any(|byte| *byte != 0) {
                of_images += 1;
                mapped += volumes;
                known.insert(name(&block));
            }
        }
    }
    Ok(Count { of_images, mapped, distinct: known.len() as u64 })
}

/// The next block. A partial block at the end is ignored: root images have none.
fn whole(file: &mut impl Read, block: &mut [u8]) -> Result<bool> {
    match file.read_exact(block) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// A hash of 128 bits of a block, by another function than the store's.
fn name(block: &[u8]) -> [u64; 2] {
    [1_u8, 2].map(|half| {
        let mut hasher = DefaultHasher::new();
        (half, block).hash(&mut hasher);
        hasher.finish()
    })
}

fn judge(stats: &Stats, count: &Count) -> Result<()> {
    let block = BLOCK_BYTES as u64;
    let (mapped, distinct) = (count.mapped * block, count.distinct * block);
    let stored = stats.stored_bytes as f64 / distinct as f64;
    let of_images = count.of_images * block;
    let metadata = stats.metadata_bytes as f64 / of_images as f64;
    say(format!(
        "images have {of_images} bytes, of which {distinct} differ; the store has {}: {stored:.4} times that; \
         metadata {}: {:.2} % of the images, {:.2} % of what is stored",
        stats.stored_bytes,
        stats.metadata_bytes,
        metadata * 100.0,
        100.0 * stats.metadata_bytes as f64 / stats.stored_bytes as f64
    ));
    ensure!(
        stats.mapped_bytes == mapped,
        "stats says that {} bytes are mapped",
        stats.mapped_bytes
    );
    ensure!(
        stats.distinct_bytes == distinct,
        "stats says that {} bytes differ",
        stats.distinct_bytes
    );
    ensure!(stored >= 1.0, "less is stored than there is");
    ensure!(stored <= STORED_AT_MOST, "more is stored than {STORED_AT_MOST} times what differs");
    ensure!(
        metadata <= METADATA_AT_MOST,
        "the metadata are more than {METADATA_AT_MOST} of the images"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn stats(stored_bytes: u64, metadata_bytes: u64) -> Stats {
        Stats { mapped_bytes: 800 * MIB, distinct_bytes: 400 * MIB, stored_bytes, metadata_bytes }
    }

    #[test]
    fn a_store_that_shares_too_little_or_says_too_little_is_noticed() {
        let count = |mapped_mib: u64, distinct_mib: u64| Count {
            of_images: 600 << 8,
            mapped: mapped_mib << 8,
            distinct: distinct_mib << 8,
        };
        judge(&stats(400 * MIB, 12 * MIB), &count(800, 400)).unwrap();
        judge(&stats(404 * MIB, 12 * MIB), &count(800, 400)).unwrap();
        for wrong in
            [stats(405 * MIB, 12 * MIB), stats(399 * MIB, 7 * MIB), stats(400 * MIB, 13 * MIB)]
        {
            judge(&wrong, &count(800, 400)).unwrap_err();
        }
        judge(&stats(400 * MIB, 12 * MIB), &count(800, 401)).unwrap_err();
        judge(&stats(400 * MIB, 12 * MIB), &count(801, 400)).unwrap_err();
    }

    #[test]
    fn blocks_are_counted_once_and_zeros_never() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
        let block = |value: u8| [value; BLOCK_BYTES];
        std::fs::write(&a, [block(1), block(0), block(2), block(1)].concat()).unwrap();
        std::fs::write(&b, [block(2), block(3), block(0)].concat()).unwrap();
        let count = count(&[("a", a), ("b", b)]).unwrap();
        assert_eq!((count.of_images, count.mapped, count.distinct), (3 + 2, 2 * 3 + 2, 3));
    }
}
