//! Rare paths on which the order of writes matters. Each is logged at debug level: the simulator counts them, and its
//! tests fail if one is not taken.

/// A rare path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rare {
    /// VHD: all bits of the batmap on disk were cleared.
    BatmapCleared,
    /// VHD: a commit after a failed one.
    CommitAgain,
    /// VHD: a table of more entries was placed.
    TableGrown,
    /// VHD: the footer was written to the new end of a device that has grown.
    DeviceGrown,
    /// VHD: the rest of the last block became zeros, as it becomes part of the disk.
    TailCleared,
    /// VHD: a parent has taken the identity of its child.
    IdentityTaken,
    /// qcow2: a cluster that was freed while the image is open is used again. It had compressed data or a table.
    ClusterReused,
    /// qcow2: such a cluster that had uncompressed data is used again.
    DataClusterReused,
    /// qcow2: L1 got more entries.
    LongerL1,
    /// A sync has failed, and nothing is committed any more.
    SyncFailed,
    /// The journal became void, since a sync has failed.
    JournalVoided,
    /// The writes in the journal of a parent were copied into the leaf.
    ParentRecovered,
}

impl Rare {
    /// All rare paths.
    pub const ALL: [Rare; 12] = [
        Rare::BatmapCleared,
        Rare::CommitAgain,
        Rare::TableGrown,
        Rare::DeviceGrown,
        Rare::TailCleared,
        Rare::IdentityTaken,
        Rare::ClusterReused,
        Rare::DataClusterReused,
        Rare::LongerL1,
        Rare::SyncFailed,
        Rare::JournalVoided,
        Rare::ParentRecovered,
    ];

    /// The target of their log messages.
    pub const TARGET: &str = "ferrite_disk::rare";

    /// The field `path` of the message.
    pub const fn name(self) -> &'static str {
        match self {
            Rare::BatmapCleared => "batmap-cleared",
            Rare::CommitAgain => "commit-again",
            Rare::TableGrown => "table-grown",
            Rare::DeviceGrown => "device-grown",
            Rare::TailCleared => "tail-cleared",
            Rare::IdentityTaken => "identity-taken",
            Rare::ClusterReused => "cluster-reused",
            Rare::DataClusterReused => "data-cluster-reused",
            Rare::LongerL1 => "longer-l1",
            Rare::SyncFailed => "sync-failed",
            Rare::JournalVoided => "journal-voided",
            Rare::ParentRecovered => "parent-recovered",
        }
    }

    /// Logs that this path was taken.
    pub fn taken(self) {
        tracing::debug!(target: Rare::TARGET, path = self.name());
    }
}
