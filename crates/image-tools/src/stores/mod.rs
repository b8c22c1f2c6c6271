//! Stores that are not served: making, inspecting and checking them, and changing their volumes. [`served`] has the
//! operations on stores that this process serves. `ferrite store` is the command line for this.

mod compact;
mod create;
mod grow;
mod receive;
mod report;
mod send;
pub mod served;
mod stream;

use std::future::{Future, poll_fn};
use std::io;
use std::path::Path;
use std::pin::pin;
use std::task::Poll;

use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ErrorKind, INDEX_BYTES, METADATA_BYTES, Port, Raw};
use ferrite_host::clock;
use ferrite_images::children::PARTIAL;
use ferrite_images::open_medium;
use ferrite_store::BLOCK_BYTES;
use ferrite_store::check::{self, How, Outcome, damage_of};
use ferrite_store::content::DomainKey;
use ferrite_store::journal::{Name, VolumeId};
use ferrite_store::live::{Found, Live, Look, MadeWay, Memory, Operation, VolumeError, VolumeInfo};
use ferrite_store::name::StoreName;
use ferrite_store::owned::{CHECK_PATH, MAKE_ROOM, help_of};
use ferrite_store::pace::Pace;
use ferrite_store::superblock::Unusable;
use serde::{Deserialize, Serialize};

use super::io_context::IoContext;
use super::{ImageTools, NewSize, broken};

pub use receive::Receive;
pub use report::{
    StoreChecked, StoreCollected, StoreCompacted, StoreGrown, StoreListed, StoreMade,
    StoreRepaired, StoreStats, VolumeDone,
};
pub use send::{Send, Sent};

use super::Progress;

/// The domain of volumes that are made without a given one.
pub const DOMAIN: &str = "default";

/// The memory of a store that is open for one operation. It has no index, as nothing is looked up by content.
const MEMORY: Memory = Memory { metadata: METADATA_BYTES, index: 0 };

/// A change of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// Make it: of so many bytes, in a domain, which is made if it does not exist.
    Create(u64, Name),
    /// Make a snapshot of it.
    Snapshot(Name),
    /// Make another volume of it.
    Clone(Name),
    /// Set it back to a snapshot of it.
    Rollback(Name),
    /// Delete it.
    Delete,
    /// Give it another name.
    Rename(Name),
    /// Give it another size. A smaller one loses what is behind it, so it has to be allowed.
    Resize {
        /// The new size.
        size: NewSize,
        /// It may be smaller.
        shrink: bool,
    },
}

/// The depth of a check.
pub type StoreCheck = How;

