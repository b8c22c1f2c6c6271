//! A disk's medium, in words that do not change when it comes back under another device
//! number.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::UNIX_EPOCH;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, StatxFlags, fstat, fstatvfs, major, minor, statx,
};
use rustix::io::Errno;

use crate::names;
use crate::naming::file_system_uuid;
use crate::nvme::block_device;

/// The longest that is kept.
pub const MAX_BYTES: usize = 4 * MAX_CHARS;
const MAX_CHARS: usize = 256;
/// The longest name of a file system; a file's number and its date go with it.
const MAX_SYSTEM_CHARS: usize = 160;

/// A device's number: major and minor.
type Number = (u32, u32);

/// A file or a device. Two that are alike are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(String);

impl Place {
    /// Of an open file, which was named by `path`.
    ///
    /// A file is its number, when it was made, and its file system: a copy has the UUID of its
    /// original, and a new file may get the number of one that is gone. A volume is the identifier that
    /// its driver reports; without one, the name that it was opened by.
    ///
    /// # Errors
    /// It cannot be examined.
    pub fn of(file: impl AsFd, path: &Path) -> io::Result<Place> {
        Place::or_else(file, |_| format!("device {}", path.display()))
    }

    /// Of an open file, to be compared until the host goes down. A device without an identifier is its
    /// number and the kernel's count of the devices that it has seen: another device may get the number.
    ///
    /// # Errors
    /// It cannot be examined.
    pub fn while_up(file: impl AsFd) -> io::Result<Place> {
        Place::or_else(file, |(major, minor)| {
            let dir = format!("/sys/dev/block/{major}:{minor}");
            let count = read(&dir, "diskseq").or_else(|| read(&dir, "../diskseq"));
            let count = count.map(|count| format!(", number {count} since the host came up"));
            format!("device {major}:{minor}{}", count.unwrap_or_default())
        })
    }

    fn or_else(file: impl AsFd, unnamed: impl FnOnce(Number) -> String) -> io::Result<Place> {
        let stat = fstat(&file)?;
        let number = (major(stat.st_rdev), minor(stat.st_rdev));
        let text = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => volume(&by_number(number)).unwrap_or_else(|| unnamed(number)),
            FileType::CharacterDevice => block_device(number)
                .and_then(|name| volume(&format!("/sys/class/block/{name}")))
                .unwrap_or_else(|| format!("character {}", unnamed(number))),
            _ => {
                let (inode, made) = (stat.st_ino, made_ns(&file)?);
                format!("inode {inode} made {made} on {}", file_system(&file)?)
            }
        };
        Ok(Place(short(text, MAX_CHARS)))
    }

    /// Of what a path leads to now.
    ///
    /// # Errors
    /// There is nothing, or it cannot be examined.
    pub fn at(path: &Path) -> io::Result<Place> {
        Place::of(look_at(path)?, path)
    }

    /// The same, to be compared after the host has started again.
    ///
    /// # Errors
    /// There is nothing, or it cannot be examined.
    pub fn lasting(path: &Path) -> io::Result<Place> {
        let place = Place::at(path)?;
        match place.file() {
            None => Ok(place),
            Some((file, _)) => Ok(Place(format!("inode {file} on {}", lasting_file_system(path)?))),
        }
    }

    /// The place of this [`text`](Self::text).
    pub fn from_text(text: String) -> Place {
        Place(text)
    }

    /// To be kept: no longer than [`MAX_BYTES`].
    pub fn text(&self) -> &str {
        &self.0
    }

    /// A file's file system, as [`file_system`] calls it; none of a device.
    pub fn file_system(&self) -> Option<&str> {
        Some(self.file()?.1)
    }

    /// Whether a file of this place has the number of that one, and is another one.
    pub fn has_replaced(&self, that: &Place) -> bool {
        let number = |place: &Place| {
            let (inode, system) = place.file()?;
            Some((inode.split_once(' ')?.0.to_owned(), system.to_owned()))
        };
        self != that && number(self).is_some() && number(self) == number(that)
    }

    /// Whether one is a loop device and the other the file that it is on.
    pub fn is_another_way_to(&self, that: &Place) -> bool {
        let is_on = |device: &Place, file: &Place| {
            let behind = device.0.strip_prefix("loop on inode ")?.split_once(", from byte ")?.0;
            Some(behind == file.file()?.0)
        };
        is_on(self, that).or_else(|| is_on(that, self)) == Some(true)
    }

    /// Of a file: number and date, and file system.
    fn file(&self) -> Option<(&str, &str)> {
        self.0.strip_prefix("inode ")?.split_once(" on ")
    }

    /// The end of the names of journals of what is there; the beginning says which image it is.
    pub fn journal_end(&self) -> String {
        format!("-{:016x}.journal", hash(&self.0))
    }
}

