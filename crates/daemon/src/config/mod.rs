//! The configuration: `/etc/ferrite/ferrite.toml`. Without the file, every key has its default.
//!
//! The keys are in a table (`keys.rs`) with their valid values. An unknown key or an invalid value
//! refuses the whole file: a half-applied configuration is one that no administrator has written.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ferrite_disk::{Fencing, INDEX_BYTES, METADATA_BYTES};
use ferrite_io::engines::EngineChoice;
use ferrite_nbd::address::{Address, Helped};
use ferrite_nbd::uri::Uri;
use ferrite_serve::memory::DataMemory;
use ferrite_serve::path::full::OnFull;
use ferrite_serve::path::limit::Limits;
use ferrite_serve::polling::PollWindow;
use ferrite_xen::mover::{DISK_MAPPINGS, HOST_MAPPINGS, Mover};

use crate::Failure;
use crate::control::protocol::{Setting, Source};

mod clusters;
mod keys;
mod migration;
mod nearest;
mod pools;
mod servers;
#[cfg(test)]
mod tests;
mod warnings;

pub use clusters::{RbdOptions, RbdPool};
pub use migration::MigrationOptions;
pub use nearest::nearest;
pub use pools::{CONFIGURED_BY, PoolOptions};
pub use servers::{NbdOptions, NbdServer};

/// The path of the configuration.
pub const PATH: &str = "/etc/ferrite/ferrite.toml";

/// The longest configuration that is read.
const MAX_BYTES: u64 = 1 << 20;

/// The daemon's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The directories that images may be in, at any depth.
    pub image_folders: Vec<PathBuf>,
    /// Directories that parents of images may be in, besides their image's own directory.
    pub parent_folders: Vec<PathBuf>,
    /// The directory of what outlives the host's restart.
    pub state_folder: PathBuf,
    /// The path of the socket for metrics. `None`: there is none.
    pub metrics_socket: Option<PathBuf>,
    /// The servers of NBD whose exports may be disks.
    pub nbd: NbdOptions,
    /// Migrations to and from other hosts.
    pub migration: MigrationOptions,
    /// The images of Ceph clusters that may be disks.
    pub rbd: RbdOptions,
    /// The pools of servers whose disks may be used, by name.
    pub pools: BTreeMap<String, PoolOptions>,
    /// The options that all disks of the host share.
    pub host: HostOptions,
    /// The options of each disk.
    pub disks: DiskOptions,
    /// The options of single images, by path or by URI.
    pub images: BTreeMap<PathBuf, DiskOptions>,
}

/// The options that all disks of the host share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Most pages of guests that all disks together may have mapped.
    pub map_budget: u32,
    /// Processors that all disks together may poll with. `None`: half of the host's.
    pub poll_processors: Option<u32>,
    /// MiB by which the data memory of all disks together may grow. `None`: an eighth of the host's
    /// memory.
    pub memory_mib: Option<u32>,
}

/// The options of one disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Most queues that are offered to the guest.
    pub queues: u32,
    /// Rings of up to 2^N pages are offered.
    pub ring_order: u32,
    /// Most segments of a request that are offered.
    pub indirect: u16,
    /// The engine for disk I/O.
    pub engine: EngineChoice,
    /// Whether completions are polled for, if the device supports that.
    pub poll_storage: bool,
    /// How data gets from and to the guest.
    pub mover: Mover,
    /// Whether data passes through pages that this domain grants to itself.
    pub own_grants: bool,
    /// Most pages of the guest that this disk may have mapped.
    pub map_budget: u32,
    /// What happens to requests that find no space on storage.
    pub on_full: OnFull,
    /// Whether the image keeps the space that it has: no discards, and zeros have space.
    pub keep_allocated: bool,
    /// Whether the image's LUN is reserved for this host.
    pub fence: Fencing,
    /// Memory for data in flight.
    pub memory: DataMemory,
    /// Memory for the tables of the disk's store, in MiB.
    pub metadata_memory_mib: u32,
    /// Memory for the index of the disk's store, in MiB.
    pub index_memory_mib: u32,
    /// How long a queue polls before it sleeps.
    pub poll: PollWindow,
    /// Percent of a processor that polling may take.
    pub poll_cpu: u32,
    /// Percent of a processor that the disk may take in all. `None`: no limit.
    pub cpu: Option<u32>,
    /// Whether neighbouring requests share an operation.
    pub merge: bool,
    /// The limits of requests and bytes in a second.
    pub limits: Limits,
}

impl DiskOptions {
    /// All keys with their values, formatted as in the file.
    pub(crate) fn values(&self) -> impl Iterator<Item = (&'static str, String)> {
        keys::values(self).into_iter()
    }

    /// The names of all keys.
    pub fn keys() -> impl Iterator<Item = &'static str> {
        keys::values(&DiskOptions::default()).into_iter().map(|(key, _)| key)
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            image_folders: keys::IMAGE_FOLDERS.map(PathBuf::from).to_vec(),
            parent_folders: Vec::new(),
            state_folder: PathBuf::from(keys::STATE_FOLDER),
            metrics_socket: None,
            nbd: NbdOptions::default(),
            migration: MigrationOptions::default(),
            rbd: RbdOptions::default(),
            pools: BTreeMap::new(),
            host: HostOptions {
                map_budget: HOST_MAPPINGS,
                poll_processors: None,
                memory_mib: None,
            },
            disks: DiskOptions::default(),
            images: BTreeMap::new(),
        }
    }
}

