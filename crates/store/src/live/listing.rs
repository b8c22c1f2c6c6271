//! Descriptions of a store and of its volumes, for people and programs. Sizes are bytes.

use std::cmp::Ordering;
use std::io;

use ferrite_disk_base::Port;
use serde::{Deserialize, Serialize};

use super::recovery::{journal_block, scan};
use super::shared::Shared;
use super::{BLOCK_BYTES, Core, Index, Live};
use crate::Damaged;
use crate::journal::{Record, VolumeId};
use crate::medium::{Medium, damaged};
use crate::opening;
use crate::page::Packing;
use crate::superblock::VERSION;
use crate::table::Volume;

/// Memory of a process that only looks at a store, in bytes.
const LOOK_BYTES: usize = 1 << 20;

fn impossible() -> io::Error {
    damaged(Damaged("a record of the journal cannot be carried out"))
}

/// The order of names in lists: numbers in them count as numbers, so s2 comes before s10.
fn in_order(a: &str, b: &str) -> Ordering {
    let is_digit = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    let run = |text: &str| {
        let same = |c: char| c.is_ascii_digit() == is_digit(text);
        text.find(|c| !same(c)).unwrap_or(text.len())
    };
    let (mut left, mut right) = (a, b);
    while !left.is_empty() && !right.is_empty() {
        let ((x, rest_x), (y, rest_y)) = (left.split_at(run(left)), right.split_at(run(right)));
        let order = match is_digit(x) && is_digit(y) {
            true => {
                let (x, y) = (x.trim_start_matches('0'), y.trim_start_matches('0'));
                x.len().cmp(&y.len()).then_with(|| x.cmp(y))
            }
            false => x.cmp(y),
        };
        if order != Ordering::Equal {
            return order;
        }
        (left, right) = (rest_x, rest_y);
    }
    // The shorter rest comes first; of equal ones, zeros before numbers decide.
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// A volume, or a snapshot, as lists show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeInfo {
    /// The name of the volume.
    pub name: String,
    /// The size of the volume.
    pub virtual_bytes: u64,
    /// The dedup domain, whose volumes share content.
    pub domain: String,
    /// Whether it is a snapshot, which is read-only.
    pub snapshot: bool,
    /// The volume that it was made from, if the store still has that.
    pub origin: Option<String>,
    /// When it was made, in seconds of Unix time. `None`: by a program that noted none.
    #[serde(default)]
    pub created_unix_s: Option<u64>,
    /// The bytes that are not zeros, if they were counted.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mapped_bytes: Option<u64>,
}

/// A store, as `info` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreInfo {
    /// The random identifier of the store.
    pub id: String,
    /// The version of the format.
    pub version: u32,
    /// The size of the store.
    pub store_bytes: u64,
    /// The size of the journal.
    pub journal_bytes: u64,
    /// The size of a segment.
    pub segment_bytes: u64,
    /// The free space for content.
    pub free_bytes: u64,
    /// The number of the last checkpoint on the medium.
    pub checkpoint: u64,
    /// The number of volumes, with the snapshots.
    pub volumes: u64,
    /// The number of snapshots.
    pub snapshots: u64,
    /// The dedup domains. Volumes of one domain share content.
    pub domains: Vec<String>,
    /// How content is compressed. `None`: it is not.
    pub compress: Option<Packing>,
}

impl Core {
    fn volume_info(&self, volume: &Volume) -> VolumeInfo {
        let domain = self.domains.entries().get(&volume.domain.into());
        let origin = volume.origin.and_then(|origin| self.volumes.entries().get(&origin));
        VolumeInfo {
            name: volume.name.as_str().into(),
            virtual_bytes: volume.blocks * BLOCK_BYTES as u64,
            domain: domain.map_or("", |domain| domain.name.as_str()).into(),
            snapshot: volume.is_snapshot,
            origin: origin.map(|origin| origin.name.as_str().into()),
            created_unix_s: volume.created_unix_s,
            mapped_bytes: None,
        }
    }

    /// All volumes, in the order of their names.
    pub(super) fn list(&self) -> Vec<VolumeInfo> {
        let volumes = self.volumes.entries().values();
        let mut all: Vec<VolumeInfo> = volumes.map(|volume| self.volume_info(volume)).collect();
        all.sort_by(|a, b| in_order(&a.name, &b.name));
        all
    }

    fn store_info(&self) -> StoreInfo {
        let volumes = self.volumes.entries();
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        let domains = self.domains.entries().values();
        StoreInfo {
            id: self.id.iter().map(|byte| format!("{byte:02x}")).collect(),
            version: VERSION,
            store_bytes: bytes(self.layout.blocks),
            journal_bytes: bytes(self.layout.journal_blocks),
            segment_bytes: bytes(self.layout.segment_blocks),
            free_bytes: bytes(self.space.free()),
            checkpoint: self.checkpoint,
            volumes: volumes.len() as u64,
            snapshots: volumes.values().filter(|volume| volume.is_snapshot).count() as u64,
            domains: domains.map(|domain| domain.name.as_str().into()).collect(),
            compress: self.packing,
        }
    }
}

