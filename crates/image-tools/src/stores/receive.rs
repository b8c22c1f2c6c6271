//! Snapshots from streams: `ferrite store receive`.
//!
//! The order:
//! 1. The content is written to `NAME.partial` and made durable.
//! 2. It is read again, and compared with the stream's hash.
//! 3. A snapshot of it gets the name.
//! 4. `NAME.partial` is deleted.
//!
//! So nothing has the name before all is there.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Disk, Session};
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, Port};
use ferrite_images::children::PARTIAL;
use ferrite_images::open_store;
use ferrite_store::BLOCK_BYTES;
use ferrite_store::journal::{Name, VolumeId};
use ferrite_store::live::{Found, Live, Operation};
use ferrite_store::name::StoreName;
use ferrite_store::owned::StoreHandle;

use super::send::Source;
use super::stream::{Hash, Header, Record, StreamReader};
use super::{VolumeDone, failed, until_stopped};
use crate::io_context::IoContext;
use crate::{ImageTools, Progress, refused, unsuitable};

/// The domain of volumes that are made without a given one.
const DOMAIN: u16 = 0;

/// How a stream is received.
#[derive(Clone, Debug, Default)]
pub struct Receive {
    /// The snapshot that the stream is a difference from, if it is called otherwise here.
    pub base: Option<Name>,
    /// Continue the partial volume of a stream that was cut off.
    pub resume: bool,
    /// Delete the partial volume of an earlier stream.
    pub force: bool,
}

/// An open store, and the names of a snapshot that is received.
struct Receiving<'a> {
    tools: &'a ImageTools<'a>,
    store: &'a Path,
    what: String,
    handle: StoreHandle,
    port: Port,
    context: IoContext,
    name: Name,
    partial: Name,
}

/// A failure, and whether what was received stays for a later stream.
struct Failed {
    keeps: bool,
    e: DiskError,
}

impl From<DiskError> for Failed {
    fn from(e: DiskError) -> Failed {
        Failed { keeps: false, e }
    }
}

impl ImageTools<'_> {
    /// Makes a snapshot of a stream, in a store that no process has open.
    ///
    /// # Errors
    /// The stream is none, damaged or cut off, or is a difference from something else; the store is in use or full, or
    /// has that name already. Nothing has the name then.
    pub fn receive(
        &self,
        store: &Path,
        name: &Name,
        how: &Receive,
        from: &mut dyn Read,
    ) -> Result<VolumeDone, DiskError> {
        let named = StoreName { path: store.to_owned(), volume: Some(name.clone()) };
        let what = format!("cannot receive {named}");
        let goes_on = || (self.progress)(Progress { done_bytes: 0, total_bytes: 0 });
        let mut stream =
            StreamReader::begin(from, &goes_on).map_err(|e| bad_stream(what.clone(), e))?;
        let header = stream.header.clone();
        let mut receiving = Receiving::open(self, store, name, what)?;
        let partial = receiving.prepare(&header, how)?;
        match receiving.take(&mut stream, &header, how) {
            Ok(()) => receiving.finish(partial),
            Err(Failed { keeps, e }) => {
                if !keeps {
                    // If it cannot be deleted, --force does it.
                    let _ = receiving.operate(Operation::Delete(partial));
                }
                let _ = receiving.close();
                Err(e)
            }
        }
    }
}