/// Opens what a path leads to, for nothing but to examine it.
pub fn look_at(path: &Path) -> io::Result<std::os::fd::OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(names::open(path, flags, Mode::empty())?)
}

/// Opens the nearest folder above a path that is there, for more than its path.
pub fn folder_above(path: &Path) -> Option<std::os::fd::OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |folder: &Path| names::open(folder, flags, Mode::empty()).ok();
    path.ancestors().skip(1).find_map(open)
}

/// The file system that an open file or folder is on, in words as [`Place`]'s: those of its volume,
/// else its own identifier, else by what and where it is mounted. FUSE and NFS have no identifier,
/// and files of two of them may have one number.
///
/// # Errors
/// It cannot be examined.
pub fn file_system(file: impl AsFd) -> io::Result<String> {
    let stat = fstat(&file)?;
    let number = (major(stat.st_dev), minor(stat.st_dev));
    let text = match (volume(&by_number(number)), fstatvfs(&file)?.f_fsid) {
        (Some(volume), _) => volume,
        (None, 0) => mounted(&names::read_to_string("/proc/self/mountinfo")?, number)
            .unwrap_or_else(|| format!("file system {}:{}", number.0, number.1)),
        (None, id) => format!("file system {id:x}"),
    };
    Ok(short(text, MAX_SYSTEM_CHARS))
}

/// The file system that a path is on, or would be, as it is called also after the host has started again.
/// Identifiers of file systems that are made of a device's number change then, UUIDs do not.
///
/// # Errors
/// It cannot be examined.
pub fn lasting_file_system(path: &Path) -> io::Result<String> {
    let there = path.ancestors().skip(1).find(|folder| names::is_dir(folder));
    let folder = look_at(there.unwrap_or(Path::new("/")))?;
    let stat = fstat(&folder)?;
    let is_named = volume(&by_number((major(stat.st_dev), minor(stat.st_dev)))).is_some();
    // A process that may not open the folder gets another name, which is that of none that is known.
    let uuid = || file_system_uuid(names::open_folder_again(folder.as_fd()).ok()?.as_fd());
    match (!is_named).then(uuid).flatten() {
        Some(uuid) => Ok(format!("file system {:032x}", u128::from_be_bytes(uuid))),
        None => file_system(folder),
    }
}

/// The file system that is mounted under this number. Lines are
/// `36 35 0:40 /root /mount/point options [fields...] - type source options`.
///
/// A server and its export name a file system. A local program names its file systems as it likes,
/// mostly all the same: such a one is named by its first mount point, too.
fn mounted(mounts: &str, (major, minor): Number) -> Option<String> {
    let number = format!("{major}:{minor}");
    mounts.lines().find_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(2);
        let at = mount.next().filter(|found| *found == number).and_then(|_| mount.nth(1))?;
        let mut system = system.split(' ');
        let (kind, source) = (system.next()?, system.next()?);
        let remote = source.contains(":/") || source.starts_with("//");
        match remote && !kind.starts_with("fuse") {
            true => Some(format!("{kind} {source}")),
            false => Some(format!("{kind} {source} at {at}")),
        }
    })
}

/// The text, or another one for it that is no longer than that.
fn short(text: String, chars: usize) -> String {
    if text.chars().count() <= chars {
        return text;
    }
    let mark = format!("~{:016x}", hash(&text));
    text.chars().take(chars - mark.len()).chain(mark.chars()).collect()
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325u64;
    text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// When a file was made, as far as its file system tells.
fn made_ns(file: impl AsFd) -> io::Result<u128> {
    match statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME) {
        Ok(stat) if stat.stx_mask & StatxFlags::BTIME.bits() != 0 => {
            let seconds = u128::try_from(stat.stx_btime.tv_sec).unwrap_or(0);
            Ok(seconds * 1_000_000_000 + u128::from(stat.stx_btime.tv_nsec))
        }
        Ok(_) | Err(Errno::NOSYS) => Ok(0),
        Err(e) => Err(e.into()),
    }
}

/// Where the kernel describes a block device.
fn by_number((major, minor): Number) -> String {
    format!("/sys/dev/block/{major}:{minor}")
}

