//! `coalesce`: the data of an image into its parent.

use super::change::{found, with_tools};
use super::{Given, Stop, Verb};

pub(in super::super) const COALESCE: Verb =
    Verb { name: "coalesce", letters: "n:o:a:x:sp", usage: "-n FILE", run: coalesce };

/// Neither image gets another name, and the upper one is not changed at all.
fn coalesce(given: &Given, out: &mut Vec<u8>) -> Result<(), Stop> {
    let path = found(given.image()?)?;
    let sectors = with_tools(|tools| tools.coalesce_vhd(&path))?;
    // Without the end of the line, as vhd-util does it.
    out.extend_from_slice(format!("Coalesced {sectors} sectors").as_bytes());
    Ok(())
}
