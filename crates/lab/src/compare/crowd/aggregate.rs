//! Reads of many guests by their size, with copied data and with mapped pages.

use std::collections::BTreeMap;

use anyhow::Result;
use ferrite_xenhost::steps::step;

use super::{Crowd, Rate, said};
use crate::experiments::aggregate::{GUESTS, MAX_REQUEST, MIB_S, MOVERS, Place, SIZES, findings};
use crate::experiments::findings::Findings;

/// Boots the host, and measures with up to `most` guests.
pub(in crate::compare) fn run(most: u32) -> Result<Findings> {
    let counts: Vec<u32> = GUESTS.into_iter().filter(|guests| *guests <= most).collect();
    let mut crowd = Crowd::boot(&counts)?;
    let mut found: BTreeMap<(&str, u32, u32), Vec<Rate>> = BTreeMap::new();
    for mover in MOVERS {
        step(mover, || {
            // A front that keeps its pages granted copies data for that, whichever mover the back has.
            crowd.attach(mover, false)?;
            for (bytes, size) in SIZES {
                crowd.begin(&load(bytes))?;
                for guests in counts.iter().rev().copied() {
                    let rates = crowd.rates(guests)?;
                    let what = format!("{size}, {guests} guests");
                    found.insert((mover, guests, bytes), said(&what, rates));
                }
                crowd.stop()?;
            }
            crowd.detach()
        })?;
    }
    let places: Vec<Place> = SIZES
        .iter()
        .flat_map(|size| counts.iter().map(|guests| Place::reads(*guests, *size)))
        .collect();
    let rates = |place: Place, mover: &str| -> Vec<f64> {
        found[&(mover, place.guests, place.size.0)].iter().map(|r| r.bytes_s / MIB_S).collect()
    };
    Ok(findings(&places, &counts, &SIZES, &rates))
}

/// At most 1 MiB of each disk in flight, and 32 requests; or one larger request.
fn load(bytes: u32) -> String {
    format!("--rw=read --bs={bytes} --iodepth={}", (MAX_REQUEST / bytes).clamp(1, 32))
}
