//! The options of opening a disk.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::fence::Terms;

use crate::parents::Parents;

/// Bytes of optional metadata that a disk keeps in memory by default.
pub const METADATA_BYTES: usize = 16 << 20;

/// Bytes of a store's index of contents by default, at most 8 for each: 128 GiB of them.
pub const INDEX_BYTES: usize = 256 << 20;

/// The longest chain that is made and served. XAPI's storage manager ends at 30.
pub const MAX_LAYERS: usize = 256;

/// The reader's reaction to a damaged image. A writer refuses it always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDamage {
    /// It is not opened if that is seen at once.
    #[default]
    Refuse,
    /// It is opened if its headers are intact. A read of a damaged part fails; all others return the right data.
    Serve,
    /// As [`Serve`](Self::Serve). If the file ends within its last cluster, the missing part is damage, too. Other
    /// programs may leave an image so, and it may be intact.
    Salvage,
}

/// The program that keeps images from being used by several at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locking {
    /// This one: an image that another process uses, or that another image stands on, is refused.
    #[default]
    Ours,
    /// The toolstack, which may change an image's parents while they are read, and lets two hosts have an image open
    /// for writing during a migration. Locks are taken as far as they are free, and nothing is refused: see
    /// docs/internals/locks.md for what it may do to an image that is open.
    Toolstack,
}

/// How to open a disk. The default is read-write, and not to wait for its lock.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Open the medium itself read-only (XSA-142: a flag above a writable file is not enough).
    pub read_only: bool,
    /// How long to wait for the lock; `None`: fail at once. A process that takes over from a killed one waits until the
    /// dead one's last operation has ended.
    pub wait_for_lock: Option<Duration>,
    /// The client's identifier on another server. All processes that follow each other on the disk have the same.
    /// `None`: this process alone, which has no predecessor.
    pub client: Option<[u8; 16]>,
    /// The folder, on tmpfs, of answered changes of metadata until they are durable, so that they survive the death of
    /// this process. `None`: they do not.
    pub state_dir: Option<PathBuf>,
    /// The folder exists, and cannot be read. Images that may have a dead process's journal there are logged.
    pub unseen_state: bool,
    /// Memory in bytes for tables and bitmaps that can be read again. For a store, the first process to open it sets
    /// this.
    pub metadata_bytes: usize,
    /// Memory in bytes for a store's index of contents, set in the same way.
    pub index_bytes: usize,
    /// Use files as if they were block devices: they keep their size and their space, and unwritten parts may have any
    /// content.
    pub fixed_size: bool,
    /// Serve a raw file that ends inside a sector, too. The rest of its last sector reads as zeros, and is made part of
    /// the file when that sector is written.
    pub odd_size: bool,
    /// Take no locks and ignore those of others: another process may write to it, and the data may be outdated or
    /// inconsistent. For writing only if the caller's caller does the locking, as XAPI's storage manager.
    pub unlocked: bool,
    /// The medium keeps the space that it has: discards are not offered, and zeros are written so that they have space.
    pub keep_allocated: bool,
    /// Give new parts of an image no space before data are written to them: for tools, which can fail. A guest's disk
    /// reserves it, so that its writes cost no allocation.
    pub thin: bool,
    /// The longest chain that is opened.
    pub max_layers: usize,
    /// Open for writing also images that are write-protected by their mode, or that have children. The caller ensures
    /// that all children read the same as before, or that they may be lost. The kernel still checks permissions.
    pub even_parent: bool,
    /// Open for writing although readers of this program have the image open as a parent. Only a
    /// merge does that, which writes nothing that those readers see: the images above hide its writes from them. All
    /// other writers are refused as ever, and so is a second merge.
    pub beside_readers: bool,
    /// The program that does the locking of the image and its parents.
    pub locking: Locking,
    /// It is opened as the parent of another image, which hides a part of it.
    pub as_parent: bool,
    /// The folders where the image's parents may be.
    pub parents: Parents,
    /// Read a qcow2 image as it was at the snapshot inside of it with this identifier or name. Read-only.
    pub inner_snapshot: Option<Vec<u8>>,
    /// The reaction to damage in the image and its parents.
    pub on_damage: OnDamage,
    /// A killed process had it open for writing, and its guest is still connected. Since the guest waits, only children
    /// that the image's own list names are examined.
    pub taken_over: bool,
    /// The user has named the format explicitly, and vouches for it: `Disk::open` sees that in the name. Never set for
    /// a parent, which an image names.
    pub format_said: bool,
    /// Open a VHD as libvhd does, for tools of XAPI: an encrypted one is opened, and its sectors are copied as they are;
    /// and on a device whose end has no footer the copy at its beginning counts. A guest can write such a copy on a
    /// fixed disk, so no guest's disk is opened so.
    pub as_libvhd: bool,
    /// QEMU, as the guest's device model, has the raw image open until the guest's own driver connects. QEMU's locks
    /// are taken by `shut_out_qemu`, and not before.
    pub qemu_first: bool,
    /// How the LUN is reserved for this host while it is open for writing. `None`: it is not.
    pub fence: Option<Terms>,
    /// The open file of the image, if the caller has it already: a caller that has it locked could not open it again,
    /// and the path may have changed.
    pub opened: Option<Arc<OwnedFd>>,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            read_only: false,
            wait_for_lock: None,
            client: None,
            state_dir: None,
            unseen_state: false,
            metadata_bytes: METADATA_BYTES,
            index_bytes: INDEX_BYTES,
            fixed_size: false,
            odd_size: false,
            unlocked: false,
            keep_allocated: false,
            thin: false,
            max_layers: MAX_LAYERS,
            even_parent: false,
            beside_readers: false,
            locking: Locking::Ours,
            as_parent: false,
            parents: Parents::default(),
            inner_snapshot: None,
            on_damage: OnDamage::Refuse,
            taken_over: false,
            format_said: false,
            as_libvhd: false,
            qemu_first: false,
            fence: None,
            opened: None,
        }
    }
}

impl OpenOptions {
    /// Whether an image that is opened for writing may be a parent, or protected by its mode.
    pub fn may_write_parents(&self) -> bool {
        self.even_parent || self.locking == Locking::Toolstack
    }

    /// Whether the image is only read, and is locked against writers.
    pub fn is_read_unchanged(&self) -> bool {
        self.read_only && !self.unlocked && self.locking == Locking::Ours
    }

    /// The reaction to damage: a writer does not tolerate it.
    pub fn on_damage(&self) -> OnDamage {
        if self.read_only { self.on_damage } else { OnDamage::Refuse }
    }
}
