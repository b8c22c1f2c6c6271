//! The counters of all disks as OpenMetrics, on a Unix socket.
//!
//! * `families`: the metrics.
//! * `networks`: those of network interfaces.
//! * `http`: the requests of clients.
//! * `server`: the limits of clients, and the socket.

use std::path::Path;

use crate::folder::{Folder, Sample};
use crate::interfaces::{self, Switch};

mod families;
mod http;
mod networks;
mod server;

pub use server::{Server, serve_metrics};

/// State of the daemon that the counters do not have.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// The daemon's version.
    pub version: String,
    /// When it was started, in seconds since 1970.
    pub started_unix_s: u64,
    /// Whether it follows xenstore.
    pub has_xen: bool,
    /// All possible phases of a disk.
    pub phases: &'static [&'static str],
    /// The attached disks.
    pub disks: Vec<Attached>,
    /// The jobs that have not ended.
    pub jobs: Vec<Job>,
    /// The numbers of jobs that have ended, by kind and result.
    pub ended_jobs: Vec<(&'static str, &'static str, u64)>,
}

/// A job that has not ended. A disk has one at a time.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// The guest's domain number.
    pub domid: u16,
    /// The device number.
    pub devid: u32,
    /// Its kind.
    pub kind: &'static str,
    /// Bytes that are done.
    pub done_bytes: u64,
    /// All bytes that are to be done.
    pub all_bytes: u64,
    /// Whether it rests until it is resumed.
    pub paused: bool,
    /// Whether something keeps it from its end: a target that fails, or a copy that does not converge.
    pub troubled: bool,
}

/// An attached disk.
#[derive(Clone, Debug, Default)]
pub struct Attached {
    /// The guest's domain number.
    pub domid: u16,
    /// The device number.
    pub devid: u32,
    /// One of [`Host::phases`].
    pub phase: &'static str,
    /// The number of starts.
    pub starts: u64,
    /// The keeper's process.
    pub keeper: Option<u32>,
    /// Its image.
    pub image: Option<String>,
    /// The image's format.
    pub format: Option<&'static str>,
}

/// The content of one answer.
#[derive(Debug)]
struct Everything {
    host: Host,
    disks: Vec<Sample>,
    switches: Vec<Switch>,
    /// Files that are not counters.
    skipped: usize,
}

/// Writes the answer as text.
///
/// # Errors
/// Those of `to`.
fn write(everything: Everything, to: &mut dyn std::fmt::Write) -> std::fmt::Result {
    let mut registry = prometheus_client::registry::Registry::default();
    registry.register_collector(Box::new(everything));
    prometheus_client::encoding::text::encode(&mut &mut *to, &registry)
}

impl Everything {
    /// Reads the folder.
    fn look(folder: &Path, host: Host) -> Everything {
        // A new `Folder` reports all problems.
        let (disks, skipped) = match Folder::new(folder).look() {
            Ok(seen) => (seen.disks, seen.problems.len()),
            Err(_) => (Vec::new(), 1),
        };
        // The folder of switches is beside that of disks.
        let (switches, more) = match interfaces::read(&folder.with_file_name("net")) {
            Ok((switches, problems)) => (switches, problems.len()),
            Err(_) => (Vec::new(), 1),
        };
        Everything { host, disks, switches, skipped: skipped + more }
    }
}

/// The text of an answer, for tests.
pub fn text_of(host: Host, disks: Vec<Sample>) -> String {
    let mut text = String::new();
    let switches = Vec::new();
    match write(Everything { host, disks, switches, skipped: 0 }, &mut text) {
        Ok(()) => text,
        Err(e) => unreachable!("a String takes everything: {e}"),
    }
}
