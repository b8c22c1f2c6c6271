//! The errors that end serving or keep it from beginning.

use std::io;

use ferrite_xen::store::StoreError;

/// The reason why serving has ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// xenstore has failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The attachment in xenstore is not one that this backend can serve.
    #[error("{0}")]
    Attachment(String),
    /// The guest is connected, and its connection cannot be taken over.
    #[error("cannot take over the running guest: {0}")]
    TakeOver(String),
    /// The guest has let go of the disk, and storage failed when its image was closed.
    #[error("cannot close the image: {0}")]
    Close(#[source] io::Error),
    /// The run directory cannot be used now: there is no space, or another process uses it. This
    /// delays a connection and ends nothing.
    #[error("cannot {what}: {source}")]
    RunDir {
        /// The failed step.
        what: String,
        /// The reason.
        source: io::Error,
    },
    /// A worker cannot open the image. It tries again when its line is followed anew.
    #[error("{what}: {why}; {help}")]
    Open {
        /// The failed step.
        what: String,
        /// The reason.
        why: String,
        /// The next step for the administrator.
        help: String,
        /// The kernel's number of the error, if it had one.
        errno: Option<i32>,
    },
    /// The worker's process is gone, or has broken the protocol. Its guest waits for the next
    /// worker: follow its line.
    #[error("the worker is lost: {0}")]
    WorkerLost(String),
    /// `stop` was woken while the worker carried out an order, which goes on.
    #[error("asked to stop")]
    Left,
    /// A failure of this host, such as no memory or descriptors, or a failed queue.
    #[error("cannot {what}: {source}")]
    Host {
        /// The failed step.
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
