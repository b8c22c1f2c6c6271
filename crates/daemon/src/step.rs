//! The points at which tests end a daemon.

/// Points at which a daemon may die. Tests let it die at each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A disk's state file is written, and the disk is not served yet.
    StateWritten,
    /// The disk has a keeper, and its image is not open.
    Kept,
    /// The image of a suspended guest is closed, and the state file says so.
    Suspended,
    /// The disk's image is open, and the guest was told nothing.
    Served,
    /// The disk's image is closed, and its state file says that it is paused.
    Paused,
    /// The new leaf of a paused raw disk is complete, and the disk has not gone on.
    LeafMade,
    /// It is recorded which image the disk goes on with, and its state file names the one before.
    Recorded,
    /// The disk's image is closed for another program.
    Retired,
    /// The other program serves the disk, or is about to.
    Upgraded,
    /// The disk is not served any more, and its state file still exists.
    Forgotten,
    /// The record of a device is written, and the kernel has not made it.
    DeviceRecorded,
    /// The kernel has made a device, and the record does not have its index.
    DeviceMade,
    /// A job has come to this point: its state file has this step, or a part of the step is done.
    Job(&'static str),
    /// A migration has come to this point, on the sender or the receiver.
    Migration(&'static str),
}
