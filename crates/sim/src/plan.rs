//! The plan of a story, and its findings.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use ferrite_simio::Lie;

use crate::load::{MAX_REQUEST_SECTORS, Mix};
use crate::model::After;
use crate::paths::Paths;

/// The scenarios of stories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Everything.
    Mixed,
    /// Writes to all parts of an empty disk.
    FirstWrites,
    /// Single sectors in few places.
    Bitmaps,
    /// As many flushes as writes.
    FlushStorm,
    /// Discards, and writes to discarded ranges.
    Discards,
    /// Writes of zeros.
    Zeroes,
    /// Opened, used a little, closed, repeatedly.
    Close,
    /// Writes to an image that another program has compressed, and compresses again.
    Compressed,
    /// An image that other programs have changed: a parent with data, or snapshots, compressed clusters and free ones
    /// between used ones.
    Past,
    /// A full device, with an image in which all data are compressed: freed clusters are reused at once.
    Full,
    /// Made, snapshotted, coalesced, resized, with a little use in between.
    Operations,
    /// Each round has a fault, and the guest continues and flushes again.
    Failures,
    /// Full blocks are discarded, zeroed and written again.
    Emptied,
    /// The disk is enlarged; or its device is too small, and enlarged during use.
    Growth,
    /// Chains that other programs extend, on images of killed processes, and that are shortened in the middle.
    Chains,
    /// Snapshots and merges of a disk in use.
    Live,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Scenario; 16] = [
        Scenario::Mixed,
        Scenario::FirstWrites,
        Scenario::Bitmaps,
        Scenario::FlushStorm,
        Scenario::Discards,
        Scenario::Zeroes,
        Scenario::Close,
        Scenario::Compressed,
        Scenario::Past,
        Scenario::Full,
        Scenario::Operations,
        Scenario::Failures,
        Scenario::Emptied,
        Scenario::Growth,
        Scenario::Chains,
        Scenario::Live,
    ];

    /// Its name for `--scenario`.
    pub fn name(self) -> &'static str {
        match self {
            Scenario::Mixed => "mixed",
            Scenario::FirstWrites => "first-writes",
            Scenario::Bitmaps => "bitmaps",
            Scenario::FlushStorm => "flush-storm",
            Scenario::Discards => "discards",
            Scenario::Zeroes => "zeroes",
            Scenario::Close => "close",
            Scenario::Compressed => "compressed",
            Scenario::Past => "past",
            Scenario::Full => "full",
            Scenario::Operations => "operations",
            Scenario::Failures => "failures",
            Scenario::Emptied => "emptied",
            Scenario::Growth => "growth",
            Scenario::Chains => "chains",
            Scenario::Live => "live",
        }
    }

    pub(crate) fn mix(self) -> Mix {
        let mix = Mix {
            reads: 20,
            writes: 50,
            flushes: 6,
            discards: 8,
            zeroes: 6,
            max_sectors: MAX_REQUEST_SECTORS,
            near: 60,
            whole: false,
        };
        match self {
            Scenario::Mixed => mix,
            Scenario::FirstWrites => {
                Mix { reads: 5, writes: 90, flushes: 4, discards: 0, zeroes: 0, near: 20, ..mix }
            }
            Scenario::Bitmaps => Mix { writes: 80, flushes: 8, max_sectors: 3, near: 98, ..mix },
            Scenario::FlushStorm => Mix { reads: 5, writes: 50, flushes: 45, ..mix },
            Scenario::Discards => Mix { reads: 10, writes: 40, flushes: 8, discards: 40, ..mix },
            Scenario::Zeroes => Mix { reads: 10, writes: 40, flushes: 8, zeroes: 40, ..mix },
            // Small writes leave clusters that can be compressed.
            Scenario::Compressed => Mix { flushes: 12, max_sectors: 12, near: 30, ..mix },
            Scenario::Past => {
                Mix { reads: 10, flushes: 10, discards: 12, max_sectors: 24, near: 90, ..mix }
            }
            // A replaced cluster becomes free with the second flush.
            Scenario::Full => {
                let mix = Mix { reads: 2, writes: 70, max_sectors: 24, near: 30, ..mix };
                Mix { flushes: 25, discards: 3, zeroes: 3, ..mix }
            }
            Scenario::Close | Scenario::Operations => Mix { reads: 10, ..mix },
            Scenario::Chains | Scenario::Live => {
                Mix { reads: 5, writes: 70, flushes: 4, near: 20, ..mix }
            }
            Scenario::Failures => Mix { writes: 60, flushes: 15, discards: 4, ..mix },
            Scenario::Emptied => Mix {
                reads: 5,
                writes: 15,
                flushes: 15,
                discards: 35,
                zeroes: 30,
                max_sectors: 64,
                near: 70,
                whole: false,
            },
            Scenario::Growth => Mix { reads: 5, writes: 80, discards: 2, near: 40, ..mix },
        }
    }
}

/// An end of a round that the seed does not choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The round, from 0. Earlier ones follow the seed, and it is the last.
    pub round: u64,
    /// The last step of the world, as in reports.
    pub step: u64,
    /// The kind of end.
    pub after: After,
}

/// The story to run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed, from which everything else follows.
    pub seed: u64,
    /// Its scenario.
    pub scenario: Scenario,
    /// The end of the story; `None`: the seed's.
    pub cut: Option<Cut>,
    /// The folder for the files of a failed story.
    pub keep: Option<PathBuf>,
    /// Prints every request that touches this sector.
    pub trace: Option<u64>,
    /// Syncs that the medium ignores, once there is an image.
    pub lie: Option<Lie>,
}

impl Plan {
    /// A whole story.
    pub const fn new(seed: u64, scenario: Scenario) -> Plan {
        Plan { seed, scenario, cut: None, keep: None, trace: None, lie: None }
    }
}

/// A story without a finding.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// The world's steps at which the round of the plan's cut could have been cut: from its first to its end. `None`:
    /// there was no such round.
    pub cut_round: Option<RangeInclusive<u64>>,
    /// The number of steps.
    pub steps: u64,
    /// Power cuts.
    pub cuts: u64,
    /// Deaths of the process.
    pub deaths: u64,
    /// Disks closed.
    pub closes: u64,
    /// How often each rare path was taken: in the round of the plan's cut, if it has one.
    pub paths: Paths,
}

/// The finding.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The format.
    pub format: String,
    /// The story.
    pub plan: Plan,
    /// The round, from 0.
    pub round: u64,
    /// The world's step at which the round ended.
    pub step: u64,
    /// The finding.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { seed, scenario, .. } = &self.plan;
        let scenario = scenario.name();
        let Violation { format, round, step, what, .. } = self;
        writeln!(f, "VIOLATION in round {round}, at step {step}: {what}")?;
        write!(f, "replay: ferrite-sim --seed {seed} --scenario {scenario} {format}")?;
        if let Some(Cut { round, step, after }) = self.plan.cut {
            let after = if after == After::Death { "death" } else { "power" };
            write!(f, " --cut {round}:{step}:{after}")?;
        }
        if let Some(Lie::Sync { of, which }) = self.plan.lie {
            write!(f, " --lie {which}:{of}")?;
        }
        Ok(())
    }
}
