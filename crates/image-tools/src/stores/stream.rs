//! The stream of a snapshot, or of what it has beside another one (docs/internals/send-stream.md): records in, bytes
//! out, and back. The bytes are not trusted: no length in them is believed beyond its bound.

use std::io::{self, Read, Write};

use ferrite_store::BLOCK_BYTES;
use ferrite_store::content::is_zeros;
use ferrite_store::journal::Name;

/// Bytes of the header.
const HEADER_BYTES: usize = 256;
/// Bytes of the header before its hash.
const HEADED_BYTES: usize = HEADER_BYTES - 32;
/// Bytes of a record before its data: kind, blocks, offset; and the hash of these and the data.
const HEAD_BYTES: usize = 16;
const HASH_BYTES: usize = 32;
/// The most bytes of data of one record.
pub(super) const MAX_DATA_BYTES: usize = 1 << 20;

const MAGIC: &[u8; 8] = b"FERRSEND";
const VERSION: u16 = 1;
/// The flag of a stream that has only what differs from a base.
const INCREMENTAL: u16 = 1;
const BLOCK: u64 = BLOCK_BYTES as u64;

const DATA: u32 = 1;
const ZEROS: u32 = 2;
const END: u32 = 3;

/// A BLAKE3 hash.
pub(super) type Hash = [u8; HASH_BYTES];

/// The hash of a volume's content up to some offset: of the offset and data of each block that is not zeros.
#[derive(Clone, Default)]
pub(super) struct ContentOf(blake3::Hasher);

impl ContentOf {
    /// Adds whole blocks, which lie behind all others.
    pub(super) fn add(&mut self, offset: u64, data: &[u8]) {
        for (at, block) in (offset..).step_by(BLOCK_BYTES).zip(data.chunks(BLOCK_BYTES)) {
            if !is_zeros(block) {
                self.0.update(&at.to_le_bytes()).update(block);
            }
        }
    }

    pub(super) fn hash(&self) -> Hash {
        *self.0.finalize().as_bytes()
    }
}

/// The beginning of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// The snapshot that was sent.
    pub(super) name: Name,
    /// The snapshot that it is sent as a difference from.
    pub(super) base: Option<Name>,
    /// The size of the volume.
    pub(super) bytes: u64,
    /// The records have what is from this offset on.
    pub(super) start: u64,
    /// The hash of the content before that.
    pub(super) before: Hash,
}

