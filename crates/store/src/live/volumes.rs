//! Operations on whole volumes (store.md 8). Each is one record, and takes constant time.

use std::io;
use std::sync::Arc;

use ferrite_disk_base::Port;
use ferrite_host::clock;
use ferrite_io::shared_lock::SharedLock;

use super::Core;
use super::altering::Alteration;
use super::changes::{ChangeKind, Changes};
use super::committer::Committer;
use super::journal::{Journal, JournalLock};
use super::journal_writer::JournalWriter;
use super::shared::Shared;
use crate::content::DomainKey;
use crate::journal::{Filling, Name, Record, VolumeId};
use crate::table::{Domain, MAX_ENTRIES, Volume};
use crate::tree::{Link, Tree};

/// Why an operation is refused. The store has not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// The name is that of another volume or domain.
    #[error("there is a volume of that name")]
    Exists,
    /// The store lacks the volume.
    #[error("there is no such volume")]
    Missing,
    /// The store lacks the domain.
    #[error("there is no such domain")]
    NoDomain,
    /// A volume can be rolled back only to a snapshot.
    #[error("a volume can be rolled back to a snapshot only, and the second name is not one")]
    NotASnapshot,
    /// Snapshots do not change.
    #[error("it is a snapshot, which never changes")]
    IsASnapshot,
    /// The snapshot has content that the volume may not refer to.
    #[error("the snapshot is in another domain")]
    OtherDomain,
    /// The store has as many volumes or domains as it can have.
    #[error("the store has as many volumes or domains as it can have")]
    Full,
    /// The size is not one that a volume can have.
    #[error("a volume has between one block and 4 PiB")]
    BadSize,
    /// Snapshots are never changed.
    #[error("it is a snapshot, which keeps its size")]
    IsSnapshot,
}

impl Core {
    /// Checks whether a record of a volume or domain can be carried out.
    ///
    /// # Errors
    /// Why it cannot.
    fn check(&self, record: &Record) -> Result<(), VolumeError> {
        let volumes = self.volumes.entries();
        let domain = |number: &u16| self.domains.entries().get(&u32::from(*number));
        let find = |number: &VolumeId| volumes.get(number).ok_or(VolumeError::Missing);
        let may_insert = |number: &VolumeId, name: &Name| {
            let exists = volumes.iter().any(|(other, v)| other == number || v.name == *name);
            match exists {
                true => Err(VolumeError::Exists),
                false if *number >= MAX_ENTRIES => Err(VolumeError::Full),
                false => Ok(()),
            }
        };
        match record {
            Record::Domain { domain: number, name, .. } => {
                let mut all = self.domains.entries().values();
                match domain(number).is_some() || all.any(|domain| domain.name == *name) {
                    true => Err(VolumeError::Exists),
                    false => Ok(()),
                }
            }
            Record::Create { volume, blocks, domain: number, name } => {
                domain(number).ok_or(VolumeError::NoDomain)?;
                match (1..1 << 40).contains(blocks) {
                    true => may_insert(volume, name),
                    false => Err(VolumeError::BadSize),
                }
            }
            Record::Share { volume, of, name, .. } => {
                find(of)?;
                may_insert(volume, name)
            }
            Record::Rollback { volume, to } => {
                let (volume, to) = (find(volume)?, find(to)?);
                match () {
                    () if volume.is_snapshot => Err(VolumeError::IsASnapshot),
                    () if !to.is_snapshot => Err(VolumeError::NotASnapshot),
                    () if to.domain != volume.domain => Err(VolumeError::OtherDomain),
                    () => Ok(()),
                }
            }
            Record::Delete { volume } | Record::Made { volume, .. } => find(volume).map(drop),
            Record::New(_) | Record::Same { .. } | Record::Zeros { .. } => Ok(()),
        }
    }

