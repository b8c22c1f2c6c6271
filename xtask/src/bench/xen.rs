//! A real Xen host in the emulator's counting mode: what fio reports in the guest depends on the
//! number of instructions on the whole path, and hardly on how loaded this machine is.

use super::result::Measurement;
use anyhow::Result;

/// Options of the part `xen`.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of the part xen")]
pub(crate) struct XenArguments {}

/// Boots the host and measures.
pub(super) fn run(_arguments: &XenArguments) -> Result<Vec<Measurement>> {
    Ok(Vec::new())
}
