//! Paths that few requests take, and on which the order of writes matters. Each says so in the log, at
//! debug level: the simulator counts them, and its tests fail where one is not taken.

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rare {
    /// VHD: the batmap on disk says of no block any more that it is full.
    BatmapCleared,
    /// VHD: a commit after one that has failed.
    CommitAgain,
    /// VHD: a table of more entries has got its place.
    TableGrown,
    /// VHD: the footer was written to the end that a device has got meanwhile.
    DeviceGrown,
    /// VHD: the rest of the last block was made zeros, as it becomes part of the disk.
    TailCleared,
    /// VHD: a parent has taken the identity of its child.
    IdentityTaken,
    /// qcow2: a cluster that came free while the image is open is used again. Compressed data or a
    /// table were there.
    ClusterReused,
    /// qcow2: one that had data which were not compressed is.
    DataClusterReused,
    /// qcow2: L1 has more entries.
    LongerL1,
    /// A sync has failed, and nothing is committed any more.
    SyncFailed,
    /// The journal says nothing any more, since a sync has failed.
    JournalVoided,
    /// The writes in the journal of a parent were copied into the leaf.
    ParentRecovered,
}

impl Rare {
    /// All of them.
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

    /// Says in the log that this path was taken.
    pub fn taken(self) {
        tracing::debug!(target: Rare::TARGET, path = self.name());
    }
}
