//! Closes an image so that it is complete for other programs.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Port, Rare};

use super::footers::{End, clear_before_footer, last_sector};
use super::format::batmap::{Batmap, covered_bytes};
use super::format::{SECTOR, footer};
use super::meta::FooterAt;
use super::pieces::write_bytes;
use super::{Body, Sparse, Vhd};
use crate::image::format::ImageFormat as _;

impl Vhd {
    /// Completes the image. While an image is open the copy of the footer at its beginning counts; the one at the end
    /// is overwritten once the image has grown. The order here:
    ///
    /// 1. A commit: all data and metadata is durable. Then the unwritten parts of new blocks give their space back: the
    ///    file system says which these are, and they read as zeros before and after.
    /// 2. If a file's footer is not directly after the last used part, the space between becomes zeros; `fdatasync`.
    /// 3. The batmap and the footer after the last block; `fdatasync`. The batmap is a hint with a checksum, so a
    ///    partial one is ignored.
    /// 4. A file is cut off after the footer; `fdatasync`. Before that the footer is followed by unused space, and the
    ///    copy counts. On a device that has grown the old footer becomes zeros; `fdatasync`.
    /// 5. The journal, which is empty since 1, is removed.
    pub(super) async fn complete(&self, port: &Port) -> io::Result<()> {
        self.commit(port).await?;
        let Body::Sparse(sparse) = &self.body else { return Ok(()) };
        if !self.raw.read_only() {
            let footer_missing = !matches!(self.footer_at, FooterAt::End(_))
                || sparse.blocks.is_moved(last_sector(&self.raw)?);
            if let Some(end) = sparse.blocks.closing(footer_missing) {
                sparse.blocks.give_back(port, &self.raw).await;
                self.write_end(port, sparse, end).await?;
            }
            sparse.blocks.closed()?;
        }
        Ok(())
    }

    async fn write_end(&self, port: &Port, sparse: &Sparse, end: End) -> io::Result<()> {
        let (file, now) = (port.files[0], self.footer_now());
        let at = match self.raw.is_file() {
            true => end.footer,
            false => last_sector(&self.raw)?,
        };
        if end.used < end.footer {
            sparse.blocks.mend_copy(port).await?;
            clear_before_footer(port, &self.commits, &self.raw, end).await?;
        }
        if let Some(batmap) = &sparse.batmap {
            let map = sparse.blocks.batmap(covered_bytes(now.current_size) as usize);
            self.write_batmap(port, sparse, batmap, &map).await?;
        }
        let footer: [u8; footer::BYTES] = now.bytes();
        write_bytes(port, file, &[(at, &footer)]).await?;
        self.commits.sync(port).await?;
        if self.raw.is_file() {
            port.io.set_len(file, at + SECTOR).await?;
            self.commits.sync(port).await?;
        } else if sparse.blocks.is_moved(at) {
            sparse.blocks.forget_footer(port, at).await?;
        }
        Ok(())
    }

    pub(super) async fn write_batmap(
        &self,
        port: &Port,
        sparse: &Sparse,
        batmap: &Batmap,
        map: &[u8],
    ) -> io::Result<()> {
        // The disk was made larger, and the room for the map was not.
        if map.len() as u64 > batmap.len {
            return Ok(());
        }
        let mut header = batmap.header_for(map);
        if let Some(key) = &*sparse.key.lock().unwrap_or_else(PoisonError::into_inner) {
            key.put(&mut header);
        }
        let mut pieces: Vec<(u64, &[u8])> = vec![(batmap.offset, map)];
        let header_at = Batmap::header_offset(&self.footer, &sparse.header);
        pieces.extend(header_at.map(|at| (at, &header[..])));
        write_bytes(port, port.files[0], &pieces).await
    }

    /// Clears all bits of the batmap, durably, before the first bit of a bitmap is cleared: a process that opens the
    /// image after a crash trusts the batmap without reading the bitmap. Closing writes it anew.
    pub(super) async fn forget_full(&self, port: &Port, sparse: &Sparse) -> io::Result<()> {
        let Some(batmap) = &sparse.batmap else { return Ok(()) };
        if !sparse.full_on_disk.load(Ordering::Acquire) || sparse.blocks.whole() {
            return Ok(());
        }
        let _held = sparse.forgetting.lock(&port.io).await?;
        if sparse.full_on_disk.load(Ordering::Acquire) {
            let map = vec![0; covered_bytes(self.footer_now().current_size) as usize];
            self.write_batmap(port, sparse, batmap, &map).await?;
            self.commits.sync(port).await?;
            sparse.full_on_disk.store(false, Ordering::Release);
            Rare::BatmapCleared.taken();
        }
        Ok(())
    }
}
