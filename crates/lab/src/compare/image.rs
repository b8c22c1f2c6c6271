//! Images for measurements.

use anyhow::{Context, Result};
use ferrite_xenhost::steps::step;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

/// A file in which every block has been written. Its name has been removed, so it is freed however this program ends.
pub(crate) struct Image {
    file: File,
}

impl Image {
    /// Makes one of `mib` MiB in `dir`.
    ///
    /// # Errors
    /// There is no room, or the folder cannot be written to.
    pub(crate) fn make(dir: &Path, mib: usize) -> Result<Image> {
        step(&format!("fill an image of {mib} MiB in {}", dir.display()), || {
            std::fs::create_dir_all(dir)?;
            let path = dir.join(format!("ferrite-bench-{}.img", std::process::id()));
            let file = filled(&path, mib);
            std::fs::remove_file(&path)?;
            Ok(Image { file: file? })
        })
    }

    /// The path by which other programs open it, as long as this program runs.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }
}

/// Makes a file in which every block has been written, and no two blocks of 4 KiB are equal.
pub(crate) fn filled(path: &Path, mib: usize) -> Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(path);
    let mut file = file.with_context(|| format!("cannot make {}", path.display()))?;
    let mut piece = noise();
    for i in 0..mib as u64 {
        piece.chunks_mut(BLOCK).for_each(|block| block[..8].copy_from_slice(&i.to_le_bytes()));
        let cannot = || format!("cannot write {}: is there room for {mib} MiB?", path.display());
        file.write_all(&piece).with_context(cannot)?;
    }
    file.sync_all().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(file)
}

/// A MiB that no storage can compress.
fn noise() -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..MIB / 8).flat_map(|_| next().to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_full_and_has_no_name() {
        let dir = std::env::temp_dir().join(format!("ferrite-xtask-{}", std::process::id()));
        let image = Image::make(&dir, 2).unwrap();
        let bytes = std::fs::read(image.path()).unwrap();
        assert_eq!(bytes.len(), 2 * MIB);
        assert!(bytes.chunks(BLOCK).all(|block| block.iter().any(|b| *b != 0)));
        let distinct: std::collections::HashSet<&[u8]> = bytes.chunks(BLOCK).collect();
        assert_eq!(distinct.len(), 2 * MIB / BLOCK);
        // The folder is empty, as it can be removed.
        std::fs::remove_dir(&dir).unwrap();
    }
}
