//! Changes of headers that vhd-util makes. Each of them closes the image.
//!
//! A sector is old or new after a power cut. All that changes here but the table is a sector, or a footer and its copy,
//! of which the one at the end counts (`replace_footers`). So at any moment there is an image, the old or the new one.

use std::io;

use ferrite_disk_base::{Port, Raw};
use ferrite_host::clock::SplitMix64;

use super::footers::{End, replace_footers};
use super::format::batmap::{self, Batmap, KeyHash, covered_bytes};
use super::format::footer::{self, Footer, Kind};
use super::format::{SECTOR, Uuid, whole_sectors};
use super::meta::FooterAt;
use super::pieces::{write_bytes, write_filled};
use super::{Body, Vhd};
use crate::image::format::ImageFormat as _;

impl Vhd {
    /// The bytes of its footer.
    pub fn footer_bytes(&self) -> [u8; footer::BYTES] {
        self.footer.bytes()
    }

    /// The entries of its table; `None`: it is fixed.
    pub fn table_entries(&self) -> Option<u32> {
        match &self.body {
            Body::Fixed => None,
            Body::Sparse(sparse) => Some(sparse.header.max_entries),
        }
    }

    /// The hash of the key of its encrypted data, if they are encrypted.
    pub fn key(&self) -> Option<KeyHash> {
        match &self.body {
            Body::Fixed => None,
            Body::Sparse(sparse) => sparse.batmap.as_ref()?.key(),
        }
    }

    /// Marks it as one that is only a parent, or not.
    ///
    /// # Errors
    /// Errors of the kernel: the mark is the old or the new one.
    pub async fn set_hidden(self, port: &Port, hidden: u8) -> io::Result<()> {
        let footer = Footer { hidden, ..self.footer.clone() };
        self.close_with(port, &footer).await
    }

