//! Options that several programs share.

use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use ferrite_disk::{Fencing, OpenOptions, size};
use ferrite_host::fence::{self, Terms};
use ferrite_host::shares::Shares;
use ferrite_io::engines::EngineChoice;
use ferrite_io::pool::HostMemory;
use ferrite_serve::memory::DataMemory;
use ferrite_serve::path::full::OnFull;
use ferrite_serve::polling::{Budget, PollWindow, host_units};
use ferrite_serve::tuning::Tuning;
use ferrite_xen::mover::Mover;

/// Parses the name of an engine. Help and completions have all names.
pub fn engines() -> impl TypedValueParser<Value = EngineChoice> {
    one_of(["auto", "uring", "aio"])
}

/// Parses what is done on full storage.
pub(crate) fn on_full_policies() -> impl TypedValueParser<Value = OnFull> {
    one_of(["error", "wait"])
}

/// Parses the name of a mover.
pub fn movers() -> impl TypedValueParser<Value = Mover> {
    one_of(["copy", "map", "persistent"])
}

fn one_of<T, const N: usize>(words: [&'static str; N]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = String> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|word| word.parse::<T>())
}

/// Options of the queues; for a server and for a bench.
#[derive(Debug, Args)]
pub struct TuningArgs {
    /// Poll for so many microseconds before sleeping; auto: as long as it pays, and not without an idle processor; 0:
    /// never.
    #[arg(long, value_name = "US|auto", default_value_t = PollWindow::Auto)]
    pub poll_us: PollWindow,

    /// Limit of processor time for polling, in percent of one processor.
    #[arg(long, value_name = "PERCENT", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(0..=6400))]
    pub poll_cpu: u32,

    /// Limit of processors that poll for all disks of this host together; by default half of them, and at least one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=4096))]
    pub poll_host: Option<u32>,

    /// Send each request to the storage by itself, even where adjacent ones could share an operation.
    #[arg(long)]
    pub no_merge: bool,
}

impl TuningArgs {
    /// The options of the queues.
    pub fn tuning(&self) -> Tuning {
        Tuning { poll: self.poll_us, merge: !self.no_merge }
    }

    /// The disk's budget for polling. All disks of the host share it in the file.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn polling(&self, shared: &Path) -> io::Result<Budget> {
        let units = self.poll_host.unwrap_or_else(host_units);
        Ok(Budget::shared(self.poll_cpu, Shares::open(shared, units)?))
    }
}

/// Whether the disk's LUN is reserved for this host.
#[derive(Debug, Args)]
pub(crate) struct FencingArgs {
    /// Reserve the LUN that the image is, so that no other host writes to it: reservation; weak-reservation takes a LUN whose
    /// target forgets that when it starts again, too.
    #[arg(long, value_name = "HOW", default_value_t = Fencing::None,
          value_parser = one_of::<Fencing, 3>(["none", "reservation", "weak-reservation"]))]
    pub(crate) fence: Fencing,

    /// The folder of this host's keys at LUNs.
    #[arg(long, value_name = "DIR", default_value = fence::RECORDS)]
    pub(crate) fence_records: PathBuf,
}

impl FencingArgs {
    /// The terms. `None`: it is not reserved.
    pub(crate) fn terms(&self) -> Option<Terms> {
        self.fence.terms(&self.fence_records)
    }
}

/// Memory of a store whose volumes are served. The first process to open the store sets it.
#[derive(Debug, Args)]
pub struct StoreMemoryArgs {
    /// Memory for the tables of a store.
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = bytes)]
    pub metadata_memory: usize,

    /// Memory of a store's index of contents, at most 8 bytes for each; forgotten contents are stored once more.
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = bytes)]
    pub index_memory: usize,
}

impl StoreMemoryArgs {
    /// Adds the memory to the options.
    pub fn give(&self, options: OpenOptions) -> OpenOptions {
        let (metadata_bytes, index_bytes) = (self.metadata_memory, self.index_memory);
        OpenOptions { metadata_bytes, index_bytes, ..options }
    }
}

fn bytes(text: &str) -> Result<usize, String> {
    let bytes = size::parse(text).map_err(|e| e.to_string())?;
    usize::try_from(bytes).map_err(|e| e.to_string())
}

/// Memory for data; for a server and for a bench.
#[derive(Debug, Args)]
pub struct MemoryArgs {
    /// Memory for data in flight; at least 1 MiB per queue. auto: 8 MiB, and more while storage is slow.
    #[arg(long, value_name = "SIZE|auto", default_value_t = DataMemory::Auto)]
    pub memory: DataMemory,

    /// Limit of the growth of all disks of this host with --memory auto; by default an eighth of the host's memory.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub memory_host: Option<u64>,
}

impl MemoryArgs {
    /// The budget by which the memory may grow. All disks of the host share it in the file.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn host(&self, shared: &Path) -> io::Result<Option<Arc<HostMemory>>> {
        self.memory.host(shared, self.memory_host)
    }
}
