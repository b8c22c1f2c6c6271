//! Changes fields of the headers of an image that is open and in use: its parent's name, the hidden mark, the hash of
//! its key, its size. Guests read and write meanwhile, and blocks get places. No block is moved.
//!
//! The chain that is open stays as it is, and so does the size of the open disk: the changes hold from the next opening
//! on. Every change may be repeated. A process or host that dies leaves the old fields or the new ones.
//!
//! `growing` is held by all of this but the key's, so no other task changes the end of the file or writes a footer.

use std::io;
use std::path::PathBuf;
use std::sync::PoisonError;

use ferrite_disk_base::Port;

use super::create::locator_texts;
use super::format::batmap::{Batmap, KeyHash};
use super::format::footer::{self, Footer};
use super::format::geometry::Geometry;
use super::format::header::{self, Header};
use super::format::layout::Layout;
use super::format::locator::{Locator, MAX_TEXT_BYTES};
use super::format::{MAX_DISK_BYTES, Malformed, SECTOR, whole_sectors};
use super::meta::{FooterAt, MetaError, read_array, read_parent_paths};
use super::pieces::write_bytes;
use super::{Body, Kind, Sparse, Uuid, Vhd};

/// A change of an image's headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The image has another parent, which reads as the old one, or hides what is different.
    Parent(ParentLink),
    /// Whether the image is used only as a parent: blktap's field.
    Hidden(u8),
    /// The hash of its key.
    Key(KeyHash),
    /// The size of its disk in bytes. It cannot shrink, nor have more blocks than the table has entries.
    Bytes(u64),
}

/// A parent as its child names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentLink {
    /// Its identity; [`Uuid::NIL`] for a raw image.
    pub uuid: Uuid,
    /// When it was last changed, in seconds since 1970.
    pub modified_unix_s: u64,
    /// Its path from the child's folder: `./NAME`.
    pub relative: PathBuf,
}

/// The facts in an open image's headers and table now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of its disk, which the disk has after the next opening.
    pub bytes: u64,
    /// The end of the last used part of its file. Space that is set aside behind that does not count.
    pub end: u64,
    /// Blocks that have a place; `None`: it is fixed.
    pub blocks: Option<u32>,
    /// Blktap's field: it is used only as a parent.
    pub hidden: u8,
    /// Its parent's likeliest path.
    pub parent: Option<PathBuf>,
}

/// The place behind all blocks where the new header is until it is at its own.
struct Aside {
    from: u64,
    to: u64,
}

/// A locator's platform, its text padded to whole sectors, and the bytes of the text.
type Text = ([u8; 4], Vec<u8>, u32);

impl Vhd {
    /// The footer that is on the medium, or is to be written there when the image is closed.
    pub(super) fn footer_now(&self) -> Footer {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_footer(&self, footer: &Footer) {
        if let Body::Sparse(sparse) = &self.body {
            sparse.blocks.set_footer(footer.bytes());
        }
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = footer.clone();
    }

    /// The facts in the headers and the table now.
    ///
    /// # Errors
    /// The parent's name cannot be read.
    pub fn facts(&self) -> io::Result<Facts> {
        let footer = self.footer_now();
        let (bytes, hidden) = (footer.current_size, footer.hidden);
        Ok(match &self.body {
            Body::Fixed => Facts { bytes, hidden, end: self.bytes(), blocks: None, parent: None },
            Body::Sparse(sparse) => Facts {
                bytes,
                hidden,
                end: sparse.blocks.end(),
                blocks: Some(sparse.blocks.allocated()),
                parent: self.parent_now(&footer)?,
            },
        })
    }

    fn parent_now(&self, footer: &Footer) -> io::Result<Option<PathBuf>> {
        if footer.kind != Kind::Differencing {
            return Ok(None);
        }
        let header = self.header_now(footer)?;
        let paths = read_parent_paths(&self.raw, &header).map_err(unread)?;
        Ok(paths.into_iter().next())
    }

    fn header_now(&self, footer: &Footer) -> io::Result<Header> {
        let at = footer.data_offset;
        let bytes = read_array::<{ header::BYTES }>(&self.raw, at).map_err(unread)?;
        Header::parse(&bytes, at, footer).map_err(broken)
    }

    /// Changes a field of the headers, durably. The image, which is file 0 of the port, is open for writing.
    ///
    /// # Errors
    /// `InvalidInput`: this image cannot have it; nothing was changed. Those of the kernel: the field is the old or the
    /// new one.
    pub async fn change(&self, port: &Port, change: &Change) -> io::Result<()> {
        if self.raw.read_only() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        match (change, &self.body) {
            (Change::Hidden(hidden), _) => {
                let _held = self.hold_end(port).await?;
                self.put_footer(port, &Footer { hidden: *hidden, ..self.footer_now() }).await
            }
            (Change::Parent(link), Body::Sparse(sparse))
                if self.footer.kind == Kind::Differencing =>
            {
                self.link(port, sparse, link).await
            }
            (Change::Parent(_), _) => Err(invalid("it has no parent")),
            (Change::Key(key), Body::Sparse(sparse)) => self.put_key(port, sparse, key).await,
            (Change::Bytes(bytes), Body::Sparse(sparse)) => {
                self.put_size(port, sparse, *bytes).await
            }
            (Change::Key(_) | Change::Bytes(_), Body::Fixed) => Err(invalid("it is fixed")),
        }
    }

    async fn hold_end(&self, port: &Port) -> io::Result<Option<ferrite_io::shared_lock::Held<'_>>> {
        match &self.body {
            Body::Fixed => Ok(None),
            Body::Sparse(sparse) => Ok(Some(sparse.blocks.hold_end(port).await?)),
        }
    }

