//! Changes the size of a disk that is not in use.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Port, Rare};

use crate::image::format::ImageFormat;
use crate::qcow2::Qcow2;
use crate::qcow2::format::header::{BITMAPS_VALID, MAX_DISK_BYTES, MAX_L1_BYTES};
use crate::qcow2::tables::meta;

impl Qcow2 {
    /// Changes the size of the disk; the image has to be opened again to use it. Nothing may be allocated past the new
    /// end. Nor may the parent have data past the old end: an image on a parent of `below_bytes`, more than the disk
    /// has, cannot grow, since the parent's data would become visible.
    ///
    /// The order: entries of a longer L1 (after the old ones, or all of them in a new place); sync; the header's
    /// sector, which has size, place and length; sync. Then the old table is free. A power cut before that leaks at
    /// most the old table. Dirty bitmaps are kept.
    ///
    /// # Errors
    /// `InvalidInput`: such a size is not possible here. Errors of the kernel.
    pub async fn resize(&self, port: &Port, bytes: u64, below_bytes: u64) -> io::Result<()> {
        let invalid = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        if bytes == 0 || !bytes.is_multiple_of(512) || bytes > MAX_DISK_BYTES {
            return invalid("a disk has whole sectors of 512 bytes, up to 64 TiB");
        }
        if bytes > self.bytes() && below_bytes > self.bytes() {
            return invalid("its parent is larger: what is behind the disk's end would be seen");
        }
        if self.header.snapshots > 0 && self.header.version < 3 {
            return invalid("it has internal snapshots, for which version 2 knows one size only");
        }
        let keeps_bitmaps = self.keeps_bitmaps(bytes)?;
        self.ready_for(port, keeps_bitmaps).await?;
        self.commit(port).await?;
        let table = self.header.l2_entries() * self.cluster_bytes();
        let needed = bytes.div_ceil(table);
        if needed * 8 > MAX_L1_BYTES {
            return invalid("its clusters are too small for a disk of that size");
        }
        let (old_entries, old_offset) = (u64::from(self.header.l1_entries), self.header.l1_offset);
        let entries = needed.max(old_entries);
        let room = (old_entries * 8).next_multiple_of(self.cluster_bytes());
        let offset = if entries * 8 <= room {
            // Bytes after the last entry were never checked.
            let new = vec![0; (entries - old_entries) as usize * 8];
            self.write_l1(port, old_offset, old_entries, new).await?;
            old_offset
        } else {
            let count = (entries * 8).div_ceil(self.cluster_bytes());
            let offset = self.alloc.take_neighbours(port, count).await?;
            let mut all: Vec<u8> =
                self.l1.iter().flat_map(|e| e.load(Ordering::Acquire).to_be_bytes()).collect();
            all.resize((count * self.cluster_bytes()) as usize, 0);
            self.write_l1(port, offset, 0, all).await?;
            // The counts have to be durable before anything refers to the clusters.
            self.commit(port).await?;
            offset
        };
        self.base.sync(port).await?;
        self.base
            .patch_header(port, |sector| {
                sector[24..32].copy_from_slice(&bytes.to_be_bytes());
                sector[36..40].copy_from_slice(&(entries as u32).to_be_bytes());
                sector[40..48].copy_from_slice(&offset.to_be_bytes());
            })
            .await?;
        if entries > old_entries {
            Rare::LongerL1.taken();
        }
        if offset != old_offset {
            let first = old_offset >> self.header.cluster_bits;
            let count = (old_entries * 8).div_ceil(self.cluster_bytes());
            self.state().clusters.due(first..first + count);
        }
        self.close(port).await?;
        match keeps_bitmaps {
            // No data have changed. A cut before this costs the bitmaps, and nothing else.
            true => self.set_autoclear(port, BITMAPS_VALID).await,
            false => Ok(()),
        }
    }

    /// Writes entries of L1 from `index` on, in whole sectors.
    async fn write_l1(&self, port: &Port, table: u64, index: u64, new: Vec<u8>) -> io::Result<()> {
        let from = table + index * 8;
        let before = from % 512;
        let mut bytes = meta::read(port, port.files[0], from - before, 512).await?;
        bytes.truncate(before as usize);
        bytes.extend(new);
        let end = from + bytes.len() as u64 - before;
        let rest = meta::read(port, port.files[0], end - end % 512, 512).await?;
        if !end.is_multiple_of(512) {
            bytes.extend(&rest[(end % 512) as usize..]);
        }
        meta::write(port, port.files[0], from - before, &bytes).await
    }
}