impl<'a> Receiving<'a> {
    fn open(
        tools: &'a ImageTools<'a>,
        store: &'a Path,
        name: &Name,
        what: String,
    ) -> Result<Receiving<'a>, DiskError> {
        let partial = Name::new(&format!("{}{PARTIAL}", name.as_str()));
        let partial = partial.filter(|_| !name.as_str().ends_with(PARTIAL)).ok_or_else(|| {
            let why = "it is no name that a volume can have while it is filled";
            let help = "choose 1 to 55 letters, digits, and -, _, . but at the beginning, and no .partial at the end";
            DiskError::new(ErrorKind::Usage, what.clone(), why, help)
        })?;
        let handle =
            StoreHandle::open_on(store, &tools.medium_options(false), open_store, tools.engine)?;
        let cannot = |e| failed(what.clone(), store, e);
        let mut context = IoContext::new(tools, 0).map_err(cannot)?;
        let port = context.port_of(handle.store().files()).map_err(cannot)?;
        let (name, live) = (name.clone(), handle.store().live());
        if live.volume(name.as_str()).is_some() {
            let why = format!("{} is there", name.as_str());
            let help = "choose another name, or delete that first (ferrite store delete)";
            return Err(refused(what, why, help));
        }
        // Equal content is found from the first block on: no background work loads the index here.
        let goes_on = || (tools.progress)(Progress { done_bytes: 0, total_bytes: 0 });
        context.run(until_stopped(&goes_on, live.load_whole_index(&port))).map_err(cannot)?;
        Ok(Receiving { tools, store, what, handle, port, context, name, partial })
    }

    fn live(&self) -> &Live {
        self.handle.store().live()
    }

    fn operate(&mut self, operation: Operation) -> Result<u32, DiskError> {
        let Receiving { context, handle, port, what, store, .. } = self;
        let done = context.run(handle.store().live().operate(port, operation));
        done.map_err(|e| failed(what.clone(), store, e))
    }

    fn close(&mut self) -> Result<(), DiskError> {
        let Receiving { context, handle, port, what, store, .. } = self;
        let done = context.run(handle.store().live().close(port));
        done.map_err(|e| failed(what.clone(), store, e))
    }

    fn refused(&self, why: impl Into<String>, help: &str) -> DiskError {
        refused(self.what.clone(), why, help)
    }

    /// The volume that is filled: a new one, a clone of the base, or what an earlier stream has left.
    fn prepare(&mut self, header: &Header, how: &Receive) -> Result<VolumeId, DiskError> {
        let base = self.base(header, how)?;
        let blocks = header.bytes / BLOCK_BYTES as u64;
        let left = self.live().volume_called(self.partial.as_str());
        if how.resume {
            let fits = |left: &Found| left.blocks == blocks && !left.is_snapshot;
            return left.filter(fits).map(|left| left.number).ok_or_else(|| {
                let why =
                    format!("there is no {} of that size to go on with", self.partial.as_str());
                self.refused(why, "send all of it, and leave --resume out")
            });
        }
        if header.start > 0 {
            let why =
                format!("the stream goes on at {}, and does not begin a snapshot", header.start);
            return Err(self.refused(why, "go on with --resume"));
        }
        if let Some(left) = left {
            if !how.force {
                let why = format!("{} is there, of one that was cut off", self.partial.as_str());
                return Err(self.refused(why, "go on with --resume, or delete it with --force"));
            }
            self.operate(Operation::Delete(left.number))?;
        }
        let partial = self.partial.clone();
        self.operate(match base {
            Some(base) => Operation::Clone(partial, base),
            None => Operation::Create(partial, blocks, DOMAIN),
        })
    }

    /// The snapshot here that the stream is a difference from.
    fn base(&self, header: &Header, how: &Receive) -> Result<Option<VolumeId>, DiskError> {
        let Some(sent) = &header.base else {
            return match &how.base {
                None => Ok(None),
                Some(_) => Err(self.refused(
                    "the stream is a whole snapshot, and no difference from another one",
                    "leave --base out",
                )),
            };
        };
        let name = how.base.as_ref().unwrap_or(sent);
        let found = self.live().volume_called(name.as_str());
        let fits =
            |found: &Found| found.is_snapshot && found.blocks == header.bytes / BLOCK_BYTES as u64;
        let what = self.what.clone();
        match found {
            Some(found) if fits(&found) => Ok(Some(found.number)),
            Some(_) => {
                let why = format!("{} is no snapshot of the size of what was sent", name.as_str());
                Err(unsuitable(
                    what,
                    why,
                    "name the snapshot that it was sent as a difference from (--base)",
                ))
            }
            None => {
                let why = format!(
                    "it is sent as a difference from {}, and the store has no {}",
                    sent.as_str(),
                    name.as_str()
                );
                let help = "receive that first, or name it as it is called here (--base)";
                Err(DiskError::new(ErrorKind::NotFound, what, why, help))
            }
        }
    }

    fn disk(&self, name: &Name, read_only: bool) -> Result<Disk, DiskError> {
        let name = StoreName { path: self.store.to_owned(), volume: Some(name.clone()) };
        let image = ImageName { format: Format::Store, path: name.to_string().into() };
        let options =
            ferrite_disk_base::OpenOptions { read_only, ..self.tools.medium_options(false) };
        Disk::open_image(&image, &options)
    }

    /// Fills the volume, and compares all of it with the stream's hash.
    fn take(
        &mut self,
        stream: &mut StreamReader<'_>,
        header: &Header,
        how: &Receive,
    ) -> Result<(), Failed> {
        let cannot = |e: io::Error| failed(self.what.clone(), self.store, e);
        if how.resume {
            let before = self.content(&self.partial, header.start);
            if before.map_err(|e| Failed { keeps: true, e })? != header.before {
                let why =
                    format!("what is there is not what the stream has before {}", header.start);
                let help = "go on at an earlier place, or send all of it and use --force";
                return Err(Failed { keeps: true, e: self.refused(why, help) });
            }
        }
        let disk = Arc::new(self.disk(&self.partial, false)?);
        let engine = |arena| (self.tools.engine)(arena);
        let mut session = Session::new(disk, engine).map_err(cannot)?;
        let filled = fill(&mut session, stream, self.tools);
        // All that was received is durable before it is compared, or is said to be there.
        session.flush().map_err(cannot)?;
        drop(session);
        match filled {
            Ok(hash) => match self.content(&self.partial, header.bytes) {
                Ok(found) if found == hash => Ok(()),
                Ok(_) => Err(self.differs(header).into()),
                Err(e) => Err(Failed { keeps: true, e: self.resumable(&e, header.bytes) }),
            },
            Err(Ended::Storage(e)) => Err(cannot(e).into()),
            Err(Ended::Stream(e)) => {
                let at = stream.at;
                let keeps = at > 0;
                let e = bad_stream(self.what.clone(), e);
                Err(Failed { keeps, e: if keeps { self.resumable(&e, at) } else { e } })
            }
        }
    }

    /// The error of a stream that ended early, with the next step.
    fn resumable(&self, e: &DiskError, at: u64) -> DiskError {
        let help = format!(
            "it is complete up to {at}: go on with ferrite store send --resume {at}, and ferrite store receive --resume"
        );
        DiskError::new(e.kind(), e.what(), e.why(), help)
    }

    /// The error of content that is not what was sent.
    fn differs(&self, header: &Header) -> DiskError {
        let what = self.what.clone();
        match &header.base {
            Some(base) => {
                let why = format!(
                    "the content is not what was sent: the base here is another one than {} was there",
                    base.as_str()
                );
                let help = "name the right snapshot (--base), or send a whole one";
                unsuitable(what, why, help)
            }
            None => {
                let why = "the content is not what was sent";
                DiskError::new(ErrorKind::Damaged, what, why, "send it again, with receive --force")
            }
        }
    }

    fn content(&self, name: &Name, end: u64) -> Result<Hash, DiskError> {
        let cannot = |e: io::Error| failed(self.what.clone(), self.store, e);
        let mut source = Source::new(self.tools, self.disk(name, true)?).map_err(cannot)?;
        let told = |done_bytes| (self.tools.progress)(Progress { done_bytes, total_bytes: end });
        Ok(source.content_before(end, &told).map_err(cannot)?.hash())
    }

    /// Gives the snapshot its name.
    fn finish(mut self, partial: VolumeId) -> Result<VolumeDone, DiskError> {
        let number = self.operate(Operation::Snapshot(self.name.clone(), partial))?;
        let volume = self.live().volume_info(number);
        let deleted = self.operate(Operation::Delete(partial)).map(drop);
        let what = self.what.clone();
        let volume =
            volume.ok_or_else(|| failed(what, self.store, io::ErrorKind::NotFound.into()))?;
        deleted.and(self.close())?;
        let path = self.store.display().to_string();
        Ok(VolumeDone { path, volume, done: "received".into() })
    }
}