    /// Replaces the footers, each in one sector and with an `fdatasync`:
    ///
    /// 1. The copy at the beginning is mended, if it is not intact.
    /// 2. The footer at the end, if the image has one: of two the one at the end counts. A file has none once it has
    ///    grown, until it is closed.
    /// 3. The copy.
    async fn put_footer(&self, port: &Port, footer: &Footer) -> io::Result<()> {
        let (file, bytes) = (port.files[0], footer.bytes());
        match &self.body {
            Body::Fixed => {
                let FooterAt::End(at) = self.footer_at else {
                    return Err(io::ErrorKind::InvalidData.into());
                };
                write_bytes(port, file, &[(at, &bytes)]).await?;
                self.commits.sync(port).await?;
            }
            Body::Sparse(sparse) => {
                sparse.blocks.mend_copy(port).await?;
                let has_end = matches!(self.footer_at, FooterAt::End(_));
                if let Some(at) = sparse.blocks.end_footer().filter(|_| has_end) {
                    write_bytes(port, file, &[(at, &bytes)]).await?;
                    self.commits.sync(port).await?;
                }
                write_bytes(port, file, &[(0, &bytes)]).await?;
                self.commits.sync(port).await?;
            }
        }
        self.set_footer(footer);
        Ok(())
    }

    /// Names another parent. Its UUID, its name and the places of its paths fill two sectors of the header, and the
    /// paths are elsewhere, so all of it is written twice (`relink` tells why it ends at its old place):
    ///
    /// 1. A header for the new parent, and its paths, behind all blocks; `fdatasync`. No block gets that place.
    /// 2. The footers name that header (`put_footer`). From here on the image has the new parent.
    /// 3. The header at its old place, and the paths before the first block; `fdatasync`. No footer refers to them.
    ///    If the blocks leave no room there for the paths, those behind them stay in use.
    /// 4. The footers name that header.
    async fn link(&self, port: &Port, sparse: &Sparse, link: &ParentLink) -> io::Result<()> {
        let texts = texts(link)?;
        let needed = bytes_of(&texts);
        let space = header::BYTES as u64 + needed;
        let (_held, from) = sparse.blocks.set_aside(port, &self.raw, space).await?;
        let aside = Aside { from, to: from + space };
        let now = self.footer_now();
        let old = self.header_now(&now)?;
        let behind = aside.from + header::BYTES as u64;
        self.put_header(port, aside.from, &named(&old, link, &texts, behind), &texts).await?;
        self.put_footer(port, &Footer { data_offset: aside.from, ..now.clone() }).await?;
        let (footer, place) = self.front(sparse, &now, &old, needed, aside.from).map_err(broken)?;
        let header = named(&old, link, &texts, place.unwrap_or(behind));
        let written = if place.is_some() { &texts[..] } else { &[] };
        self.put_header(port, footer.data_offset, &header, written).await?;
        self.put_footer(port, &footer).await?;
        if place.is_some() {
            sparse.blocks.give_aside_back(aside.from, aside.to);
        }
        Ok(())
    }

    /// The footer that names the header's final place, and the place of the paths before the first block; `None`: the
    /// blocks leave no room. `end` is the end of all blocks.
    fn front(
        &self,
        sparse: &Sparse,
        now: &Footer,
        old: &Header,
        needed: u64,
        end: u64,
    ) -> Result<(Footer, Option<u64>), Malformed> {
        let bare = Header { locators: Default::default(), ..old.clone() };
        let layout = |footer: &Footer| Layout::new(footer, &bare, sparse.batmap.as_ref(), u64::MAX);
        let is_free = |from: u64, to: u64| {
            let stride = sparse.blocks.layout().stride();
            to <= end
                && sparse.blocks.placed().all(|p| to <= p.start() || p.start() + stride <= from)
        };
        // After a change that was cut off the header is behind the blocks.
        let usual = footer::BYTES as u64;
        let front = Footer { data_offset: usual, ..now.clone() };
        let is_room = layout(&front).is_ok() && is_free(usual, usual + header::BYTES as u64);
        let footer = if is_room { front } else { now.clone() };
        let at = layout(&footer)?.place_for_metadata(needed);
        Ok((footer, Some(at).filter(|at| is_free(*at, at + needed))))
    }

