//! The keeper of a disk: a small process that starts the disk's worker, and the next worker when
//! that one ends.
//!
//! * [`DiskSpec`]: how a disk is kept, and how its keeper is started.
//! * [`Keeper`]: a connection to a running keeper.
//! * [`run`]: the keeper's process.
//! * [`remove_leftovers`]: removes the files of a killed keeper.
//! * [`WorkerSandbox`], [`drop_privileges`]: the files that an unprivileged worker may open, and
//!   how it gives up its rights.
//! * [`Group`], [`WorkerChannel`]: several disks that share one keeper and one worker.
//! * [`become_relay`]: turns this process into an unprivileged relay.
//! * [`ExporterSpec`], [`run_exporter`]: the process that listens for NBD clients of other hosts.
//! * [`Tunnel`]: the process that speaks TLS with NBD clients of other hosts.

#![forbid(unsafe_code)]

use std::sync::{Mutex, PoisonError};

mod backoff;
mod channel;
mod client;
mod exporter;
mod group;
mod keeper;
mod member;
mod public;
mod relay;
mod sandbox;
mod socket;
mod spec;
mod tunnel;
mod wire;
mod worker;

pub use channel::{AssignedDisk, WorkerChannel, WorkerEvent};
pub use client::{Keeper, Line};
pub use exporter::{Exporter, ExporterSpec, Started, TlsFolder, run_exporter};
pub use keeper::run;
pub use public::nbd_socket;
pub use relay::become_relay;
pub use sandbox::{DataServer, FenceTerms, MirrorFiles, WorkerSandbox, drop_privileges};
pub use socket::{name_of, remove_leftovers, socket_name};
pub use spec::{DiskSpec, Group, Preopen};
pub use tunnel::{Tunnel, TunnelSpec, admitted};
pub use worker::{ALIVE, ALIVE_FD, CLIENT_CHANNEL_FD, LINE_FD, SECOND_FD};

/// The run directory's name of the disk or group that this process keeps.
static DISK: Mutex<String> = Mutex::new(String::new());

/// Names the disk of this process in its log. Where several keepers run in one process, as in
/// tests, it is the last one's.
pub(crate) fn name_disk(run_dir: &std::path::Path) {
    let name = run_dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    *DISK.lock().unwrap_or_else(PoisonError::into_inner) = name;
}

/// Writes a line to standard error. A failed write is ignored: the reader may have ended.
pub(crate) fn log(text: &str) {
    use std::io::Write as _;
    let disk = DISK.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = writeln!(std::io::stderr(), "ferrite keeper {disk}: {text}");
}
