//! The size of the memory for a store's tables: Parallax's experiment on a similar translation.

use anyhow::Result;

use super::findings::{Chart, Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::result::Target;
use crate::compare::rounds::{Plan, Rounds, Sample};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "store-cache",
    shows: "How often a request to a store's volume waits for a page of P2M, and what that costs, by the memory for tables.",
    source: "UBC thesis (2012), factor 4: 32,768 sequential requests of 4 KiB. Parallax with 10 slots for its table of blocks \
             missed 0.98 %; with 128, none but the first of each page.",
    differs: "V2P and P2M share the memory. The least that a store takes is 88 pages, as it has to have room for the \
              largest change. 193 pages are 128 of P2M with the 65 of V2P beside them. Whoever reads in order needs each \
              page once in a pass, so a memory that is too small misses each page in each pass, and no page twice.",
    how: How::Here(run),
};

/// 32,768 blocks.
const VOLUME_MIB: usize = 128;
/// Blocks of a page of P2M.
const PAGE_BLOCKS: usize = 256;
const BLOCKS_A_MIB: usize = 256;
/// Slots of 4,176 bytes with their index entry: the least number, and one with room for 128 pages of P2M with V2P.
const MEMORY: [(u32, usize); 2] = [(88, 88 * 4176), (193, 193 * 4176)];

fn run(lab: &Lab) -> Result<Findings> {
    let raw = lab.image(Medium::Disk, VOLUME_MIB)?;
    let volume = lab.stored(&raw)?;
    let mut plan = Plan::new("store-cache");
    for (pages, bytes) in MEMORY {
        let options = format!("--mode read --block 4K --depth 1 --metadata-cache {bytes}");
        plan = plan.add(key(pages), lab.bench(volume.path(), options));
    }
    let blocks = raw.path().metadata()?.len() as usize / (1 << 20) * BLOCKS_A_MIB;
    Ok(findings(&lab.measure(plan)?, blocks))
}

fn key(pages: u32) -> String {
    format!("{pages} pages")
}

fn findings(rounds: &Rounds, blocks: usize) -> Findings {
    let each = |pages: u32, of: fn(Sample) -> f64| rounds.each(|r| of(r.of(&key(pages))));
    let missed = |pages| each(pages, |s| 100.0 * s.p2m_misses / (s.p2m_misses + s.p2m_hits));
    let mut rows = Vec::new();
    let mut misses = Chart::new("Requests that wait for a page of P2M", "pages", "%");
    let mut rates = Chart::new("Rate", "pages", "IOPS");
    let (mut missed_rows, mut rate_rows) = (Vec::new(), Vec::new());
    for (pages, _) in MEMORY {
        let row =
            Row::new(format!("sequential, {pages} pages: misses of P2M"), "%", &missed(pages));
        missed_rows.push(match pages {
            88 => row.published(0.98).target(Target::AtMost(0.98)),
            _ => row,
        });
        let rate = each(pages, |s| s.iops);
        rate_rows.push(Row::new(format!("sequential, {pages} pages: rate"), "IOPS", &rate));
    }
    // Numbers begin with 1, so the last block may be on one more page.
    let compulsory = (blocks / PAGE_BLOCKS + 1) as f64;
    let read = each(193, |s| s.p2m_misses);
    let read = Row::new("sequential, 193 pages: pages of P2M that were read", "pages", &read);
    let at = || MEMORY.iter().map(|(pages, _)| f64::from(*pages));
    misses = misses.line("sequential", at().zip(&missed_rows));
    rates = rates.line("sequential", at().zip(&rate_rows));
    rows.extend(missed_rows);
    rows.extend(rate_rows);
    rows.push(read.target(Target::AtMost(compulsory)));
    Findings { rows, charts: vec![misses, rates], missing: vec![] }
}
