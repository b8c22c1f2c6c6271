//! Snapshots as streams: `ferrite store send`.

use std::io::{self, Write};
use std::sync::Arc;

use ferrite_disk::{Disk, Session};
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, SECTOR_BYTES};
use ferrite_store::BLOCK_BYTES;
use ferrite_store::content::is_zeros;
use ferrite_store::journal::Name;
use ferrite_store::name::StoreName;

use super::stream::{ContentOf, Header, MAX_DATA_BYTES, StreamWriter};
use crate::{ImageTools, Progress, broken};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// The part of a snapshot that is sent.
#[derive(Clone, Debug, Default)]
pub struct Send {
    /// Only what differs from this snapshot of the same store.
    pub base: Option<Name>,
    /// Only what is from this offset on: the rest of a stream that was cut off.
    pub start: u64,
}

/// The result of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The size of the volume.
    pub virtual_bytes: u64,
    /// Bytes of data in the stream.
    pub sent_bytes: u64,
}

/// A disk that is read once, from its beginning to its end.
pub(super) struct Source {
    session: Session,
    bytes: u64,
}

impl Source {
    pub(super) fn new(tools: &ImageTools<'_>, disk: Disk) -> io::Result<Source> {
        let bytes = disk.sectors() * SECTOR_BYTES;
        Ok(Source { session: Session::new(Arc::new(disk), |arena| (tools.engine)(arena))?, bytes })
    }

    /// Whether the beginning of the rest is zeros, and for at least how many bytes: whole blocks.
    fn look(&mut self, at: u64) -> io::Result<(bool, u64)> {
        let (disk, port) = (self.session.disk().clone(), self.session.port().clone());
        let found = self.session.run(disk.allocation(&port, at, self.bytes - at))??;
        match found.len / BLOCK * BLOCK {
            0 => Err(io::Error::new(io::ErrorKind::InvalidData, "a part of it is no whole block")),
            len => Ok((found.zeros, len)),
        }
    }

    /// Reads a part, of which it is known whether it is zeros.
    fn read(&mut self, at: u64, zeros: bool, to: &mut [u8]) -> io::Result<()> {
        match zeros {
            true => {
                to.fill(0);
                Ok(())
            }
            false => self.session.read(at, to),
        }
    }

    /// The hash of the content before an offset. `goes_on` gets the offset that is reached.
    pub(super) fn content_before(
        &mut self,
        end: u64,
        goes_on: &dyn Fn(u64) -> bool,
    ) -> io::Result<ContentOf> {
        let (mut content, mut at, mut data) = (ContentOf::default(), 0, vec![0; MAX_DATA_BYTES]);
        while at < end {
            if !goes_on(at) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let (zeros, len) = self.look(at)?;
            let mut len = len.min(end - at);
            if !zeros {
                len = len.min(MAX_DATA_BYTES as u64);
                let data = &mut data[..len as usize];
                self.read(at, false, data)?;
                content.add(at, data);
            }
            at += len;
        }
        Ok(content)
    }
}

/// How a block of a snapshot differs from that of its base.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Data,
    Zeros,
}

