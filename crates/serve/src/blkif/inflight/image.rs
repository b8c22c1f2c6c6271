//! The image name in a table, and how it is replaced.
//!
//! The header has room for two names, and a word that says which of them is current. A process that
//! is killed at any point leaves one of the two names whole:
//! 1. The new name is written where the other name is.
//! 2. The word is stored.

use ferrite_disk::DiskIdentity;
use ferrite_host::shm::Shm;

/// Size of the whole header.
pub(super) const HEADER_BYTES: usize = 20 << 10;
/// The word that says which name is current: 0 or 1.
const COUNTS_AT: usize = 28;
/// The lengths of the first name's key and path. Those of the second name follow.
const LENGTHS_AT: usize = 32;
const LENGTHS_BYTES: usize = 8;
/// Longer paths are cut off.
const PATH_BYTES: usize = 1024;
const NAME_BYTES: usize = DiskIdentity::MAX_KEY_BYTES + PATH_BYTES;
/// Offset of the two names, at the end of the header.
pub(super) const FIRST_AT: usize = HEADER_BYTES - 2 * NAME_BYTES;

/// Returns where a name's texts are: for each the offset of its length, the offset of its text, and
/// its room in bytes.
fn places(name: u32) -> [(usize, usize, usize); 2] {
    let (lengths, at) =
        (LENGTHS_AT + name as usize * LENGTHS_BYTES, FIRST_AT + name as usize * NAME_BYTES);
    let key = (lengths, at, DiskIdentity::MAX_KEY_BYTES);
    [key, (lengths + 4, at + DiskIdentity::MAX_KEY_BYTES, PATH_BYTES)]
}

fn counting(shm: &Shm) -> u32 {
    shm.load_u32(COUNTS_AT) & 1
}

/// Returns the current name.
pub(super) fn named(shm: &Shm) -> DiskIdentity {
    let [key, path] = places(counting(shm)).map(|(len_at, at, most)| text(shm, len_at, at, most));
    DiskIdentity { key, path }
}

/// Makes `image` the current name.
pub(super) fn name(shm: &Shm, image: &DiskIdentity) {
    let other = 1 - counting(shm);
    for ((len_at, at, most), text) in places(other).into_iter().zip([&image.key, &image.path]) {
        let bytes = &text.as_bytes()[..text.len().min(most)];
        if lives() {
            shm.store_u32(len_at, bytes.len() as u32);
        }
        if lives() {
            shm.copy_in(at, bytes);
        }
    }
    if lives() {
        shm.store_u32(COUNTS_AT, other);
    }
}

/// Returns whether the process still runs: tests kill a model of it before any single store.
fn lives() -> bool {
    #[cfg(test)]
    return super::tests::lives();
    #[cfg(not(test))]
    true
}

/// Reads a text that the predecessor wrote to the header.
pub(super) fn text(shm: &Shm, len_at: usize, at: usize, most: usize) -> String {
    let mut bytes = vec![0; (shm.load_u32(len_at) as usize).min(most)];
    shm.copy_out(at, &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
