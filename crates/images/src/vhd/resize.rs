//! Changes the size of a disk.

use std::io;

use ferrite_disk_base::{DiskError, ErrorKind, Port, Rare};

use super::footers::replace_footers;
use super::format::batmap::{self, Batmap};
use super::format::footer::Footer;
use super::format::geometry::Geometry;
use super::format::{MAX_BLOCKS, MAX_DISK_BYTES, SECTOR};
use super::meta::FooterAt;
use super::pieces::{write_bytes, write_zeros};
use super::table::{self, ENTRIES};
use super::{Body, Sparse, Vhd};
use crate::image::format::ImageFormat as _;

impl Vhd {
    /// Changes the size of the disk, at once: only data in the way of a larger table are moved. The image is closed by
    /// that.
    ///
    /// If the table has no room, a larger one replaces it (`table`), and then the footers are replaced: until then it
    /// is a table with room. If there was room, the entries that the disk gets become unused before the footers are
    /// replaced: they were never checked.
    ///
    /// # Errors
    /// Not whole sectors, too large, no room on the device, or smaller with data allocated past the new end: nothing
    /// was changed. Those of the kernel: as after a crash, the size is the old or the new one.
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
            // Some programs take this for the size (libvhdi), or refuse a larger one (vhd-lib).
            original_size: bytes,
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

    /// Makes a fixed disk larger. At any moment the medium ends with an intact footer, and the added part reads as
    /// zeros:
    ///
    /// 1. A file is made longer by writing the unchanged footer to the place of the new one, in one sector;
    ///    `fdatasync`. A device keeps its end.
    /// 2. The space between the old end and the new one, in a file the old footer, becomes zeros; `fdatasync`.
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
                self.commits.sync(port).await?;
                match port.io.allocate(file, old, new - old).await {
                    Err(e) if e.kind() == io::ErrorKind::Unsupported => {}
                    done => done?,
                }
            }
        } else if at < new {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if new > old {
            write_zeros(port, &self.raw, old, new - old).await?;
            self.commits.sync(port).await?;
        }
        write_bytes(port, file, &[(at, &footer.bytes())]).await?;
        self.commits.sync(port).await
    }

    /// Overwrites the part of the last block that was past the disk's end and will be within it: its bits may be set,
    /// and on a device it may have any content. Zeros, durable.
    async fn clear_tail(&self, port: &Port, sparse: &Sparse) -> io::Result<()> {
        let block_bytes = u64::from(sparse.header.block_bytes);
        let (block, within) = (self.bytes() / block_bytes, self.bytes() % block_bytes);
        let place = u32::try_from(block).ok().and_then(|block| sparse.blocks.place_of(block));
        if let Some(sector) = place.filter(|_| within > 0) {
            let data = u64::from(sector) * SECTOR + sparse.blocks.bitmap_bytes();
            write_zeros(port, &self.raw, data + within, block_bytes - within).await?;
            self.commits.sync(port).await?;
            Rare::TailCleared.taken();
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
        let mut end = sparse.blocks.end_of_file();
        // Unused space before the new footer of a file, perhaps with the old one, becomes zeros.
        sparse.blocks.mend_copy(port).await?;
        if blocks > sparse.header.max_entries || sparse.blocks.is_table_behind_a_block() {
            end = self.move_table(port, sparse, footer, blocks).await?;
        } else {
            let sectors = sparse.blocks.blocks() / ENTRIES..blocks.div_ceil(ENTRIES);
            table::write(port, sparse, sparse.header.table_offset, sectors).await?;
            self.commits.sync(port).await?;
            self.resize_batmap(port, sparse, footer).await?;
        }
        replace_footers(port, &self.commits, &self.raw, &self.footer, footer, end).await
    }

    /// The batmap of the disk with its new size, which gives the length for the checksum.
    pub(super) fn full_blocks(&self, sparse: &Sparse, footer: &Footer) -> Vec<u8> {
        let mut full = sparse.blocks.batmap(batmap::covered_bytes(footer.current_size) as usize);
        // The last block may have more sectors now than its bits were checked for.
        let last = (self.bytes() / u64::from(sparse.header.block_bytes)) as usize;
        if let Some(byte) = full.get_mut(last / 8) {
            *byte &= !(0x80 >> (last % 8));
        }
        full
    }

    async fn resize_batmap(&self, port: &Port, sparse: &Sparse, footer: &Footer) -> io::Result<()> {
        if let (Some(map), Some(at)) =
            (&sparse.batmap, Batmap::header_offset(footer, &sparse.header))
        {
            let full = self.full_blocks(sparse, footer);
            if full.len() as u64 <= map.len {
                let raw = map.header_for(&full);
                write_bytes(port, port.files[0], &[(map.offset, &full), (at, &raw)]).await?;
                self.commits.sync(port).await?;
            }
        }
        Ok(())
    }
}
