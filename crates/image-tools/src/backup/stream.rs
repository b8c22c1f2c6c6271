//! A full backup as one stream of bytes: `ferrite backup create IMAGE -`.
//!
//! The stream has the magic and the disk's size; for each region that is not zeros its number, its length and its data;
//! a mark; and the manifest, which has the hashes. All numbers are little-endian. A stream without its manifest is no
//! backup.

use std::io::{self, Read, Write};
use std::sync::Arc;

use ferrite_disk::{Disk, Session};
use ferrite_disk_base::dirty::{MAX_DISK_BYTES, REGION_BYTES};
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, SECTOR_BYTES};
use ferrite_host::clock::{secret, unix_time_s};

use super::create::{BackUp, name_of};
use super::manifest::{DiskOf, Hash, Manifest, NewManifest};
use super::restore::RestoreStream;
use super::{BackupDone, BackupInfo, BackupKind};
use crate::files::Over;
use crate::formats::{self, Blank};
use crate::{Done, ImageTools, NewImage, Progress, broken, refused};

const MAGIC: &[u8; 16] = b"ferrite-backup 1";
/// In place of a region's number: the manifest follows, with its length.
const END: u32 = u32::MAX;
/// Bytes that are read or written at a time.
const PIECE: usize = 1 << 20;

