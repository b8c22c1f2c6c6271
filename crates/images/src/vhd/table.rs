//! A block table for another size of the disk. It has as many entries as the disk has blocks, since some programs take
//! entries times block size for the disk's size.
//!
//! libvhd takes an image whose metadata does not end before the first block for damaged, and XAPI then no longer
//! coalesces it. So the first blocks make room for a larger table: they are copied to after the last one. The
//! alternative, room at creation for the largest disk, would cost each image 4 MiB, and would not help images that
//! other programs made. Table and batmap get room for twice as many blocks as are needed: between the batmap's header,
//! which has to follow the table, and the batmap, and behind that. So growing in small steps seldom moves them, and all
//! old tables of an image together are smaller than the present room.

use std::io;
use std::ops::Range;

use ferrite_disk_base::{Port, Rare};

use super::footers::{End, last_sector};
use super::format::batmap::Batmap;
use super::format::footer::{Footer, Kind};
use super::format::header::{self, Header};
use super::format::layout::{Layout, Placed, UNUSED};
use super::format::{MAX_BLOCKS, MAX_DISK_BYTES, Malformed, SECTOR, whole_sectors};
use super::pieces::{copy, erase, write_bytes, write_pieces};
use super::{Sparse, Vhd};

/// Entries in a sector of the table.
pub(super) const ENTRIES: u32 = 128;

/// The new table, and the batmap after it.
pub(super) struct Plan {
    header: Header,
    /// The batmap, and byte offset of its header.
    batmap: Option<(u64, Batmap)>,
    /// The end of both, and of the room for larger ones.
    end: u64,
}

impl Plan {
    /// A table at `table_offset`, with room for twice so many blocks.
    fn at(table_offset: u64, footer: &Footer, old: &Header, blocks: u32) -> Plan {
        let largest = MAX_DISK_BYTES.div_ceil(u64::from(old.block_bytes)).min(MAX_BLOCKS.into());
        // At most MAX_BLOCKS, which fits.
        let room_entries = (u64::from(blocks) * 2).min(largest.max(blocks.into())) as u32;
        let header = Header { table_offset, max_entries: blocks, ..old.clone() };
        let room = table_offset + table_bytes(room_entries);
        let at = Batmap::header_offset(footer, &header);
        let batmap = at.map(|at| (at, Batmap::at(room + SECTOR, blocks)));
        let map_end = |(_, map): &(u64, Batmap)| map.offset + Batmap::map_bytes(room_entries);
        let end = batmap.as_ref().map_or(room, map_end);
        Plan { header, batmap, end }
    }

    /// The table with another number of entries at its old place, and the batmap at its own. `None`: something else is
    /// where they would be.
    fn in_place(sparse: &Sparse, footer: &Footer, blocks: u32) -> Option<Plan> {
        let old = &sparse.header;
        let header = Header { max_entries: blocks, ..old.clone() };
        let (old_end, end) = (table_end(old), table_end(&header));
        let at = Batmap::header_offset(footer, &header);
        let batmap = sparse.batmap.as_ref().zip(at).map(|(map, at)| (at, map.resized(blocks)));
        if end > old_end && at.is_some() && batmap.is_none() {
            return None;
        }
        // The batmap's header moves on with the end of the table.
        let headers = if batmap.is_some() { SECTOR } else { 0 };
        let grown = old_end + headers..(end + headers).max(old_end + headers);
        let map = match (&sparse.batmap, &batmap) {
            (Some(old), Some((_, new))) => old.offset + old.len..new.offset + new.len.max(old.len),
            _ => 0..0,
        };
        let apart = grown.end <= map.start || map.end <= grown.start;
        let is_free = |range: &Range<u64>| {
            range.is_empty() || range.end <= sparse.blocks.end() && sparse.blocks.is_free(range)
        };
        (apart && is_free(&grown) && is_free(&map)).then_some(Plan { header, batmap, end })
    }

    fn layout(&self, footer: &Footer) -> Result<Layout, Malformed> {
        Layout::new(footer, &self.header, self.batmap.as_ref().map(|(_, map)| map), u64::MAX)
    }

