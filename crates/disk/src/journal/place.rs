//! Where an image is, in words that do not change when its volume comes back under another device
//! number.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::UNIX_EPOCH;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, StatxFlags, fstat, fstatvfs, major, minor, statx,
};
use rustix::io::Errno;

/// The longest that is kept.
pub(super) const MAX_BYTES: usize = 1024;

/// A file or a block device. Two that are alike are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place(String);

impl Place {
    /// Of an open file, which was named by `path`.
    ///
    /// A file is its number, when it was made, and its file system: a copy has the UUID of its
    /// original, and a new file may get the number of one that is gone. A volume is what it is
    /// called by whoever made it; where nobody says, the name that it was opened by.
    ///
    /// # Errors
    /// It cannot be examined.
    pub(super) fn of(file: impl AsFd, path: &Path) -> io::Result<Place> {
        let stat = fstat(&file)?;
        let text = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice | FileType::CharacterDevice => {
                volume((major(stat.st_rdev), minor(stat.st_rdev)))
                    .unwrap_or_else(|| format!("device {}", path.display()))
            }
            _ => {
                let system = volume((major(stat.st_dev), minor(stat.st_dev)));
                let system = match system {
                    Some(volume) => volume,
                    None => format!("file system {:x}", fstatvfs(&file)?.f_fsid),
                };
                format!("inode {} made {} on {system}", stat.st_ino, made_ns(&file)?)
            }
        };
        Ok(Place(text.chars().take(MAX_BYTES / 4).collect()))
    }

    /// Of what a path leads to now.
    pub(super) fn at(path: &Path) -> io::Result<Place> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        Place::of(rustix::fs::open(path, flags, Mode::empty())?, path)
    }

    pub(super) fn from_text(text: String) -> Place {
        Place(text)
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// A number for file names (FNV-1a).
    pub(super) fn hash(&self) -> u64 {
        let start = 0xcbf2_9ce4_8422_2325u64;
        self.0
            .bytes()
            .fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }
}

/// When a file was made, as far as its file system tells.
pub(crate) fn made_ns(file: impl AsFd) -> io::Result<u128> {
    match statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME) {
        Ok(stat) if stat.stx_mask & StatxFlags::BTIME.bits() != 0 => {
            let seconds = u128::try_from(stat.stx_btime.tv_sec).unwrap_or(0);
            Ok(seconds * 1_000_000_000 + u128::from(stat.stx_btime.tv_nsec))
        }
        Ok(_) | Err(Errno::NOSYS) => Ok(0),
        Err(e) => Err(e.into()),
    }
}

/// What a block device is called, whatever its number.
fn volume((major, minor): (u32, u32)) -> Option<String> {
    let dir = format!("/sys/dev/block/{major}:{minor}");
    let read = |dir: &str, name: &str| {
        let text = fs::read_to_string(format!("{dir}/{name}")).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    if let Some(start) = read(&dir, "partition").and_then(|_| read(&dir, "start")) {
        let whole = named(&|name| read(&format!("{dir}/.."), name))?;
        return Some(format!("{whole}, from sector {start}"));
    }
    named(&|name| read(&dir, name))
}

/// By what its driver says of it.
fn named(read: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let said = |name: &str, what: &str| Some(format!("{what} {}", read(name)?));
    said("dm/uuid", "volume")
        .or_else(|| said("md/uuid", "array"))
        .or_else(|| said("wwid", "device"))
        .or_else(|| said("device/wwid", "device"))
        .or_else(|| {
            let file = fs::metadata(read("loop/backing_file")?).ok()?;
            let made = file.created().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
            let (number, from) = (std::os::unix::fs::MetadataExt::ino(&file), read("loop/offset")?);
            Some(format!("loop on inode {number} made {made}, from byte {from}"))
        })
}
