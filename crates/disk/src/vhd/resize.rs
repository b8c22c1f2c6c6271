//! Other sizes.

use std::io;
use std::ops::Range;

use super::footers::replace_footers;
use super::format::batmap::{self, Batmap};
use super::format::footer::{Footer, Kind};
use super::format::geometry::Geometry;
use super::format::header::{self, Header};
use super::format::layout::{Layout, UNUSED};
use super::format::{MAX_BLOCKS, MAX_DISK_BYTES, SECTOR, whole_sectors};
use super::meta::FooterAt;
use super::pieces::{write_bytes, write_filled, write_pieces};
use super::{Body, Sparse, Vhd};
use crate::{DiskError, ErrorKind, Port};

/// Memory of zeros that is written over and over where the medium knows nothing better.
const ZEROS_BYTES: usize = 64 << 10;
/// Entries in a sector of the table.
const ENTRIES: u32 = 128;

impl Vhd {
    /// Gives the disk another size, at once: no data is moved. The image is closed by that.
    ///
    /// Where the table has no room, a larger one is written behind the last block (1), with a
    /// batmap; `fdatasync`; then the first sector of the dynamic header, which has the table's
    /// place and size and the checksum, is replaced (2); `fdatasync`; then the footers (3). Before
    /// 2 the new table is unused space; between 2 and 3 it is a table with room.
    /// Where there was room, the entries that the disk gets become unused before 3: nobody has
    /// looked at them so far.
    ///
    /// # Errors
    /// Not whole sectors, too large, no room on the device, or smaller with something allocated
    /// behind the new end: nothing was changed. The kernel's: as after a crash, the size is the
    /// old or the new one.
    pub async fn resize(self, port: &Port, bytes: u64) -> Result<(), DiskError> {
        let path = self.raw.path().display().to_string();
        let error = |kind, why: String, help: &str| {
            DiskError::new(kind, format!("cannot resize {path}"), why, help)
        };
        let broken = |e: io::Error| {
            let help = "check the medium and the kernel's log (dmesg), then run it again";
            error(ErrorKind::Io, e.to_string(), help).with_source(e)
        };
        if bytes == 0 || bytes > MAX_DISK_BYTES || !bytes.is_multiple_of(SECTOR) {
            let why = format!("a disk of {bytes} bytes");
            return Err(error(ErrorKind::Usage, why, "a VHD has whole sectors, up to 2040 GiB"));
        }
        let footer = Footer {
            current_size: bytes,
            geometry: Geometry::of_sectors(bytes / SECTOR),
            ..self.footer.clone()
        };
        match &self.body {
            Body::Fixed if bytes < self.bytes() => {
                let help = "convert it to a dynamic image first";
                Err(error(ErrorKind::Unsuitable, "a fixed image cannot shrink".into(), help))
            }
            Body::Fixed => self.grow_fixed(port, &footer).await.map_err(broken),
            Body::Sparse(sparse) => {
                if bytes < self.bytes() {
                    let used = sparse.blocks.used_behind(port, bytes).await.map_err(broken)?;
                    if let Some(at) = used {
                        let why = format!("there is a block at byte {at}, behind its new end");
                        let help = "what was discarded keeps its block: convert the disk \
                                    (ferrite image convert), the copy has none there and can shrink";
                        return Err(error(ErrorKind::Unsuitable, why, help));
                    }
                }
                let blocks = bytes.div_ceil(u64::from(sparse.header.block_bytes));
                if blocks > u64::from(MAX_BLOCKS) {
                    let why = format!("{blocks} blocks; at most {MAX_BLOCKS} are supported");
                    return Err(error(ErrorKind::Unsuitable, why, "convert it to larger blocks"));
                }
                self.close(port).await.map_err(broken)?;
                if bytes > self.bytes() {
                    self.clear_tail(port, sparse).await.map_err(broken)?;
                }
                self.resize_sparse(port, sparse, &footer, blocks as u32).await.map_err(broken)
            }
        }
    }

