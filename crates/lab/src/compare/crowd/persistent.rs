//! Persistent grants four ways, for a growing number of guests.

use std::collections::BTreeMap;

use anyhow::Result;
use ferrite_xenhost::steps::step;

use super::{Crowd, Rate, said};
use crate::experiments::findings::Findings;
use crate::experiments::persistent::{GUESTS, WAYS, findings};

const LOAD: &str = "--rw=randread --bs=4k --iodepth=32";

/// Boots the host, and measures with up to `most` guests.
pub(in crate::compare) fn run(most: u32) -> Result<Findings> {
    let counts: Vec<u32> = GUESTS.into_iter().filter(|guests| *guests <= most).collect();
    let mut crowd = Crowd::boot(&counts)?;
    let mut found: BTreeMap<(&str, u32), Vec<Rate>> = BTreeMap::new();
    for way in WAYS {
        step(way.name, || {
            crowd.attach(way.mover, way.front)?;
            crowd.begin(LOAD)?;
            for guests in counts.iter().rev().copied() {
                let rates = said(&format!("{guests} guests"), crowd.rates(guests)?);
                found.insert((way.name, guests), rates);
            }
            crowd.stop()?;
            crowd.detach()
        })?;
    }
    Ok(findings(&counts, |way, guests| found[&(way, guests)].iter().map(|r| r.iops).collect()))
}