impl Default for DiskOptions {
    fn default() -> DiskOptions {
        DiskOptions {
            queues: 4,
            ring_order: 4,
            indirect: 256,
            engine: EngineChoice::Auto,
            poll_storage: false,
            mover: Mover::Copy,
            own_grants: true,
            map_budget: DISK_MAPPINGS,
            on_full: OnFull::Error,
            keep_allocated: false,
            fence: Fencing::None,
            memory: DataMemory::Auto,
            metadata_memory_mib: (METADATA_BYTES >> 20) as u32,
            index_memory_mib: (INDEX_BYTES >> 20) as u32,
            poll: PollWindow::Auto,
            poll_cpu: 100,
            cpu: None,
            merge: true,
            limits: Limits::default(),
        }
    }
}

/// Why a configuration is refused.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The path of the file.
    pub file: PathBuf,
    /// The key with its tables. `None` if the file itself is at fault.
    pub key: Option<String>,
    /// The problem.
    pub why: String,
    /// The valid values, or the next step.
    pub allowed: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file.display())?;
        if let Some(key) = &self.key {
            write!(f, "{key}: ")?;
        }
        write!(f, "{}; {}", self.why, self.allowed)
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Reads the configuration. A missing file has all defaults, unless the user has named it
    /// (`asked_for`).
    ///
    /// # Errors
    /// The file cannot be read, or a key is invalid. The error names the key and its valid values.
    pub fn load(path: &Path, asked_for: bool) -> Result<Config, ConfigError> {
        match read(path) {
            Ok(text) => Config::parse(&text, path),
            Err(e) if e.kind() == io::ErrorKind::NotFound && !asked_for => Ok(Config::default()),
            Err(e) => Err(ConfigError {
                file: path.to_owned(),
                key: None,
                why: format!("it cannot be read: {e}"),
                allowed: "name a file of text in TOML".to_owned(),
            }),
        }
    }

    /// Parses a configuration. `path` is the file's path, for errors.
    ///
    /// # Errors
    /// As [`load`](Config::load).
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| ConfigError {
            file: path.to_owned(),
            key: None,
            why: format!(
                "it is not TOML: {}: {}",
                position(text, e.span()),
                e.message().replace('\n', " ")
            ),
            allowed: "docs/operations.md shows a whole file".to_owned(),
        })?;
        let mut config = Config::default();
        keys::take_all(&mut config, &table).map_err(|wrong| ConfigError {
            file: path.to_owned(),
            key: Some(wrong.key),
            why: wrong.why,
            allowed: wrong.allowed,
        })?;
        Ok(config)
    }

    /// Checks that an export, an image on Ceph or a disk of a pool may be a disk: its server or its pool is listed, or the server
    /// is a host that disks migrate to.
    ///
    /// # Errors
    /// Neither, or files that it names are elsewhere.
    pub(crate) fn check_export(&self, uri: &Uri) -> Result<(), Failure> {
        match &uri.server {
            Address::Helped { by: Helped::Rbd(image), .. } => self.rbd.check(image),
            Address::Helped { by: Helped::Pool(disk), .. } => pools::check(&self.pools, disk),
            Address::Tls { host, certificates, .. }
                if self.migration.knows(host)
                    && self.migration.certificates.as_ref() == Some(certificates) =>
            {
                Ok(())
            }
            _ => self.nbd.check(uri),
        }
    }

    /// The options of an image.
    pub fn of_image(&self, image: &Path) -> &DiskOptions {
        self.images.get(image).unwrap_or(&self.disks)
    }

    /// The values in force for an image, each with its source.
    pub fn settings(&self, image: &Path, in_force: &DiskOptions) -> Vec<Setting> {
        let (now, all) = (keys::values(self.of_image(image)), keys::values(&self.disks));
        let layers = now.into_iter().zip(all).zip(keys::values(&DiskOptions::default()));
        let settings = keys::values(in_force).into_iter().zip(layers);
        let setting = settings.map(|((key, value), ((now, all), default))| {
            let from = match (value == now.1, now == all, all == default) {
                (false, ..) => Source::Earlier,
                (true, false, _) => Source::Image,
                (true, true, false) => Source::Disks,
                (true, true, true) => Source::Default,
            };
            Setting { key: key.to_owned(), value, from }
        });
        setting.collect()
    }

    /// The folder of this host's keys at LUNs.
    pub fn fence_records(&self) -> PathBuf {
        self.state_folder.join("fences")
    }

    /// Whether the image is in one of the allowed directories. Links in its path have to be
    /// resolved before. An allowed directory may be a link itself, and its target may change. So it
    /// is resolved each time.
    pub fn allows(&self, image: &Path) -> bool {
        let is_below = |folder: &Path| image.starts_with(folder);
        self.image_folders.iter().any(|folder| is_below(folder))
            || self
                .image_folders
                .iter()
                .any(|folder| folder.canonicalize().is_ok_and(|real| is_below(&real)))
    }
}

/// Line and column of the beginning of a span, both from 1.
fn position(text: &str, span: Option<std::ops::Range<usize>>) -> String {
    let before = span.and_then(|span| text.get(..span.start)).unwrap_or("");
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    format!("line {}, column {column}", before.matches('\n').count() + 1)
}

fn read(path: &Path) -> io::Result<String> {
    use std::io::Read as _;
    let mut text = String::new();
    let read = std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    match read as u64 > MAX_BYTES {
        true => Err(io::Error::other(format!("it is longer than {MAX_BYTES} bytes"))),
        false => Ok(text),
    }
}
