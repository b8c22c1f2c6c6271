//! Clearing bits of one map while the disk is in use. A mirror does so, whose map names what its target may lack.
//!
//! # Order
//! The caller knows that both copies of the regions are durable, and that no write to them begins or is under way.
//! 1. The regions do not count as marked any more: the next write to them sets their bits again, durably.
//! 2. The sectors are written with the bits cleared. No sync follows: a bit that is set names too much.
//!
//! One commit runs at a time, so a bit that a later write sets is not taken back by an older sector.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::Tracker;
use crate::Port;
use crate::dirty::layout::BITS;

impl Tracker {
    /// The index of the map of this name. `None`: there is none, or the maps are void.
    pub fn map_of(&self, name: &str) -> Option<usize> {
        if self.is_off.load(Ordering::Acquire) {
            return None;
        }
        self.book().maps.iter().position(|(known, _)| known == name)
    }

    /// Whether the bit of a region may be set in a map. Regions beyond the file's size are.
    ///
    /// # Panics
    /// If there is no such map.
    pub fn is_set(&self, map: usize, region: u64) -> bool {
        region >= self.regions
            || self.book().maps[map].1[region as usize / 64] >> (region % 64) & 1 != 0
    }

    /// Up to `most` regions of a range whose bits may be set in a map and can be cleared, of which `f` says so.
    ///
    /// # Panics
    /// If there is no such map.
    pub fn set_regions(
        &self,
        map: usize,
        range: Range<u64>,
        most: usize,
        f: impl Fn(u64) -> bool,
    ) -> Vec<u64> {
        if self.is_off.load(Ordering::Acquire) {
            return Vec::new();
        }
        let book = self.book();
        let words = book.maps[map].1.iter().enumerate();
        let words = words.take(range.end.div_ceil(64) as usize).skip(range.start as usize / 64);
        let all = words.filter(|(_, word)| **word != 0).flat_map(|(i, word)| {
            (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| i as u64 * 64 + bit)
        });
        let is_in = |region: &u64| *region < self.regions && range.contains(region);
        all.filter(|region| is_in(region) && f(*region)).take(most).collect()
    }

    /// Clears the bits of regions in one map; the order is in the module's text. A region's bit is set again before the
    /// next data are written to it.
    ///
    /// # Errors
    /// Errors of the kernel. Some of the bits may be set still.
    ///
    /// # Panics
    /// If there is no such map or region.
    pub async fn clear(&self, port: &Port, map: usize, regions: &[u64]) -> io::Result<()> {
        let _alone = self.commits.pause(&port.io).await?;
        if self.is_off.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut sectors = BTreeMap::<u64, Vec<u64>>::new();
        {
            let mut book = self.book();
            for region in regions {
                let (word, bit) = (*region as usize / 64, 1 << (region % 64));
                book.marked[word] &= !bit;
                book.maps[map].1[word] &= !bit;
                sectors.entry(region / BITS).or_default().push(*region);
            }
        }
        regions.iter().for_each(|region| self.fine.clear(map, *region));
        let file = port.files[self.index];
        for (sector, regions) in sectors {
            let clear = |bits: &mut [u64]| {
                for bit in regions.iter().map(|region| region % BITS) {
                    bits[bit as usize / 64] &= !(1 << (bit % 64));
                }
            };
            self.change_bits(port, file, map, sector, clear).await?;
        }
        Ok(())
    }
}