    /// At any moment the medium ends with a whole footer, and what the disk gets reads as zeros:
    ///
    /// 1. A file is made longer by writing the footer, as it was, where the new one shall be, in
    ///    one sector; `fdatasync`. A device ends where it ended.
    /// 2. What lies between the old end and the new one, in a file the old footer, becomes zeros;
    ///    `fdatasync`.
    /// 3. The footer, one sector, becomes the new one; `fdatasync`.
    async fn grow_fixed(&self, port: &Port, footer: &Footer) -> io::Result<()> {
        let file = port.files[0];
        let (old, new) = (self.bytes(), footer.current_size);
        let FooterAt::End(mut at) = self.footer_at else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        if self.raw.is_file() {
            if at < new {
                at = new;
                write_bytes(port, file, &[(at, &self.footer.bytes())]).await?;
                port.io.sync(file).await?;
                match port.io.allocate(file, old, new - old).await {
                    Err(e) if e.kind() == io::ErrorKind::Unsupported => {}
                    done => done?,
                }
            }
        } else if at < new {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if new > old {
            self.write_zeros(port, old, new - old).await?;
            port.io.sync(file).await?;
        }
        write_bytes(port, file, &[(at, &footer.bytes())]).await?;
        port.io.sync(file).await
    }

    /// Makes a range of the medium zeros.
    async fn write_zeros(&self, port: &Port, offset: u64, len: u64) -> io::Result<()> {
        let zeros = port.scratch.take(ZEROS_BYTES).await;
        port.memory().fill(zeros.span(), 0);
        self.raw.write_zeroes(&port.io, &port.files, offset, len, zeros.span()).await
    }

    /// The part of the last block that was behind the disk's end and will not be: its bits may be
    /// set, and on a device there may be anything. Zeros, durable.
    async fn clear_tail(&self, port: &Port, sparse: &Sparse) -> io::Result<()> {
        let block_bytes = u64::from(sparse.header.block_bytes);
        let (block, within) = (self.bytes() / block_bytes, self.bytes() % block_bytes);
        let place = u32::try_from(block).ok().and_then(|block| sparse.blocks.place_of(block));
        if let Some(sector) = place.filter(|_| within > 0) {
            let data = u64::from(sector) * SECTOR + sparse.blocks.bitmap_bytes();
            self.write_zeros(port, data + within, block_bytes - within).await?;
            port.io.sync(port.files[0]).await?;
        }
        Ok(())
    }

    async fn resize_sparse(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        blocks: u32,
    ) -> io::Result<()> {
        let mut end = sparse.blocks.footer_at();
        // A larger table may take the place of the footer at the end of a file.
        sparse.blocks.mend_copy(port).await?;
        if blocks > sparse.header.max_entries {
            end = self.move_table(port, sparse, footer, blocks).await?;
        } else {
            let sectors = sparse.blocks.blocks() / ENTRIES..blocks.div_ceil(ENTRIES);
            write_table(port, sparse, sparse.header.table_offset, sectors).await?;
            port.io.sync(port.files[0]).await?;
            self.resize_batmap(port, sparse, footer).await?;
        }
        replace_footers(port, &self.raw, &self.footer, footer, end).await
    }

    async fn resize_batmap(&self, port: &Port, sparse: &Sparse, footer: &Footer) -> io::Result<()> {
        if let (Some(map), Some(at)) =
            (&sparse.batmap, Batmap::header_offset(footer, &sparse.header))
        {
            // Its checksum is made for as many bytes as the disk's size says.
            let len = batmap::covered_bytes(footer.current_size) as usize;
            let mut full = sparse.blocks.batmap(len);
            // The last block may have become larger than what its bits were looked at for.
            let last = (self.bytes() / u64::from(sparse.header.block_bytes)) as usize;
            if let Some(byte) = full.get_mut(last / 8) {
                *byte &= !(0x80 >> (last % 8));
            }
            if full.len() as u64 <= map.len {
                let raw = map.header_for(&full);
                write_bytes(port, port.files[0], &[(map.offset, &full), (at, &raw)]).await?;
                port.io.sync(port.files[0]).await?;
            }
        }
        Ok(())
    }

    /// Writes a larger table behind everything else, and has the header name it. Returns where the
    /// footer of a file belongs. No block is behind the new batmap, so it stays empty for now (see
    /// `Layout::qemu_overwrites_batmap`).
    async fn move_table(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        blocks: u32,
    ) -> io::Result<u64> {
        let file = port.files[0];
        let table_offset = sparse.blocks.end().next_multiple_of(4096);
        let header = Header { table_offset, max_entries: blocks, ..sparse.header.clone() };
        let table_bytes = whole_sectors(u64::from(blocks) * 4);
        let mut end = table_offset + table_bytes;
        let map = Batmap::header_offset(footer, &header).map(|at| (at, Batmap::new(at, blocks)));
        if let Some((_, map)) = &map {
            end = map.offset + map.len;
        }
        if !self.raw.is_file() && self.raw.bytes_now()? < end + SECTOR {
            return Err(io::ErrorKind::StorageFull.into());
        }
        write_table(port, sparse, table_offset, 0..(table_bytes / SECTOR) as u32).await?;
        if let Some((at, map)) = &map {
            write_filled(port, file, map.offset, map.len, 0).await?;
            let raw = map.header_for(&vec![0; batmap::covered_bytes(footer.current_size) as usize]);
            write_bytes(port, file, &[(*at, &raw)]).await?;
        }
        port.io.sync(file).await?;
        // The second sector stays, whatever is in its reserved fields.
        let old = self.raw.read_now(footer.data_offset, header::BYTES)?;
        let first = header.moved_table(&old).ok_or(io::ErrorKind::UnexpectedEof)?;
        write_bytes(port, file, &[(footer.data_offset, &first)]).await?;
        port.io.sync(file).await?;
        let map = map.as_ref().map(|(_, map)| map);
        let layout = Layout::new(footer, &header, map, u64::MAX);
        let layout = layout.map_err(|bad| io::Error::new(io::ErrorKind::InvalidData, bad))?;
        let qemu = footer.kind == Kind::Dynamic;
        Ok(layout.footer_at(end, qemu && layout.qemu_overwrites_batmap(std::iter::empty())))
    }
}

/// Writes these sectors of a table at `offset`: blocks of the disk as they are, others without a
/// place.
async fn write_table(
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
