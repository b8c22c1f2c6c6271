//! The counters of all disks as OpenMetrics, for whoever asks on a Unix socket.
//!
//! * `families`: which metrics there are.
//! * `http`: what a client may ask for.
//! * `server`: how much of it, and for how long.

use std::path::Path;

use crate::folder::{Folder, Sample};

mod families;
mod http;
mod server;

pub use server::{Server, serve_metrics};

/// What the daemon knows and the counters do not.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// The daemon's version.
    pub version: String,
    /// When it was started, in seconds since 1970.
    pub started_unix_s: u64,
    /// It follows xenstore.
    pub has_xen: bool,
    /// All phases that a disk may be in.
    pub phases: &'static [&'static str],
    /// The disks that are attached.
    pub disks: Vec<Attached>,
}

/// A disk that is attached.
#[derive(Clone, Debug, Default)]
pub struct Attached {
    /// Its guest,
    pub domid: u16,
    /// and its number there.
    pub devid: u32,
    /// One of [`Host::phases`].
    pub phase: &'static str,
    /// Starts that it has taken.
    pub starts: u64,
    /// The process that stands for it.
    pub keeper: Option<u32>,
    /// Its image.
    pub image: Option<String>,
    /// The image's format.
    pub format: Option<&'static str>,
}

/// All that one answer has.
#[derive(Debug)]
struct Everything {
    host: Host,
    disks: Vec<Sample>,
    /// Files that are no disk's counters.
    skipped: usize,
}

/// Everything, as text.
///
/// # Errors
/// Those of `to`.
fn write(everything: Everything, to: &mut dyn std::fmt::Write) -> std::fmt::Result {
    let mut registry = prometheus_client::registry::Registry::default();
    registry.register_collector(Box::new(everything));
    prometheus_client::encoding::text::encode(&mut &mut *to, &registry)
}

impl Everything {
    /// A look at the folder.
    fn look(folder: &Path, host: Host) -> Everything {
        // A folder that is looked at for the first time names all its problems.
        match Folder::new(folder).look() {
            Ok(seen) => Everything { host, disks: seen.disks, skipped: seen.problems.len() },
            Err(_) => Everything { host, disks: Vec::new(), skipped: 1 },
        }
    }
}

/// What an answer would be, for tests.
pub fn text_of(host: Host, disks: Vec<Sample>) -> String {
    let mut text = String::new();
    match write(Everything { host, disks, skipped: 0 }, &mut text) {
        Ok(()) => text,
        Err(e) => unreachable!("a String takes everything: {e}"),
    }
}
