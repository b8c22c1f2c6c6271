//! The cost of a request by its size, and the cost of splitting large ones.

use anyhow::Result;

use super::findings::{Chart, Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::result::Target;
use crate::compare::rounds::{Plan, Rounds};
use crate::statistics::line;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "request-size",
    shows: "What a request costs by its size, and what cutting up large ones costs.",
    source: "UBC thesis (2012), factor 1: time = X + Y x size with X = 335 us and Y = 4 us a KiB; blkif's 11 segments cut \
             everything into pieces of 44 KiB.",
    differs: "The thesis measured a spinning disk of 2010, whose seeks are its X; here a request ends in a file of this \
              machine's disk, so both X and Y are this disk's.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 1024;
/// Sizes of a single request in flight, in KiB.
const SIZES: [u32; 9] = [4, 8, 16, 44, 88, 176, 352, 704, 1024];
/// A little more than 1 MiB in total, as so many requests of so many KiB.
const CUTS: [(u32, u32); 4] = [(44, 24), (88, 12), (704, 2), (1024, 1)];
const KIB_S: f64 = 1024.0;

fn run(lab: &Lab) -> Result<Findings> {
    let image = lab.image(Medium::Disk, IMAGE_MIB)?;
    let (sizes, cuts) = (lab.some(&SIZES), lab.some(&CUTS));
    let mut plan = Plan::new("request-size");
    for size in &sizes {
        plan = plan.add(alone(*size), lab.bench(image.path(), one_at_a_time(*size)));
    }
    for (size, count) in &cuts {
        let options = format!("--mode read --block {size}K --depth {count} --batch --no-merge");
        plan = plan.add(cut(*size), lab.bench(image.path(), options));
    }
    let rounds = lab.measure(plan)?;
    let mut findings = by_size(&rounds, &sizes);
    let pieces = pieces(&rounds, &cuts);
    findings.rows.extend(pieces.rows);
    findings.charts.extend(pieces.charts);
    Ok(findings)
}

fn alone(size: u32) -> String {
    format!("{size} KiB alone")
}

fn cut(size: u32) -> String {
    format!("1 MiB in {size} KiB")
}

/// The guest never sleeps, so no request includes the time to wake it.
fn one_at_a_time(size: u32) -> String {
    format!("--mode randread --block {size}K --depth 1 --guest-poll 1000")
}

/// The model of the thesis, fitted to each round.
fn by_size(rounds: &Rounds, sizes: &[u32]) -> Findings {
    let times: Vec<Row> = sizes
        .iter()
        .map(|size| {
            let each = rounds.each(|r| r.of(&alone(*size)).lat_us);
            Row::new(format!("{size} KiB, one at a time: time"), "us", &each)
        })
        .collect();
    let fit = |part: fn((f64, f64)) -> f64| {
        rounds.each(|r| {
            let point = |size: &u32| (f64::from(*size), r.of(&alone(*size)).lat_us);
            part(line(&sizes.iter().map(point).collect::<Vec<_>>()))
        })
    };
    let points = sizes.iter().map(|size| f64::from(*size)).zip(&times);
    let chart = Chart::new("Time of a request", "KiB", "us").line("random reads", points);
    let x = Row::new("time = X + Y x size: X", "us", &fit(|fit| fit.0)).published(335.0);
    let y = Row::new("time = X + Y x size: Y", "us/KiB", &fit(|fit| fit.1)).published(4.0);
    let rows = [x.target(Target::AtMost(335.0)), y.target(Target::AtMost(4.0))];
    Findings { rows: rows.into_iter().chain(times).collect(), charts: vec![chart], missing: vec![] }
}

/// The same data in flight in smaller and larger requests.
fn pieces(rounds: &Rounds, cuts: &[(u32, u32)]) -> Findings {
    let rate = |size: u32| {
        let each = rounds.each(|r| r.of(&cut(size)).iops * f64::from(size) / KIB_S);
        Row::new(format!("a MiB at once in requests of {size} KiB: rate"), "MiB/s", &each)
    };
    let rows: Vec<Row> = cuts.iter().map(|(size, _)| rate(*size)).collect();
    let cpu = |size: u32| {
        let each = rounds.each(|r| r.of(&cut(size)).cpu_us * KIB_S / f64::from(size));
        Row::new(
            format!("a MiB at once in requests of {size} KiB: backend's processor"),
            "us/MiB",
            &each,
        )
    };
    let costs = cuts.iter().map(|(size, _)| cpu(*size));
    let points = cuts.iter().map(|(size, _)| f64::from(*size)).zip(&rows);
    let chart =
        Chart::new("A MiB at once", "KiB a request", "MiB/s").line("sequential reads", points);
    Findings {
        rows: rows.iter().cloned().chain(costs).collect(),
        charts: vec![chart],
        missing: vec![],
    }
}
