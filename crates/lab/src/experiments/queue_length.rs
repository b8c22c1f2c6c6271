//! The number of requests that a ring holds, and the rate.

use anyhow::Result;

use super::findings::{Chart, Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::result::Target;
use crate::compare::rounds::{Plan, Rounds};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "queue-length",
    shows: "What longer rings give: as many requests in flight as 1, 2 and 16 pages of ring hold.",
    source: "UBC thesis (2012), factor 2: a ring of one page holds 32 requests of 44 KiB, 352 segments; its disk could \
             use about 704.",
    differs: "The thesis names no rate; a disk that serves more than 32 requests at once gains from longer rings, and on \
              tmpfs, where a request waits for nobody, there is nothing to gain.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 1024;
/// Pages of a ring, their order, and the requests that it holds.
const RINGS: [(u32, u32, u32); 3] = [(1, 0, 32), (2, 1, 64), (16, 4, 512)];
/// KiB of a request, and memory for all requests in flight.
const SIZES: [(u32, &str); 2] = [(4, "8M"), (44, "32M")];
const MEDIA: [(&str, Medium); 2] = [("disk", Medium::Disk), ("tmpfs", Medium::Memory)];

fn run(lab: &Lab) -> Result<Findings> {
    let mut findings = Findings::default();
    for (name, medium) in lab.some(&MEDIA) {
        let image = lab.image(medium, IMAGE_MIB)?;
        let mut plan = Plan::new(format!("queue-length, {name}"));
        for (size, memory) in SIZES {
            for (pages, order, depth) in RINGS {
                let options = format!(
                    "--mode randread --block {size}K --depth {depth} --ring-order {order} --memory {memory}"
                );
                plan = plan.add(key(size, pages), lab.bench(image.path(), options));
            }
        }
        add(&mut findings, name, &lab.measure(plan)?);
    }
    Ok(findings)
}

fn key(size: u32, pages: u32) -> String {
    format!("{size} KiB, {pages} pages")
}

fn add(findings: &mut Findings, medium: &str, rounds: &Rounds) {
    let mut chart =
        Chart::new(&format!("Random reads, {medium}"), "pages of ring", "times one page");
    for (size, _) in SIZES {
        let iops = |pages| rounds.each(|r| r.of(&key(size, pages)).iops);
        let gain = |pages: u32| {
            let over = |r: &crate::compare::rounds::Round<'_>| {
                r.of(&key(size, pages)).iops / r.of(&key(size, 1)).iops
            };
            let name = format!("{medium}, {size} KiB: {pages} pages over one");
            Row::new(name, "times", &rounds.each(over))
        };
        let name = format!("{medium}, {size} KiB: ring of one page");
        findings.rows.push(Row::new(name, "IOPS", &iops(1)));
        let gains: Vec<(f64, Row)> =
            RINGS.iter().map(|(pages, ..)| (f64::from(*pages), gain(*pages))).collect();
        chart = chart.line(format!("{size} KiB"), gains.iter().map(|(x, row)| (*x, row)));
        let longer = gains.into_iter().skip(1).map(|(_, row)| row.target(Target::AtLeast(0.95)));
        findings.rows.extend(longer);
    }
    findings.charts.push(chart);
}