impl ImageTools<'_> {
    /// Writes a stream of a snapshot: what [`receive`](Self::receive) makes it from.
    ///
    /// # Errors
    /// It is no snapshot, is not there, or cannot be read; or the stream cannot be written.
    pub fn send(
        &self,
        store: &StoreName,
        snapshot: &Name,
        how: &Send,
        to: &mut dyn Write,
    ) -> Result<Sent, DiskError> {
        let named =
            |name: &Name| StoreName { path: store.path.clone(), volume: Some(name.clone()) };
        let what = format!("cannot send {}", named(snapshot));
        let cannot = |e: io::Error| broken(what.clone(), e);
        let open = |name: &Name| -> Result<Source, DiskError> {
            let named = named(name);
            let image = ImageName { format: Format::Store, path: named.to_string().into() };
            let disk = self.open(&image, true)?;
            let is_snapshot = match &disk {
                Disk::Store(volume) => volume.is_snapshot(),
                Disk::Elsewhere(volume) => volume.is_snapshot(),
                _ => false,
            };
            if !is_snapshot {
                let why = format!("{named} is no snapshot, and may be written later");
                let help = format!("make one: ferrite store snapshot {named} NAME");
                return Err(DiskError::new(ErrorKind::Unsuitable, what.clone(), why, help));
            }
            Source::new(self, disk).map_err(cannot)
        };
        let mut source = open(snapshot)?;
        let mut base = how.base.as_ref().map(open).transpose()?;
        let bytes = source.bytes;
        let usage = |why: String, help: &str| {
            Err(DiskError::new(ErrorKind::Usage, what.clone(), why, help))
        };
        if base.as_ref().is_some_and(|base| base.bytes != bytes) {
            return usage("the two snapshots have different sizes".into(), "leave --from out");
        }
        if how.start > bytes || !how.start.is_multiple_of(BLOCK) {
            let why = format!("{} is no place to go on at", how.start);
            return usage(why, "give --resume what ferrite store receive said");
        }
        let told = |at| (self.progress)(Progress { done_bytes: at, total_bytes: bytes });
        let sent = || -> io::Result<u64> {
            let mut content = source.content_before(how.start, &told)?;
            let (name, before) = (snapshot.clone(), content.hash());
            let header = Header { name, base: how.base.clone(), bytes, start: how.start, before };
            let mut writer = StreamWriter::begin(to, &header)?;
            send_rest(&mut source, base.as_mut(), how.start, &mut content, &mut writer, &told)?;
            let sent = writer.data_bytes;
            writer.end(bytes, content.hash())?;
            Ok(sent)
        };
        let sent_bytes = { sent }().map_err(|e| match e.kind() {
            io::ErrorKind::BrokenPipe => {
                let help = "look at what the program at the other end of the pipe says";
                DiskError::new(
                    ErrorKind::Io,
                    what.clone(),
                    "no program reads the stream any more",
                    help,
                )
            }
            _ => cannot(e),
        })?;
        Ok(Sent { virtual_bytes: bytes, sent_bytes })
    }
}

/// Sends what a snapshot has beside its base, or beside zeros, from an offset on.
fn send_rest(
    source: &mut Source,
    mut base: Option<&mut Source>,
    start: u64,
    content: &mut ContentOf,
    to: &mut StreamWriter<'_>,
    told: &dyn Fn(u64) -> bool,
) -> io::Result<()> {
    let (mut new, mut old) = (vec![0; MAX_DATA_BYTES], vec![0; MAX_DATA_BYTES]);
    let mut at = start;
    while at < source.bytes {
        if !told(at) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let (zeros, len) = source.look(at)?;
        let (were_zeros, most) = match &mut base {
            Some(base) => base.look(at)?,
            None => (true, len),
        };
        let mut len = len.min(most);
        if zeros && were_zeros {
            at += len;
            continue;
        }
        len = len.min(MAX_DATA_BYTES as u64);
        let (new, old) = (&mut new[..len as usize], &mut old[..len as usize]);
        source.read(at, zeros, new)?;
        match &mut base {
            Some(base) => base.read(at, were_zeros, old)?,
            None => old.fill(0),
        }
        content.add(at, new);
        send_changes(at, new, old, to)?;
        at += len;
    }
    Ok(())
}

/// Sends the runs of blocks that differ.
fn send_changes(at: u64, new: &[u8], old: &[u8], to: &mut StreamWriter<'_>) -> io::Result<()> {
    let blocks = new.chunks(BLOCK_BYTES).zip(old.chunks(BLOCK_BYTES));
    let changes: Vec<Change> = blocks
        .map(|(new, old)| match (new == old, is_zeros(new)) {
            (true, _) => Change::None,
            (false, true) => Change::Zeros,
            (false, false) => Change::Data,
        })
        .collect();
    let mut done = 0;
    for run in changes.chunk_by(|a, b| a == b) {
        let (from, len) = (done * BLOCK_BYTES, run.len() * BLOCK_BYTES);
        let offset = at + from as u64;
        match run[0] {
            Change::None => {}
            Change::Data => to.data(offset, &new[from..from + len])?,
            Change::Zeros => to.zeros(offset, len as u64)?,
        }
        done += run.len();
    }
    Ok(())
}
