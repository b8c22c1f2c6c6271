//! Why serving ended, or cannot begin.

use std::io;

use ferrite_xen::store::StoreError;

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// xenstore's.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The attachment in xenstore is not ours to serve.
    #[error("{0}")]
    Attachment(String),
    /// The guest is connected, and its connection cannot be taken over.
    #[error("cannot take over the running guest: {0}")]
    TakeOver(String),
    /// The guest has let go of the disk, and storage failed when its image was to be closed.
    #[error("cannot close the image: {0}")]
    Close(#[source] io::Error),
    /// The run directory cannot be used now: there is no space, or another process works in it.
    /// That delays a connection, and ends nothing.
    #[error("cannot {what}: {source}")]
    RunDir {
        /// What was tried.
        what: String,
        /// The reason.
        source: io::Error,
    },
    /// A worker cannot open the image. It tries again when its line is followed anew.
    #[error("{what}: {why}; {help}")]
    Open {
        /// What was tried.
        what: String,
        /// The reason.
        why: String,
        /// The next step for the administrator.
        help: String,
    },
    /// The worker's process is gone, or is not to be believed any more. Its guest waits for the next
    /// one: follow its line.
    #[error("the worker is lost: {0}")]
    WorkerLost(String),
    /// We were asked to stop while the worker was at an order; it goes on.
    #[error("asked to stop")]
    Left,
    /// This host's fault: no memory, no descriptors, a queue that failed.
    #[error("cannot {what}: {source}")]
    Host {
        /// What was tried.
        what: String,
        /// The reason.
        source: io::Error,
    },
}

impl ServeError {
    pub(super) fn host(what: impl Into<String>, source: io::Error) -> Self {
        ServeError::Host { what: what.into(), source }
    }
}