    /// Carries out a record of a volume or domain.
    ///
    /// # Errors
    /// Why it cannot be carried out. The core has not changed.
    pub(super) fn apply(&mut self, record: &Record) -> Result<(), VolumeError> {
        self.check(record)?;
        match record {
            Record::Domain { domain, key, name } => {
                let new = Domain { name: name.clone(), key: key.clone() };
                self.domains.insert((*domain).into(), new);
            }
            Record::Create { volume, blocks, domain, name } => {
                let tree = Tree::of_volume(*blocks, Link::Nothing);
                let (name, blocks, domain) = (name.clone(), *blocks, *domain);
                let (is_snapshot, origin, generation) = (false, None, self.new_generation());
                let created_unix_s = None;
                let new = Volume {
                    name,
                    blocks,
                    domain,
                    generation,
                    is_snapshot,
                    origin,
                    created_unix_s,
                    tree,
                };
                self.volumes.insert(*volume, new);
            }
            Record::Share { volume, of, snapshot, name } => {
                let from = self.volumes.entries()[of].clone();
                let (name, is_snapshot, origin) = (name.clone(), *snapshot, Some(*of));
                let generation = self.new_generation();
                let created_unix_s = None;
                let new = Volume { name, generation, is_snapshot, origin, created_unix_s, ..from };
                self.volumes.insert(*volume, new);
                // Both volumes copy the pages that they share before they change them.
                self.renew(*of);
            }
            Record::Rollback { volume, to } => {
                let Volume { tree, blocks, .. } = self.volumes.entries()[to];
                if let Some(volume) = self.volumes.get_mut(*volume) {
                    (volume.tree, volume.blocks) = (tree, blocks);
                }
                self.pages.hide_volume(*volume);
                self.renew(*volume);
            }
            Record::Made { volume, unix_s } => {
                if let Some(volume) = self.volumes.get_mut(*volume) {
                    volume.created_unix_s = Some(*unix_s);
                }
            }
            Record::Delete { volume } => {
                self.remove(*volume);
                self.forget_origin(*volume);
            }
            Record::New(_) | Record::Same { .. } | Record::Zeros { .. } => {}
        }
        Ok(())
    }

    /// Removes a volume. A later volume with its number has other leaves, so readers must not find these.
    fn remove(&mut self, volume: VolumeId) {
        self.volumes.remove(volume);
        self.pages.hide_volume(volume);
    }

    /// Clears the origin of volumes that were made from this one. A later volume may get its number.
    fn forget_origin(&mut self, volume: VolumeId) {
        let made_of = self.volumes.entries().iter().filter(|(_, v)| v.origin == Some(volume));
        let made_of: Vec<VolumeId> = made_of.map(|(number, _)| *number).collect();
        for number in made_of {
            if let Some(volume) = self.volumes.get_mut(number) {
                volume.origin = None;
            }
        }
    }

    /// Gives a generation that no volume has had.
    fn new_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation - 1
    }

    /// Has a volume copy the pages that it has now before it changes them.
    pub(super) fn renew(&mut self, volume: VolumeId) {
        let generation = self.new_generation();
        if let Some(volume) = self.volumes.get_mut(volume) {
            volume.generation = generation;
        }
    }
}

/// The lowest number that is not in use.
fn free(numbers: impl Iterator<Item = u32>) -> u32 {
    (0..).zip(numbers).take_while(|(i, number)| i == number).count() as u32
}

/// An operation on whole volumes. The caller chooses names, the store gives numbers.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Makes a dedup domain with this name and this random key.
    Domain(Name, DomainKey),
    /// Makes a volume that reads as zeros: its name, its size in blocks of 4096 bytes, and its domain.
    Create(Name, u64, u16),
    /// Makes a read-only volume with the present content of another one.
    Snapshot(Name, VolumeId),
    /// Makes a volume with the present content of another one.
    Clone(Name, VolumeId),
    /// Gives a volume, which is not in use, the content of a snapshot of its domain.
    Rollback(VolumeId, VolumeId),
    /// Deletes a volume that is not in use.
    Delete(VolumeId),
    /// Gives a volume or snapshot, which is not in use, another name.
    Rename(VolumeId, Name),
    /// Gives a volume, which is not in use, another size in blocks. Data behind a smaller size are lost; they read as
    /// zeros if the volume grows again.
    Resize(VolumeId, u64),
}

impl Operation {
    /// The record of the operation, and the number of the volume or domain that it is about. `Err`: there is no record for
    /// it.
    fn record(self, core: &Core) -> Result<(Record, u32), (VolumeId, Alteration)> {
        let volume = free(core.volumes.entries().keys().copied());
        Ok(match self {
            Operation::Domain(name, key) => {
                let number = free(core.domains.entries().keys().copied());
                // If all numbers are in use, `check` refuses the record: domain 0 exists then.
                let domain = u16::try_from(number).unwrap_or(0);
                (Record::Domain { domain, key, name }, domain.into())
            }
            Operation::Create(name, blocks, domain) => {
                (Record::Create { volume, blocks, domain, name }, volume)
            }
            Operation::Snapshot(name, of) => {
                (Record::Share { volume, of, snapshot: true, name }, volume)
            }
            Operation::Clone(name, of) => {
                (Record::Share { volume, of, snapshot: false, name }, volume)
            }
            Operation::Rollback(volume, to) => (Record::Rollback { volume, to }, volume),
            Operation::Delete(volume) => (Record::Delete { volume }, volume),
            Operation::Rename(volume, name) => return Err((volume, Alteration::Name(name))),
            Operation::Resize(volume, blocks) => return Err((volume, Alteration::Blocks(blocks))),
        })
    }
}

