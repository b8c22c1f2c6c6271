//! The journal, as far as no checkpoint has it: blocks that it says are durable have to be there.

use std::collections::BTreeMap;
use std::io;

use super::{Check, StoreFinding, in_bytes};
use crate::content::DomainKey;
use crate::journal::{Block, NewContent, Record, Replay, Scan, VolumeId};
use crate::medium::MAX_BLOCKS;
use crate::space::Kind;
use crate::{BLOCK_BYTES, Damaged};

/// The volumes' names and the domains' keys from records before this one.
#[derive(Default)]
struct Names {
    volumes: BTreeMap<VolumeId, String>,
    keys: BTreeMap<u16, DomainKey>,
}

impl Check<'_> {
    /// See the module text. Replay itself is not tried.
    pub(super) async fn journal(&mut self) -> io::Result<()> {
        let replay = match self.scan().await? {
            Ok(replay) => replay,
            Err(Damaged(why)) => {
                self.add(StoreFinding::damage("journal", why));
                return Ok(());
            }
        };
        let mut names = Names::default();
        for (number, volume) in self.core.volumes.entries() {
            names.volumes.insert(*number, volume.name.as_str().into());
        }
        for (number, domain) in self.core.domains.entries() {
            names.keys.insert(*number as u16, domain.key.clone());
        }
        for number in &replay.blocks {
            let place = self.layout.journal(*number);
            let bytes = self.medium.read(self.port, place, 1).await?;
            let Ok(Some(block)) = Block::decode(&bytes, &self.core.id, &self.layout) else {
                continue;
            };
            for record in &block.records {
                self.record(record, replay.is_durable(*number), &mut names).await?;
            }
        }
        Ok(())
    }

    async fn scan(&mut self) -> io::Result<Result<Replay, Damaged>> {
        let layout = self.layout;
        let mut scan = Scan::new(&layout, self.core.replay_from);
        for at in (0..layout.journal_blocks).step_by(MAX_BLOCKS) {
            let count = (layout.journal_blocks - at).min(MAX_BLOCKS as u64);
            let first = layout.journal(at);
            let blocks = self.medium.read_each(self.port, first, count as usize).await?;
            for (block, place) in blocks.into_iter().zip(first..) {
                let Ok(bytes) = block else {
                    scan.add_unreadable(&layout, place);
                    continue;
                };
                let added = match Block::decode(&bytes, &self.core.id, &layout) {
                    Ok(Some(block)) => scan.add(&layout, place, &block),
                    Ok(None) => continue,
                    Err(e) => Err(e),
                };
                if let Err(e) = added {
                    return Ok(Err(e));
                }
            }
        }
        for number in scan.in_doubt() {
            let why = "a block of the journal cannot be read: the store is not opened";
            let place_bytes = Some(in_bytes(layout.journal(number)));
            self.add(StoreFinding { place_bytes, ..StoreFinding::damage("journal", why) });
        }
        Ok(scan.end())
    }

    async fn record(
        &mut self,
        record: &Record,
        is_durable: bool,
        names: &mut Names,
    ) -> io::Result<()> {
        match record {
            Record::New(new) => self.new_content(new, is_durable, names).await?,
            Record::Create { volume, name, .. } | Record::Share { volume, name, .. } => {
                names.volumes.insert(*volume, name.as_str().into());
            }
            Record::Domain { domain, key, .. } => drop(names.keys.insert(*domain, key.clone())),
            Record::Same { .. }
            | Record::Zeros { .. }
            | Record::Rollback { .. }
            | Record::Delete { .. }
            | Record::Made { .. } => {}
        }
        Ok(())
    }

    /// In a pair without a place in use any kind may have begun since.
    fn has_pages(&self, segment: u64) -> bool {
        let places = 2 * self.layout.segment_blocks;
        let first = segment / 2 * places;
        let is_of_pages = self.kinds[segment as usize / 2] == Some(Kind::Metadata);
        is_of_pages && (first..first + places).any(|at| self.used.get(at))
    }

    async fn new_content(
        &mut self,
        new: &NewContent,
        is_durable: bool,
        names: &Names,
    ) -> io::Result<()> {
        let finding = |why: &str| StoreFinding {
            volume: names.volumes.get(&new.volume).cloned(),
            offset_bytes: Some(in_bytes(new.block)),
            length_bytes: Some(BLOCK_BYTES as u64),
            place_bytes: Some(in_bytes(new.place)),
            ..StoreFinding::damage("journal", why)
        };
        if self.layout.segment_of(new.place).is_some_and(|(segment, _)| self.has_pages(segment)) {
            self.add(finding("a record has content where pages are"));
            return Ok(());
        }
        let Some(key) = names.keys.get(&new.domain) else {
            self.add(finding("a record refers to a missing dedup domain"));
            return Ok(());
        };
        if !self.how.contents {
            return Ok(());
        }
        let data = self.medium.read(self.port, new.place, 1).await;
        let why = match data {
            Ok(data) if key.hash(&data) == new.hash => None,
            Ok(_) if is_durable => Some("content that was durable is not what its record says"),
            // It does not count.
            Ok(_) => None,
            Err(_) => {
                Some("new content cannot be read: so cannot its block, until it is written again")
            }
        };
        if let Some(why) = why {
            self.add(finding(why));
        }
        self.has_read(BLOCK_BYTES as u64).await
    }
}