    /// Writes the footer to its place behind the last block, and the copy: both are whole then, whatever a process that
    /// was killed has left. An image without an identity gets one.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub async fn mend_footers(self, port: &Port) -> io::Result<()> {
        let mut footer = self.footer.clone();
        if footer.uuid == Uuid::NIL {
            footer.uuid = Uuid::random(&mut SplitMix64::from_system());
        }
        self.close_with(port, &footer).await
    }

    /// Closes the image with another footer.
    pub(super) async fn close_with(&self, port: &Port, footer: &Footer) -> io::Result<()> {
        self.close(port).await?;
        match (&self.body, self.footer_at) {
            (Body::Sparse(sparse), _) => {
                let end = sparse.blocks.end_of_file();
                sparse.blocks.mend_copy(port).await?;
                replace_footers(port, &self.commits, &self.raw, &self.footer, footer, end).await
            }
            // A fixed image has only this one, in a single sector. There may be space between the disk and it.
            (Body::Fixed, FooterAt::End(at)) => {
                write_bytes(port, port.files[0], &[(at, &footer.bytes())]).await?;
                self.commits.sync(port).await
            }
            (Body::Fixed, FooterAt::Start | FooterAt::Taken(_)) => {
                Err(io::ErrorKind::InvalidData.into())
            }
        }
    }

    /// Sets the marker in the header of the batmap, which means nothing here.
    ///
    /// # Errors
    /// `InvalidInput`: it has no batmap. Errors of the kernel.
    pub async fn set_marker(self, port: &Port, marker: u8) -> io::Result<()> {
        self.edit_batmap(port, |header| Batmap::with_marker(header, marker)).await
    }

    /// Sets the hash of the key that the image's data will be encrypted with.
    ///
    /// # Errors
    /// `InvalidInput`: it has no batmap, or it has blocks. Errors of the kernel.
    pub async fn set_key(self, port: &Port, key: &KeyHash) -> io::Result<()> {
        if self.allocated_bytes() > 0 {
            return Err(invalid("it has data, which are not encrypted with that key"));
        }
        self.edit_batmap(port, |header| Batmap::with_key(header, key)).await
    }

    /// Replaces the header of the batmap, one sector; `fdatasync`. It keeps the checksum of the map on disk.
    async fn edit_batmap(
        self,
        port: &Port,
        edit: impl FnOnce([u8; batmap::BYTES]) -> [u8; batmap::BYTES],
    ) -> io::Result<()> {
        self.close(port).await?;
        let at = match &self.body {
            Body::Sparse(sparse) if sparse.batmap.is_some() => {
                Batmap::header_offset(&self.footer, &sparse.header)
            }
            _ => None,
        };
        let at = at.ok_or_else(|| invalid("it has no batmap, whose header has that"))?;
        let old = self.raw.read_now(at, batmap::BYTES)?;
        let old = old.try_into().map_err(|_| io::ErrorKind::UnexpectedEof)?;
        write_bytes(port, port.files[0], &[(at, &edit(old))]).await?;
        self.commits.sync(port).await
    }

    /// Puts the footer to the end of the first `bytes` of the medium, of which only these are left to the image: the
    /// medium of a volume is made smaller after this, or was made larger before.
    ///
    /// 1. The footer at its new place; `fdatasync`. Until then the old one counts, or the copy at the beginning.
    /// 2. A file is cut off behind it; `fdatasync`.
    ///
    /// # Errors
    /// `InvalidInput`: the image needs more, or these are no whole sectors; nothing was changed. Errors of the kernel.
    pub async fn set_end(self, port: &Port, bytes: u64) -> io::Result<()> {
        let used = match &self.body {
            Body::Fixed => self.bytes(),
            Body::Sparse(sparse) => sparse.blocks.end(),
        };
        if bytes < used + SECTOR || !bytes.is_multiple_of(SECTOR) {
            return Err(invalid(&format!("it needs {} bytes, in whole sectors", used + SECTOR)));
        }
        self.close(port).await?;
        if let Body::Sparse(sparse) = &self.body {
            sparse.blocks.mend_copy(port).await?;
        }
        write_bytes(port, port.files[0], &[(bytes - SECTOR, &self.footer.bytes())]).await?;
        self.commits.sync(port).await?;
        if self.raw.is_file() {
            port.io.set_len(port.files[0], bytes).await?;
            self.commits.sync(port).await?;
        }
        Ok(())
    }

    /// Forgets all blocks of the image. A process that is killed may have forgotten some of them.
    ///
    /// 1. All bits of the batmap become clear; `fdatasync`. A bit would be trusted without a look at the bitmap.
    /// 2. All entries of the table become unused; `fdatasync`.
    /// 3. The footers (`replace_footers`); a file ends behind the metadata then.
    ///
    /// # Errors
    /// `Unsupported`: it is fixed. Errors of the kernel.
    pub async fn empty(self, port: &Port) -> io::Result<()> {
        let Body::Sparse(sparse) = &self.body else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        self.close(port).await?;
        sparse.blocks.mend_copy(port).await?;
        if let Some(batmap) = &sparse.batmap {
            let none = vec![0; covered_bytes(self.footer.current_size) as usize];
            self.write_batmap(port, sparse, batmap, &none).await?;
            self.commits.sync(port).await?;
        }
        let table = whole_sectors(u64::from(sparse.header.max_entries) * 4);
        write_filled(port, port.files[0], sparse.header.table_offset, table, 0xff).await?;
        self.commits.sync(port).await?;
        let layout = sparse.blocks.layout();
        let used = layout.unused(&[]).0;
        let qemu =
            self.footer.kind == Kind::Dynamic && layout.qemu_overwrites_batmap(std::iter::empty());
        let end = End { used, footer: layout.footer_at(used, qemu) };
        replace_footers(port, &self.commits, &self.raw, &self.footer, &self.footer, end).await
    }
}

/// The identity in the bytes of a footer. `None`: they are none.
pub fn identity_in(bytes: &[u8; footer::BYTES]) -> Option<Uuid> {
    Footer::parse(bytes, 0).ok().map(|footer| footer.uuid)
}

pub(super) fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// Makes a file empty, durably, so that it can become another image.
///
/// # Errors
/// Errors of the kernel.
pub async fn cut_off(port: &Port, raw: &Raw) -> io::Result<()> {
    if raw.is_file() && raw.bytes_now()? > 0 {
        port.io.set_len(port.files[0], 0).await?;
        port.io.sync(port.files[0]).await?;
    }
    Ok(())
}
