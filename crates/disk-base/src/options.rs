//! How a disk is opened.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::parents::Parents;

/// Bytes of metadata that a disk keeps in memory by default, besides what it cannot do without.
pub const METADATA_BYTES: usize = 16 << 20;

/// Bytes in which a store remembers contents by default, at most 8 for each: 128 GiB of them.
pub const INDEX_BYTES: usize = 256 << 20;

/// The longest chain that is made and served. XAPI's storage manager ends at 30.
pub const MAX_LAYERS: usize = 256;

/// How to open a disk. The default is read-write, and not to wait for its lock.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Open the medium itself read-only (XSA-142: a flag above a writable file is not enough).
    pub read_only: bool,
    /// How long to wait for a holder of the lock to let go; none: fail at once. A process that
    /// takes over from a killed one waits until the dead one's last operation has ended.
    pub wait_for_lock: Option<Duration>,
    /// Where answered changes of metadata are kept until they are durable, so that they survive
    /// the death of this process; on tmpfs. None: they do not.
    pub state_dir: Option<PathBuf>,
    /// There is such a directory, and it cannot be read: the log says so of images of which a
    /// process that died may have left something there.
    pub unseen_state: bool,
    /// Memory in bytes for tables and bitmaps that can be read again. A store is given it by whoever
    /// opens it first.
    pub metadata_bytes: usize,
    /// Memory in bytes in which a store remembers contents, given in the same way.
    pub index_bytes: usize,
    /// Use files as block devices are used: they keep their size and their space, and what was
    /// never written in them may be anything.
    pub fixed_size: bool,
    /// Take no locks and mind nobody's: others may be writing to it. Read-only, and what is read
    /// may be stale, or of several moments.
    pub unlocked: bool,
    /// The longest chain that is opened.
    pub max_layers: usize,
    /// Open for writing also what is write-protected by its mode, and what other images stand on:
    /// whoever asks for that sees to it that all of them read what they did before, or knows
    /// better. The kernel has a say in it, too.
    pub even_parent: bool,
    /// Where the image's parents may be.
    pub parents: Parents,
    /// A killed process had it open for writing, and its guest is connected still. Of the images that
    /// may stand on it, those are asked that it knows of itself: the guest waits.
    pub taken_over: bool,
    /// Who named the image has said its format in so many words, and vouches for it: `Disk::open` sees
    /// that in the name. Never of a parent, which an image names.
    pub format_said: bool,
    /// QEMU, as the device model of the guest that this is for, has a raw image open until the guest's
    /// own driver connects: QEMU's locks are taken by `shut_out_qemu`, and not before.
    pub qemu_first: bool,
    /// The open file of the image itself, if the caller has that already: whoever has it locked can
    /// open it in no other way, and nobody gets between.
    pub opened: Option<Arc<OwnedFd>>,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            read_only: false,
            wait_for_lock: None,
            state_dir: None,
            unseen_state: false,
            metadata_bytes: METADATA_BYTES,
            index_bytes: INDEX_BYTES,
            fixed_size: false,
            unlocked: false,
            max_layers: MAX_LAYERS,
            even_parent: false,
            parents: Parents::default(),
            taken_over: false,
            format_said: false,
            qemu_first: false,
            opened: None,
        }
    }
}
