//! Persistent grants: which side keeps pages granted and mapped, and from how many guests on that pays.

use anyhow::Result;

use super::findings::{Chart, Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::rounds::Plan;
use crate::statistics::ratios;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "persistent",
    shows: "Persistent grants four ways, front and back, for 1 to 15 guests, and from how many guests on they pay.",
    source: "Persistent grants (Xen Project, 2012), 4 KiB reads of a RAM disk a guest: 340,668 IOPS without and 1,245,575 \
             with them at 15 guests; they pay from 6 to 7 guests on.",
    differs: "On the loopback to map is mmap, a page fault and munmap for every request, and there is no lock of a grant table \
              that guests share: mapping is dear from the first guest on, so there is no number of guests from which \
              persistent grants begin to pay.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 512;
pub(crate) const GUESTS: [u32; 5] = [1, 2, 4, 8, 15];
/// A front and a back. Pages stay granted only if both support it: with a mapping back a front that keeps them is as
/// any other, and a back that keeps mappings copies from a front that does not.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    /// The back's mover.
    pub(crate) mover: &'static str,
    /// Whether the front keeps its pages granted.
    pub(crate) front: bool,
}

pub(crate) const WAYS: [Way; 4] = [
    Way { name: "neither", mover: "map", front: false },
    Way { name: "front only", mover: "map", front: true },
    Way { name: "back only", mover: "persistent", front: false },
    Way { name: "both", mover: "persistent", front: true },
];
/// The source's figures for 15 guests.
const PUBLISHED: [(&str, f64); 2] = [("neither", 340_668.0), ("both", 1_245_575.0)];

fn run(lab: &Lab) -> Result<Findings> {
    let image = lab.image(Medium::Memory, IMAGE_MIB)?;
    let guests = lab.some(&GUESTS);
    let mut plan = Plan::new("persistent");
    for guests in &guests {
        for Way { name, mover, front } in WAYS {
            let options = format!("--guests {guests} --mover {mover} --front-persistent {front}");
            plan = plan.add(key(name, *guests), lab.bench(image.path(), options));
        }
    }
    let rounds = lab.measure(plan)?;
    Ok(findings(&guests, |way, guests| rounds.each(|r| r.of(&key(way, guests)).iops)))
}

fn key(way: &str, guests: u32) -> String {
    format!("{way}, {guests} guests")
}

/// The findings from the rates of each way and number of guests, which are a value per round.
pub(crate) fn findings(guests: &[u32], rates: impl Fn(&str, u32) -> Vec<f64>) -> Findings {
    let mut rows = Vec::new();
    let mut chart = Chart::new("4 KiB random reads, all guests together", "guests", "IOPS");
    for Way { name: way, .. } in WAYS {
        let row = |guests: u32| {
            let name = format!("{way}, {guests} guests: rate");
            let row = Row::new(name, "IOPS", &rates(way, guests));
            match PUBLISHED.iter().find(|(of, _)| *of == way && guests == 15) {
                Some((_, figure)) => row.published(*figure),
                None => row,
            }
        };
        let line: Vec<(f64, Row)> = guests.iter().map(|n| (f64::from(*n), row(*n))).collect();
        chart = chart.line(way, line.iter().map(|(x, row)| (*x, row)));
        rows.extend(line.into_iter().map(|(_, row)| row));
    }
    let gain = |n: u32| ratios(&rates("both", n), &rates("neither", n));
    let gains: Vec<(u32, Row)> = guests
        .iter()
        .map(|n| (*n, Row::new(format!("{n} guests: both over neither"), "times", &gain(*n))))
        .collect();
    let ahead = Chart::new("Both over neither", "guests", "times")
        .line("gain", gains.iter().map(|(n, row)| (f64::from(*n), row)))
        .level("even", gains.iter().map(|(n, _)| f64::from(*n)), 1.0);
    let means: Vec<(f64, f64)> = gains.iter().map(|(n, row)| (f64::from(*n), row.mean)).collect();
    let even: Vec<f64> = break_even(&means).into_iter().collect();
    rows.extend(gains.into_iter().map(|(n, row)| if n == 15 { row.published(3.656) } else { row }));
    let missing = match even.is_empty() {
        true => vec!["a break-even: one way is ahead for every number of guests".to_owned()],
        false => vec![],
    };
    if !even.is_empty() {
        rows.push(Row::new("break-even", "guests", &even).published(6.5));
    }
    Findings { rows, charts: vec![chart, ahead], missing }
}

/// The number of guests at which the gain is 1, interpolated on a straight line between the measured numbers.
fn break_even(gains: &[(f64, f64)]) -> Option<f64> {
    gains.windows(2).find_map(|pair| {
        let [(x, from), (y, to)] = pair else { return None };
        let crosses = *from < 1.0 && *to >= 1.0;
        crosses.then(|| x + (y - x) * (1.0 - from) / (to - from))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_break_even_is_where_the_gain_goes_through_one() {
        assert_eq!(break_even(&[(1.0, 0.5), (4.0, 0.75), (8.0, 1.25), (15.0, 3.0)]), Some(6.0));
        assert_eq!(break_even(&[(1.0, 1.5), (15.0, 3.0)]), None);
        assert_eq!(break_even(&[(1.0, 0.5), (15.0, 0.9)]), None);
    }
}
