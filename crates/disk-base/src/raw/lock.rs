//! Opens an image exclusively.
//!
//! Three locks, all held by the open file that does all I/O:
//! * `flock`, exclusive for a writer, shared for readers. It belongs to the open file, not to the process, and an
//!   io_uring keeps the open file until its last operation has ended. So when a process was killed, the lock is
//!   released only after the dead process's last write has reached the medium or failed. A process that takes over can
//!   neither overtake that write nor be overtaken by it.
//! * `O_EXCL` on a block device that is to be written: refused while it is mounted or claimed by device mapper, RAID or
//!   another exclusive opener, and refuses them from then on.
//! * QEMU's own, since QEMU uses neither of the two ([`qemu`]). They are taken after the `flock` and released before
//!   it, so no other process of ours has contradicting ones. On the disk of an HVM guest they may be taken as late as
//!   the guest's own driver connects (locks.md).
//!
//! If the toolstack does the locking, other users of the image are no reason to refuse it
//! ([`toolstack`]).
//!
//! A merge into a parent whose readers stay open has locks of its own ([`merging`]).
//!
//! A file that is attached to a loop device is not opened for writing, nor a loop device whose file is locked. That is
//! a check and no lock: a later attachment is not noticed.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::{Clock, SystemClock};
use ferrite_host::names::{self, stat};
use ferrite_host::nvme::block_device;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, major, minor};
use rustix::io::Errno;

use super::hold::Hold;
use super::holder::disk_of;
use super::medium::{Medium, cannot_open, io_error, sysfs_number};
use super::proc_locks::flock_holder;
use super::{loops, merging, qemu, toolstack};
use crate::content::before_sign;
use crate::error::READ_ONLY;
use crate::{DiskError, ErrorKind, OpenOptions};

const RETRY_AFTER: Duration = Duration::from_millis(20);

/// Device managers lock a block device for a moment, to examine it, after every close of it by a writer; that is no
/// reason to fail.
const DEVICE_GRACE: Duration = Duration::from_millis(500);

/// How long a device manager may take that is seen to have the lock: on a busy host it examines a device for seconds.
const EXAMINED_GRACE: Duration = Duration::from_secs(10);

/// The names of udev's processes.
const DEVICE_MANAGERS: [&str; 3] = ["(udev-worker)", "systemd-udevd", "udevd"];

/// How long the kernel may take to end the last operations of a process that has died; for a slower medium there is
/// `wait_for_lock`.
pub(super) const GONE_GRACE: Duration = Duration::from_secs(5);

/// A kernel thread releases a file a little after the end of its last operation, so an image that this process has just
/// closed may be locked for a moment.
pub(super) const OWN_GRACE: Duration = Duration::from_millis(500);

/// An image that is open and locked.
pub(super) struct Opened {
    pub(super) file: Arc<OwnedFd>,
    pub(super) stat: Stat,
    pub(super) medium: Medium,
    /// The keeper's hold of the file. For an NVMe namespace that is used by commands, also of its block device, so that
    /// no other process mounts or claims it.
    pub(super) holds: Vec<Hold>,
}

/// The reason why a file or device was not opened.
pub enum Unopened {
    /// No user has the permission to write to it. The kernel would let root write it nevertheless.
    Protected,
    /// Any other reason.
    Other(DiskError),
}

impl From<DiskError> for Unopened {
    fn from(e: DiskError) -> Unopened {
        Unopened::Other(e)
    }
}

/// The result of one attempt.
pub(super) enum Attempt {
    Done(Opened),
    /// In use: how long to try again in any case, and the reason.
    Busy(Duration, String),
    /// In use: after this time it is opened all the same.
    Later(Duration),
}

