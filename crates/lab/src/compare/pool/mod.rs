//! Disks on several servers: of a pool, and on Ceph. Rates beside a local disk and fio, pauses when a process is lost, memory.
//!
//! The servers of a pool are processes of this machine, each a host of its own behind a link (`net.rs`, `servers.rs`), with
//! their copies in memory. A disk has the parts that a guest's disk has: the loopback's rings, the backend, the disk's
//! process.

mod memory;
mod net;
mod pauses;
mod rbd;
mod servers;
mod speed;

// The cluster that tests start, too. Not all of it is used here.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../../testkit/src/ceph.rs"]
mod ceph;

/// The parts of the tests' crate that it uses.
mod programs {
    use std::io::Result;
    use std::process::Output;

    pub(super) fn installed(_: &str, said: Result<Output>) -> Option<Output> {
        said.ok()
    }
}

use anyhow::Result;

use super::Setup;
use super::result::Measurement;

const PART: &str = "pool";
/// The servers have the same processors: a guest that polls would take them from those.
const GUEST: &str = "--guest-poll 0";

/// Rows that can be measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Rows {
    /// Large requests over limited links.
    Large,
    /// Small requests, one at a time.
    Single,
    /// The guest's rate during the return of a member.
    Return,
    /// Pauses when a process or a host is lost.
    Pauses,
    /// Memory.
    Memory,
    /// Disks on Ceph.
    Rbd,
}

impl Rows {
    const ALL: &[Rows] =
        &[Rows::Large, Rows::Single, Rows::Return, Rows::Pauses, Rows::Memory, Rows::Rbd];
}

/// Measures these rows; all, if there are none.
pub(super) fn run(setup: &Setup, rows: &[Rows]) -> Result<Vec<Measurement>> {
    let rows = if rows.is_empty() { Rows::ALL } else { rows };
    let mut measured = Vec::new();
    for rows in rows {
        measured.extend(match rows {
            Rows::Large => speed::large(setup)?,
            Rows::Single => speed::single(setup)?,
            Rows::Return => speed::beside_return(setup)?,
            Rows::Pauses => pauses::run(setup)?,
            Rows::Memory => memory::run(setup)?,
            Rows::Rbd => rbd::run(setup)?,
        });
    }
    Ok(measured)
}

/// The largest of several figures: of a pause the median says little.
fn worst(name: String, unit: &'static str, values: &[f64]) -> Measurement {
    // A figure that is missing is the largest.
    let larger = |most: f64, value: f64| if most > value || most.is_nan() { most } else { value };
    let largest = values.iter().copied().reduce(larger).unwrap_or(f64::NAN);
    Measurement { value: largest, ..Measurement::of_runs(PART, name, unit, values) }
}

#[cfg(test)]
mod tests {
    use super::super::result::Target;
    use super::*;

    #[test]
    fn one_long_pause_is_what_counts() {
        let row = worst("row".to_owned(), "s", &[0.5, 3.0, 0.4]).target(Target::AtMost(1.0));
        assert_eq!((row.value, row.runs, row.met()), (3.0, 3, Some(false)));
        assert_eq!(row.values, [0.5, 3.0, 0.4]);
    }

    #[test]
    fn a_missing_figure_meets_no_target() {
        for values in [&[f64::NAN, 0.1][..], &[0.1, f64::NAN], &[]] {
            let row = worst("row".to_owned(), "s", values).target(Target::AtMost(1.0));
            assert_eq!(row.met(), Some(false), "{values:?}");
        }
    }
}
