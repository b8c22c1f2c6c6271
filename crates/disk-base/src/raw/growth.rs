//! Notifications that a medium has grown, so that its size need not be polled.
//!
//! A local file is watched by inotify. Its own I/O reveals growth, too, so the watch is for times without any. A block
//! device's new size comes as an event of the kernel to all listeners (netlink(7), `NETLINK_KOBJECT_UEVENT`). A file on
//! a network has no notifications: its size has to be polled.
//! A remote medium's new size is told on a descriptor of its own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use ferrite_host::names;
use rustix::fs::inotify::{self, CreateFlags};

use super::medium::Medium;

/// Buffer for events, which are not parsed, in bytes.
const WORDS_BYTES: usize = 4096;
/// `statfs(2)` types of file systems whose files other machines or processes change without inotify: NFS, CIFS, SMB2,
/// FUSE, Ceph, 9P, GFS2, OCFS2, AFS.
const REMOTE: [u64; 9] = [
    0x6969,
    0xFF53_4D42,
    0xFE53_4D42,
    0x6573_5546,
    0x00C3_6400,
    0x0102_1997,
    0x0116_1970,
    0x7461_636F,
    0x5346_414F,
];

/// The source of notifications.
#[derive(Debug)]
enum Means {
    Inotify {
        notify: OwnedFd,
        /// Not kept open: a disk that is closed has to release its lock.
        file: Weak<OwnedFd>,
        watch: Option<i32>,
    },
    Events {
        socket: OwnedFd,
    },
    /// A counter (eventfd). A thread that learns of a new size adds to it.
    Told(Arc<OwnedFd>),
    /// It never grows.
    Never,
    /// There are no notifications: poll.
    Ask,
}

/// Notifies that a medium may have grown; `Disk::refresh_size` then gives the size.
#[derive(Debug)]
pub struct GrowthWatch(Means);

impl GrowthWatch {
    /// A watch of a medium that never grows.
    pub fn never() -> GrowthWatch {
        GrowthWatch(Means::Never)
    }

    /// A watch of a counter (eventfd, non-blocking) that is added to when the medium has grown.
    pub fn told(counter: Arc<OwnedFd>) -> GrowthWatch {
        GrowthWatch(Means::Told(counter))
    }

    pub(super) fn of(file: &Arc<OwnedFd>, medium: Medium) -> GrowthWatch {
        let means = match medium {
            Medium::File => inotify_of(file),
            Medium::BlockDevice | Medium::Nvme => events(),
        };
        GrowthWatch(means.unwrap_or(Means::Ask))
    }

    /// Begins to listen. From now on [`fd`](Self::fd) becomes readable when the medium may have grown; earlier growth
    /// is not reported. `false`: there are no notifications, the caller has to poll.
    pub fn listen(&mut self) -> bool {
        match &mut self.0 {
            Means::Inotify { notify, file, watch } => {
                if watch.is_none()
                    && let Some(file) = file.upgrade()
                {
                    *watch = names::watch(notify.as_fd(), file.as_fd()).ok();
                }
                watch.is_some()
            }
            Means::Events { .. } | Means::Told(_) | Means::Never => true,
            Means::Ask => false,
        }
    }

    /// Ends listening, and drops pending events.
    pub fn ignore(&mut self) {
        match &mut self.0 {
            Means::Inotify { notify, watch, .. } => {
                if let Some(watch) = watch.take() {
                    let _ = inotify::remove_watch(&*notify, watch);
                    drain(notify);
                }
            }
            Means::Events { socket } => drain(socket),
            Means::Told(counter) => drain(counter),
            Means::Never | Means::Ask => {}
        }
    }

    /// The descriptor to wait for; `None` without notifications.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Means::Inotify { notify, .. } => Some(notify.as_fd()),
            Means::Events { socket } => Some(socket.as_fd()),
            Means::Told(counter) => Some(counter.as_fd()),
            Means::Never | Means::Ask => None,
        }
    }
}

fn inotify_of(file: &Arc<OwnedFd>) -> Option<Means> {
    if is_remote(file) {
        return None;
    }
    let notify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
    Some(Means::Inotify { notify, file: Arc::downgrade(file), watch: None })
}

/// Whether other machines may use a file without notice.
pub(super) fn is_remote(file: &OwnedFd) -> bool {
    let kind = rustix::fs::fstatfs(file).map(|system| system.f_type as u64 & 0xFFFF_FFFF);
    kind.is_ok_and(|kind| REMOTE.contains(&kind))
}

fn events() -> Option<Means> {
    Some(Means::Events { socket: names::device_events().ok()? })
}

/// Reads all events; lost ones do not matter.
fn drain(fd: &OwnedFd) {
    let mut words = [0; WORDS_BYTES];
    while matches!(rustix::io::read(fd, &mut words), Ok(1..)) {}
}
