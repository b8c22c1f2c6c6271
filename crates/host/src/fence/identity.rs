//! Which LUN a block device is, by the name that the LUN itself has: it outlives the host's restart.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, fstat, major, minor};

use crate::names;

/// A name for people and for a file: letters, digits, `.` and `-`.
///
/// # Errors
/// Why the device is no LUN that can be reserved.
pub(super) fn of(file: BorrowedFd<'_>) -> Result<String, String> {
    let stat = fstat(file).map_err(|e| e.to_string())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
        return Err("it is no block device".to_owned());
    }
    let of = format!("/sys/dev/block/{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    let read = |name: &str| {
        let text = names::read_to_string(format!("{of}/{name}")).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    if read("partition").is_some() {
        return Err("it is a partition, and a reservation is the whole LUN's".to_owned());
    }
    let name = match read("dm/uuid") {
        Some(uuid) if uuid.starts_with("mpath-") => Some(uuid),
        Some(_) => {
            let why = "it is a volume, and a reservation is the whole LUN's, with all volumes of other hosts on it";
            return Err(why.to_owned());
        }
        None => read("device/wwid").or_else(|| read("wwid")),
    };
    match name {
        Some(name) => Ok(as_file_name(&name)),
        None => Err("it is neither a LUN of SCSI or NVMe nor multipath's device of one".to_owned()),
    }
}

/// The name that a LUN has on every host, by one path or by several: its own (NAA, EUI and such).
///
/// # Errors
/// Why the device is no LUN that can be reserved.
pub(super) fn wwid(file: BorrowedFd<'_>) -> Result<String, String> {
    of(file)?;
    let stat = fstat(file).map_err(|e| e.to_string())?;
    let number = format!("{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    let none = || "it does not say what its name is on other hosts".to_owned();
    wwid_of(Path::new("/sys/dev/block").join(number).as_path()).ok_or_else(none)
}

/// The name that a device with this folder in sysfs has on every host. `None`: it is no LUN.
fn wwid_of(sysfs: &Path) -> Option<String> {
    let first =
        names::read_dir(sysfs.join("slaves")).ok().and_then(|mut all| all.find_map(Result::ok));
    let is_of_several =
        names::read_to_string(sysfs.join("dm/uuid")).is_ok_and(|uuid| uuid.starts_with("mpath-"));
    let of = match first {
        Some(path) if is_of_several => path.path(),
        _ => sysfs.to_owned(),
    };
    let read = |name: &str| names::read_to_string(of.join(name)).ok();
    let name = read("device/wwid").or_else(|| read("wwid"))?;
    Some(as_file_name(name.trim())).filter(|name| !name.is_empty())
}

/// The device of the LUN with this name on this host: multipath's, if it has one.
pub(super) fn find(wwid: &str) -> Option<PathBuf> {
    let all = names::read_dir("/sys/block").ok()?.filter_map(Result::ok);
    let is_it = |path: &PathBuf| wwid_of(path).is_some_and(|name| name == wwid);
    let mut found: Vec<PathBuf> = all.map(|entry| entry.path()).filter(is_it).collect();
    // Multipath's device has a path's name, too.
    found.sort_by_key(|path| !path.join("dm").exists());
    Some(Path::new("/dev").join(found.first()?.file_name()?))
}

fn as_file_name(name: &str) -> String {
    const MOST: usize = 160;
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '_' };
    let name: String = name.chars().map(plain).take(MOST).collect();
    let is_part = |part: &&str| part.chars().any(|c| c != '.');
    name.split('_').filter(is_part).collect::<Vec<_>>().join("_").trim_start_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_luns_name_becomes_a_files() {
        for (name, file) in [
            ("naa.60014050a1b2c3d4", "naa.60014050a1b2c3d4"),
            ("t10.IET     00010001", "t10.IET_00010001"),
            ("../../etc/x", "etc_x"),
            ("eui.00\u{e9}", "eui.00"),
        ] {
            let found = as_file_name(name);
            assert!(!found.contains('/') && !found.starts_with('.'), "{found}");
            if !name.contains("..") {
                assert_eq!(found, file);
            }
        }
    }
}