/// Opens and locks `path`. While it is in use, it tries again until the options' time is over.
pub(super) fn open(path: &Path, options: &OpenOptions) -> Result<Opened, Unopened> {
    let clock = SystemClock;
    let start_ns = clock.now_ns();
    let spent = || Duration::from_nanos(clock.now_ns() - start_ns);
    let mut insists = false;
    loop {
        let (grace, why) = match attempt(path, options, insists)? {
            Attempt::Done(opened) => return Ok(opened),
            Attempt::Busy(grace, why) => (grace, why),
            Attempt::Later(grace) => {
                insists = spent() >= grace;
                clock.sleep(RETRY_AFTER);
                continue;
            }
        };
        let patience = options.wait_for_lock.unwrap_or_default().max(grace);
        if spent() >= patience {
            let help = match options.read_only {
                true => {
                    "stop its writer first, or use a snapshot or copy of it; ferrite image info, map, \
                     du and check look at it all the same with -U"
                }
                false => {
                    "stop what uses it first (fuser -v shows it); several readers may share an \
                     image if all of them open it read-only (access=r in xl's configuration, \
                     --read-only with ferrite)"
                }
            };
            let why = disk_of(path).map_or(why, |disk| {
                format!("it is served as disk {disk} (ferrite disk show {disk})")
            });
            return Err(DiskError::new(ErrorKind::InUse, cannot_open(path), why, help).into());
        }
        clock.sleep(RETRY_AFTER);
    }
}

/// Opens a file or a block device for reading, without a lock. A device is read past the page cache with `fresh`.
pub(super) fn glance(path: &Path, fresh: bool) -> rustix::io::Result<Option<Opened>> {
    let medium = |stat: &Stat| match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Some(Medium::File),
        FileType::BlockDevice => Some(Medium::BlockDevice),
        _ => None,
    };
    let Some(found) = medium(&stat(path)?) else { return Ok(None) };
    let mut flags = flags(found, true);
    flags.set(OFlags::DIRECT, fresh && found == Medium::BlockDevice);
    let file = Arc::new(names::open(path, flags, Mode::empty())?);
    let stat = fstat(&file)?;
    Ok(medium(&stat).map(|medium| Opened { file, stat, medium, holds: Vec::new() }))
}

fn attempt(path: &Path, options: &OpenOptions, insists: bool) -> Result<Attempt, Unopened> {
    let (read_only, theirs) = (options.read_only, toolstack::is_theirs(options));
    let before = stat(path).map_err(|e| open_error(path, read_only, e))?;
    let medium = classify(path, &before)?;
    let is_protected = |stat: &Stat| {
        let for_writing = !read_only && !options.may_write_parents();
        for_writing && medium == Medium::File && stat.st_mode & 0o222 == 0
    };
    if is_protected(&before) {
        return Err(Unopened::Protected);
    }
    let grace = if medium == Medium::File { Duration::ZERO } else { DEVICE_GRACE };
    let claim = match claim(medium, &before, read_only) {
        Ok(claim) => claim,
        Err((device, e)) => {
            return Ok(Attempt::Busy(grace, format!("its block device {device} is in use ({e})")));
        }
    };
    let unwanted = if options.unlocked { OFlags::EXCL } else { OFlags::empty() };
    let opened = match &options.opened {
        Some(opened) => rustix::io::fcntl_dupfd_cloexec(opened, 0),
        None => names::open(path, flags(medium, read_only) - unwanted, Mode::empty()),
    };
    let file = match opened {
        Ok(file) => Arc::new(file),
        Err(e @ (Errno::BUSY | Errno::TXTBSY | Errno::AGAIN)) => {
            let is_claimed = theirs && e == Errno::BUSY && medium == Medium::BlockDevice;
            match is_claimed.then(|| toolstack::open_claimed(path, &before)).flatten() {
                Some(file) => file,
                None => return Ok(Attempt::Busy(grace, busy_reason(&before, medium, e))),
            }
        }
        Err(e) => return Err(open_error(path, read_only, e).into()),
    };
    let is_ours = !read_only && options.opened.is_none();
    let hold = is_ours.then(|| Hold::of(file.clone()));
    let holds: Vec<Hold> = hold.into_iter().chain(claim).collect();
    if options.unlocked {
        let stat = fstat(&file).map_err(|e| io_error(path, "it could not be examined", e))?;
        return Ok(Attempt::Done(Opened { file, stat, medium, holds }));
    }
    if let Some(busy) = take_locks(path, &file, (&before, medium), options, insists)? {
        return Ok(busy);
    }
    // The former holder may have replaced the image before releasing it.
    let stat = fstat(&file).map_err(|e| io_error(path, "it could not be examined", e))?;
    let now = names::stat(path).map_err(|e| open_error(path, read_only, e))?;
    if [before, now]
        .iter()
        .any(|s| (s.st_dev, s.st_ino, s.st_rdev) != (stat.st_dev, stat.st_ino, stat.st_rdev))
    {
        let grace = if theirs { grace.max(OWN_GRACE) } else { grace };
        return Ok(Attempt::Busy(grace, "it was replaced while it was being opened".into()));
    }
    // A child may have been made before it was locked.
    if is_protected(&stat) {
        return Err(Unopened::Protected);
    }
    if !read_only && medium == Medium::BlockDevice && is_write_protected(&stat) {
        return Err(open_error(path, read_only, Errno::ROFS).into());
    }
    Ok(Attempt::Done(Opened { file, stat, medium, holds }))
}