impl ImageTools<'_> {
    /// Changes a volume, durably.
    ///
    /// # Errors
    /// The store is in use, cannot be opened, or the change is impossible: nothing has changed.
    pub fn change_volume(
        &self,
        store: &Path,
        volume: &Name,
        change: Change,
    ) -> Result<VolumeDone, DiskError> {
        let what = change.what(store, volume);
        let (mut context, port, bytes) = self.store(store, &what, false)?;
        let done = context.run(async {
            let live = Live::open(&port, bytes, MEMORY).await?;
            let done = change_live(&live, &port, volume, &change).await;
            if let Err(e) = live.close(&port).await
                && done.is_ok()
            {
                // The change is durable: it is in the journal.
                tracing::warn!(
                    "the store has no checkpoint of this ({e}): the next command makes it"
                );
            }
            done
        });
        let volume = done.map_err(|e| failed(what, store, e))?;
        Ok(change.done(store, volume))
    }

    /// The properties of a store, or of a volume of it.
    ///
    /// # Errors
    /// It is in use, cannot be opened, or there is no such volume.
    pub fn list_store(&self, store: &Path) -> Result<StoreListed, DiskError> {
        let what = cannot_look(store);
        let (mut context, port, bytes) = self.store(store, &what, true)?;
        let look = context.run(Look::open(&port, bytes)).map_err(|e| failed(what, store, e))?;
        let path = store.display().to_string();
        Ok(StoreListed { path, store: look.info(), volumes: look.list() })
    }

    /// Checks a store. Nothing is written.
    ///
    /// # Errors
    /// It is in use, is no store, or cannot be read. Damage is in the report.
    pub fn check_store(&self, store: &Path, how: StoreCheck) -> Result<StoreChecked, DiskError> {
        let what = cannot_check(store);
        let (mut context, port, bytes) = self.store(store, &what, !how.mend)?;
        let outcome = self.outcome(&mut context, &port, bytes, how);
        outcome.map(|outcome| StoreChecked::of(store, outcome)).map_err(|e| failed(what, store, e))
    }

    /// Reads and checks all content, at most so many bytes a second. If content is damaged, writes no longer share it:
    /// writing the same data again stores a good copy. Otherwise nothing is written.
    ///
    /// # Errors
    /// As [`check_store`](Self::check_store).
    pub fn scrub_store(&self, store: &Path, rate: u64) -> Result<StoreChecked, DiskError> {
        let how = How { contents: true, deep: false, rate: Some(rate), mend: false };
        let checked = self.check_store(store, how)?;
        if !checked.findings.iter().any(|finding| finding.kind == "content") {
            return Ok(checked);
        }
        match self.forget_damaged(store, rate) {
            Err(e) if e.kind() == ErrorKind::Interrupted => return Err(e),
            // The findings are reported nevertheless.
            Err(e) => tracing::warn!("writes may find the damaged content again: {e}"),
            Ok(()) => {}
        }
        Ok(checked)
    }

    fn forget_damaged(&self, store: &Path, rate: u64) -> Result<(), DiskError> {
        let what = cannot_check(store);
        let (mut context, port, bytes) = self.store(store, &what, false)?;
        let goes_on = || (self.progress)(Progress { done_bytes: 0, total_bytes: 0 });
        let scrubbed = until_stopped(&goes_on, async {
            let live = Live::open(&port, bytes, MEMORY).await?;
            let pace = Pace::bounded(Some(rate), None);
            live.begin_scrub();
            while let Some(bytes) = live.scrub_in_turn(&port, &pace).await? {
                pace.used(&port.io, bytes).await?;
            }
            live.close(&port).await
        });
        context.run(scrubbed).map_err(|e| failed(what, store, e))
    }

    fn outcome(
        &self,
        context: &mut IoContext,
        port: &Port,
        bytes: u64,
        how: How,
    ) -> io::Result<Outcome> {
        let progress =
            |done_bytes, total_bytes| (self.progress)(Progress { done_bytes, total_bytes });
        context.run(check::check(port, bytes, how, &progress))
    }

    /// Restores damaged metadata from its second copy, if `force` is set. Otherwise it only reports these repairs.
    ///
    /// # Errors
    /// As [`check_store`](Self::check_store).
    pub fn repair_store(&self, store: &Path, force: bool) -> Result<StoreRepaired, DiskError> {
        repaired(force, |how| self.check_store(store, how))
    }

    /// The use of a store's space. The journal is replayed before, if it is not empty.
    ///
    /// # Errors
    /// It is in use, damaged, or cannot be read.
    pub fn store_stats(&self, store: &Path) -> Result<StoreStats, DiskError> {
        let what = cannot_look(store);
        let cannot = |e| failed(what.clone(), store, e);
        let has_background_work = {
            let (mut context, port, bytes) = self.store(store, &what, true)?;
            context.run(Look::open(&port, bytes)).map_err(cannot)?.has_records()
        };
        if has_background_work {
            let (mut context, port, bytes) = self.store(store, &what, false)?;
            let replayed = async { Live::open(&port, bytes, MEMORY).await?.close(&port).await };
            context.run(replayed).map_err(cannot)?;
        }
        let (mut context, port, raw) = self.medium_of(store, &what, true)?;
        let bytes = raw.bytes_now().map_err(cannot)?;
        let outcome = self.outcome(&mut context, &port, bytes, How::default()).map_err(cannot)?;
        match outcome.stats {
            Some(stats) if outcome.findings.counts.damage == 0 => {
                Ok(StoreStats::of(store, stats, raw.space_below()))
            }
            _ => {
                let help = format!("ferrite store check {} says where", store.display());
                Err(DiskError::new(ErrorKind::Damaged, what, "the store is damaged", help))
            }
        }
    }

    /// Frees the space of content that no volume references.
    ///
    /// # Errors
    /// It is in use, damaged, cannot be read, or was stopped: no data are lost then.
    pub fn collect_store(&self, store: &Path) -> Result<StoreCollected, DiskError> {
        let what = cannot_collect(store);
        let (mut context, port, bytes) = self.store(store, &what, false)?;
        let goes_on = || (self.progress)(Progress { done_bytes: 0, total_bytes: 0 });
        let collected = until_stopped(&goes_on, async {
            // The pass also joins equal content that is stored twice.
            let memory = Memory { index: INDEX_BYTES, ..MEMORY };
            let live = Live::open(&port, bytes, memory).await?;
            live.load_whole_index(&port).await?;
            let passed = live.gc(&port).await?;
            live.close(&port).await?;
            Ok((passed, live.info().free_bytes))
        });
        let (passed, free_bytes) = context.run(collected).map_err(|e| failed(what, store, e))?;
        Ok(StoreCollected::of(store, passed, free_bytes))
    }

    /// Opens a store's file or device, and locks it.
    fn store(
        &self,
        path: &Path,
        what: &str,
        read_only: bool,
    ) -> Result<(IoContext, Port, u64), DiskError> {
        let (context, port, raw) = self.medium_of(path, what, read_only)?;
        let bytes = raw.bytes_now().map_err(|e| failed(what, path, e))?;
        Ok((context, port, bytes))
    }

    fn medium_of(
        &self,
        path: &Path,
        what: &str,
        read_only: bool,
    ) -> Result<(IoContext, Port, Raw), DiskError> {
        let raw = open_medium(path, &self.medium_options(read_only));
        let raw = raw.map_err(|e| of_store(what, path, &e))?;
        let cannot = |e| failed(what.to_owned(), path, e);
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port_of(raw.files()).map_err(cannot)?;
        Ok((context, port, raw))
    }
}

