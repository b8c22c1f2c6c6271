//! What is done with whole volumes (store.md 8): one record each, and O(1).

use std::io;

use ferrite_disk_base::Port;

use super::room::Whose;
use super::writing::JournalLock;
use super::{Core, Live};
use crate::content::DomainKey;
use crate::journal::{Filling, Name, Record, VolumeId};
use crate::table::{Domain, MAX_ENTRIES, Volume};
use crate::tree::{Link, Tree};

/// Why an operation cannot be done. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// There is another one.
    #[error("there is a volume of that name")]
    Exists,
    /// There is none.
    #[error("there is no such volume")]
    Missing,
    /// There is none.
    #[error("there is no such domain")]
    NoDomain,
    /// A volume is rolled back to a snapshot only, and of its own domain.
    #[error("a volume is rolled back to a snapshot of its domain only")]
    NotASnapshot,
    /// There are as many as there can be.
    #[error("the store has as many volumes or domains as it can have")]
    Full,
    /// No volume has such a size.
    #[error("a volume has between one block and 4 PiB")]
    BadSize,
}

impl Core {
    /// Whether a record of a volume or domain can be carried out.
    ///
    /// # Errors
    /// It cannot.
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
                match to.is_snapshot && to.domain == volume.domain && !volume.is_snapshot {
                    true => Ok(()),
                    false => Err(VolumeError::NotASnapshot),
                }
            }
            Record::Delete { volume } => find(volume).map(drop),
            Record::New(_) | Record::Same { .. } | Record::Zeros { .. } => Ok(()),
        }
    }

    /// Carries out a record of a volume or domain.
    ///
    /// # Errors
    /// It cannot be done, and nothing has changed.
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
                let new = Volume { name, blocks, domain, generation, is_snapshot, origin, tree };
                self.volumes.insert(*volume, new);
            }
            Record::Share { volume, of, snapshot, name } => {
                let from = self.volumes.entries()[of].clone();
                let (name, is_snapshot, origin) = (name.clone(), *snapshot, Some(*of));
                let generation = self.new_generation();
                let new = Volume { name, generation, is_snapshot, origin, ..from };
                self.volumes.insert(*volume, new);
                // Neither changes the pages that both have.
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
            Record::Delete { volume } => {
                self.remove(*volume);
                self.forget_origin(*volume);
            }
            Record::New(_) | Record::Same { .. } | Record::Zeros { .. } => {}
        }
        Ok(())
    }

    /// A volume ends. Another one may get its number, whose leaves are others.
    fn remove(&mut self, volume: VolumeId) {
        self.volumes.remove(volume);
        self.pages.hide_volume(volume);
    }

    /// What was made from a volume that has ended was made from none: another one may get its number.
    fn forget_origin(&mut self, volume: VolumeId) {
        let made_of = self.volumes.entries().iter().filter(|(_, v)| v.origin == Some(volume));
        let made_of: Vec<VolumeId> = made_of.map(|(number, _)| *number).collect();
        for number in made_of {
            if let Some(volume) = self.volumes.get_mut(number) {
                volume.origin = None;
            }
        }
    }

    /// No two volumes ever have the same.
    fn new_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation - 1
    }

    /// A volume changes none of the pages that it has now.
    pub(super) fn renew(&mut self, volume: VolumeId) {
        let generation = self.new_generation();
        if let Some(volume) = self.volumes.get_mut(volume) {
            volume.generation = generation;
        }
    }
}

/// The lowest number that is nobody's.
fn free(numbers: impl Iterator<Item = u32>) -> u32 {
    (0..).zip(numbers).take_while(|(i, number)| i == number).count() as u32
}

/// What is to be done. Names are of the caller's choice, numbers are given.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A domain: volumes that share content with each other, and its random key.
    Domain(Name, DomainKey),
    /// A volume that reads as zeros: its name, blocks, and domain.
    Create(Name, u64, u16),
    /// A volume that nobody writes, with what another one has now.
    Snapshot(Name, VolumeId),
    /// A volume with what another one has now.
    Clone(Name, VolumeId),
    /// A volume, which nobody uses, gets what a snapshot of its domain has.
    Rollback(VolumeId, VolumeId),
    /// A volume, which nobody uses, ends.
    Delete(VolumeId),
}

impl Operation {
    /// Its record, and the number that is new in it or that it is about.
    fn record(self, core: &Core) -> (Record, u32) {
        let volume = free(core.volumes.entries().keys().copied());
        match self {
            Operation::Domain(name, key) => {
                let number = free(core.domains.entries().keys().copied());
                // As many as there are have such numbers; `check` refuses one more.
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
        }
    }
}

/// A volume as its users see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its number.
    pub number: VolumeId,
    /// Its size.
    pub blocks: u64,
    /// Nobody writes it.
    pub is_snapshot: bool,
}

impl Live {
    /// The volume with this name.
    pub fn volume_called(&self, name: &str) -> Option<Found> {
        let core = self.core();
        let mut entries = core.volumes.entries().iter();
        let (number, volume) = entries.find(|(_, volume)| volume.name.as_str() == name)?;
        Some(Found { number: *number, blocks: volume.blocks, is_snapshot: volume.is_snapshot })
    }

    /// The number of the volume with this name.
    pub fn volume(&self, name: &str) -> Option<VolumeId> {
        self.volume_called(name).map(|found| found.number)
    }

    /// Does something with whole volumes. It is durable when this returns `Ok`. Gives the number of what is new.
    ///
    /// # Errors
    /// A [`VolumeError`] (of kind `InvalidInput`): nothing has changed. Others are the kernel's.
    pub async fn operate(&self, port: &Port, operation: Operation) -> io::Result<u32> {
        let _alone = self.operating.lock(&port.io).await?;
        // Section 8, step 1.
        self.flush(port).await?;
        let (record, number) = operation.record(&self.core());
        let invalid = |e| io::Error::new(io::ErrorKind::InvalidInput, e);
        let check = |core: &Core| core.check(&record).map_err(invalid);
        // What is wrong in any case is refused before it is put into a block.
        check(&self.core())?;
        if !matches!(record, Record::Rollback { .. } | Record::Delete { .. }) {
            self.check_room(Whose::Data)?;
        }
        let mut block = Filling::default();
        block.add(&record);
        // Step 2. All wait, not the volume's records only: that is simpler, and not for long.
        let apply = async |live: &Live| live.core().apply(&record).map_err(invalid);
        let told = self.tell(port, JournalLock::Exclusive, block, check, apply).await;
        // Step 3.
        let done = match told {
            Ok(()) => self.flush(port).await,
            Err(e) => return Err(e),
        };
        if let (Err(_), Record::Create { .. } | Record::Share { .. }) = (&done, &record) {
            self.core().remove(number);
        }
        done.map(|()| number)
    }
}