/// The kernel's attribute of a device, if there is one.
fn read(dir: &str, name: &str) -> Option<String> {
    let text = names::read_to_string(format!("{dir}/{name}")).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The name of a block device, whatever its number.
fn volume(dir: &str) -> Option<String> {
    if let Some(start) = read(dir, "partition").and_then(|_| read(dir, "start")) {
        let whole = named(&|name| read(&format!("{dir}/.."), name))?;
        return Some(format!("{whole}, from sector {start}"));
    }
    named(&|name| read(dir, name))
}

/// By what its driver says of it.
fn named(read: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let said = |name: &str, what: &str| Some(format!("{what} {}", read(name)?));
    said("dm/uuid", "volume")
        .or_else(|| said("md/uuid", "array"))
        .or_else(|| said("wwid", "device"))
        .or_else(|| said("device/wwid", "device"))
        .or_else(|| said("serial", "device with serial number"))
        .or_else(|| {
            let file = names::metadata(read("loop/backing_file")?).ok()?;
            let made = file.created().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
            let (number, from) = (std::os::unix::fs::MetadataExt::ino(&file), read("loop/offset")?);
            Some(format!("loop on inode {number} made {made}, from byte {from}"))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
        27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
        42 27 0:39 / /srv/a rw,nosuid - fuse /dev/fuse rw,user_id=0\n\
        43 27 0:40 / /srv/b rw,nosuid master:3 shared:7 - fuse /dev/fuse rw,user_id=0\n\
        44 27 0:41 / /run/sr-mount/1 rw - nfs4 server:/export/1 rw,vers=4.2\n\
        45 27 0:42 / /run/sr-mount/2 rw - nfs4 server:/export/2 rw,vers=4.2\n\
        46 27 0:43 / /run/sr-mount/3 rw - nfs4 server:/export/1 rw,vers=4.2\n\
        47 27 0:44 / /srv/c rw - fuse.sshfs host:/a rw\n\
        garbage\n";

    #[test]
    fn two_file_systems_without_an_identifier_are_told_apart_by_what_is_mounted() {
        let name = |minor| mounted(MOUNTS, (0, minor));
        assert_eq!(name(39).unwrap(), "fuse /dev/fuse at /srv/a");
        assert_eq!(name(40).unwrap(), "fuse /dev/fuse at /srv/b");
        assert_ne!(name(41), name(42));
        assert_eq!(name(41), name(43), "mounted again, it has another number");
        assert_eq!(name(44).unwrap(), "fuse.sshfs host:/a at /srv/c");
        assert_eq!(name(4), None);
        assert_eq!(mounted(MOUNTS, (254, 0)).unwrap(), "ext4 /dev/vda at /");
        assert_eq!(mounted("1 2 0:39\n1 2 0:39 / / - \n - fuse a", (0, 39)), None);
    }

    #[test]
    fn a_file_that_has_anothers_number_has_replaced_it_on_the_same_file_system_only() {
        let place = |text: &str| Place::from_text(text.into());
        let old = place("inode 5 made 1 on volume a");
        assert!(place("inode 5 made 2 on volume a").has_replaced(&old));
        for other in ["inode 6 made 2 on volume a", "inode 5 made 2 on volume b", "volume a"] {
            assert!(!place(other).has_replaced(&old), "{other}");
        }
        assert!(!old.has_replaced(&old) && !place("volume b").has_replaced(&place("volume a")));
        assert_eq!((old.file_system(), place("volume a").file_system()), (Some("volume a"), None));
    }

    #[test]
    fn a_loop_device_is_another_way_to_its_file_and_to_no_other() {
        let place = |text: &str| Place::from_text(text.into());
        let device = place("loop on inode 5 made 1, from byte 0");
        let file = place("inode 5 made 1 on volume a");
        assert!(device.is_another_way_to(&file) && file.is_another_way_to(&device));
        for other in
            ["inode 6 made 1 on volume a", "inode 5 made 2 on volume a", "device /dev/loop0"]
        {
            assert!(!device.is_another_way_to(&place(other)), "{other}");
        }
        assert!(!device.is_another_way_to(&device) && !file.is_another_way_to(&file));
    }

    #[test]
    fn texts_that_differ_at_their_ends_only_stay_different_when_they_are_cut() {
        let long = "é".repeat(MAX_CHARS);
        assert_eq!(short(long.clone(), MAX_CHARS), long);
        let [a, b] = ["a", "b"].map(|end| short(format!("{long}{end}"), MAX_CHARS));
        assert_ne!(a, b);
        assert!(a.chars().count() == MAX_CHARS && a.len() <= MAX_BYTES);
    }

    #[test]
    fn a_device_is_what_its_driver_says_of_it() {
        let says = |files: &[(&str, &str)]| {
            let files = files.to_vec();
            named(&|name| Some(files.iter().find(|file| file.0 == name)?.1.to_owned()))
        };
        assert_eq!(says(&[("serial", "7"), ("wwid", "naa.1")]).unwrap(), "device naa.1");
        assert_eq!(says(&[("serial", "7")]).unwrap(), "device with serial number 7");
        assert_eq!(says(&[("size", "7")]), None);
    }
}
