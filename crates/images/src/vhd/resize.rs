//! Changes the size of a disk.

use std::io;

use ferrite_disk_base::{DiskError, ErrorKind, Port, Rare};

use super::footers::{End, replace_footers};
use super::format::batmap;
use super::format::footer::Footer;
use super::format::geometry::Geometry;
use super::format::{MAX_BLOCKS, MAX_DISK_BYTES, SECTOR};
use super::meta::FooterAt;
use super::pieces::{write_bytes, write_zeros};
use super::{Body, Sparse, Vhd};
use crate::image::format::ImageFormat as _;

impl Vhd {
    /// Changes the size of the disk, at once: only data in the way of a larger table are moved. The image is closed by
    /// that.
    ///
    /// The table gets as many entries as the disk has blocks then, at its place or at another one (`table`).
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
    pub(super) async fn clear_tail(&self, port: &Port, sparse: &Sparse) -> io::Result<()> {
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

    /// A larger table comes before the footers, a smaller one behind them: at any moment the table has an entry for each
    /// block of the disk. A smaller table may change the place of a file's footer (`Layout::footer_at`), so the footers
    /// are replaced once more.
    async fn resize_sparse(
        &self,
        port: &Port,
        sparse: &Sparse,
        footer: &Footer,
        blocks: u32,
    ) -> io::Result<()> {
        let replace = async |old: &Footer, end: End| {
            replace_footers(port, &self.commits, &self.raw, old, footer, end).await
        };
        // Unused space before the new footer of a file, perhaps with the old one, becomes zeros.
        sparse.blocks.mend_copy(port).await?;
        if blocks < sparse.blocks.blocks() {
            replace(&self.footer, sparse.blocks.end_of_file()).await?;
            let end = self.retable(port, sparse, footer, blocks).await?;
            return replace(footer, end).await;
        }
        let end = self.retable(port, sparse, footer, blocks).await?;
        replace(&self.footer, end).await
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
}
