//! `repair`: the footer, after a crash.

use ferrite_image_tools::VhdChange;

use super::change::{change, found};
use super::{Given, Stop, Verb};

pub(in super::super) const REPAIR: Verb =
    Verb { name: "repair", letters: "n:b", usage: "-n FILE", run: repair };

fn repair(given: &Given, _: &mut Vec<u8>) -> Result<(), Stop> {
    let path = found(given.image()?)?;
    change(&path, &VhdChange::Mend)
}
