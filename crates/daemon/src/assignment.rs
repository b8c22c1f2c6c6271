//! A disk that is to be served, as the daemon hands it to its `Serving`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_serve::blkif::lifecycle::{Ahead, ExpectedAttachment};
use ferrite_serve::blkif::negotiate::DiskFacts;

use crate::config::{Config, DiskOptions};
use crate::joint_upgrade::Participant;
use crate::params::Image;
use crate::state::DiskId;
use crate::table::{Phase, Upgrade, WakeReason};
use crate::{Failure, Shared, Step, beside, jobs, pause, taps};

/// A disk that is to be served.
pub struct Assignment<'a> {
    /// The disk.
    pub id: DiskId,
    /// The path of its backend directory in xenstore; of a tap, that of its guest.
    pub backend: String,
    /// The guest's disk that is served: the disk itself, or the one that has joined a tap.
    pub guest: DiskId,
    /// How the image of a tap is opened.
    pub ahead: Option<Ahead>,
    /// The image to serve.
    pub image: Image,
    /// The options to serve it with.
    pub options: DiskOptions,
    /// Whether QEMU opens the raw image of an HVM guest by itself, until the guest's own driver
    /// connects.
    pub qemu_first: bool,
    /// Whether the image is opened when the guest connects, since another host may have it until
    /// then.
    pub defers: bool,
    /// The disk's number for tapdisk's tools.
    pub minor: u32,
    /// The attachment to serve. Another attachment of the same name may have another image.
    pub attached: ExpectedAttachment,
    /// The mirror of the image, if there is one.
    pub mirror: Option<jobs::MirrorSpec>,
    /// The file in which changed blocks are noted, if they are.
    pub changes: Option<PathBuf>,
    /// Whether the disk is paused, and goes on if its image can be opened.
    pub(crate) resumes: bool,
    /// The size in sectors that the guest was told, of a paused disk that is to go on.
    pub(crate) told_sectors: Option<u64>,
    pub(crate) shared: &'a Arc<Shared>,
}

impl Assignment<'_> {
    /// The daemon's configuration.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The directory of all files that outlive a process.
    pub fn run_dir(&self) -> &Path {
        &self.shared.paths.run
    }

    /// Records which process keeps the disk, the path of its NBD socket, and the group that shares
    /// this keeper.
    pub fn set_keeper(&self, pid: u32, nbd: Option<PathBuf>, group: Option<PathBuf>) {
        self.shared.names.link(&self.shared.paths, self.id, pid, self.minor);
        taps::take_keeper(self.shared, self.id, pid);
        self.shared.table.change(self.id, |entry| {
            (entry.pid, entry.nbd, entry.group) = (Some(pid), nbd, group);
        });
        (self.shared.on_step)(Step::Kept);
    }

    /// Records whether the disk's worker is started with `fence = "weak-reservation"`.
    pub(crate) fn set_weak(&self, weak: bool) {
        self.shared.table.change(self.id, |entry| entry.weak = Some(weak));
    }

    /// Whether the disk is paused, and goes on if its image can be opened.
    pub fn resumes(&self) -> bool {
        self.resumes
    }

    /// Records that the image is open. A paused disk goes on with it, if it fits.
    ///
    /// # Errors
    /// The disk stays paused.
    pub fn opened(&self, facts: &DiskFacts) -> Result<(), Failure> {
        if self.resumes {
            pause::fits(self.told_sectors, facts)?;
            // The state file comes before the guest: its next write is in this image.
            self.shared.end_pause(self.id, &self.image, self.minor)?;
        }
        self.end_suspension()?;
        self.shared.settle_leaf(self.id, &self.image);
        self.set_served();
        Ok(())
    }

    /// Records that the image is open.
    pub fn set_served(&self) {
        self.shared.openings.leave(self.id);
        self.shared.table.change(self.id, |entry| entry.was_open = true);
        self.shared.table.set(self.id, Phase::Served);
        (self.shared.on_step)(Step::Served);
    }

    /// Why `stop` was woken. Clears the waker, unless the thread has to end.
    pub(crate) fn wake_reason(&self) -> WakeReason {
        self.shared.table.wake_reason(self.id)
    }

    /// Whether `first`, of this stub domain's guest, is served with the image that this disk is to
    /// have.
    pub(crate) fn is_beside(&self, first: DiskId) -> bool {
        self.shared.table.read(|disks| beside::are_one(disks, first, self.id))
    }

    /// Reports a step to the test's callback.
    pub(crate) fn reached(&self, step: Step) {
        (self.shared.on_step)(step);
    }

    /// Takes this disk's part in a joint upgrade. A disk without one upgrades alone.
    pub(crate) fn participant(&self) -> Participant {
        let mut participant = None;
        self.shared.table.change(self.id, |entry| participant = entry.participant.take());
        participant.or_else(|| Participant::of(1).pop()).expect("one of one")
    }

    /// Records the result of an upgrade.
    pub(crate) fn upgraded(&self, outcome: Result<(), Failure>) {
        self.shared.table.change(self.id, |entry| entry.upgrade = Upgrade::Done(outcome));
    }
}
