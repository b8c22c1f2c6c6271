//! The configuration: `/etc/ferrite/ferrite.toml`. Without the file, everything has its default.
//!
//! Each key is looked up in a table (`keys.rs`), which says what may stand there. A key that is not
//! there, or a value that may not stand there, refuses the whole file: half of a configuration is
//! none that anybody has written.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ferrite_disk::{INDEX_BYTES, METADATA_BYTES};
use ferrite_io::engines::EngineChoice;
use ferrite_serve::memory::DataMemory;
use ferrite_serve::path::full::OnFull;
use ferrite_serve::polling::PollWindow;
use ferrite_xen::mover::{DISK_MAPPINGS, HOST_MAPPINGS, Mover};

use crate::control::protocol::{Setting, Source};

mod doubts;
mod keys;
mod nearest;
#[cfg(test)]
mod tests;

pub use nearest::nearest;

/// Where it is.
pub const PATH: &str = "/etc/ferrite/ferrite.toml";

/// No configuration of a host is longer.
const MAX_BYTES: u64 = 1 << 20;

/// What the daemon goes by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Images are served from these folders and below, and from nowhere else.
    pub image_folders: Vec<PathBuf>,
    /// Parents of images may be there and below, besides their image's own folder.
    pub parent_folders: Vec<PathBuf>,
    /// Where metrics are asked for; none: nowhere.
    pub metrics_socket: Option<PathBuf>,
    /// What all disks of the host share.
    pub host: HostOptions,
    /// How a disk is served.
    pub disks: DiskOptions,
    /// The same for single images.
    pub images: BTreeMap<PathBuf, DiskOptions>,
}

/// What all disks of the host share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Pages of guests that all disks together may have mapped.
    pub map_budget: u32,
    /// Processors that all disks together may poll with; none: half of them.
    pub poll_processors: Option<u32>,
    /// MiB by which the memory for data of all disks together may grow; none: an eighth of the host's.
    pub memory_mib: Option<u32>,
}

/// How a disk is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Queues that are offered.
    pub queues: u32,
    /// Rings of up to 2^N pages are offered.
    pub ring_order: u32,
    /// Requests of up to so many segments are offered.
    pub indirect: u16,
    /// What does the disk I/O.
    pub engine: EngineChoice,
    /// Completions are asked for, not waited for, where the device can do that.
    pub poll_storage: bool,
    /// How data gets from and to the guest.
    pub mover: Mover,
    /// Data passes through pages that this domain grants to itself.
    pub own_grants: bool,
    /// Pages of the guest that this disk may have mapped.
    pub map_budget: u32,
    /// What requests get for which there is no space.
    pub on_full: OnFull,
    /// Memory for data in flight.
    pub memory: DataMemory,
    /// Memory for the tables of the disk's store, in MiB.
    pub metadata_memory_mib: u32,
    /// Memory in which that store remembers contents, in MiB.
    pub index_memory_mib: u32,
    /// How long a queue polls before it sleeps.
    pub poll: PollWindow,
    /// Percent of a processor that polling may take.
    pub poll_cpu: u32,
    /// Percent of a processor that the disk may take in all.
    pub cpu: Option<u32>,
    /// Whether neighbouring requests share an operation.
    pub merge: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            image_folders: keys::IMAGE_FOLDERS.map(PathBuf::from).to_vec(),
            parent_folders: Vec::new(),
            metrics_socket: None,
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
            memory: DataMemory::Auto,
            metadata_memory_mib: (METADATA_BYTES >> 20) as u32,
            index_memory_mib: (INDEX_BYTES >> 20) as u32,
            poll: PollWindow::Auto,
            poll_cpu: 100,
            cpu: None,
            merge: true,
        }
    }
}

/// Why a configuration is not taken.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// The key with its tables; none if the file itself is at fault.
    pub key: Option<String>,
    /// What is wrong with it.
    pub why: String,
    /// What may stand there.
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
    /// Reads the file. One that is not there says nothing, if nobody has asked for it by name.
    ///
    /// # Errors
    /// It cannot be read, or something in it is wrong: which key, and what may stand there.
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

    /// What a text says, which is the file `path`'s.
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

    /// How this image is served.
    pub fn of_image(&self, image: &Path) -> &DiskOptions {
        self.images.get(image).unwrap_or(&self.disks)
    }

    /// The settings in force of a disk with this image, and where each comes from.
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

    /// Whether an image may be served from there. Links have to be resolved before. A folder may be
    /// named by a link, and that may point elsewhere later: it is looked up each time.
    pub fn allows(&self, image: &Path) -> bool {
        let is_below = |folder: &Path| image.starts_with(folder);
        self.image_folders.iter().any(|folder| is_below(folder))
            || self
                .image_folders
                .iter()
                .any(|folder| folder.canonicalize().is_ok_and(|real| is_below(&real)))
    }
}

/// Line and column of a byte, both from 1.
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
