//! Reads of compressed content. Another thread unpacks its group, and the last few groups are remembered (store.md 2
//! and 6).

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::Port;

use super::shared::Shared;
use super::{BLOCK_BYTES, damaged};
use crate::Damaged;
use crate::content::checksum;
use crate::packing::unpack;
use crate::page::{Packing, Whereabouts};

/// The most groups that are remembered: 1 MiB.
const REMEMBERED: usize = 16;

/// The groups that were unpacked last, by their first places. The most recently used is first.
#[derive(Debug, Default)]
struct Remembered(VecDeque<(u64, Arc<[u8]>)>);

impl Remembered {
    fn find(&mut self, place: u64) -> Option<Arc<[u8]>> {
        let at = self.0.iter().position(|(known, _)| *known == place)?;
        let found = self.0.remove(at)?;
        let blocks = found.1.clone();
        self.0.push_front(found);
        Some(blocks)
    }

    fn remember(&mut self, place: u64, blocks: Arc<[u8]>) {
        self.0.retain(|(known, _)| *known != place);
        self.0.truncate(REMEMBERED - 1);
        self.0.push_front((place, blocks));
    }
}

/// Reads content, also of compressed groups.
pub(super) struct Groups {
    shared: Arc<Shared>,
    remembered: Mutex<Remembered>,
}

impl Groups {
    pub(super) fn new(shared: Arc<Shared>) -> Groups {
        Groups { shared, remembered: Mutex::default() }
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all groups, before their places get other contents.
    pub(super) fn forget(&self) {
        self.remembered().0.clear();
    }

    /// Reads a content from its place, and compares it with its checksum. The caller is in an epoch, or has the pass.
    ///
    /// # Errors
    /// It is damaged (`InvalidData`), or cannot be read.
    pub(super) async fn read(&self, port: &Port, entry: Whereabouts) -> io::Result<Vec<u8>> {
        match entry {
            Whereabouts::Plain { place, checksum: sum } => {
                let block = self.shared.medium.read(port, place, 1).await?;
                match checksum(&block) == sum {
                    true => Ok(block),
                    false => Err(io::ErrorKind::InvalidData.into()),
                }
            }
            packed => self.unpacked(port, packed).await,
        }
    }

    /// A block of a compressed group, compared with its checksum. The caller is in an epoch, or has the pass.
    ///
    /// # Errors
    /// It is damaged (`InvalidData`), or cannot be read.
    pub(super) async fn unpacked(&self, port: &Port, entry: Whereabouts) -> io::Result<Vec<u8>> {
        let Whereabouts::Packed { place, checksum: sum, packing, places, index } = entry else {
            return Err(damaged(Damaged("a content is not compressed")));
        };
        let at = usize::from(index) * BLOCK_BYTES;
        let block_of = |blocks: &[u8]| {
            let block = blocks.get(at..at + BLOCK_BYTES)?;
            (checksum(block) == sum).then(|| block.to_vec())
        };
        let known = self.remembered().find(place);
        if let Some(block) = known.and_then(|blocks| block_of(&blocks)) {
            return Ok(block);
        }
        // A remembered group may be an earlier one of the same place: a pass that ended early has not called `forget`.
        let blocks = self.unpack(port, packing, place, places).await?;
        self.remembered().remember(place, blocks.clone());
        let wrong = Damaged("a compressed block does not fit its checksum");
        block_of(&blocks).ok_or_else(|| damaged(wrong))
    }

    async fn unpack(
        &self,
        port: &Port,
        packing: Packing,
        place: u64,
        places: u8,
    ) -> io::Result<Arc<[u8]>> {
        let group = self.shared.medium.read(port, place, places.into()).await?;
        let blocks = port.io.compute(move || unpack(packing, &group)).await?;
        Ok(blocks.map_err(damaged)?.into())
    }
}
