//! The policy by which a keeper opens files for a worker.
//!
//! It is asked about what a name has led to in the end, as the kernel says it, and never about the name
//! itself. The exceptions are a few texts of the kernel's, which are known by their names.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use super::connect::Server;
use crate::fence::Terms;
use crate::tunnel::TunnelUser;

/// The end of the name of an image's dirty maps, in the image's folder.
pub const DIRTY_EXTENSION: &str = ".ferrite-dirty";
/// The end of the name of the mark of an image that was moved to another host, in the image's folder.
pub const MOVED_EXTENSION: &str = ".ferrite-moved";

/// The rights that a worker may have in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Right {
    /// Files and devices are read, folders are listed.
    Read,
    /// This one is written, too, and keeps its name.
    Write,
    /// Files come and go here; the folder itself, too, or the one file.
    Own,
    /// Of this folder's files, which are the journals of all images, those of the own image come and go.
    /// All are read: which of them an image needs, only the image tells.
    Journals,
}

/// The right in one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// A folder with all below it, or one file.
    pub place: PathBuf,
    /// Whether it is a folder's.
    pub is_folder: bool,
    /// The right there.
    pub right: Right,
}

/// The names of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Whatever none of them allows is refused.
    pub rules: Vec<Rule>,
    /// How the names of the own image's journals end. It follows from what the image is now.
    pub journal_end: Option<String>,
    /// The servers that it may be connected to.
    pub servers: Vec<Server>,
    /// The user of the tunnels to these.
    pub tunnel: Option<TunnelUser>,
    /// How the image's LUN is reserved, if it is one that other hosts see.
    pub fence: Option<Terms>,
}

/// The purpose of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read, list or examine it.
    Look,
    /// To write what is there.
    Change,
    /// To make it if it is not there.
    Make,
    /// To take its name away, to give it one.
    Replace,
    /// To make and remove a folder.
    ReplaceFolder,
}

impl Policy {
    /// That of a disk's worker. Its image is written if `writable`, and whatever is read lies in
    /// the image's folder or one of `folders`, or below.
    pub fn of_disk(image: &Path, writable: bool, folders: &[PathBuf]) -> Policy {
        let mut policy = Policy::default();
        policy.add(image, false, if writable { Right::Write } else { Right::Read });
        if writable {
            let mut maps = image.as_os_str().to_owned();
            maps.push(DIRTY_EXTENSION);
            policy.add(maps.as_ref(), false, Right::Write);
        }
        // A folder of devices, or the root, is not allowed as a whole below.
        let mut mark = image.as_os_str().to_owned();
        mark.push(MOVED_EXTENSION);
        policy.add(mark.as_ref(), false, Right::Read);
        // Below the root there is everything, and the devices' folder is no image's.
        let own = image.parent().filter(|folder| folder.parent().is_some());
        let is_devices =
            |folder: &Path| folder.starts_with("/dev") && !folder.starts_with("/dev/shm/");
        let own = own.filter(|folder| !is_devices(folder));
        for folder in own.into_iter().chain(folders.iter().map(PathBuf::as_path)) {
            policy.add(folder, true, Right::Read);
        }
        policy
    }

    /// One rule more.
    pub fn add(&mut self, place: &Path, is_folder: bool, right: Right) {
        self.rules.push(Rule { place: place.to_owned(), is_folder, right });
    }

    /// Whether `access` is allowed to what is at `place`, which is without links and dots.
    pub fn allows(&self, place: &Path, kind: FileType, access: Access) -> bool {
        let is_kind = match kind {
            FileType::RegularFile | FileType::BlockDevice => true,
            // Of an NVMe namespace, which the image itself may be: the caller has looked.
            FileType::CharacterDevice => self.rules.iter().any(|rule| rule.is_image(place)),
            FileType::Directory => matches!(access, Access::Look | Access::ReplaceFolder),
            FileType::Symlink => access == Access::Look,
            _ => false,
        };
        is_kind && self.rules.iter().any(|rule| rule.allows(place, kind, access))
            || kind == FileType::RegularFile && self.is_own_journal(place)
            || is_kernels(place, kind) && access == Access::Look
    }
}

