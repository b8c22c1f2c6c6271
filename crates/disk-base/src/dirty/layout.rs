//! The file of a disk's maps as bytes. All numbers are little-endian.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 512 | the head |
//! | 512 | 512 | the identity of the image |
//! | 1024 | 512 | another file that the maps fit, and when it was last changed; zeros: none |
//! | 4096 | 4096 | the table of maps: 16 entries of 128 bytes |
//! | 8192 | | for each map of the table its sectors of bits |
//!
//! A sector of bits has 4,032 of them (504 bytes), its number, and a checksum over the file's identifier, the map's
//! index, the number and the bits. A sector is written as a whole or not at all. One whose checksum is wrong has all
//! bits set for its reader.

use crc_fast::CrcAlgorithm;

use super::{MAX_DISK_BYTES, MAX_MAPS, REGION_BYTES};
use crate::VolumeName;

/// `ferrdrt1`.
const MAGIC: [u8; 8] = *b"ferrdrt1";
/// The unit of writes.
pub(super) const SECTOR: usize = 512;
const SUM_AT: usize = SECTOR - 4;
/// Words of 64 bits in a sector.
const WORDS: usize = 63;
/// Regions whose bits are in a sector.
pub(super) const BITS: u64 = 64 * WORDS as u64;
const TABLE_AT: usize = 4096;
const TABLE_BYTES: usize = 4096;
const ENTRY_BYTES: usize = 128;
const BITS_AT: usize = TABLE_AT + TABLE_BYTES;
/// The longest identity of an image.
pub(super) const MAX_IDENTITY_BYTES: usize = 480;
/// The places of the two identities.
pub(super) const IDENTITY_AT: usize = SECTOR;
pub(super) const OTHER_AT: usize = 2 * SECTOR;
/// The time of the last change, in the sector of an identity.
const CHANGED_AT: usize = 4 + MAX_IDENTITY_BYTES;
const MAX_NAME_BYTES: usize = 63;

/// A random identifier, of a file of maps or of one map.
pub type MapId = [u8; 16];

/// The state of the image, as the file of maps has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The image was closed in good order, and last changed at this time: seconds and nanoseconds.
    Closed(i64, u32),
    /// The image was opened and written.
    Open,
    /// The maps are void.
    Void,
}

/// The part of the file that changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The file's identifier.
    pub file: MapId,
    /// Whether the image is in use.
    pub state: State,
    /// Maps in the table.
    pub maps: usize,
    /// The size of the disk in bytes, when the file was made.
    pub bytes: u64,
    /// The last opening that marked regions: a random number.
    pub opening: u64,
}

/// One map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    /// Its name: as a volume's ([`VolumeName`]).
    pub name: String,
    /// Its identifier, which no other map has.
    pub id: MapId,
    /// When it was begun, in seconds since 1970.
    pub begun_s: u64,
    /// A bit for each region, 64 in a word.
    pub bits: Vec<u64>,
}

/// The file of an image, as far as maps are bound to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its identity.
    pub identity: String,
    /// When it was last changed: seconds and nanoseconds.
    pub changed: (i64, u32),
}

/// A whole file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Its head.
    pub head: Head,
    /// The identity of the image.
    pub identity: String,
    /// Another file that the maps fit: one that is about to get the image's name, or has got it.
    pub other: Option<Image>,
    /// The maps, in the order of the table.
    pub maps: Vec<Map>,
    /// Sectors of bits that were damaged: all of their bits are set.
    pub damaged: usize,
}

/// Regions of a disk of so many bytes.
pub fn regions(bytes: u64) -> u64 {
    bytes.div_ceil(REGION_BYTES)
}

/// Sectors of one map.
fn sectors(bytes: u64) -> usize {
    regions(bytes).div_ceil(BITS) as usize
}

/// The place of a map's sector of bits.
pub(super) fn place(bytes: u64, map: usize, sector: u64) -> u64 {
    BITS_AT as u64 + (map as u64 * sectors(bytes) as u64 + sector) * SECTOR as u64
}

/// The length of a file.
pub(super) fn file_bytes(bytes: u64, maps: usize) -> u64 {
    place(bytes, maps, 0)
}

/// The longest file that is read.
pub(super) fn most_bytes() -> u64 {
    file_bytes(MAX_DISK_BYTES, MAX_MAPS)
}

fn sum(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |chunk| u64::from_le_bytes(*chunk))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |chunk| u32::from_le_bytes(*chunk))
}