/// Takes the locks of an open file. `Some`: it is in use.
fn take_locks(
    path: &Path,
    file: &OwnedFd,
    (before, medium): (&Stat, Medium),
    options: &OpenOptions,
    insists: bool,
) -> Result<Option<Attempt>, Unopened> {
    let (read_only, theirs) = (options.read_only, toolstack::is_theirs(options));
    let grace = if medium == Medium::File { Duration::ZERO } else { DEVICE_GRACE };
    let shares = read_only || options.beside_readers;
    let operation = match shares {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    match flock(file, operation) {
        Ok(()) => {}
        Err(Errno::AGAIN) if theirs => {
            return Ok(toolstack::beside(path, file, before, shares, insists));
        }
        Err(Errno::AGAIN) => return Ok(Some(locked(before, grace))),
        Err(e) => return Err(io_error(path, "it could not be locked", e).into()),
    }
    if theirs {
        toolstack::take_others(path, file, (before, medium), options);
        return Ok(None);
    }
    if !options.qemu_first && !share_with_qemu(path, file, shares) {
        let why = match read_only {
            true => "QEMU (or one of its tools) writes to it",
            false => "QEMU (or one of its tools) has it open",
        };
        return Ok(Some(Attempt::Busy(grace, why.into())));
    }
    if let Some(why) = merging::claim(file, options).map_err(|e| merging_error(path, e))? {
        return Ok(Some(Attempt::Busy(grace, why.into())));
    }
    if !read_only && let Some(why) = other_way(before, medium) {
        return Ok(Some(Attempt::Busy(DEVICE_GRACE, why)));
    }
    Ok(None)
}

fn merging_error(path: &Path, e: std::io::Error) -> DiskError {
    let why = format!(
        "its file system has no locks on bytes ({e}), and a merge beside readers needs one"
    );
    let help = "stop what uses the image, and merge it then";
    DiskError::new(ErrorKind::Unsuitable, cannot_open(path), why, help).with_source(e)
}

/// The user of the same bytes by way of a loop device.
pub(super) fn other_way(stat: &Stat, medium: Medium) -> Option<String> {
    match medium {
        Medium::File => loops::writer_of(stat).map(|device| {
            format!("it is attached to {device}, which may be mounted (losetup -d detaches it)")
        }),
        Medium::BlockDevice => loops::locker_of(stat).map(|(file, pid)| {
            format!("the file behind it, {}, is locked by process {pid}", file.display())
        }),
        Medium::Nvme => None,
    }
}

/// Takes QEMU's locks; `false` if QEMU's use of the image conflicts with ours.
pub(super) fn share_with_qemu(path: &Path, file: &OwnedFd, read_only: bool) -> bool {
    qemu::Permissions::new(read_only).take(file).unwrap_or_else(|e| {
        tracing::warn!(
            image = %path.display(),
            "its file system has no locks on bytes ({e}): nothing keeps QEMU from using it, too",
        );
        true
    })
}

/// Releases QEMU's locks after an incomplete attempt.
pub(super) fn stand_back(file: &OwnedFd) {
    qemu::release(file);
}

/// Releases the locks of a file that stays open. The `flock` is the last, as it tells that all are released.
pub(super) fn release(file: &OwnedFd) {
    merging::release(file);
    qemu::release(file);
    // An error cannot be handled: the lock ends with the file.
    let _ = flock(file, FlockOperation::Unlock);
}

/// Claims the block device of an NVMe namespace, if there is one and it is to be written: commands to the character
/// device check no claims.
fn claim(medium: Medium, stat: &Stat, read_only: bool) -> Result<Option<Hold>, (String, Errno)> {
    let device = block_device((major(stat.st_rdev), minor(stat.st_rdev)));
    let Some(device) = device.filter(|_| medium == Medium::Nvme && !read_only) else {
        return Ok(None);
    };
    let path = format!("/dev/{device}");
    match names::open(&path, flags(Medium::BlockDevice, false), Mode::empty()) {
        Ok(file) => Ok(Some(Hold::of(Arc::new(file)))),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err((path, e)),
    }
}

/// Whether a device is write-protected. The kernel lets it be opened for writing, and fails the writes. A partition is
/// protected by itself or with its disk.
fn is_write_protected(stat: &Stat) -> bool {
    let device = (major(stat.st_rdev), minor(stat.st_rdev));
    ["ro", "../ro"].iter().any(|name| sysfs_number(device, name) == Some(1))
}

/// The flags of opening: never `O_CREAT`, never `O_TRUNC`. `O_NONBLOCK` guards against a name that becomes a pipe
/// between the check and the open; [`Geometry`](super::Geometry) clears it again.
pub(super) fn flags(medium: Medium, read_only: bool) -> OFlags {
    let access = match (read_only, medium) {
        (true, _) => OFlags::RDONLY,
        (false, Medium::File | Medium::Nvme) => OFlags::RDWR,
        (false, Medium::BlockDevice) => OFlags::RDWR | OFlags::EXCL,
    };
    access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK
}

/// Checks the kind before opening: opening a device of the wrong kind can have effects by itself.
fn classify(path: &Path, stat: &Stat) -> Result<Medium, DiskError> {
    let (why, help) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok(Medium::File),
        FileType::BlockDevice => return Ok(Medium::BlockDevice),
        FileType::Directory => ("it is a directory", "name an image file inside of it"),
        FileType::CharacterDevice
            if block_device((major(stat.st_rdev), minor(stat.st_rdev))).is_some() =>
        {
            return Ok(Medium::Nvme);
        }
        FileType::CharacterDevice => (
            "it is a character device, and none of an NVMe namespace (/dev/ngXnY)",
            "name a regular file or a block device (for a disk without medium, null:)",
        ),
        _ => ("it is a pipe or socket", "name a regular file or a block device"),
    };
    Err(DiskError::new(ErrorKind::Unsuitable, cannot_open(path), why, help))
}