    async fn put_header(
        &self,
        port: &Port,
        at: u64,
        header: &Header,
        texts: &[Text],
    ) -> io::Result<()> {
        let raw = header.bytes();
        let mut pieces: Vec<(u64, &[u8])> = vec![(at, &raw)];
        let places = header.locators.iter().map(|locator| locator.offset);
        pieces.extend(places.zip(texts).map(|(at, (_, text, _))| (at, &text[..])));
        write_bytes(port, port.files[0], &pieces).await?;
        self.commits.sync(port).await
    }

    /// Replaces the hash of the key in the batmap's header, which is one sector; `fdatasync`. `forgetting` is held: no
    /// other task writes that sector. Closing keeps the hash.
    async fn put_key(&self, port: &Port, sparse: &Sparse, key: &KeyHash) -> io::Result<()> {
        let at = sparse.batmap.as_ref().and(Batmap::header_offset(&self.footer, &sparse.header));
        let at = at.ok_or_else(|| invalid("it has no batmap, which is where the key's hash is"))?;
        let _held = sparse.forgetting.lock(&port.io).await?;
        let mut raw = read_array::<{ SECTOR as usize }>(&self.raw, at).map_err(unread)?;
        key.put(&mut raw);
        write_bytes(port, port.files[0], &[(at, &raw)]).await?;
        self.commits.sync(port).await?;
        *sparse.key.lock().unwrap_or_else(PoisonError::into_inner) = Some(*key);
        Ok(())
    }

    /// Makes the disk larger, within the entries of its table:
    ///
    /// 1. The batmap's bits are cleared (`forget_full`): the last block may have more sectors now than its bit was set
    ///    for.
    /// 2. The part of the last block that is past the disk's end becomes zeros; `fdatasync` (`clear_tail`).
    /// 3. The footers (`put_footer`).
    async fn put_size(&self, port: &Port, sparse: &Sparse, bytes: u64) -> io::Result<()> {
        if bytes > MAX_DISK_BYTES || !bytes.is_multiple_of(SECTOR) {
            return Err(invalid("a VHD has whole sectors, up to 2040 GiB"));
        }
        let blocks = bytes.div_ceil(u64::from(sparse.header.block_bytes));
        if blocks > u64::from(sparse.header.max_entries) {
            return Err(invalid("its table has no entries for so many blocks"));
        }
        if !self.bytes().is_multiple_of(u64::from(sparse.header.block_bytes)) {
            self.forget_full(port, sparse).await?;
        }
        let _held = sparse.blocks.hold_end(port).await?;
        let now = self.footer_now();
        if bytes < now.current_size {
            return Err(invalid("a disk in use cannot shrink"));
        }
        self.clear_tail(port, sparse).await?;
        let footer = Footer {
            current_size: bytes,
            original_size: bytes,
            geometry: Geometry::of_sectors(bytes / SECTOR),
            ..now
        };
        self.put_footer(port, &footer).await
    }
}

/// The texts of the locators for a parent.
fn texts(link: &ParentLink) -> io::Result<Vec<Text>> {
    let padded = |(code, mut text): ([u8; 4], Vec<u8>)| {
        let (len, room) = (text.len() as u32, whole_sectors(text.len() as u64));
        if room > MAX_TEXT_BYTES {
            return Err(invalid("the parent's path is too long"));
        }
        text.resize(room as usize, 0);
        Ok((code, text, len))
    };
    locator_texts(&link.relative).map(padded).collect()
}

fn bytes_of(texts: &[Text]) -> u64 {
    texts.iter().map(|(_, text, _)| text.len() as u64).sum()
}

/// The header of a child with this parent, whose paths are from byte `at` on.
fn named(old: &Header, link: &ParentLink, texts: &[Text], at: u64) -> Header {
    let mut header = Header { locators: Default::default(), ..old.clone() };
    let name = link.relative.file_name().unwrap_or_default();
    header.set_parent_name(&name.to_string_lossy());
    header.parent_uuid = link.uuid;
    header.parent_timestamp = footer::timestamp(link.modified_unix_s);
    let mut at = at;
    for (slot, (code, text, len)) in header.locators.iter_mut().zip(texts) {
        let room = text.len() as u64;
        *slot = Locator { code: *code, space: room as u32, len: *len, offset: at };
        at += room;
    }
    header
}

fn unread(e: MetaError) -> io::Error {
    match e {
        MetaError::Io(_, e) => e,
        MetaError::Bad(bad) => broken(bad),
    }
}

fn broken(bad: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, bad)
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}
