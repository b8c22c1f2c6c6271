//! What a part of the comparison has measured, and the file it goes into.

use crate::steps;
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::PathBuf;

/// One figure, beside the same figure of a peer from the same run where there is one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Measurement {
    /// The part of the comparison it belongs to.
    pub(crate) part: &'static str,
    /// What was measured: the row's name.
    pub(crate) name: String,
    /// The median of all runs, in `unit`.
    pub(crate) value: f64,
    /// The unit of `value` and `peer_value`: "IOPS", "MB/s", "us", ...
    pub(crate) unit: &'static str,
    /// Who it is compared with.
    pub(crate) peer: Option<String>,
    /// The peer's median, in `unit`.
    pub(crate) peer_value: Option<f64>,
    /// `value` over `peer_value`.
    pub(crate) ratio: Option<f64>,
    /// What the ratio, or the value where there is no peer, is meant to be.
    pub(crate) target: Option<Target>,
    /// How often it was measured.
    pub(crate) runs: u32,
}

/// A bound on a ratio or a value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "each part takes what it needs")]
pub(crate) enum Target {
    /// No less than this.
    AtLeast(f64),
    /// No more than this.
    AtMost(f64),
}

impl Target {
    /// Whether `value` keeps the bound.
    pub(crate) fn met(self, value: f64) -> bool {
        match self {
            Target::AtLeast(bound) => value >= bound,
            Target::AtMost(bound) => value <= bound,
        }
    }
}

#[allow(dead_code, reason = "each part takes what it needs")]
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
        }
    }

    /// Beside a peer's figure.
    pub(crate) fn against(mut self, peer: impl Into<String>, peer_value: f64) -> Self {
        self.peer = Some(peer.into());
        self.peer_value = Some(peer_value);
        self.ratio = (peer_value > 0.0).then(|| self.value / peer_value);
        self
    }

    /// With a target for the ratio, or for the value where there is no peer.
    pub(crate) fn target(mut self, target: Target) -> Self {
        self.target = Some(target);
        self
    }

    /// Whether the target is met; nothing without one.
    pub(crate) fn met(&self) -> Option<bool> {
        let target = self.target?;
        let compared = if self.peer.is_some() { self.ratio? } else { self.value };
        Some(target.met(compared))
    }
}

/// Writes a part's measurements to `target/bench/PART.json`.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write(part: &str, measurements: &[Measurement]) -> Result<PathBuf> {
    let dir = steps::target_dir().join("bench");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let file = dir.join(format!("{part}.json"));
    let text = serde_json::to_string_pretty(measurements)?;
    std::fs::write(&file, text + "\n")
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_holds_for_the_ratio_where_there_is_a_peer_and_for_the_value_elsewhere() {
        let alone = Measurement::new("part", "row", 8.0, "MiB").target(Target::AtMost(8.0));
        assert_eq!(alone.met(), Some(true));
        let beside = Measurement::new("part", "row", 90.0, "IOPS").against("peer", 100.0);
        assert_eq!(beside.met(), None);
        assert_eq!(beside.target(Target::AtLeast(0.95)).met(), Some(false));
    }
}