fn open_error(path: &Path, read_only: bool, e: Errno) -> DiskError {
    let or_writable = format!("{READ_ONLY}, or make it writable");
    let perhaps_volume = format!("say store:{}, if that is a volume of a store", path.display());
    let (kind, why, help) = match e {
        Errno::NOENT | Errno::NOTDIR => (
            ErrorKind::NotFound,
            "there is no such file".to_owned(),
            match before_sign(path).is_some_and(Path::is_file) {
                true => &perhaps_volume,
                false => {
                    "check the path; ferrite image create and convert make images, and ferrite store create stores"
                }
            },
        ),
        Errno::ACCESS | Errno::PERM => (
            ErrorKind::Permission,
            format!("not permitted ({e})"),
            "run as a user who may open it, or check its mode, its attributes (lsattr) and \
             whether the device is write-protected",
        ),
        Errno::ROFS if !read_only => (
            ErrorKind::Permission,
            "it is on a read-only file system or write-protected".to_owned(),
            or_writable.as_str(),
        ),
        Errno::NXIO | Errno::NODEV | Errno::NOMEDIUM => (
            ErrorKind::Unsuitable,
            format!("there is no device or no medium behind it ({e})"),
            "attach the device, or insert a medium",
        ),
        Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL => {
            (ErrorKind::NotFound, format!("the path cannot be followed ({e})"), "check the path")
        }
        e => return io_error(path, "the kernel refused", e),
    };
    DiskError::new(kind, cannot_open(path), why, help).with_source(e)
}