/// A part of the volume.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    Data(u64, &'a [u8]),
    /// The offset and the bytes of a range that has become zeros.
    Zeros(u64, u64),
    /// The hash of all of the volume's content.
    End(Hash),
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        let flags = if self.base.is_some() { INCREMENTAL } else { 0 };
        put(0, MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(10, &flags.to_le_bytes());
        put(12, &(BLOCK_BYTES as u32).to_le_bytes());
        put(16, &self.bytes.to_le_bytes());
        put(24, &self.start.to_le_bytes());
        put(32, &self.before);
        for (at, name) in [(64, Some(&self.name)), (128, self.base.as_ref())] {
            let name = name.map_or("", Name::as_str).as_bytes();
            // A name has at most 63 bytes.
            put(at, &[name.len() as u8]);
            put(at + 1, name);
        }
        let hash = *blake3::hash(&bytes[..HEADED_BYTES]).as_bytes();
        bytes[HEADED_BYTES..].copy_from_slice(&hash);
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> io::Result<Header> {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if bytes[..8] != *MAGIC {
            return Err(damaged("it is no stream of ferrite store send"));
        }
        if *blake3::hash(&bytes[..HEADED_BYTES]).as_bytes() != bytes[HEADED_BYTES..] {
            return Err(damaged("its header is damaged"));
        }
        let (version, flags) = (word(8), word(10));
        if version != VERSION || flags & !INCREMENTAL != 0 {
            let why = format!(
                "it has version {version} and flags {flags:#x}, and this program knows version 1"
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let wrong = || damaged("its header makes no sense");
        let name = |at: usize| -> Option<&str> {
            let field = bytes[at + 1..at + 64].get(..usize::from(bytes[at]))?;
            std::str::from_utf8(field).ok()
        };
        let base = match flags & INCREMENTAL {
            0 => None,
            _ => Some(name(128).and_then(Name::new).ok_or_else(wrong)?),
        };
        let mut before = [0; HASH_BYTES];
        before.copy_from_slice(&bytes[32..64]);
        let header = Header {
            name: name(64).and_then(Name::new).ok_or_else(wrong)?,
            base,
            bytes: long(bytes, 16),
            start: long(bytes, 24),
            before,
        };
        let is_whole = |bytes: u64| bytes.is_multiple_of(BLOCK);
        let fits = header.bytes > 0 && is_whole(header.bytes) && is_whole(header.start);
        match fits && header.start <= header.bytes && bytes[12..16] == [0, 16, 0, 0] {
            true => Ok(header),
            false => Err(wrong()),
        }
    }
}

fn long(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Writes a stream.
pub(super) struct StreamWriter<'a> {
    to: &'a mut dyn Write,
    /// Bytes of data that were sent.
    pub(super) data_bytes: u64,
}

impl<'a> StreamWriter<'a> {
    pub(super) fn begin(to: &'a mut dyn Write, header: &Header) -> io::Result<StreamWriter<'a>> {
        to.write_all(&header.encode())?;
        Ok(StreamWriter { to, data_bytes: 0 })
    }

    /// Writes data of whole blocks, at most [`MAX_DATA_BYTES`].
    pub(super) fn data(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.data_bytes += data.len() as u64;
        self.record(DATA, data.len() as u64 / BLOCK, offset, data)
    }

    pub(super) fn zeros(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.record(ZEROS, len / BLOCK, offset, &[])
    }

    pub(super) fn end(mut self, bytes: u64, content: Hash) -> io::Result<()> {
        self.record(END, 0, bytes, &content)?;
        self.to.flush()
    }

    fn record(&mut self, kind: u32, blocks: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        let blocks = u32::try_from(blocks).map_err(io::Error::other)?;
        let mut head = [0; HEAD_BYTES + HASH_BYTES];
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head[4..8].copy_from_slice(&blocks.to_le_bytes());
        head[8..16].copy_from_slice(&offset.to_le_bytes());
        let hash = record_hash(&head[..HEAD_BYTES], data);
        head[HEAD_BYTES..].copy_from_slice(&hash);
        self.to.write_all(&head)?;
        self.to.write_all(data)
    }
}

fn record_hash(head: &[u8], data: &[u8]) -> Hash {
    *blake3::Hasher::new().update(head).update(data).finalize().as_bytes()
}

/// Reads a stream. It takes [`MAX_DATA_BYTES`] of memory, whatever the stream says.
pub(super) struct StreamReader<'a> {
    from: &'a mut dyn Read,
    /// Asked where a read was interrupted.
    goes_on: &'a dyn Fn() -> bool,
    pub(super) header: Header,
    /// The end of the last record: all before it was given out.
    pub(super) at: u64,
    data: Vec<u8>,
}

impl<'a> StreamReader<'a> {
    /// # Errors
    /// `UnexpectedEof`: the stream ends here. `InvalidData`: it is none, or damaged. `Unsupported`: it has another
    /// version. `Interrupted`: `goes_on` has said no. Those of `from`.
    pub(super) fn begin(
        from: &'a mut dyn Read,
        goes_on: &'a dyn Fn() -> bool,
    ) -> io::Result<StreamReader<'a>> {
        let mut bytes = [0; HEADER_BYTES];
        fill(from, goes_on, &mut bytes)?;
        let header = Header::decode(&bytes)?;
        let at = header.start;
        Ok(StreamReader { from, goes_on, header, at, data: Vec::new() })
    }

    /// The next record. After [`Record::End`] there is none.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub(super) fn next(&mut self) -> io::Result<Record<'_>> {
        let mut head = [0; HEAD_BYTES + HASH_BYTES];
        fill(self.from, self.goes_on, &mut head)?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (kind, offset) = (word(0), long(&head, 8));
        let len = u64::from(word(4)) * BLOCK;
        let end = offset.checked_add(len).filter(|end| *end <= self.header.bytes);
        let is_behind = offset >= self.at && offset.is_multiple_of(BLOCK);
        let data_bytes = match (kind, len) {
            (DATA, 1..) if len <= MAX_DATA_BYTES as u64 => len as usize,
            (ZEROS, 1..) => 0,
            (END, 0) if offset == self.header.bytes => HASH_BYTES,
            _ => return Err(damaged("a record of it makes no sense")),
        };
        let Some(end) = end.filter(|_| is_behind) else {
            return Err(damaged(
                "a record of it lies outside of the volume, or before another one",
            ));
        };
        self.data.resize(data_bytes, 0);
        fill(self.from, self.goes_on, &mut self.data)?;
        if record_hash(&head[..HEAD_BYTES], &self.data) != head[HEAD_BYTES..] {
            return Err(damaged("a record of it does not fit its hash"));
        }
        self.at = end;
        Ok(match kind {
            DATA => Record::Data(offset, &self.data),
            ZEROS => Record::Zeros(offset, len),
            _ => {
                let mut hash = [0; HASH_BYTES];
                hash.copy_from_slice(&self.data);
                Record::End(hash)
            }
        })
    }
}

/// Reads all of `to`.
fn fill(from: &mut dyn Read, goes_on: &dyn Fn() -> bool, to: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < to.len() {
        match from.read(&mut to[done..]) {
            Ok(0) => {
                let why = "it ends before it is complete";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
            }
            Ok(more) => done += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                if !goes_on() {
                    return Err(e);
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
