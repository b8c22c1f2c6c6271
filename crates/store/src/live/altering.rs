//! Changes of volumes that no record of the journal says: another name, another size (store.md 8).
//!
//! The journal has no record for them, and an older program would take a new kind of record for damage. So each is a
//! change of the table of volumes in memory, and of the volume's tree, that one checkpoint has as a whole.

use std::collections::BTreeSet;
use std::io;

use ferrite_disk_base::Port;

use super::Core;
use super::changes::ChangeKind;
use super::leaf::Leaf;
use super::volumes::{VolumeError, Volumes};
use crate::journal::{Name, VolumeId};

/// The change of a volume.
#[derive(Clone, Debug)]
pub(super) enum Alteration {
    /// Another name.
    Name(Name),
    /// Another size, in blocks.
    Blocks(u64),
}

impl Core {
    /// Whether a volume can get this.
    ///
    /// # Errors
    /// Why it cannot.
    fn check_alteration(
        &self,
        volume: VolumeId,
        alteration: &Alteration,
    ) -> Result<(), VolumeError> {
        let volumes = self.volumes.entries();
        let known = volumes.get(&volume).ok_or(VolumeError::Missing)?;
        match alteration {
            Alteration::Name(name) if volumes.values().any(|volume| volume.name == *name) => {
                Err(VolumeError::Exists)
            }
            Alteration::Name(_) => Ok(()),
            Alteration::Blocks(_) if known.is_snapshot => Err(VolumeError::IsSnapshot),
            Alteration::Blocks(blocks) if !(1..1 << 40).contains(blocks) => {
                Err(VolumeError::BadSize)
            }
            Alteration::Blocks(_) => Ok(()),
        }
    }

    /// Alters a volume. The caller has a claim on the last leaf that a smaller one keeps.
    ///
    /// # Errors
    /// Why it cannot. Nothing has changed then.
    fn alter(&mut self, volume: VolumeId, alteration: &Alteration) -> Result<(), VolumeError> {
        self.check_alteration(volume, alteration)?;
        if let Alteration::Blocks(_) = alteration {
            // Pages of a part that was cut off may be in memory, of this generation. None that is new may be taken for one.
            self.renew(volume);
            // Nor may readers find a leaf of that part when the volume has grown again.
            self.pages.hide_volume(volume);
        }
        let Core { volumes, pages, .. } = self;
        let Some(known) = volumes.get_mut(volume) else { return Err(VolumeError::Missing) };
        match alteration {
            Alteration::Name(name) => known.name = name.clone(),
            Alteration::Blocks(blocks) => {
                match *blocks < known.blocks {
                    true => known.tree.cut(pages, known.generation, *blocks),
                    false => known.tree.grow(pages, known.generation, *blocks),
                }
                known.blocks = *blocks;
            }
        }
        Ok(())
    }
}

impl Volumes {
    /// Alters a volume that is not in use, durably. The caller has the lock of operations: no other one is recorded behind
    /// the change before the medium has it, and no disk begins to use the volume.
    ///
    /// # Errors
    /// A [`VolumeError`] (of kind `InvalidInput`): nothing has changed. `StorageFull`: there is no room for the pages of
    /// it. Others are the kernel's: memory has the change then, and the medium has it when the next checkpoint ends well.
    pub(super) async fn alter(
        &self,
        port: &Port,
        volume: VolumeId,
        alteration: &Alteration,
    ) -> io::Result<VolumeId> {
        let invalid = |e| io::Error::new(io::ErrorKind::InvalidInput, e);
        // The last leaf that is left loses what is behind the new end.
        let (leaves, kind) = {
            let core = self.shared.core();
            core.check_alteration(volume, alteration).map_err(invalid)?;
            let before = core.volumes.entries().get(&volume).map_or(0, |volume| volume.blocks);
            match *alteration {
                Alteration::Name(_) => (BTreeSet::new(), ChangeKind::Zeros),
                Alteration::Blocks(blocks) if blocks < before => {
                    ([Leaf::of_block(volume, blocks - 1).0].into(), ChangeKind::Zeros)
                }
                Alteration::Blocks(_) => (BTreeSet::new(), ChangeKind::Data),
            }
        };
        let mut claim = self.changes.claim(port, &leaves).await?;
        self.changes.check_room(kind)?;
        let change = async || {
            let alter = |core: &mut Core| core.alter(volume, alteration).map_err(invalid);
            self.changes.with_all(port, &mut claim, &leaves, alter).await
        };
        self.committer.checkpoint_of(port, change).await?;
        Ok(volume)
    }
}
