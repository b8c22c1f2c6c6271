//! The kinds of medium, and the errors of opening one.

use std::path::Path;

use ferrite_host::names;

use crate::{DiskError, ErrorKind};

/// The kinds of medium that a raw disk can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    File,
    BlockDevice,
    /// The character device of an NVMe namespace: only engines that send commands can use it.
    Nvme,
}

/// The purpose of opening a file or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// As a raw disk.
    Disk,
    /// As the medium of an image.
    Medium,
    /// As a store, which is accessed in its own blocks.
    Store,
}

pub(super) fn cannot_open(path: &Path) -> String {
    format!("cannot open image {}", path.display())
}

pub(super) fn io_error(path: &Path, what: &str, e: rustix::io::Errno) -> DiskError {
    let help = "check the medium below it and the kernel's log (dmesg)";
    DiskError::new(ErrorKind::Io, cannot_open(path), format!("{what}: {e}"), help).with_source(e)
}

/// A number from sysfs about a block device, or about the device that a partition is part of.
pub(super) fn sysfs_number((major, minor): (u32, u32), name: &str) -> Option<u64> {
    let device = format!("/sys/dev/block/{major}:{minor}");
    ["", "../"].iter().find_map(|up| {
        names::read_to_string(format!("{device}/{up}{name}")).ok()?.trim().parse().ok()
    })
}
