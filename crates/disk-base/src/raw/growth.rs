//! Word of a medium that has grown, so that nobody has to ask for its size over and over.
//!
//! A local file is watched by inotify; its own I/O tells as well, so that the watch is for times
//! without any. A block device's new size comes as an event of the kernel's to everybody who
//! listens (netlink(7), `NETLINK_KOBJECT_UEVENT`). Neither tells of a file on a network: there
//! one has to ask.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use ferrite_host::names;
use rustix::fs::inotify::{self, CreateFlags};

use super::medium::Medium;

/// Buffer for words that are not read, only counted, in bytes.
const WORDS_BYTES: usize = 4096;
/// `statfs(2)` types of file systems whose files are changed by other machines or processes
/// without inotify: NFS, CIFS, SMB2, FUSE, Ceph, 9P, GFS2, OCFS2, AFS.
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

/// How word of growth comes.
#[derive(Debug)]
enum Means {
    Inotify {
        notify: OwnedFd,
        /// Not kept open: a disk that is let go of gives up its lock.
        file: Weak<OwnedFd>,
        watch: Option<i32>,
    },
    Events {
        socket: OwnedFd,
    },
    /// It never grows.
    Never,
    /// Nobody tells.
    Ask,
}

/// Tells that a medium may have grown; what it is then says
/// `Disk::refresh_size`.
#[derive(Debug)]
pub struct GrowthWatch(Means);

impl GrowthWatch {
    /// A watch of a medium that never grows.
    pub fn never() -> GrowthWatch {
        GrowthWatch(Means::Never)
    }

    pub(super) fn of(file: &Arc<OwnedFd>, medium: Medium) -> GrowthWatch {
        let means = match medium {
            Medium::File => inotify_of(file),
            Medium::BlockDevice | Medium::Nvme => events(),
        };
        GrowthWatch(means.unwrap_or(Means::Ask))
    }

    /// Begins to listen. From now on [`fd`](Self::fd) becomes readable when the medium may have
    /// grown; what was before is not told. `false`: nobody tells here, the caller has to ask now
    /// and then.
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
            Means::Events { .. } | Means::Never => true,
            Means::Ask => false,
        }
    }

    /// Ends listening, and forgets what was heard.
    pub fn ignore(&mut self) {
        match &mut self.0 {
            Means::Inotify { notify, watch, .. } => {
                if let Some(watch) = watch.take() {
                    let _ = inotify::remove_watch(&*notify, watch);
                    drain(notify);
                }
            }
            Means::Events { socket } => drain(socket),
            Means::Never | Means::Ask => {}
        }
    }

    /// The descriptor to wait for; none where nothing is ever told.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Means::Inotify { notify, .. } => Some(notify.as_fd()),
            Means::Events { socket } => Some(socket.as_fd()),
            Means::Never | Means::Ask => None,
        }
    }
}

fn inotify_of(file: &Arc<OwnedFd>) -> Option<Means> {
    let kind = rustix::fs::fstatfs(file).ok()?.f_type as u64 & 0xFFFF_FFFF;
    if REMOTE.contains(&kind) {
        return None;
    }
    let notify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
    Some(Means::Inotify { notify, file: Arc::downgrade(file), watch: None })
}

fn events() -> Option<Means> {
    Some(Means::Events { socket: names::device_events().ok()? })
}

/// Reads until there is nothing left; that some may have been lost does not matter.
fn drain(fd: &OwnedFd) {
    let mut words = [0; WORDS_BYTES];
    while matches!(rustix::io::read(fd, &mut words), Ok(1..)) {}
}