fn id(bytes: &[u8], at: usize) -> MapId {
    bytes[at..].first_chunk().copied().unwrap_or_default()
}

/// One sector of bits.
pub(super) fn sector_to_bytes(file: &MapId, map: usize, sector: u64, bits: &[u64]) -> [u8; SECTOR] {
    let mut to = [0; SECTOR];
    for (to, bits) in to.chunks_exact_mut(8).zip(bits.iter().take(WORDS)) {
        to.copy_from_slice(&bits.to_le_bytes());
    }
    to[SUM_AT - 4..SUM_AT].copy_from_slice(&(sector as u32).to_le_bytes());
    let sum = sum(&[file, &(map as u32).to_le_bytes(), &to[..SUM_AT]]);
    to[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
    to
}

/// The bits of a sector; `None`: it is damaged, or of another file.
pub(super) fn parse_sector(
    file: &MapId,
    map: usize,
    sector: u64,
    from: &[u8],
) -> Option<[u64; WORDS]> {
    let from: &[u8; SECTOR] = from.first_chunk()?;
    let sum = sum(&[file, &(map as u32).to_le_bytes(), &from[..SUM_AT]]);
    if half(from, SUM_AT) != sum || half(from, SUM_AT - 4) != sector as u32 {
        return None;
    }
    let mut bits = [0; WORDS];
    bits.iter_mut().enumerate().for_each(|(i, bits)| *bits = word(from, 8 * i));
    Some(bits)
}

/// The sector of an identity.
pub(super) fn identity_to_bytes(file: &MapId, text: &str, changed: (i64, u32)) -> [u8; SECTOR] {
    let mut to = [0; SECTOR];
    let text = &text.as_bytes()[..text.len().min(MAX_IDENTITY_BYTES)];
    to[..4].copy_from_slice(&(text.len() as u32).to_le_bytes());
    to[4..4 + text.len()].copy_from_slice(text);
    to[CHANGED_AT..CHANGED_AT + 8].copy_from_slice(&changed.0.to_le_bytes());
    to[CHANGED_AT + 8..CHANGED_AT + 12].copy_from_slice(&changed.1.to_le_bytes());
    let sum = sum(&[file, &to[..SUM_AT]]);
    to[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
    to
}

fn parse_identity(file: &MapId, from: &[u8]) -> Option<Image> {
    let len = half(from, 0) as usize;
    if half(from, SUM_AT) != sum(&[file, &from[..SUM_AT]]) || len > MAX_IDENTITY_BYTES {
        return None;
    }
    let identity = String::from_utf8(from[4..4 + len].to_vec()).ok()?;
    let changed = (word(from, CHANGED_AT).cast_signed(), half(from, CHANGED_AT + 8));
    Some(Image { identity, changed })
}

impl Head {
    pub(super) fn to_bytes(&self) -> [u8; SECTOR] {
        let mut to = [0; SECTOR];
        to[..8].copy_from_slice(&MAGIC);
        to[8..24].copy_from_slice(&self.file);
        let (state, seconds, nanoseconds) = match self.state {
            State::Closed(seconds, nanoseconds) => (0u32, seconds, nanoseconds),
            State::Open => (1, 0, 0),
            State::Void => (2, 0, 0),
        };
        to[24..28].copy_from_slice(&state.to_le_bytes());
        to[28..32].copy_from_slice(&(self.maps as u32).to_le_bytes());
        to[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        to[40..48].copy_from_slice(&REGION_BYTES.to_le_bytes());
        to[48..56].copy_from_slice(&self.opening.to_le_bytes());
        to[56..64].copy_from_slice(&seconds.to_le_bytes());
        to[64..68].copy_from_slice(&nanoseconds.to_le_bytes());
        let sum = sum(&[&to[..SUM_AT]]);
        to[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
        to
    }

    fn parse(from: &[u8]) -> Result<Head, &'static str> {
        let Some(from) = from.first_chunk::<SECTOR>() else { return Err("it is too short") };
        if from[..7] != MAGIC[..7] {
            return Err("it is no file of dirty maps");
        }
        if from[..8] != MAGIC {
            return Err("it was made by another version of this program");
        }
        if half(from, SUM_AT) != sum(&[&from[..SUM_AT]]) {
            return Err("its head is damaged");
        }
        let state = match half(from, 24) {
            0 => State::Closed(word(from, 56).cast_signed(), half(from, 64)),
            1 => State::Open,
            2 => State::Void,
            _ => return Err("its head is damaged"),
        };
        let (maps, bytes) = (half(from, 28) as usize, word(from, 32));
        if maps > MAX_MAPS || bytes > MAX_DISK_BYTES || word(from, 40) != REGION_BYTES {
            return Err("its head has sizes that no file of this version has");
        }
        Ok(Head { file: id(from, 8), state, maps, bytes, opening: word(from, 48) })
    }
}

impl Content {
    /// The file's bytes.
    ///
    /// # Panics
    /// If there are too many maps, or a map has not as many bits as the disk has regions.
    pub fn to_bytes(&self) -> Vec<u8> {
        assert!(self.maps.len() <= MAX_MAPS && self.head.maps == self.maps.len());
        let mut to = Vec::with_capacity(file_bytes(self.head.bytes, self.maps.len()) as usize);
        to.extend(self.head.to_bytes());
        to.extend(identity_to_bytes(&self.head.file, &self.identity, (0, 0)));
        if let Some(Image { identity, changed }) = &self.other {
            to.extend(identity_to_bytes(&self.head.file, identity, *changed));
        }
        to.resize(TABLE_AT, 0);
        for (i, map) in self.maps.iter().enumerate() {
            to.extend(map.id);
            to.extend(map.begun_s.to_le_bytes());
            to.push(map.name.len() as u8);
            to.extend(map.name.as_bytes());
            to.resize(TABLE_AT + (i + 1) * ENTRY_BYTES, 0);
        }
        to.resize(BITS_AT - 4, 0);
        to.extend(sum(&[&self.head.file, &to[TABLE_AT..]]).to_le_bytes());
        for (i, map) in self.maps.iter().enumerate() {
            assert_eq!(map.bits.len() as u64, regions(self.head.bytes).div_ceil(64));
            for (sector, bits) in map.bits.chunks(WORDS).enumerate() {
                to.extend(sector_to_bytes(&self.head.file, i, sector as u64, bits));
            }
        }
        to
    }

    /// Reads a file. The length of `from` bounds the allocated memory.
    ///
    /// # Errors
    /// Why it is no such file.
    pub fn parse(from: &[u8]) -> Result<Content, &'static str> {
        let head = Head::parse(from)?;
        if from.len() as u64 != file_bytes(head.bytes, head.maps) {
            return Err("its length does not fit its head");
        }
        let image = |at| {
            let found = parse_identity(&head.file, &from[at..at + SECTOR]);
            found.ok_or("the identity of its image is damaged")
        };
        let identity = image(IDENTITY_AT)?.identity;
        let has_other = from[OTHER_AT..OTHER_AT + SECTOR].iter().any(|byte| *byte != 0);
        let other = has_other.then(|| image(OTHER_AT)).transpose()?;
        let table = &from[TABLE_AT..BITS_AT];
        if half(table, TABLE_BYTES - 4) != sum(&[&head.file, &table[..TABLE_BYTES - 4]]) {
            return Err("its table of maps is damaged");
        }
        let mut content = Content { head, identity, other, maps: Vec::new(), damaged: 0 };
        for i in 0..content.head.maps {
            let entry = &table[i * ENTRY_BYTES..(i + 1) * ENTRY_BYTES];
            let map = content.parse_map(i, entry, from).ok_or("its table of maps is damaged")?;
            content.maps.push(map);
        }
        Ok(content)
    }

    fn parse_map(&mut self, i: usize, entry: &[u8], from: &[u8]) -> Option<Map> {
        let len = usize::from(entry[24]);
        let name = entry.get(25..25 + len).filter(|_| len <= MAX_NAME_BYTES)?;
        let name = String::from_utf8(name.to_vec()).ok()?;
        VolumeName::new(&name)?;
        if self.maps.iter().any(|other| other.name == name) {
            return None;
        }
        let (file, bytes) = (self.head.file, self.head.bytes);
        let mut bits = Vec::new();
        for sector in 0..sectors(bytes) as u64 {
            let at = place(bytes, i, sector) as usize;
            let found = parse_sector(&file, i, sector, &from[at..at + SECTOR]);
            self.damaged += usize::from(found.is_none());
            bits.extend(found.unwrap_or([u64::MAX; WORDS]));
        }
        bits.truncate(regions(bytes).div_ceil(64) as usize);
        Some(Map { name, id: id(entry, 0), begun_s: word(entry, 16), bits })
    }
}
