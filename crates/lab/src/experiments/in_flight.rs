//! More data in flight: depth, indirect segments, queues.

use anyhow::Result;

use super::findings::{Chart, Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::result::Target;
use crate::compare::rounds::{Plan, Rounds};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "in-flight",
    shows: "The rate by requests in flight, with one queue and four, and what indirect segments give large transfers.",
    source: "Keeping up with the hardware (XenServer, 2015): allow more data in flight by indirect segments, rings of several \
             pages and several queues; its pictures, and so its figures, are lost.",
    differs: "There is no published figure to compare with; how much depth a disk can use is this machine's disk's own.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 1024;
const DEPTHS: [u32; 6] = [1, 4, 16, 64, 128, 256];
const QUEUES: [u32; 2] = [1, 4];
/// 2112 KiB in flight: direct requests of 11 segments and indirect ones of 176.
const TRANSFERS: [(&str, &str); 2] = [
    ("direct, 44 KiB", "--indirect 0 --block 44K --depth 48"),
    ("indirect, 704 KiB", "--indirect 256 --block 704K --depth 3"),
];
const KIB: [f64; 2] = [44.0, 704.0];

fn run(lab: &Lab) -> Result<Findings> {
    let image = lab.image(Medium::Disk, IMAGE_MIB)?;
    let depths = lab.some(&DEPTHS);
    let mut plan = Plan::new("in-flight");
    for queues in QUEUES {
        for depth in depths.iter().filter(|depth| **depth >= queues) {
            let each = depth / queues;
            let options = format!("--mode randread --queues {queues} --depth {each}");
            plan = plan.add(key(queues, *depth), lab.bench(image.path(), options));
        }
    }
    for (name, options) in TRANSFERS {
        plan = plan.add(name, lab.bench(image.path(), format!("--mode read --no-merge {options}")));
    }
    let rounds = lab.measure(plan)?;
    let mut findings = by_depth(&rounds, &depths);
    findings.rows.extend(transfers(&rounds));
    Ok(findings)
}

fn key(queues: u32, depth: u32) -> String {
    format!("{queues} queues, {depth} in flight")
}

fn by_depth(rounds: &Rounds, depths: &[u32]) -> Findings {
    let mut rows = Vec::new();
    let mut chart = Chart::new("4 KiB random reads", "in flight", "IOPS");
    for queues in QUEUES {
        let row = |depth: u32| {
            let each = rounds.each(|r| r.of(&key(queues, depth)).iops);
            let queues = if queues == 1 { "one queue".into() } else { format!("{queues} queues") };
            Row::new(format!("{queues}, {depth} in flight: rate"), "IOPS", &each)
        };
        let depths = depths.iter().filter(|depth| **depth >= queues);
        let line: Vec<(f64, Row)> = depths.map(|d| (f64::from(*d), row(*d))).collect();
        let name = if queues == 1 { "one queue" } else { "four queues" };
        chart = chart.line(name, line.iter().map(|(x, row)| (*x, row)));
        rows.extend(line.into_iter().map(|(_, row)| row));
    }
    Findings { rows, charts: vec![chart], missing: vec![] }
}

fn transfers(rounds: &Rounds) -> Vec<Row> {
    let rate = |i: usize| {
        let name = TRANSFERS[i].0;
        let each = rounds.each(|r| r.of(name).iops * KIB[i] / 1024.0);
        Row::new(format!("2 MiB in flight, {name}: rate"), "MiB/s", &each)
    };
    let over =
        rounds.each(|r| r.of(TRANSFERS[1].0).iops * KIB[1] / (r.of(TRANSFERS[0].0).iops * KIB[0]));
    let over = Row::new("2 MiB in flight: indirect over direct", "times", &over);
    vec![rate(0), rate(1), over.target(Target::AtLeast(1.0))]
}
