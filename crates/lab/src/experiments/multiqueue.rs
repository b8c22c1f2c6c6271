//! One disk with several queues.

use anyhow::Result;

use super::findings::{Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::result::Target;
use crate::compare::rounds::{Plan, Rounds};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "multiqueue",
    shows: "What several queues give one disk with four jobs, and what a single job pays for queues that it does not use.",
    source: "SPDK as a blkif backend (XCP-ng, 2023), one Optane drive: nearly +100 % IOPS over tapdisk at 4 KiB with 4 jobs, \
             +25 % at 1 MiB; a single job gains less and sometimes loses.",
    differs: "The post compares SPDK with another program, tapdisk; here one queue is compared with several of the same \
              program, and guests share the processors of this machine with the backend.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 1024;
/// Queues, and the requests in flight of each: 32 in total.
const QUEUES: [(u32, u32); 3] = [(1, 32), (2, 16), (4, 8)];
/// The same with requests of 1 MiB: 8 in total.
const LARGE: [(u32, u32); 3] = [(1, 8), (2, 4), (4, 2)];
const MODES: [(&str, &str); 2] = [("random", "randread"), ("sequential", "read")];
const SINGLE: &str = "a single job";

fn run(lab: &Lab) -> Result<Findings> {
    let image = lab.image(Medium::Memory, IMAGE_MIB)?;
    let mut plan = Plan::new("multiqueue");
    for (name, mode) in MODES {
        for (size, queues) in [("4K", QUEUES), ("1M", LARGE)] {
            for (count, depth) in queues {
                let options = format!(
                    "--mode {mode} --block {size} --queues {count} --depth {depth} --guest-poll 0"
                );
                plan = plan.add(key(name, size, count), lab.bench(image.path(), options));
            }
        }
    }
    for (count, _) in QUEUES {
        let options = format!("--queues {count} --load-queues 1 --guest-poll 0");
        plan = plan.add(key(SINGLE, "4K", count), lab.bench(image.path(), options));
    }
    Ok(Findings { rows: rows(&lab.measure(plan)?), ..Findings::default() })
}

fn key(what: &str, size: &str, queues: u32) -> String {
    format!("{what}, {size}, {queues} queues")
}

fn rows(rounds: &Rounds) -> Vec<Row> {
    let mut rows = Vec::new();
    for (what, size, published) in [
        ("random", "4K", Some(2.0)),
        ("random", "1M", Some(1.25)),
        ("sequential", "4K", None),
        ("sequential", "1M", None),
        (SINGLE, "4K", None),
    ] {
        let one = rounds.each(|r| r.of(&key(what, size, 1)).iops);
        rows.push(Row::new(format!("{what}, {size}: one queue"), "IOPS", &one));
        for (queues, _) in &QUEUES[1..] {
            let over = rounds
                .each(|r| r.of(&key(what, size, *queues)).iops / r.of(&key(what, size, 1)).iops);
            let row = Row::new(format!("{what}, {size}: {queues} queues over one"), "times", &over);
            let row = if what == SINGLE { row.target(Target::AtLeast(0.95)) } else { row };
            rows.push(match (published, queues) {
                (Some(figure), 4) => row.published(figure),
                _ => row,
            });
        }
    }
    rows
}
