//! Reads of content that is compressed: its group is unpacked beside this thread, and a few of them are remembered
//! (store.md 2 and 6).

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use ferrite_disk_base::Port;

use super::{BLOCK_BYTES, Live, damaged};
use crate::Damaged;
use crate::content::checksum;
use crate::packing::unpack;
use crate::page::{Packing, Whereabouts};

/// Groups that are remembered: 1 MiB of them.
const REMEMBERED: usize = 16;

/// Groups that were unpacked last, by their first places.
#[derive(Debug, Default)]
pub(super) struct Groups(VecDeque<(u64, Arc<[u8]>)>);

impl Groups {
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

    /// Places become others'.
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }
}

impl Live {
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
        let known = self.groups().find(place);
        if let Some(block) = known.and_then(|blocks| block_of(&blocks)) {
            return Ok(block);
        }
        // What is remembered may be what was there before: a pass that ended early has forgotten nothing.
        let blocks = self.unpack(port, packing, place, places).await?;
        self.groups().remember(place, blocks.clone());
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
        let group = self.medium.read(port, place, places.into()).await?;
        let blocks = port.io.compute(move || unpack(packing, &group)).await?;
        Ok(blocks.map_err(damaged)?.into())
    }
}
