//! New stores.

use std::io;

use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ErrorKind, SpaceBelow};
use ferrite_host::clock;
use ferrite_store::content::DomainKey;
use ferrite_store::journal::Name;
use ferrite_store::layout::Layout;
use ferrite_store::live::{Live, Operation};
use ferrite_store::medium::Medium;
use ferrite_store::name::StoreName;
use ferrite_store::{BLOCK_BYTES, opening};

use super::{DOMAIN, MEMORY, StoreMade, failed, until_stopped};
use crate::files::Over;
use crate::io_context::IoContext;
use crate::{ImageTools, Progress};

/// The next step where a new store does not fit.
const NEW_STORE: &str = "make room on its file system, or choose a smaller store: one of 64M takes 18 MiB at once, one \
                         of 100G 340 MiB";

impl ImageTools<'_> {
    /// Makes a store without volumes, and with one domain, durably: in a file of so many bytes, or on a device, or a
    /// part of it.
    ///
    /// # Errors
    /// The name or device is taken and `force` is not set; or the store cannot be made.
    pub fn create_store(
        &self,
        name: &StoreName,
        bytes: Option<u64>,
        force: bool,
    ) -> Result<StoreMade, DiskError> {
        let (path, what) = (&name.path, format!("cannot make store {}", name.path.display()));
        let usage =
            |why: String, help: &str| DiskError::new(ErrorKind::Usage, what.clone(), why, help);
        if bytes.is_none() && !self.is_device(path) {
            return Err(usage("a file needs a size".into(), "say --size SIZE, for example 100G"));
        }
        let bad_size =
            |e: ferrite_store::layout::BadSize| usage(e.to_string(), "choose another size");
        // Checked before anything is made, or lost.
        bytes.map(Layout::of).transpose().map_err(bad_size)?;
        let mut file = self.new_file(path, Over::forced(force))?;
        let raw = file.open()?;
        let cannot = |e: io::Error| match e.kind() {
            // There is no store yet that could be made smaller.
            io::ErrorKind::StorageFull => {
                let why = e.to_string();
                let error = DiskError::new(ErrorKind::Io, what.clone(), why, NEW_STORE);
                file.named(error.with_source(e))
            }
            _ => file.named(failed(what.clone(), path, e)),
        };
        let room = raw.bytes_now().map_err(cannot)?;
        let layout = Layout::of(bytes.unwrap_or(room)).map_err(bad_size)?;
        let bytes = layout.blocks * BLOCK_BYTES as u64;
        if !raw.is_file() && bytes > room {
            return Err(usage(format!("the device has {room} bytes"), "leave --size out"));
        }
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port_of(raw.files()).map_err(cannot)?;
        let id = clock::secret().map_err(cannot)?;
        let made = async {
            if raw.is_file() {
                port.io.set_len(port.files[0], bytes).await?;
            }
            opening::create(&Medium::default(), &port, &layout, id).await?;
            // Volumes that are made without a given domain use this one.
            let live = Live::open(&port, bytes, MEMORY).await?;
            let key = DomainKey(clock::secret()?);
            let name = Name::new(DOMAIN).ok_or(io::ErrorKind::InvalidInput)?;
            live.operate(&port, Operation::Domain(name, key)).await?;
            live.close(&port).await
        };
        let goes_on = || (self.progress)(Progress { done_bytes: 0, total_bytes: 0 });
        context.run(until_stopped(&goes_on, made)).map_err(cannot)?;
        let notes = raw.space_below().and_then(|below| overcommitted(bytes, below));
        file.finish()?;
        let notes = notes.into_iter().collect();
        Ok(StoreMade { path: path.display().to_string(), store_bytes: bytes, notes })
    }
}

/// The note that a store of so many bytes is larger than what its file has and can still get.
pub(super) fn overcommitted(bytes: u64, below: SpaceBelow) -> Option<String> {
    let SpaceBelow { free_bytes, taken_bytes } = below;
    (taken_bytes.saturating_add(free_bytes) < bytes).then(|| {
        format!(
            "its file system has {} free: it is full before the store is, and guests' writes wait or fail then \
             (ferrite store stats shows both; --overcommit leaves this note out)",
            Human(free_bytes)
        )
    })
}
