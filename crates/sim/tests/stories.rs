//! The first stories of all kinds, of the formats that are served.

use ferrite_sim::format::Format;
use ferrite_sim::images::Images;
use ferrite_sim::raw::Raw;
use ferrite_sim::story::{Plan, Scenario, tell};

/// Tells the stories of the first so many seeds.
fn tell_all(format: &impl Format, seeds: u64) {
    for scenario in Scenario::ALL {
        for seed in 0..seeds {
            if let Err(found) = tell(format, &Plan { seed, scenario, cut: None, keep: None }) {
                panic!("{found}");
            }
        }
    }
}

#[test]
fn raw_keeps_its_promises() {
    tell_all(&Raw, 20);
}

#[test]
fn vhd_keeps_its_promises() {
    tell_all(&Images(ferrite_disk::Format::Vhd), 12);
}
