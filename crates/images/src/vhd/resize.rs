//! Changes the size of a disk.

use std::io;

use ferrite_disk_base::{DiskError, ErrorKind, Port, Rare};

use super::edit::invalid;
use super::footers::{End, replace_footers};
use super::format::batmap;
use super::format::footer::{self, Footer};
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
        let footer = self.footer.of_size(bytes);
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

    /// Makes the disk larger within the room of its table. Nothing moves, so other processes may read the image.
    ///
    /// 1. The part of the last block that was past the disk's end becomes zeros (`clear_tail`).
    /// 2. The entries for new blocks become unused, and the batmap gets the checksum of its larger part; `fdatasync`.
    ///    The disk as it is does not use them.
    /// 3. The footers (`replace_footers`).
    ///
    /// # Errors
    /// `InvalidInput`: the table has no entries for that, the disk would be smaller, or it is fixed; nothing was changed.
    /// Errors of the kernel: the size is the old or the new one.
    pub async fn grow_in_table(self, port: &Port, bytes: u64) -> io::Result<()> {
        let Body::Sparse(sparse) = &self.body else {
            return Err(invalid("a fixed image has no table"));
        };
        let blocks = bytes.div_ceil(u64::from(sparse.header.block_bytes));
        if blocks > u64::from(sparse.header.max_entries) {
            let entries = sparse.header.max_entries;
            return Err(invalid(&format!("its table has {entries} entries, not {blocks}")));
        }
        if bytes < self.bytes() || bytes > MAX_DISK_BYTES || !bytes.is_multiple_of(SECTOR) {
            return Err(invalid(&format!("its disk of {} bytes would get {bytes}", self.bytes())));
        }
        let footer = self.footer.of_size(bytes);
        self.close(port).await?;
        sparse.blocks.mend_copy(port).await?;
        if bytes > self.bytes() {
            self.clear_tail(port, sparse).await?;
        }
        let (first, end) = (sparse.blocks.blocks() / ENTRIES, (blocks as u32).div_ceil(ENTRIES));
        table::write(port, sparse, sparse.header.table_offset, first..end).await?;
        let covered = batmap::covered_bytes(bytes);
        if let Some(map) = sparse.batmap.as_ref().filter(|map| covered <= map.len) {
            self.write_batmap(port, sparse, map, &self.full_blocks(sparse, &footer)).await?;
        }
        self.commits.sync(port).await?;
        let end = sparse.blocks.end_of_file();
        replace_footers(port, &self.commits, &self.raw, &self.footer, &footer, end).await
    }

    /// Takes a resize back: the disk gets its old footer, `old`, and its table the old number of entries. Nothing was
    /// written behind the old end. The order is that of a resize to a smaller size.
    ///
    /// # Errors
    /// `InvalidInput`: that is the footer of another image, or of a larger disk. Errors of the kernel: the size is the
    /// old or the new one, and this can be done again.
    pub async fn take_back(
        self,
        port: &Port,
        old: &[u8; footer::BYTES],
        entries: u32,
    ) -> io::Result<()> {
        let footer = Footer::parse(old, 0).map_err(|bad| invalid(&bad.to_string()))?;
        let is_its = (footer.uuid, footer.kind) == (self.footer.uuid, self.footer.kind)
            && footer.data_offset == self.footer.data_offset
            && footer.current_size <= self.bytes();
        if !is_its {
            return Err(invalid("the journal is of another image"));
        }
        match &self.body {
            Body::Fixed => self.shrink_fixed(port, &footer).await,
            Body::Sparse(sparse) => {
                let blocks = footer.current_size.div_ceil(u64::from(sparse.header.block_bytes));
                if u64::from(entries) < blocks || entries > MAX_BLOCKS {
                    return Err(invalid("the journal has no number of entries for that disk"));
                }
                self.close(port).await?;
                self.resize_sparse(port, sparse, &footer, entries).await
            }
        }
    }

    /// Makes a fixed disk smaller. A file ends with an intact footer at any moment:
    ///
    /// 1. The footer of the smaller disk: in a file behind its end, where the disk of the other one still is; on a
    ///    device over the other one; `fdatasync`.
    /// 2. A file is cut off behind it; `fdatasync`.
    async fn shrink_fixed(&self, port: &Port, footer: &Footer) -> io::Result<()> {
        let FooterAt::End(at) = self.footer_at else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let at = if self.raw.is_file() { footer.current_size } else { at };
        write_bytes(port, port.files[0], &[(at, &footer.bytes())]).await?;
        self.commits.sync(port).await?;
        if self.raw.is_file() {
            port.io.set_len(port.files[0], at + SECTOR).await?;
            self.commits.sync(port).await?;
        }
        Ok(())
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
