//! A larger block table, at the place that libvhd requires. libvhd takes an image whose metadata does not end before
//! the first block for damaged, and XAPI then no longer coalesces it.
//!
//! So the first blocks make room: they are copied to after the last one. The alternative, room at creation for the
//! largest disk, would cost each image 4 MiB, and would not help images that other programs made. The new table has
//! room for twice as many blocks as are needed. So growing in small steps seldom moves it, and all old tables of an
//! image together are smaller than the present one.

use std::io;
use std::ops::Range;

use ferrite_disk_base::{Port, Rare};

use super::footers::{End, last_sector};
use super::format::batmap::Batmap;
use super::format::footer::{Footer, Kind};
use super::format::header::{self, Header};
use super::format::layout::{Layout, Placed, UNUSED};
use super::format::{MAX_BLOCKS, MAX_DISK_BYTES, Malformed, SECTOR, whole_sectors};
use super::pieces::{copy, erase, write_bytes, write_filled, write_pieces};
use super::{Sparse, Vhd};

/// Entries in a sector of the table.
pub(super) const ENTRIES: u32 = 128;

/// The new table, and the batmap after it.
struct Plan {
    header: Header,
    table_bytes: u64,
    /// The batmap, and byte offset of its header.
    batmap: Option<(u64, Batmap)>,
    /// The end of both.
    end: u64,
}

impl Plan {
    /// A table at `table_offset` for twice so many blocks.
    fn at(table_offset: u64, footer: &Footer, old: &Header, blocks: u32) -> Plan {
        let largest = MAX_DISK_BYTES.div_ceil(u64::from(old.block_bytes)).min(MAX_BLOCKS.into());
        // At most MAX_BLOCKS, which fits.
        let max_entries = (u64::from(blocks) * 2).min(largest) as u32;
        let header = Header { table_offset, max_entries, ..old.clone() };
        let table_bytes = whole_sectors(u64::from(max_entries) * 4);
        let at = Batmap::header_offset(footer, &header);
        let batmap = at.map(|at| (at, Batmap::new(at, max_entries)));
        let end =
            batmap.as_ref().map_or(table_offset + table_bytes, |(_, map)| map.offset + map.len);
        Plan { header, table_bytes, batmap, end }
    }

    fn layout(&self, footer: &Footer) -> Result<Layout, Malformed> {
        Layout::new(footer, &self.header, self.batmap.as_ref().map(|(_, map)| map), u64::MAX)
    }
}

impl Vhd {
    /// Gives the image a table with room for `blocks`, and a batmap. Returns the end of the file after that. The copy
    /// of the footer is intact.
    ///
    /// 1. The blocks that are in the way are copied to after the last one; `fdatasync`. (In a file the footer at the
    ///    end makes room for them, see `Blocks::grow_file`.)
    /// 2. The table names the copies, a sector of it at a time; `fdatasync`. Each entry has the old place or the new
    ///    one, and both have the same data.
    /// 3. The new table and batmap are written where those blocks were; `fdatasync`.
    /// 4. The first sector of the dynamic header, which has the table's place and size and the
    ///    checksum, is replaced; `fdatasync`.
    /// 5. The old table, the old batmap and the old places of moved blocks become zeros. Replacing the footers syncs
    ///    that. At the end of a file they are cut off, or become zeros then (`clear_before_footer`).
    pub(super) async fn move_table(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        blocks: u32,
    ) -> io::Result<End> {
        let old = sparse.blocks.layout();
        let len = Plan::at(0, footer, &sparse.header, blocks).end;
        let plan = Plan::at(old.place_for_metadata(len), footer, &sparse.header, blocks);
        if !self.raw.is_file() && last_sector(&self.raw)? < plan.end {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.make_room(port, sparse, plan.end).await?;
        self.write_plan(port, sparse, footer, &plan).await?;
        let broken = |bad| io::Error::new(io::ErrorKind::InvalidData, bad);
        let layout = plan.layout(footer).map_err(broken)?;
        let placed: Vec<Placed> = sparse.blocks.placed().collect();
        let (used, gaps) = layout.unused(&placed);
        let first = placed.iter().map(Placed::start).min().unwrap_or(used);
        // A gap below 4 KiB between two blocks comes from their alignment.
        for (from, to) in gaps.iter().filter(|(from, to)| *to <= first || to - from >= 4096) {
            erase(port, &self.raw, *from, to - from).await?;
        }
        let qemu = footer.kind == Kind::Dynamic
            && layout.qemu_overwrites_batmap(placed.iter().map(|p| p.sector));
        Ok(End { used, footer: layout.footer_at(used, qemu) })
    }

    /// Steps 1 and 2: moves blocks so that none begins before `end`.
    async fn make_room(&self, port: &Port, sparse: &Sparse, end: u64) -> io::Result<()> {
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
        let file = port.files[0];
        let sectors = 0..(plan.table_bytes / SECTOR) as u32;
        write(port, sparse, plan.header.table_offset, sectors).await?;
        if let Some((at, map)) = &plan.batmap {
            let full = self.full_blocks(sparse, footer);
            write_filled(port, file, map.offset, map.len, 0).await?;
            write_bytes(port, file, &[(map.offset, &full), (*at, &map.header_for(&full))]).await?;
        }
        self.commits.sync(port).await?;
        // The second sector stays, whatever is in its reserved fields.
        let old = self.raw.read_now(footer.data_offset, header::BYTES)?;
        let first = plan.header.moved_table(&old).ok_or(io::ErrorKind::UnexpectedEof)?;
        write_bytes(port, file, &[(footer.data_offset, &first)]).await?;
        self.commits.sync(port).await?;
        Rare::TableGrown.taken();
        Ok(())
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
