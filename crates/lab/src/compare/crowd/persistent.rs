//! Persistent grants four ways, for a growing number of guests.

use std::collections::BTreeMap;

use anyhow::Result;
use ferrite_xenhost::steps::step;

use super::{Crowd, Rate, said};
use crate::experiments::findings::Findings;
use crate::experiments::persistent::{GUESTS, WAYS, findings};

const LOAD: &str = "--rw=randread --bs=4k --iodepth=32";

/// Boots the host, and measures.
pub(in crate::compare) fn run() -> Result<Findings> {
    let mut crowd = Crowd::boot(GUESTS[GUESTS.len() - 1])?;
    let mut found: BTreeMap<(&str, u32), Vec<Rate>> = BTreeMap::new();
    for way in WAYS {
        step(way.name, || {
            crowd.attach(way.mover, way.front)?;
            for guests in GUESTS {
                let rates = said(&format!("{guests} guests"), crowd.rates(guests, LOAD)?);
                found.insert((way.name, guests), rates);
            }
            crowd.stop()?;
            crowd.detach()
        })?;
    }
    Ok(findings(&GUESTS, |way, guests| found[&(way, guests)].iter().map(|r| r.iops).collect()))
}
