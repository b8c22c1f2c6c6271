//! The limits of a disk's log lines.

pub use ferrite_host::log_limit::{LogLimit, SharedLogLimit, field};

pub(crate) use ferrite_host::limited;

/// The limits of one disk's log lines, one for each cause, so that no cause drowns another. They
/// belong to the disk and not to a connection or a queue: a guest can make any number of those.
#[derive(Debug, Default)]
pub struct LogLimits {
    /// Invalid requests.
    pub requests: SharedLogLimit,
    /// Connections that begin, end, break or are refused.
    pub connections: SharedLogLimit,
    /// Storage errors.
    pub storage: SharedLogLimit,
    /// Errors of xenstore.
    pub store: SharedLogLimit,
    /// A guest that causes too many requests to xenstore.
    pub pace: SharedLogLimit,
}
