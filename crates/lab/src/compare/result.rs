//! The measurements of a part of the comparison, and their file.

use super::rounds::median;
use anyhow::{Context, Result};
use ferrite_xenhost::steps;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One figure, with the same figure of a peer from the same run if there is one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Measurement {
    /// The part of the comparison.
    pub(crate) part: &'static str,
    /// The row's name: the subject of the measurement.
    pub(crate) name: String,
    /// The median of all runs, in `unit`.
    pub(crate) value: f64,
    /// The unit of `value` and `peer_value`: "IOPS", "MB/s", "us", ...
    pub(crate) unit: &'static str,
    /// The peer of the comparison.
    pub(crate) peer: Option<String>,
    /// The peer's median, in `unit`.
    pub(crate) peer_value: Option<f64>,
    /// `value` over `peer_value`.
    pub(crate) ratio: Option<f64>,
    /// The target of the ratio, or of the value without a peer.
    pub(crate) target: Option<Target>,
    /// The number of runs.
    pub(crate) runs: u32,
    /// The figure of each run, if there were several, and of the peer in its turn.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) values: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) peer_values: Vec<f64>,
}

/// A bound on a ratio or a value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    /// No less than this.
    AtLeast(f64),
    /// No more than this.
    AtMost(f64),
}

impl Target {
    /// Whether `value` meets the target.
    pub(crate) fn met(self, value: f64) -> bool {
        match self {
            Target::AtLeast(bound) => value >= bound,
            Target::AtMost(bound) => value <= bound,
        }
    }
}

impl Measurement {
    /// A figure without a peer and a target, of one run.
    pub(crate) fn new(
        part: &'static str,
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
    ) -> Self {
        Measurement {
            part,
            name: name.into(),
            value,
            unit,
            peer: None,
            peer_value: None,
            ratio: None,
            target: None,
            runs: 1,
            values: Vec::new(),
            peer_values: Vec::new(),
        }
    }

    /// The median of several runs.
    pub(crate) fn of_runs(
        part: &'static str,
        name: impl Into<String>,
        unit: &'static str,
        values: &[f64],
    ) -> Self {
        let row = Self::new(part, name, median(values), unit);
        Measurement { runs: values.len() as u32, values: values.to_vec(), ..row }
    }

    /// Adds a peer that was measured in turn. The ratio is the median of the runs' ratios, which differs from the ratio
    /// of the medians: a disturbance of one run disturbs the next one, too.
    pub(crate) fn against_runs(self, peer: impl Into<String>, peer_values: &[f64]) -> Self {
        let pairs = self.values.iter().zip(peer_values);
        let ratios: Vec<f64> = pairs.map(|(ours, theirs)| ours / theirs).collect();
        let row = self.against(peer, median(peer_values));
        Measurement { ratio: Some(median(&ratios)), peer_values: peer_values.to_vec(), ..row }
    }

    /// Adds a peer's figure.
    pub(crate) fn against(mut self, peer: impl Into<String>, peer_value: f64) -> Self {
        self.peer = Some(peer.into());
        self.peer_value = Some(peer_value);
        self.ratio = (peer_value > 0.0).then(|| self.value / peer_value);
        self
    }

    /// Sets the target of the ratio, or of the value without a peer.
    pub(crate) fn target(mut self, target: Target) -> Self {
        self.target = Some(target);
        self
    }

    /// Whether the target is met; `None` without one.
    pub(crate) fn met(&self) -> Option<bool> {
        let target = self.target?;
        let compared = if self.peer.is_some() { self.ratio? } else { self.value };
        Some(target.met(compared))
    }
}

/// The contents of the file.
#[derive(Serialize)]
struct File<'a> {
    part: &'a str,
    machine: &'a str,
    rows: Vec<Row<'a>>,
}

/// A measurement with its verdict.
#[derive(Serialize)]
struct Row<'a> {
    #[serde(flatten)]
    row: &'a Measurement,
    met: Option<bool>,
}

/// Writes a part's measurements to `target/bench/PART.json`.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write(part: &str, machine: &str, measurements: &[Measurement]) -> Result<PathBuf> {
    let dir = steps::target_dir().join("bench");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let file = dir.join(format!("{part}.json"));
    let rows: Vec<Row<'_>> = measurements.iter().map(|m| Row { row: m, met: m.met() }).collect();
    let text = serde_json::to_string_pretty(&File { part, machine, rows })?;
    std::fs::write(&file, text + "\n")
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_run_by_run() {
        let row = Measurement::of_runs("part", "row", "IOPS", &[90.0, 50.0, 99.0])
            .against_runs("peer", &[100.0, 40.0, 90.0])
            .target(Target::AtLeast(1.0));
        assert_eq!((row.value, row.peer_value, row.runs), (90.0, Some(90.0), 3));
        assert_eq!((row.ratio, row.met()), (Some(1.1), Some(true)));
    }

    #[test]
    fn what_was_not_measured_meets_no_target() {
        let row = Measurement::of_runs("part", "row", "us", &[f64::NAN]);
        assert_eq!(row.clone().target(Target::AtMost(8.0)).met(), Some(false));
        let row = row.against_runs("peer", &[1.0]).target(Target::AtLeast(0.0));
        assert_eq!(row.met(), Some(false));
    }

    #[test]
    fn a_target_holds_for_the_ratio_where_there_is_a_peer_and_for_the_value_elsewhere() {
        let alone = Measurement::new("part", "row", 8.0, "MiB").target(Target::AtMost(8.0));
        assert_eq!(alone.met(), Some(true));
        let beside = Measurement::new("part", "row", 90.0, "IOPS").against("peer", 100.0);
        assert_eq!(beside.met(), None);
        assert_eq!(beside.target(Target::AtLeast(0.95)).met(), Some(false));
    }
}