impl ImageTools<'_> {
    /// Writes a full backup as a stream. No map is used or changed: whether the stream was kept is not known here.
    ///
    /// # Errors
    /// The disk cannot be read, the stream cannot be written; an incremental backup is asked for.
    pub fn back_up_to(
        &self,
        image: &ImageName,
        to: &mut dyn Write,
        how: &BackUp,
    ) -> Result<BackupDone, DiskError> {
        let what = || format!("cannot back up {}", image.path.display());
        let cannot = |e: io::Error| match e.kind() {
            io::ErrorKind::BrokenPipe => {
                let help = "look at what the program at the other end of the pipe says";
                DiskError::new(ErrorKind::Io, what(), "no program reads the stream any more", help)
            }
            _ => broken(what(), e),
        };
        if how.kind == BackupKind::Incremental {
            let help = "back up into a folder, and copy that";
            return Err(refused(what(), "a stream is always a full backup", help));
        }
        let disk = Arc::new(self.open(image, true)?);
        let bytes = disk.sectors() * SECTOR_BYTES;
        if bytes > MAX_DISK_BYTES {
            let help = "copy it with ferrite image convert";
            return Err(refused(what(), "the disk is larger than 64 TiB", help));
        }
        let session = Session::new(disk, |arena| (self.engine)(arena)).map_err(cannot)?;
        let id: [u8; 16] = secret().map_err(cannot)?;
        let created_unix_s = unix_time_s();
        let mut manifest = Manifest::new(NewManifest {
            name: how.name.clone().unwrap_or_else(|| crate::date::compact(created_unix_s)),
            id: format!("{:032x}", u128::from_be_bytes(id)),
            parent: None,
            created_unix_s,
            disk: DiskOf { name: name_of(image), virtual_bytes: bytes },
            map: None,
        });
        let read_bytes = self.write_stream(session, to, &mut manifest).map_err(cannot)?;
        let backup = BackupInfo {
            name: manifest.name,
            id: manifest.id,
            parent: None,
            created_unix_s,
            disk: manifest.disk.name,
            virtual_bytes: bytes,
            data_bytes: read_bytes,
            map: None,
            state: "complete",
            snapshot: None,
            why: None,
        };
        Ok(BackupDone { backup, read_bytes, resumed: false, notes: Vec::new() })
    }

    fn write_stream(
        &self,
        mut session: Session,
        to: &mut dyn Write,
        manifest: &mut Manifest,
    ) -> io::Result<u64> {
        let bytes = manifest.disk.virtual_bytes;
        to.write_all(MAGIC)?;
        to.write_all(&bytes.to_le_bytes())?;
        let (mut read, mut part) = (0, (false, 0));
        let mut data = vec![0; REGION_BYTES as usize];
        for number in 0..bytes.div_ceil(REGION_BYTES) {
            let start = number * REGION_BYTES;
            if !(self.progress)(Progress { done_bytes: start, total_bytes: bytes }) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let data = &mut data[..REGION_BYTES.min(bytes - start) as usize];
            let end = start + data.len() as u64;
            let mut at = start;
            let mut is_zeros = true;
            while at < end {
                if part.1 <= at {
                    let (disk, port) = (session.disk().clone(), session.port().clone());
                    let found = session.run(disk.allocation(&port, at, bytes - at))??;
                    part = (found.zeros, at + found.len.max(1));
                }
                let len = (part.1.min(end) - at).min(PIECE as u64) as usize;
                let from = (at - start) as usize;
                let data = &mut data[from..from + len];
                match part.0 {
                    true => data.fill(0),
                    false => {
                        session.read(at, data)?;
                        read += len as u64;
                        is_zeros = is_zeros && data.iter().all(|byte| *byte == 0);
                    }
                }
                at += len as u64;
            }
            if is_zeros {
                continue;
            }
            let number = u32::try_from(number).map_err(io::Error::other)?;
            manifest.regions.push((number, Hash(*blake3::hash(data).as_bytes())));
            to.write_all(&number.to_le_bytes())?;
            to.write_all(&(data.len() as u32).to_le_bytes())?;
            to.write_all(data)?;
        }
        let text = manifest.sealed()?;
        to.write_all(&END.to_le_bytes())?;
        to.write_all(&u32::try_from(text.len()).map_err(io::Error::other)?.to_le_bytes())?;
        to.write_all(&text)?;
        to.flush()?;
        Ok(read)
    }

    /// Restores a disk from a stream into a new image.
    ///
    /// # Errors
    /// The stream is none, is damaged or ends early; the destination is there, or is too small.
    pub fn restore_stream(
        &self,
        to: &ImageName,
        how: RestoreStream<'_>,
    ) -> Result<Done, DiskError> {
        let what = || format!("cannot restore {}", to.path.display());
        let cannot = |e| broken(what(), e);
        if to.format == Format::Store || to.format.is_remote() || self.is_device(&to.path) {
            let help = "restore into an image, and copy that with ferrite image convert";
            return Err(refused(what(), "a stream is restored into a new image only", help));
        }
        let from = how.from;
        let unread = |e: io::Error| {
            let why = match e.kind() {
                io::ErrorKind::UnexpectedEof => "the stream ends before it is complete".to_owned(),
                _ => e.to_string(),
            };
            let help = "make the stream again, or take another one; nothing was restored";
            let kind = match e.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => ErrorKind::Damaged,
                io::ErrorKind::Interrupted => ErrorKind::Interrupted,
                _ => ErrorKind::Io,
            };
            DiskError::new(kind, what(), why, help).with_source(e)
        };
        let mut head = [0; 24];
        fill(from, &mut head).map_err(unread)?;
        let mut size = [0; 8];
        size.copy_from_slice(&head[16..]);
        let bytes = u64::from_le_bytes(size);
        let is_whole = bytes.is_multiple_of(SECTOR_BYTES) && (1..=MAX_DISK_BYTES).contains(&bytes);
        if head[..16] != *MAGIC || !is_whole {
            return Err(unread(bad("it is no stream of ferrite backup")));
        }
        let new = NewImage::default();
        formats::check_new(to, &new, None, bytes)?;
        let mut file = self.new_file(&to.path, Over::forced(how.force))?;
        self.write_new(&mut file, to.format, &new, (None, Blank::Zeros), bytes)?;
        let target: Arc<Disk> = Arc::new(file.open_disk(to.format)?);
        let mut session =
            Session::new(target.clone(), |arena| (self.engine)(arena)).map_err(cannot)?;
        self.read_stream(&mut session, from, bytes).map_err(unread)?;
        let port = session.port().clone();
        session.run(target.close(&port)).and_then(|closed| closed).map_err(cannot)?;
        drop(session);
        drop(target);
        file.finish()?;
        Ok(crate::create::done(to, bytes, formats::warnings(to, &new, None, bytes)))
    }

    fn read_stream(
        &self,
        session: &mut Session,
        from: &mut dyn Read,
        bytes: u64,
    ) -> io::Result<()> {
        let mut data = vec![0; REGION_BYTES as usize];
        let mut found: Vec<(u32, Hash)> = Vec::new();
        loop {
            let (number, len) = (word(from)?, word(from)?);
            if number == END {
                return check_manifest(from, len, (bytes, &found));
            }
            let start = u64::from(number) * REGION_BYTES;
            if !(self.progress)(Progress { done_bytes: start, total_bytes: bytes }) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let rises = found.last().is_none_or(|last| last.0 < number);
            let is_region = start < bytes && u64::from(len) == REGION_BYTES.min(bytes - start);
            if !rises || !is_region {
                return Err(bad("a region of it lies outside of the disk, or before another one"));
            }
            let data = &mut data[..len as usize];
            fill(from, data)?;
            found.push((number, Hash(*blake3::hash(data).as_bytes())));
            for (i, piece) in data.chunks(PIECE).enumerate() {
                if piece.iter().any(|byte| *byte != 0) {
                    session.write(start + (i * PIECE) as u64, piece)?;
                }
            }
        }
    }
}

/// Reads the manifest, which has to name these regions.
fn check_manifest(
    from: &mut dyn Read,
    len: u32,
    (bytes, found): (u64, &[(u32, Hash)]),
) -> io::Result<()> {
    let most = 4096 * 4 + 90 * (found.len() as u64 + 1);
    if u64::from(len) > most {
        return Err(bad("its manifest is too long"));
    }
    let mut text = vec![0; len as usize];
    fill(from, &mut text)?;
    let manifest = Manifest::parse_any(&text)?;
    match manifest.disk.virtual_bytes == bytes && manifest.regions == found {
        true => Ok(()),
        false => Err(bad("its data are not what was backed up: a hash of its manifest differs")),
    }
}

/// Reads all of `to`. A read that was interrupted ends it: the reader has asked whether it goes on.
fn fill(from: &mut dyn Read, to: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < to.len() {
        match from.read(&mut to[done..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => done += more,
        }
    }
    Ok(())
}

fn word(from: &mut dyn Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    fill(from, &mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn bad(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}
