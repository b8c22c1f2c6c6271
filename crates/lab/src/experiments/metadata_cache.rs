//! The size of the cache of an image's tables.

use anyhow::Result;

use super::findings::{Chart, Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::result::Target;
use crate::compare::rounds::{Plan, Rounds};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "metadata-cache",
    shows: "How often a request misses the cache of an image's tables, and what that costs, by the cache's slots.",
    source: "UBC thesis (2012), factor 4: Parallax with 10 slots for its table of blocks missed 0.98 %; with 128, none that \
             matters.",
    differs: "The thesis copied files, which keeps to one place: sequential reads are nearest to that, and miss once for each \
              2 MiB. Random reads go all over the disk, which no cache that is smaller than the table can serve.",
    how: How::Here(run),
};

/// A slot has a slice of 4 KiB, with the places of 512 clusters. With clusters of 4 KiB that is 2 MiB of the disk, so
/// 128 slots have all of it.
const IMAGE_MIB: usize = 256;
const CLUSTER_BYTES: u32 = 4096;
const SLOT_KIB: u32 = 4;
/// The cache has whole sets of eight: 8 is the nearest to the thesis's ten.
const SLOTS: [u32; 5] = [8, 16, 32, 64, 128];
/// With several requests in flight, all concurrent requests to a new slice would count as its misses.
const MODES: [(&str, &str, u32); 2] = [("sequential", "read", 1), ("random", "randread", 8)];

fn run(lab: &Lab) -> Result<Findings> {
    let raw = lab.image(Medium::Disk, IMAGE_MIB)?;
    let image = lab.converted(&raw, "disk.qcow2", CLUSTER_BYTES)?;
    let slots = lab.some(&SLOTS);
    let mut plan = Plan::new("metadata-cache");
    for (name, mode, depth) in MODES {
        for slots in &slots {
            let kib = slots * SLOT_KIB;
            let options =
                format!("--mode {mode} --block 4K --depth {depth} --metadata-cache {kib}K");
            plan = plan.add(key(name, *slots), lab.bench(image.path(), options));
        }
    }
    Ok(findings(&lab.measure(plan)?, &slots))
}

fn key(mode: &str, slots: u32) -> String {
    format!("{mode}, {slots} slots")
}

fn findings(rounds: &Rounds, slots: &[u32]) -> Findings {
    let mut rows = Vec::new();
    let mut misses = Chart::new("Requests that miss", "slots", "%");
    let mut rates = Chart::new("Rate", "slots", "IOPS");
    for (mode, ..) in MODES {
        let missed = |slots: u32| {
            let each = rounds.each(|r| 100.0 * r.of(&key(mode, slots)).misses);
            let row = Row::new(format!("{mode}, {slots} slots: misses"), "%", &each);
            match (mode, slots) {
                ("sequential", 8) => row.published(0.98).target(Target::AtMost(0.98)),
                ("random", 128) => row.published(0.0).target(Target::AtMost(0.1)),
                _ => row,
            }
        };
        let rate = |slots: u32| {
            let each = rounds.each(|r| r.of(&key(mode, slots)).iops);
            Row::new(format!("{mode}, {slots} slots: rate"), "IOPS", &each)
        };
        let (missed, rate): (Vec<Row>, Vec<Row>) =
            slots.iter().map(|slots| (missed(*slots), rate(*slots))).unzip();
        let at = || slots.iter().map(|slots| f64::from(*slots));
        misses = misses.line(mode, at().zip(&missed));
        rates = rates.line(mode, at().zip(&rate));
        rows.extend(missed);
        rows.extend(rate);
    }
    Findings { rows, charts: vec![misses, rates], missing: vec![] }
}