    /// Writes the batmap, with the bits of the blocks that are known to be full, and its header.
    async fn write_batmap(
        &self,
        port: &Port,
        image: &Vhd,
        sparse: &Sparse,
        footer: &Footer,
    ) -> io::Result<()> {
        let Some((at, map)) = &self.batmap else { return Ok(()) };
        let mut full = image.full_blocks(sparse, footer);
        let raw = map.header_for(&full);
        full.resize(map.len as usize, 0);
        write_bytes(port, port.files[0], &[(map.offset, &full), (*at, &raw)]).await
    }
}

/// Bytes of a table: whole sectors.
fn table_bytes(entries: u32) -> u64 {
    whole_sectors(u64::from(entries) * 4)
}

fn table_end(header: &Header) -> u64 {
    header.table_offset + table_bytes(header.max_entries)
}

impl Vhd {
    /// Gives the image a table of `blocks` entries, at least as many as the disk has now, and a batmap. Returns the end
    /// of the file after that. The copy of the footer is intact.
    pub(super) async fn retable(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        blocks: u32,
    ) -> io::Result<End> {
        let here = Plan::in_place(sparse, footer, blocks);
        let plan = match here.filter(|_| !sparse.blocks.is_table_behind_a_block()) {
            Some(plan) => {
                self.retable_in_place(port, sparse, footer, &plan).await?;
                plan
            }
            None => self.move_table(port, sparse, footer, blocks).await?,
        };
        let (old, new) = (&sparse.header, &plan.header);
        let is_other = (old.table_offset, table_end(old)) != (new.table_offset, table_end(new));
        self.clear_unused(port, sparse, footer, &plan, is_other).await
    }

    /// Changes the number of entries of the table where it is. The entries that the disk uses now stay.
    ///
    /// 1. The batmap's header is written to the end of the new table: into its present sector, into room that nothing
    ///    uses, or over entries for blocks that the disk does not have; `fdatasync`.
    /// 2. The entries for new blocks become unused; `fdatasync`. In a larger table the first of them was the batmap's
    ///    header, so there is no batmap for a moment.
    /// 3. The first sector of the dynamic header, which has the number of entries and the checksum, is replaced;
    ///    `fdatasync`.
    async fn retable_in_place(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        plan: &Plan,
    ) -> io::Result<()> {
        let (old, new) = (&sparse.header, &plan.header);
        plan.write_batmap(port, self, sparse, footer).await?;
        self.commits.sync(port).await?;
        let sectors = sparse.blocks.blocks() / ENTRIES..new.max_entries.div_ceil(ENTRIES);
        write(port, sparse, old.table_offset, sectors).await?;
        self.commits.sync(port).await?;
        if new.max_entries != old.max_entries {
            self.replace_header(port, footer, new).await?;
        }
        if table_end(new) > table_end(old) {
            Rare::TableGrown.taken();
        }
        Ok(())
    }

