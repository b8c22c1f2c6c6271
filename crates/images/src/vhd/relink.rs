//! Gives a differencing image another parent, in its place: no data are touched.
//!
//! The parent's UUID, its name and the places of its paths fill two sectors of the dynamic header, and the paths are
//! elsewhere. A power cut may leave any of these sectors old and the others new. So all of it is written a second time
//! to the end of the image first, and only the footers, which are one sector each and name the header's place, change
//! from one to the other. In the end the header is at its old place again: some programs (vhd-lib) look for it there
//! only, and libvhd wants all of it before the first block.

use std::io;
use std::path::Path;

use ferrite_disk_base::Port;

use super::create::{NewParent, set_parent};
use super::footers::{End, last_sector, replace_footers};
use super::format::footer::{self, Footer};
use super::format::header::{self, Header};
use super::format::layout::{Layout, Placed};
use super::pieces::write_bytes;
use super::{Body, Sparse, Vhd};
use crate::image::format::ImageFormat as _;

/// Blocks that are moved to make room for longer paths, at most.
pub const MAX_MOVED: usize = 4;

/// Texts of locators, and their places.
type Texts = Vec<(u64, Vec<u8>)>;

/// Where header and paths are in the end.
struct Plan {
    footer: Footer,
    header: Header,
    texts: Texts,
    layout: Layout,
}

impl Vhd {
    /// Makes this image, which is file 0 of the port, one on another parent, and closes it. The parent reads as the old
    /// one, or hides what is different, and its data are durable. At most `max_moved` blocks are moved to make room for
    /// longer paths ([`MAX_MOVED`]): none, if other processes read the image.
    ///
    /// 1. The copy of the footer at the beginning is mended. Blocks in the way of longer paths are moved (`make_room`).
    /// 2. A header for the new parent, and its paths, are written behind all blocks; `fdatasync`. In a file they cover
    ///    the footer at the end, and the copy counts.
    /// 3. The footers name that header (`replace_footers`, each with an `fdatasync`). From the first of these on the
    ///    image has the new parent.
    /// 4. The header at its old place and the paths there are written; `fdatasync`. No footer refers to them.
    /// 5. The footers name that header, in the same way.
    /// 6. The file ends behind the last block again, with the footer there.
    ///
    /// # Errors
    /// Those of the kernel: the parent is the old or the new one. `InvalidInput`: the image has none, or cannot have
    /// this one; nothing was changed.
    pub async fn relink(self, port: &Port, parent: &NewParent, max_moved: usize) -> io::Result<()> {
        self.close(port).await?;
        let Body::Sparse(sparse) = &self.body else {
            return Err(invalid("a fixed image has no parent"));
        };
        let plan = self.plan_relink(port, sparse, parent, max_moved).await?;
        sparse.blocks.mend_copy(port).await?;
        let at = sparse.blocks.end_of_file().footer;
        let (aside, texts) =
            named(&sparse.header, parent, self.raw.path(), at + header::BYTES as u64)?;
        let end = texts.iter().map(|(at, text)| at + text.len() as u64).max().unwrap_or(at);
        if !self.raw.is_file() && last_sector(&self.raw)? < end {
            let is_here = plan.footer.data_offset == self.footer.data_offset;
            if max_moved > 0 || !is_here {
                return Err(io::ErrorKind::StorageFull.into());
            }
            return self.relink_in_place(port, &plan).await;
        }
        self.write_header(port, at, &aside, &texts).await?;
        let aside = Footer { data_offset: at, ..self.footer.clone() };
        let (behind, raw) = (End { used: end, footer: end }, &self.raw);
        replace_footers(port, &self.commits, raw, &self.footer, &aside, behind).await?;
        let footer = &plan.footer;
        self.write_header(port, footer.data_offset, &plan.header, &plan.texts).await?;
        replace_footers(port, &self.commits, raw, &aside, footer, behind).await?;
        let placed: Vec<Placed> = sparse.blocks.placed().collect();
        let used = plan.layout.unused(&placed).0;
        let end = End { used, footer: plan.layout.footer_at(used, false) };
        if raw.is_file() {
            replace_footers(port, &self.commits, raw, footer, footer, end).await?;
        }
        Ok(())
    }

    /// Writes the paths, `fdatasync`, and then the header over the old one, for a full device of XAPI's. The header is
    /// one write, so a process that is killed leaves the old or the new parent. But a power cut may tear it.
    async fn relink_in_place(&self, port: &Port, plan: &Plan) -> io::Result<()> {
        let pieces: Vec<(u64, &[u8])> =
            plan.texts.iter().map(|(at, text)| (*at, &text[..])).collect();
        write_bytes(port, port.files[0], &pieces).await?;
        self.commits.sync(port).await?;
        self.write_header(port, plan.footer.data_offset, &plan.header, &[]).await
    }

    /// Finds the places of the header and the paths before the first block, and makes room for them.
    async fn plan_relink(
        &self,
        port: &Port,
        sparse: &Sparse,
        parent: &NewParent,
        max_moved: usize,
    ) -> io::Result<Plan> {
        let path = self.raw.path();
        let bare = Header { locators: Default::default(), ..sparse.header.clone() };
        let layout = |footer: &Footer, header: &Header| {
            Layout::new(footer, header, sparse.batmap.as_ref(), u64::MAX)
        };
        let is_free = |start: u64, end: u64| {
            let stride = sparse.blocks.layout().stride();
            sparse.blocks.placed().all(|p| end <= p.start() || p.start() + stride <= start)
        };
        // After a relink that was cut off the header is behind the blocks.
        let usual = footer::BYTES as u64;
        let front = Footer { data_offset: usual, ..self.footer.clone() };
        let is_room = layout(&front, &bare).is_ok() && is_free(usual, usual + header::BYTES as u64);
        let footer = if is_room { front } else { self.footer.clone() };
        let broken = |bad| io::Error::new(io::ErrorKind::InvalidData, bad);
        let (_, texts) = named(&sparse.header, parent, path, 0)?;
        let needed: u64 = texts.iter().map(|(_, text)| text.len() as u64).sum();
        let at = layout(&footer, &bare).map_err(broken)?.place_for_metadata(needed);
        if !is_free(at, at + needed) {
            if sparse.blocks.placed().filter(|p| p.start() < at + needed).count() > max_moved {
                return Err(invalid("its blocks leave no room for the path of that parent"));
            }
            self.make_room(port, sparse, at + needed).await?;
        }
        let (header, texts) = named(&sparse.header, parent, path, at)?;
        let layout = layout(&footer, &header).map_err(broken)?;
        Ok(Plan { footer, header, texts, layout })
    }

    async fn write_header(
        &self,
        port: &Port,
        at: u64,
        header: &Header,
        texts: &[(u64, Vec<u8>)],
    ) -> io::Result<()> {
        let raw = header.bytes();
        let mut pieces: Vec<(u64, &[u8])> = vec![(at, &raw)];
        pieces.extend(texts.iter().map(|(at, text)| (*at, &text[..])));
        write_bytes(port, port.files[0], &pieces).await?;
        self.commits.sync(port).await
    }
}

/// The header of a child with this parent, whose paths are from byte `at` on.
fn named(old: &Header, parent: &NewParent, child: &Path, at: u64) -> io::Result<(Header, Texts)> {
    let mut header = Header { locators: Default::default(), ..old.clone() };
    let texts = set_parent(&mut header, parent, child, at).map_err(|why| invalid(&why))?;
    Ok((header, texts))
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}
