//! The layers below a layer, as it sees them.

use std::io;

use ferrite_disk_base::{Extent, Port};
use ferrite_io::arena::Span;

/// The layers below one, where copy-on-write gets the rest of a cluster from. Formats are compiled for the one
/// type that it is, so that asking costs a call at most.
#[allow(async_fn_in_trait, reason = "the futures stay on the thread that makes them")]
pub trait Backing: Copy {
    /// Whether there is nothing: what the layer above does not have is zeros.
    fn is_empty(&self) -> bool;

    /// The answer of the layers below for the beginning of a range; `file` of data is an index into
    /// the port's.
    fn map(&self, offset: u64, len: u64) -> Extent;

    /// Reads what is below, zeros where it says nothing or ends.
    async fn read(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()>;
}
