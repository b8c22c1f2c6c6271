//! Adjacent blocks of the disk that come one by one and out of order.

use anyhow::Result;

use super::findings::{Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::result::Target;
use crate::compare::rounds::{Plan, Rounds};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "fragmentation",
    shows: "What sorting and merging give a guest whose neighbouring blocks come one by one and out of order.",
    source: "UBC thesis (2012), factor 3: stretches of 112 KiB, the even blocks and then the odd ones, took 1.419 s, and \
             0.359 s with sort and merge.",
    differs: "The thesis counts seeks saved on a spinning disk; here an operation saved is a request to this machine's \
              disk, or on tmpfs a system call's work, so the gain follows what one operation costs.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 512;
const MEDIA: [(&str, Medium); 2] = [("disk", Medium::Disk), ("tmpfs", Medium::Memory)];
/// The guest's patterns: the blocks of a stretch in order, interleaved, and scattered over the disk.
const PATTERNS: [(&str, &str); 3] =
    [("in order", "read"), ("interleaved", "interleaved"), ("scattered", "randread")];
const PUBLISHED: f64 = 1.419 / 0.359;

fn run(lab: &Lab) -> Result<Findings> {
    let mut findings = Findings::default();
    for (name, medium) in lab.some(&MEDIA) {
        let image = lab.image(medium, IMAGE_MIB)?;
        let mut plan = Plan::new(format!("fragmentation, {name}"));
        for (pattern, mode) in PATTERNS {
            for (how, option) in [("merged", ""), ("alone", "--no-merge")] {
                // A stretch has 28 blocks of 4 KiB.
                let options = format!("--mode {mode} --block 4K --depth 28 --batch {option}");
                plan = plan.add(format!("{pattern}, {how}"), lab.bench(image.path(), options));
            }
        }
        findings.rows.extend(rows(name, &lab.measure(plan)?));
    }
    Ok(findings)
}

fn rows(medium: &str, rounds: &Rounds) -> Vec<Row> {
    let pattern = |pattern: &str| {
        let of = |how: &str| format!("{pattern}, {how}");
        let iops = |how: &str| rounds.each(|r| r.of(&of(how)).iops);
        let gain = rounds.each(|r| r.of(&of("merged")).iops / r.of(&of("alone")).iops);
        let name = |what: &str| format!("{medium}, {pattern}: {what}");
        let gain = Row::new(name("gain of sort and merge"), "times", &gain);
        let operations = rounds.each(|r| r.of(&of("merged")).operations);
        vec![
            match (medium, pattern) {
                ("disk", "interleaved") => gain.published(PUBLISHED).target(Target::AtLeast(3.0)),
                (_, "interleaved") => gain.published(PUBLISHED),
                _ => gain.target(Target::AtLeast(0.95)),
            },
            Row::new(name("rate merged"), "IOPS", &iops("merged")),
            Row::new(name("rate one by one"), "IOPS", &iops("alone")),
            Row::new(name("operations a request, merged"), "", &operations),
        ]
    };
    PATTERNS.iter().flat_map(|(name, _)| pattern(name)).collect()
}