/// A volume, as its users see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The number of the volume.
    pub number: VolumeId,
    /// The size in blocks of 4096 bytes.
    pub blocks: u64,
    /// Whether it is a snapshot, which is read-only.
    pub is_snapshot: bool,
}

impl Core {
    /// The volume with this name.
    pub(super) fn volume_called(&self, name: &str) -> Option<Found> {
        let mut entries = self.volumes.entries().iter();
        let (number, volume) = entries.find(|(_, volume)| volume.name.as_str() == name)?;
        Some(Found { number: *number, blocks: volume.blocks, is_snapshot: volume.is_snapshot })
    }
}

/// Makes, changes and deletes volumes, one after the other.
pub(super) struct Volumes {
    pub(super) shared: Arc<Shared>,
    journal: Arc<Journal>,
    journal_writer: Arc<JournalWriter>,
    pub(super) committer: Arc<Committer>,
    pub(super) changes: Arc<Changes>,
    /// Held by the operation under way.
    pub(super) operating: SharedLock,
}

impl Volumes {
    pub(super) fn new(
        shared: Arc<Shared>,
        journal: Arc<Journal>,
        journal_writer: Arc<JournalWriter>,
        committer: Arc<Committer>,
        changes: Arc<Changes>,
    ) -> Volumes {
        let operating = SharedLock::new();
        Volumes { shared, journal, journal_writer, committer, changes, operating }
    }

    /// Carries out an operation. It is durable when this returns `Ok`. Gives the number of the new volume or domain.
    ///
    /// # Errors
    /// A [`VolumeError`] (of kind `InvalidInput`): nothing has changed. `StorageFull`. Others are the kernel's.
    pub(super) async fn operate(&self, port: &Port, operation: Operation) -> io::Result<u32> {
        let _alone = self.operating.lock(&port.io).await?;
        let recorded = operation.record(&self.shared.core());
        let (record, number) = match recorded {
            Ok(recorded) => recorded,
            Err((volume, alteration)) => return self.alter(port, volume, &alteration).await,
        };
        // Section 8, step 1.
        self.journal.flush(port).await?;
        let invalid = |e| io::Error::new(io::ErrorKind::InvalidInput, e);
        let check = |core: &Core| core.check(&record).map_err(invalid);
        // A wrong operation is refused before a journal block has it.
        check(&self.shared.core())?;
        if !matches!(record, Record::Rollback { .. } | Record::Delete { .. }) {
            self.changes.check_room(ChangeKind::Data)?;
        }
        let makes = matches!(record, Record::Create { .. } | Record::Share { .. });
        let unix_s = clock::unix_time_s();
        let made = makes && self.may_have_times(port).await;
        let made = made.then_some(Record::Made { volume: number, unix_s });
        let mut block = Filling::default();
        block.add(&record);
        made.iter().for_each(|made| {
            block.add(made);
        });
        // Step 2. All journal blocks wait, not only the volume's: that is simpler, and takes little time.
        let apply = async || {
            let core = &mut *self.shared.core();
            [Some(&record), made.as_ref()]
                .into_iter()
                .flatten()
                .try_for_each(|record| core.apply(record).map_err(invalid))
        };
        let told =
            self.journal_writer.write(port, JournalLock::Exclusive, block, check, apply).await;
        // Step 3.
        let done = match told {
            Ok(()) => self.journal.flush(port).await,
            Err(e) => return Err(e),
        };
        if let (Err(_), Record::Create { .. } | Record::Share { .. }) = (&done, &record) {
            self.shared.core().remove(number);
        }
        done.map(|()| number)
    }

    /// Whether records may say when a volume was made. In a store that an older program has made a checkpoint says so first,
    /// once: so that program refuses the store by its superblock, and takes no record for damage.
    async fn may_have_times(&self, port: &Port) -> bool {
        // The checkpoint under way may have begun before.
        for _ in 0..2 {
            {
                let core = &mut *self.shared.core();
                core.wants_times = true;
                if core.has_times {
                    return true;
                }
            }
            // Without it the volume has no time.
            if self.committer.checkpoint(port).await.is_err() {
                return false;
            }
        }
        self.shared.core().has_times
    }
}