impl Live {
    /// All volumes, in the order of their names.
    pub fn list(&self) -> Vec<VolumeInfo> {
        self.shared.core().list()
    }

    /// Describes a volume.
    pub fn volume_info(&self, volume: VolumeId) -> Option<VolumeInfo> {
        let core = self.shared.core();
        core.volumes.entries().get(&volume).map(|volume| core.volume_info(volume))
    }

    /// Describes the store.
    pub fn info(&self) -> StoreInfo {
        self.shared.core().store_info()
    }

    /// The number of the dedup domain with this name.
    pub fn domain(&self, name: &str) -> Option<u16> {
        let core = self.shared.core();
        let mut entries = core.domains.entries().iter();
        let found = entries.find(|(_, domain)| domain.name.as_str() == name);
        found.and_then(|(number, _)| u16::try_from(*number).ok())
    }
}

/// A store that is not in use, opened without a write. It has the volumes that the journal says. Their content is not
/// looked at.
pub struct Look {
    shared: Shared,
    has_records: bool,
}

impl Look {
    /// Opens the store on a medium of `bytes` bytes.
    ///
    /// # Errors
    /// It is no store, is damaged (`InvalidData`), or cannot be read.
    pub async fn open(port: &Port, bytes: u64) -> io::Result<Look> {
        let medium = Medium::default();
        let core = opening::open(&medium, port, bytes, LOOK_BYTES, false).await?;
        let shared = Shared::new(medium, core, Index::new(0));
        let blocks = scan(&shared, port).await?.blocks;
        for number in &blocks {
            for record in journal_block(&shared, port, *number).await?.records {
                if !matches!(record, Record::New(_) | Record::Same { .. } | Record::Zeros { .. }) {
                    shared.core().apply(&record).map_err(|_| impossible())?;
                }
            }
        }
        Ok(Look { shared, has_records: !blocks.is_empty() })
    }

    /// All volumes, in the order of their names.
    pub fn list(&self) -> Vec<VolumeInfo> {
        self.shared.core().list()
    }

    /// Describes the store.
    pub fn info(&self) -> StoreInfo {
        self.shared.core().store_info()
    }

    /// Whether the journal has records that no checkpoint has.
    pub fn has_records(&self) -> bool {
        self.has_records
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::DomainKey;
    use crate::journal::Name;
    use crate::live::{Memory, Operation};
    use crate::testing::{self, BYTES, Machine};

    #[test]
    fn numbers_in_names_are_ordered_as_numbers() {
        let mut names = ["s10", "s1", "b", "s2-b", "s", "s2", "s02", "s100", "1", "s2-a"];
        names.sort_by(|a, b| in_order(a, b));
        assert_eq!(names, ["1", "b", "s", "s1", "s02", "s2", "s2-a", "s2-b", "s10", "s100"]);
    }

    #[test]
    fn who_only_looks_sees_the_volumes_of_the_journal_and_writes_nothing() {
        let machine = Machine::new(5);
        let (port, mut reactor) = testing::port(&machine.world, &machine.path);
        let name = |name| Name::new(name).unwrap();
        let used = async {
            let memory = Memory { metadata: LOOK_BYTES, index: 0 };
            let live = Live::open(&port, BYTES, memory).await.unwrap();
            let domain = Operation::Domain(name("d"), DomainKey([1; 32]));
            live.operate(&port, domain).await.unwrap();
            let a = live.operate(&port, Operation::Create(name("a"), 9, 0)).await.unwrap();
            let b = live.operate(&port, Operation::Snapshot(name("b"), a)).await.unwrap();
            live.operate(&port, Operation::Clone(name("c"), b)).await.unwrap();
            live.operate(&port, Operation::Delete(b)).await.unwrap();
        };
        reactor.block_on(used).unwrap();
        let before = std::fs::read(&machine.path).unwrap();
        let look = async { Look::open(&port, BYTES).await };
        let look = reactor.block_on(look).unwrap().unwrap();
        let volume = |name: &str| VolumeInfo {
            name: name.into(),
            virtual_bytes: 9 << 12,
            domain: "d".into(),
            snapshot: false,
            origin: None,
            created_unix_s: None,
            mapped_bytes: None,
        };
        let mut listed = look.list();
        // Replayed, as it was noted.
        let now = ferrite_host::clock::unix_time_s();
        for volume in &mut listed {
            let made = volume.created_unix_s.take().unwrap();
            assert!(made <= now && now - made < 3600, "{made} at {now}");
        }
        assert_eq!(listed, [volume("a"), volume("c")]);
        assert_eq!((look.info().checkpoint, look.info().volumes), (1, 2));
        assert!(look.has_records());
        assert!(std::fs::read(&machine.path).unwrap() == before);
    }
}