impl Change {
    fn what(&self, store: &Path, volume: &Name) -> String {
        let name = StoreName { path: store.to_owned(), volume: Some(volume.clone()) };
        match self {
            Change::Create(..) => format!("cannot make volume {name}"),
            Change::Snapshot(_) => format!("cannot make a snapshot of {name}"),
            Change::Clone(_) => format!("cannot clone {name}"),
            Change::Rollback(_) => format!("cannot roll {name} back"),
            Change::Delete => format!("cannot delete {name}"),
            Change::Rename(_) => format!("cannot rename {name}"),
            Change::Resize { .. } => format!("cannot resize {name}"),
        }
    }

    /// The next step where a disk uses the volume, if this is for volumes that none uses.
    fn help_in_use(&self) -> Option<&'static str> {
        match self {
            Change::Create(..) | Change::Snapshot(_) | Change::Clone(_) => None,
            Change::Delete => Some("detach that disk first, or end the export"),
            Change::Rollback(_) => Some(
                "detach that disk first, or end the export; or have it go on, and make a clone of \
                 the snapshot (ferrite store clone)",
            ),
            Change::Rename(_) => Some(
                "detach that disk first, or end the export: it would look for the old name when it is \
                 served anew",
            ),
            Change::Resize { .. } => Some(
                "detach that disk first, or end the export; resize it, and attach it again: its guest \
                 sees the new size then",
            ),
        }
    }

    fn done(&self, store: &Path, volume: VolumeInfo) -> VolumeDone {
        VolumeDone { path: store.display().to_string(), volume, done: self.word().into() }
    }

    /// The name that a volume or snapshot gets, if the change gives one.
    fn new_name<'a>(&'a self, volume: &'a Name) -> Option<&'a Name> {
        match self {
            Change::Create(..) => Some(volume),
            Change::Snapshot(name) | Change::Clone(name) | Change::Rename(name) => Some(name),
            Change::Rollback(_) | Change::Delete | Change::Resize { .. } => None,
        }
    }

    fn word(&self) -> &'static str {
        match self {
            Change::Create(..) => "created",
            Change::Snapshot(_) => "snapshot",
            Change::Clone(_) => "cloned",
            Change::Rollback(_) => "rolled-back",
            Change::Delete => "deleted",
            Change::Rename(_) => "renamed",
            Change::Resize { .. } => "resized",
        }
    }
}

fn cannot_look(store: &Path) -> String {
    format!("cannot look at store {}", store.display())
}

fn cannot_collect(store: &Path) -> String {
    format!("cannot collect what store {} needs no more", store.display())
}

fn cannot_compact(store: &Path) -> String {
    format!("cannot compact store {}", store.display())
}

fn cannot_check(store: &Path) -> String {
    format!("cannot check store {}", store.display())
}

/// A repair, with at most three checks.
fn repaired(
    force: bool,
    mut check: impl FnMut(StoreCheck) -> Result<StoreChecked, DiskError>,
) -> Result<StoreRepaired, DiskError> {
    let before = check(StoreCheck::default())?;
    if !force || before.counts.mendable == 0 {
        return Ok(StoreRepaired { done: force, mended: 0, after: before.clone(), before });
    }
    let mended = check(StoreCheck { mend: true, ..StoreCheck::default() })?;
    let after = check(StoreCheck::default())?;
    Ok(StoreRepaired { done: true, mended: mended.mended, before, after })
}

