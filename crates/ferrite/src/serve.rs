//! `ferrite serve`.

use ferrite_disk::{Disk, OpenOptions};

use crate::cli::ServeArgs;
use crate::exit::Failure;

/// Serves one disk. The image comes first: what is wrong with it is said on any machine, with
/// Xen or without.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let options = OpenOptions { read_only: args.read_only, wait_for_lock: None };
    let disk = Disk::open(&args.image, &options)?;
    tracing::info!(device = %args.xen, "opened {disk}");
    Err(Failure::new(
        format!("cannot serve {}", args.xen),
        "this is not a Xen domain that may serve guests",
        "ferrite doctor shows what is missing",
    ))
}