impl Policy {
    /// The image, if it is written.
    pub fn written(&self) -> Option<&Path> {
        let is_written = |rule: &&Rule| !rule.is_folder && rule.right == Right::Write;
        self.rules.iter().find(is_written).map(|rule| rule.place.as_path())
    }

    fn is_own_journal(&self, place: &Path) -> bool {
        let name = place.file_name().unwrap_or_default().as_bytes();
        let is_own = |end: &String| {
            // Beside a journal are the blocks that have changed (disk-base/src/dirty/fine.rs).
            let blocks = name.strip_suffix(b".dirty").zip(end.strip_suffix(".journal"));
            let is_blocks = |(name, end): (&[u8], &str)| name.ends_with(end.as_bytes());
            name.ends_with(end.as_bytes()) || blocks.is_some_and(is_blocks)
        };
        let mut folders = self.rules.iter().filter(|rule| rule.right == Right::Journals);
        self.journal_end.as_ref().is_some_and(is_own)
            && folders.any(|rule| place.parent() == Some(&rule.place))
    }
}

impl Rule {
    fn is_image(&self, place: &Path) -> bool {
        let name = place.as_os_str().as_bytes();
        let is_beside =
            [DIRTY_EXTENSION, MOVED_EXTENSION].iter().any(|e| name.ends_with(e.as_bytes()));
        !self.is_folder && self.right <= Right::Write && self.place == place && !is_beside
    }

    fn allows(&self, place: &Path, kind: FileType, access: Access) -> bool {
        let is_there = match self.is_folder {
            true => place.starts_with(&self.place),
            false => place == self.place,
        };
        let is_own = self.right == Right::Own;
        is_there
            && match access {
                Access::Look => true,
                // A device has no place in a folder of ours.
                Access::Change if is_own => kind == FileType::RegularFile,
                Access::Change => !self.is_folder && self.right >= Right::Write,
                Access::Make | Access::Replace => {
                    is_own && !(self.is_folder && place == self.place)
                }
                Access::ReplaceFolder => is_own && self.is_folder,
            }
    }
}

/// Whether it is a part of sysfs that describes block devices or memory, by its place without links.
fn is_kernels(place: &Path, kind: FileType) -> bool {
    let of_devices = |place: &Path| {
        let text = place.as_os_str().as_bytes();
        let has = |part: &[u8]| text.windows(part.len()).any(|window| window == part);
        place.starts_with("/sys/devices") && (has(b"/block/") || has(b"/nvme"))
    };
    let lists = ["/sys/block", "/sys/class/block", "/sys/dev/block", "/sys/dev/char"];
    match kind {
        FileType::RegularFile => of_devices(place) || place.starts_with("/sys/kernel/mm"),
        FileType::Symlink | FileType::Directory => {
            of_devices(place) || lists.iter().any(|list| place.starts_with(list))
        }
        _ => false,
    }
}