    /// Puts the table where there is room for it.
    ///
    /// 1. The blocks that are in the way are copied to after the last one; `fdatasync`. (In a file the footer at the
    ///    end makes room for them, see `Blocks::grow_file`.)
    /// 2. The table names the copies, a sector of it at a time; `fdatasync`. Each entry has the old place or the new
    ///    one, and both have the same data.
    /// 3. The new table and batmap are written where those blocks were; `fdatasync`.
    /// 4. The first sector of the dynamic header, which has the table's place and size and the
    ///    checksum, is replaced; `fdatasync`.
    async fn move_table(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        blocks: u32,
    ) -> io::Result<Plan> {
        let old = sparse.blocks.layout();
        let len = Plan::at(0, footer, &sparse.header, blocks).end;
        let plan = Plan::at(old.place_for_metadata(len), footer, &sparse.header, blocks);
        if !self.raw.is_file() && last_sector(&self.raw)? < plan.end {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.make_room(port, sparse, plan.end).await?;
        self.write_plan(port, sparse, footer, &plan).await?;
        Ok(plan)
    }

    /// The end of the file with the new table. If that `is_other` sectors than the old one, the old table, the old
    /// batmap, the room for larger ones and the old places of moved blocks become zeros. Replacing the footers syncs
    /// that. At the end of a file they are cut off, or become zeros then (`clear_before_footer`).
    async fn clear_unused(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        plan: &Plan,
        is_other: bool,
    ) -> io::Result<End> {
        let broken = |bad| io::Error::new(io::ErrorKind::InvalidData, bad);
        let layout = plan.layout(footer).map_err(broken)?;
        let placed: Vec<Placed> = sparse.blocks.placed().collect();
        let (used, gaps) = layout.unused(&placed);
        let first = placed.iter().map(Placed::start).min().unwrap_or(used);
        // A gap below 4 KiB between two blocks comes from their alignment.
        let clears = |from, to| is_other && (to <= first || to - from >= 4096);
        for (from, to) in gaps.iter().filter(|(from, to)| clears(*from, *to)) {
            erase(port, &self.raw, *from, to - from).await?;
        }
        let qemu = footer.kind == Kind::Dynamic
            && layout.qemu_overwrites_batmap(placed.iter().map(|p| p.sector));
        Ok(End { used, footer: layout.footer_at(used, qemu) })
    }

    /// Steps 1 and 2: moves blocks so that none begins before `end`.
    pub(super) async fn make_room(&self, port: &Port, sparse: &Sparse, end: u64) -> io::Result<()> {
        let file = port.files[0];
        let in_the_way: Vec<Placed> = sparse.blocks.placed().filter(|p| p.start() < end).collect();
        if in_the_way.is_empty() {
            return Ok(());
        }
        let stride = sparse.blocks.layout().stride();
        sparse.blocks.leave_room(end);
        let places = sparse.blocks.places_behind(port, &self.raw, in_the_way.len()).await?;
        for (block, place) in in_the_way.iter().zip(&places) {
            copy(port, file, block.start(), u64::from(*place) * SECTOR, stride).await?;
        }
        self.commits.sync(port).await?;
        for (block, place) in in_the_way.iter().zip(&places) {
            sparse.blocks.moved(block.block, *place);
        }
        for block in &in_the_way {
            let sector = block.block / ENTRIES;
            write(port, sparse, sparse.header.table_offset, sector..sector + 1).await?;
        }
        self.commits.sync(port).await
    }

    /// Steps 3 and 4: writes the table and the batmap.
    async fn write_plan(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        plan: &Plan,
    ) -> io::Result<()> {
        let sectors = 0..plan.header.max_entries.div_ceil(ENTRIES);
        write(port, sparse, plan.header.table_offset, sectors).await?;
        plan.write_batmap(port, self, sparse, footer).await?;
        self.commits.sync(port).await?;
        self.replace_header(port, footer, &plan.header).await?;
        Rare::TableGrown.taken();
        Ok(())
    }

    /// Replaces the first sector of the dynamic header, durably. The second one stays, whatever is in its reserved
    /// fields.
    async fn replace_header(&self, port: &Port, footer: &Footer, new: &Header) -> io::Result<()> {
        let old = self.raw.read_now(footer.data_offset, header::BYTES)?;
        let first = new.moved_table(&old).ok_or(io::ErrorKind::UnexpectedEof)?;
        write_bytes(port, port.files[0], &[(footer.data_offset, &first)]).await?;
        self.commits.sync(port).await
    }
}

/// Writes these sectors of a table at `offset`: unchanged entries for blocks of the disk, unused ones for others.
pub(super) async fn write(
    port: &Port,
    sparse: &Sparse,
    offset: u64,
    sectors: Range<u32>,
) -> io::Result<()> {
    let end = sectors.end;
    write_pieces(port, port.files[0], sectors.step_by(64), |first, to| {
        for entry in first * ENTRIES..(first + 64).min(end) * ENTRIES {
            let place = sparse.blocks.place_of(entry).unwrap_or(UNUSED);
            to.extend_from_slice(&place.to_be_bytes());
        }
        offset + u64::from(first) * SECTOR
    })
    .await
}