/// Runs a future that may be stopped where it waits. The steps done by then stay done.
pub(super) async fn until_stopped<T>(
    goes_on: &dyn Fn() -> bool,
    future: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let mut future = pin!(future);
    poll_fn(|cx| match goes_on() {
        true => future.as_mut().poll(cx),
        false => Poll::Ready(Err(io::ErrorKind::Interrupted.into())),
    })
    .await
}

/// The error that no volume has a name.
#[derive(Debug, thiserror::Error)]
#[error("there is no volume or snapshot {}", .0.as_str())]
struct NoVolume(Name);

/// The error that a new name is that of an unfinished copy.
#[derive(Debug, thiserror::Error)]
#[error("{}: so a copy is called that is not complete, and image convert --force deletes it", .0.as_str())]
struct NameOfACopy(Name);

/// The error that a name is taken.
#[derive(Debug, thiserror::Error)]
#[error("there is a {kind} of that name: {}", .name.as_str())]
struct Taken {
    /// A volume or a snapshot.
    kind: &'static str,
    name: Name,
}

/// Why a volume does not get a size.
#[derive(Debug, thiserror::Error)]
enum NoSize {
    #[error("a volume has whole blocks of 4 KiB, and {0} bytes are none")]
    NoBlocks(u64),
    #[error("{0} at its end would be gone")]
    Smaller(Human),
}

impl NoSize {
    /// The new size in blocks.
    fn check(found: Found, size: NewSize, shrink: bool) -> Result<u64, NoSize> {
        let before = found.blocks * BLOCK_BYTES as u64;
        let bytes = size.of(before);
        match before.checked_sub(bytes) {
            _ if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES as u64) => {
                Err(NoSize::NoBlocks(bytes))
            }
            Some(less @ 1..) if !shrink && !found.is_snapshot => Err(NoSize::Smaller(Human(less))),
            _ => Ok(bytes / BLOCK_BYTES as u64),
        }
    }

    fn kind_and_help(&self) -> (ErrorKind, String) {
        match self {
            NoSize::NoBlocks(bytes) => {
                let block = BLOCK_BYTES as u64;
                let next = bytes.checked_next_multiple_of(block).unwrap_or(*bytes).max(block);
                (ErrorKind::Usage, format!("take {} ({next} bytes)", Human(next)))
            }
            NoSize::Smaller(_) => (
                ErrorKind::Refused,
                "make file systems and partitions in it smaller first; --shrink does it then"
                    .into(),
            ),
        }
    }
}

/// Makes the change; returns the new volume, or the changed one.
///
/// # Errors
/// A [`VolumeError`]: nothing has changed. Or the kernel's.
pub async fn change_live(
    live: &Live,
    port: &Port,
    volume: &Name,
    change: &Change,
) -> io::Result<VolumeInfo> {
    let found = |name: &Name| -> io::Result<Found> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, NoVolume(name.clone()));
        live.volume_called(name.as_str()).ok_or_else(missing)
    };
    let find = |name: &Name| Ok::<VolumeId, io::Error>(found(name)?.number);
    let new = change.new_name(volume);
    if let Some(name) = new.filter(|name| name.as_str().ends_with(PARTIAL)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, NameOfACopy(name.clone())));
    }
    if let Some((name, there)) =
        new.and_then(|name| Some((name, live.volume_called(name.as_str())?)))
    {
        let kind = if there.is_snapshot { "snapshot" } else { "volume" };
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            Taken { kind, name: name.clone() },
        ));
    }
    let operation = match change {
        Change::Create(bytes, domain) => {
            let domain = match live.domain(domain.as_str()) {
                Some(domain) => domain,
                None => {
                    let key = DomainKey(clock::secret()?);
                    let number = live.operate(port, Operation::Domain(domain.clone(), key)).await?;
                    u16::try_from(number).map_err(io::Error::other)?
                }
            };
            Operation::Create(volume.clone(), bytes / BLOCK_BYTES as u64, domain)
        }
        Change::Snapshot(name) => Operation::Snapshot(name.clone(), find(volume)?),
        Change::Clone(name) => Operation::Clone(name.clone(), find(volume)?),
        Change::Rollback(to) => Operation::Rollback(find(volume)?, find(to)?),
        Change::Delete => Operation::Delete(find(volume)?),
        Change::Rename(name) => Operation::Rename(find(volume)?, name.clone()),
        Change::Resize { size, shrink } => {
            let found = found(volume)?;
            let blocks = NoSize::check(found, *size, *shrink);
            let refused = |e| io::Error::new(io::ErrorKind::InvalidInput, e);
            Operation::Resize(found.number, blocks.map_err(refused)?)
        }
    };
    let before = live.volume(volume.as_str()).and_then(|number| live.volume_info(number));
    let number = live.operate(port, operation).await?;
    let after = live.volume_info(number).filter(|_| !matches!(change, Change::Delete));
    after.or(before).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The error of an operation on a store.