/// Why a volume was not filled.
enum Ended {
    Stream(io::Error),
    Storage(io::Error),
}

/// Writes all records; gives the hash at their end.
fn fill(
    session: &mut Session,
    stream: &mut StreamReader<'_>,
    tools: &ImageTools<'_>,
) -> Result<Hash, Ended> {
    loop {
        let progress = Progress { done_bytes: stream.at, total_bytes: stream.header.bytes };
        if !(tools.progress)(progress) {
            return Err(Ended::Stream(io::ErrorKind::Interrupted.into()));
        }
        match stream.next().map_err(Ended::Stream)? {
            Record::Data(at, data) => session.write(at, data).map_err(Ended::Storage)?,
            Record::Zeros(at, len) => session.write_zeroes(at, len).map_err(Ended::Storage)?,
            Record::End(hash) => return Ok(hash),
        }
    }
}

fn bad_stream(what: String, e: io::Error) -> DiskError {
    let (kind, why, help) = match e.kind() {
        io::ErrorKind::Interrupted => {
            (ErrorKind::Interrupted, "interrupted".to_owned(), "run the same commands again")
        }
        io::ErrorKind::Unsupported => (
            ErrorKind::Unsuitable,
            format!("the stream: {e}"),
            "receive it with the version that sent it, or a later one",
        ),
        io::ErrorKind::InvalidData => {
            (ErrorKind::Damaged, format!("the stream: {e}"), "send it again")
        }
        _ => (
            ErrorKind::Io,
            format!("the stream: {e}"),
            "look at what the sender says, and send it again",
        ),
    };
    DiskError::new(kind, what, why, help).with_source(e)
}
