//! A disk as it should be: which sector holds what, and sessions to compare it with.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ferrite_disk::{Disk, DiskError, ImageName, OpenOptions, Session};
use ferrite_image_tools::ImageTools;
use ferrite_testkit::bytes::first_difference;
use ferrite_testkit::images::{self, work};

pub(crate) use ferrite_testkit::images::{name, session as session_of};
pub(crate) use ferrite_testkit::programs::{check_clean, qemu, qemu_img, wait_until_released};

pub(crate) const SECTOR: u64 = 512;

/// Sectors that are not zeros, with the number that they are full of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Model(pub(crate) BTreeMap<u64, u64>);

/// The bytes of `count` sectors from `first` on that were written with `stamp`.
pub(crate) fn pattern(first: u64, count: u64, stamp: u64) -> Vec<u8> {
    sectors(first, count, |sector| mix(sector, stamp))
}

fn mix(sector: u64, stamp: u64) -> u64 {
    (sector + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(stamp << 32 | 1)
}

/// Sectors that are full of a number each. By the byte it would take most of the time of these tests.
fn sectors(first: u64, count: u64, word: impl Fn(u64) -> u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity((count * SECTOR) as usize);
    for sector in first..first + count {
        bytes.extend_from_slice(&word(sector).to_le_bytes().repeat(SECTOR as usize / 8));
    }
    bytes
}

impl Model {
    pub(crate) fn write(&mut self, first: u64, count: u64, stamp: u64) {
        self.0.extend((first..first + count).map(|sector| (sector, mix(sector, stamp))));
    }

    pub(crate) fn zero(&mut self, first: u64, count: u64) {
        let gone: Vec<u64> = self.0.range(first..first + count).map(|(s, _)| *s).collect();
        gone.iter().for_each(|s| {
            self.0.remove(s);
        });
    }

    /// The bytes of a range of sectors.
    pub(crate) fn bytes(&self, first: u64, count: u64) -> Vec<u8> {
        let word = |sector| self.0.get(&sector).copied().unwrap_or(0);
        sectors(first, count, word)
    }
}

/// Opens an image read-write, without a journal.
pub(crate) fn open(name: &str) -> Session {
    session(name, &OpenOptions::default()).unwrap()
}

/// Opens an image.
pub(crate) fn session(name: &str, options: &OpenOptions) -> Result<Session, DiskError> {
    Ok(images::session(Disk::open_image(&ImageName::parse(name)?, options)?))
}

/// Reads every part of the disk that the model or its surroundings know of, and compares.
pub(crate) fn compare(session: &mut Session, model: &Model) {
    let sectors = session.disk().sectors();
    let mut from = 0;
    let mut starts: Vec<u64> = model.0.keys().map(|s| s / 256 * 256).collect();
    starts.extend([0, sectors / 2 / 256 * 256, (sectors - 1) / 256 * 256]);
    starts.sort_unstable();
    starts.dedup();
    for start in starts.into_iter().filter(|s| *s < sectors) {
        assert!(start >= from);
        let count = 256.min(sectors - start);
        let mut bytes = vec![0xEE; (count * SECTOR) as usize];
        session.read(start * SECTOR, &mut bytes).unwrap();
        let wanted = model.bytes(start, count);
        if bytes != wanted {
            let at = first_difference(&bytes, &wanted).unwrap();
            panic!("sector {} differs", start + at as u64 / SECTOR);
        }
        from = start + count;
    }
}

/// Tools for images that are not in use.
pub(crate) fn tools<T>(use_it: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    work(None, use_it)
}

/// Changes 8 bytes of an image.
pub(crate) fn poke(path: &Path, at: u64, change: impl FnOnce(u64) -> u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    file.write_all_at(&change(u64::from_be_bytes(bytes)).to_be_bytes(), at).unwrap();
}

/// Reads them.
pub(crate) fn peek(path: &Path, at: u64) -> u64 {
    let mut found = 0;
    poke(path, at, |value| {
        found = value;
        value
    });
    found
}