fn failed(what: impl Into<String>, store: &Path, e: io::Error) -> DiskError {
    let (what, shown) = (what.into(), store.display());
    let inner = e.get_ref();
    if let Some(why) = inner.and_then(|e| e.downcast_ref::<NoVolume>()) {
        let help = format!("ferrite store list {shown} shows those that there are");
        return DiskError::new(ErrorKind::NotFound, what, why.to_string(), help);
    }
    if let Some(why) = inner.and_then(|e| e.downcast_ref::<NameOfACopy>()) {
        let help = "choose a name that does not end in .partial";
        return DiskError::new(ErrorKind::Refused, what, why.to_string(), help);
    }
    if let Some(why) = inner.and_then(|e| e.downcast_ref::<Taken>()) {
        let help = "choose another name";
        return DiskError::new(ErrorKind::Refused, what, why.to_string(), help);
    }
    if let Some(why) = inner.and_then(|e| e.downcast_ref::<NoSize>()) {
        let (kind, help) = why.kind_and_help();
        return DiskError::new(kind, what, why.to_string(), help);
    }
    if let Some(why) = inner.and_then(|e| e.downcast_ref::<VolumeError>()) {
        let (kind, help) = match why {
            VolumeError::Missing | VolumeError::NoDomain => (
                ErrorKind::NotFound,
                format!("ferrite store list {shown} shows those that there are"),
            ),
            VolumeError::Exists => (ErrorKind::Refused, "choose another name".into()),
            VolumeError::NotASnapshot | VolumeError::OtherDomain => (
                ErrorKind::Unsuitable,
                format!("ferrite store list {shown} shows snapshots and domains"),
            ),
            VolumeError::IsASnapshot => {
                (ErrorKind::Unsuitable, "ferrite store clone makes a volume of it".into())
            }
            VolumeError::Full => (ErrorKind::Refused, "delete some, or use another store".into()),
            VolumeError::BadSize => (ErrorKind::Usage, "sizes are multiples of 4 KiB".into()),
            VolumeError::IsSnapshot => (
                ErrorKind::Unsuitable,
                "make a clone of it (ferrite store clone), and resize that".into(),
            ),
        };
        return DiskError::new(kind, what, why.to_string(), help).with_source(e);
    }
    if let Some(why) = inner.and_then(|e| e.downcast_ref::<MadeWay>()) {
        let help = "try again when the store has more room: delete volumes or snapshots that are not needed, and run \
                    ferrite store gc; or have its content read, which keeps no room (ferrite store scrub)";
        return DiskError::new(ErrorKind::InUse, what, why.to_string(), help).with_source(e);
    }
    if let Some(why) = damage_of(&e) {
        let help = format!("ferrite store check {shown} says where");
        return DiskError::new(ErrorKind::Damaged, what, why, help).with_source(e);
    }
    match inner.and_then(|e| e.downcast_ref::<Unusable>()) {
        Some(why @ Unusable::Foreign) => {
            DiskError::new(ErrorKind::Unsuitable, what, why.to_string(), CHECK_PATH)
        }
        Some(why) => {
            let help = "use the version of this program that has made or used it";
            DiskError::new(ErrorKind::Unsuitable, what, why.to_string(), help)
        }
        None if e.kind() == io::ErrorKind::StorageFull => {
            DiskError::new(ErrorKind::Io, what, e.to_string(), MAKE_ROOM).with_source(e)
        }
        None if e.kind() == io::ErrorKind::NotFound => {
            DiskError::new(ErrorKind::NotFound, what, e.to_string(), CHECK_PATH).with_source(e)
        }
        None => broken(what, e),
    }
}

/// An error at the opening of a store's file, in words for a store.
fn of_store(what: &str, path: &Path, e: &DiskError) -> DiskError {
    let help = match e.kind() {
        ErrorKind::InUse => {
            format!("stop what uses it first (fuser -v {} shows it)", path.display())
        }
        _ => help_of(e).to_owned(),
    };
    DiskError::new(e.kind(), what, e.why(), help)
}