/// The result for a locked image, with the holder of the `flock` if the kernel tells.
fn locked(stat: &Stat, grace: Duration) -> Attempt {
    // The kernel names no holder that has ended, nor one of another process namespace.
    let device = (major(stat.st_dev), minor(stat.st_dev));
    let Some(pid) = flock_holder(device, stat.st_ino) else {
        return Attempt::Busy(GONE_GRACE, "another process has locked it".into());
    };
    let grace = if pid == std::process::id() { grace.max(OWN_GRACE) } else { grace };
    match holder(pid) {
        Some(name) => {
            let examines = DEVICE_MANAGERS.contains(&name.as_str());
            let grace = if examines { grace.max(EXAMINED_GRACE) } else { grace };
            Attempt::Busy(grace, format!("process {pid} ({name}) has locked it"))
        }
        None => Attempt::Busy(
            GONE_GRACE,
            format!(
                "process {pid} had locked it and is gone, but a child of it, or its last \
                 operations, still hold the lock"
            ),
        ),
    }
}

/// The name of a process; `None`: it has ended, or its memory is gone already and its files are about to be.
pub(super) fn holder(pid: u32) -> Option<String> {
    let name = names::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    if names::read(format!("/proc/{pid}/cmdline")).is_ok_and(|words| words.is_empty()) {
        return None;
    }
    Some(name.trim_end().to_owned())
}

fn busy_reason(stat: &Stat, medium: Medium, e: Errno) -> String {
    if medium == Medium::File {
        return match e {
            Errno::TXTBSY => "it is a program that is running, or a swap file".into(),
            _ => "another process holds a lease on it".into(),
        };
    }
    match mounted_at(stat) {
        Some(at) => format!("it is mounted at {at}"),
        None => "it is mounted, or in use by device mapper, LVM, RAID or another program".into(),
    }
}

/// Where a block device is mounted.
pub(super) fn mounted_at(stat: &Stat) -> Option<String> {
    let device = format!("{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    let mounts = names::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mount_point_in(&mounts, &device).map(str::to_owned)
}

/// The mount point of a device. Lines are `36 35 98:0 /root /mount/point options ...`.
fn mount_point_in<'a>(mounts: &'a str, device: &str) -> Option<&'a str> {
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(2);
        (words.next()? == device).then(|| words.nth(1))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_point_of_a_device_is_found() {
        let mounts = "21 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      30 21 7:0 /sub /mnt/a\\040b rw - ext4 /dev/loop0 rw\n";
        assert_eq!(mount_point_in(mounts, "7:0"), Some("/mnt/a\\040b"));
        assert_eq!(mount_point_in(mounts, "7:1"), None);
        assert_eq!(mount_point_in("x\n7:0", "7:0"), None);
    }

    #[test]
    fn no_flags_ever_create_or_truncate() {
        for medium in [Medium::File, Medium::BlockDevice] {
            for read_only in [false, true] {
                let flags = flags(medium, read_only);
                assert!(!flags.intersects(OFlags::CREATE | OFlags::TRUNC));
                assert_eq!(flags.contains(OFlags::RDWR), !read_only);
            }
        }
        assert!(flags(Medium::BlockDevice, false).contains(OFlags::EXCL));
    }
}