/// Whether a name is that of a text of procfs that a worker may read. Its names do not lead
/// elsewhere, and `self` is the keeper, whose mounts are the same.
pub fn is_text(name: &Path, worker: u32) -> bool {
    const TEXTS: [&str; 3] = ["/proc/locks", "/proc/self/mountinfo", "/proc/sys/kernel/osrelease"];
    let Some(name) = name.to_str() else { return false };
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    let words: Vec<&str> = name.split('/').collect();
    TEXTS.contains(&name)
        || match words[..] {
            ["", "proc", process, "comm"] => is_number(process),
            ["", "proc", process, "task", thread, "schedstat"] => {
                process == worker.to_string() && is_number(thread)
            }
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        let mut policy = Policy::of_disk(
            "/srv/a/disk.qcow2".as_ref(),
            true,
            &["/srv/templates".into(), "/dev/vg".into()],
        );
        policy.add("/run/ferrite/vbd-1-2".as_ref(), true, Right::Own);
        policy.add("/run/ferrite/stats/vbd-1-2".as_ref(), false, Right::Own);
        policy.add("/run/ferrite/images".as_ref(), true, Right::Journals);
        policy.journal_end = Some("-12.journal".to_owned());
        policy
    }

    #[test]
    fn only_the_image_is_written_and_only_own_folders_change() {
        use Access::{Change, Look, Make, Replace, ReplaceFolder};
        let file = FileType::RegularFile;
        for (place, allowed) in [
            ("/srv/a/disk.qcow2", &[Look, Change][..]),
            ("/srv/a/disk.qcow2.ferrite-dirty", &[Look, Change]),
            ("/srv/a/parent.qcow2.ferrite-dirty", &[Look]),
            ("/srv/a/parent.qcow2", &[Look]),
            ("/srv/a/b/c", &[Look]),
            ("/srv/templates/t.vhd", &[Look]),
            ("/srv/ab/x", &[]),
            ("/srv/templates.old", &[]),
            ("/etc/shadow", &[]),
            ("/run/ferrite/vbd-1-2/inflight", &[Look, Change, Make, Replace, ReplaceFolder]),
            ("/run/ferrite/vbd-1-20/inflight", &[]),
            ("/run/ferrite/vbd-1-2", &[Look, Change, ReplaceFolder]),
            ("/run/ferrite/stats/vbd-1-2", &[Look, Change, Make, Replace]),
            ("/run/ferrite/stats/vbd-1-3", &[]),
            ("/run/ferrite/control.sock", &[]),
            ("/run/ferrite/images/ab-12.journal", &[Look, Change, Make, Replace, ReplaceFolder]),
            ("/run/ferrite/images/ab-12.dirty", &[Look, Change, Make, Replace, ReplaceFolder]),
            ("/run/ferrite/images/ab-123.dirty", &[Look]),
            ("/run/ferrite/images/ab-123.journal", &[Look]),
            ("/run/ferrite/images/x/ab-12.journal", &[Look]),
            ("/run/ferrite/images", &[Look]),
            ("/srv/a/ab-12.journal", &[Look]),
        ] {
            for access in [Look, Change, Make, Replace, ReplaceFolder] {
                let is = policy().allows(place.as_ref(), file, access);
                assert_eq!(is, allowed.contains(&access), "{place} {access:?}");
            }
        }
    }

    #[test]
    fn what_is_neither_file_nor_block_device_is_nobodys() {
        for kind in [FileType::Fifo, FileType::Socket, FileType::CharacterDevice, FileType::Unknown]
        {
            for place in ["/srv/a/x", "/run/ferrite/vbd-1-2/x", "/dev/vg/x", "/sys/block/x"] {
                assert!(!policy().allows(place.as_ref(), kind, Access::Look), "{place} {kind:?}");
            }
        }
        let node = Path::new("/run/ferrite/vbd-1-2/node");
        assert!(!policy().allows(node, FileType::BlockDevice, Access::Change));
    }

    #[test]
    fn the_root_and_the_devices_folder_are_nobodys_own() {
        for image in ["/disk.img", "/dev/sda"] {
            let policy = Policy::of_disk(image.as_ref(), true, &[]);
            assert!(policy.rules.iter().all(|rule| !rule.is_folder), "{image}");
        }
    }

    #[test]
    fn texts_of_the_kernels_are_known_by_their_names() {
        for name in
            ["/proc/locks", "/proc/self/mountinfo", "/proc/1/comm", "/proc/7/task/8/schedstat"]
        {
            assert!(is_text(name.as_ref(), 7), "{name}");
        }
        for name in [
            "/proc/self/environ",
            "/proc/8/task/8/schedstat",
            "/proc/7/task/../environ",
            "/proc/7/../1/comm",
            "/proc//comm",
            "/proc/self/comm",
            "proc/locks",
            "/proc/locks/",
        ] {
            assert!(!is_text(name.as_ref(), 7), "{name}");
        }
        let is = |place: &str, kind| policy().allows(place.as_ref(), kind, Access::Look);
        assert!(is("/sys/devices/virtual/block/loop0/queue/io_poll", FileType::RegularFile));
        assert!(!is("/sys/devices/virtual/dmi/id/product_serial", FileType::RegularFile));
        assert!(!is("/sys/kernel/notes", FileType::RegularFile));
    }
}
