//! The layers below a layer, as it sees them.

use std::io;

use ferrite_disk_base::{Extent, Port};
use ferrite_io::arena::Span;

/// The layers below a layer, from which copy-on-write reads the rest of a cluster. Formats are compiled for one
/// concrete type, so a call is not dynamic.
#[allow(async_fn_in_trait, reason = "the futures stay on the thread that makes them")]
pub trait Backing: Copy {
    /// Whether there are no layers below: data that the layer above lacks are zeros.
    fn is_empty(&self) -> bool;

    /// The answer of the layers below for the beginning of a range; `file` of data is an index into the port's files.
    fn map(&self, offset: u64, len: u64) -> Extent;

    /// Reads the data below. Missing data and data past the end are zeros.
    async fn read(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()>;
}
