//! The image that a table names, and how it comes to name another one.
//!
//! There is room for two names, and a word that says which of them counts. Killed anywhere, the
//! process leaves one of the two whole:
//! 1. the new name goes where the other one counts;
//! 2. the word is stored.

use ferrite_disk::DiskIdentity;
use ferrite_io::shm::Shm;

/// Of the whole header.
pub(super) const HEADER_BYTES: usize = 20 << 10;
/// 0 or 1: which name counts.
const COUNTS_AT: usize = 28;
/// The lengths of the first name's key and path; the other's are behind them.
const LENGTHS_AT: usize = 32;
const LENGTHS_BYTES: usize = 8;
/// A path that is longer is cut off.
const PATH_BYTES: usize = 1024;
const NAME_BYTES: usize = DiskIdentity::MAX_KEY_BYTES + PATH_BYTES;
/// Both names, at the header's end.
pub(super) const FIRST_AT: usize = HEADER_BYTES - 2 * NAME_BYTES;

/// Where a name's texts are: length, text, and its room.
fn places(name: u32) -> [(usize, usize, usize); 2] {
    let (lengths, at) =
        (LENGTHS_AT + name as usize * LENGTHS_BYTES, FIRST_AT + name as usize * NAME_BYTES);
    let key = (lengths, at, DiskIdentity::MAX_KEY_BYTES);
    [key, (lengths + 4, at + DiskIdentity::MAX_KEY_BYTES, PATH_BYTES)]
}

fn counting(shm: &Shm) -> u32 {
    shm.load_u32(COUNTS_AT) & 1
}

/// The name that counts.
pub(super) fn named(shm: &Shm) -> DiskIdentity {
    let [key, path] = places(counting(shm)).map(|(len_at, at, most)| text(shm, len_at, at, most));
    DiskIdentity { key, path }
}

/// From now on this one counts.
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

/// Whether the process was not killed: tests kill a model of it before any one store.
fn lives() -> bool {
    #[cfg(test)]
    return super::tests::lives();
    #[cfg(not(test))]
    true
}

/// A text of the header, which the predecessor wrote.
pub(super) fn text(shm: &Shm, len_at: usize, at: usize, most: usize) -> String {
    let mut bytes = vec![0; (shm.load_u32(len_at) as usize).min(most)];
    shm.copy_out(at, &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
