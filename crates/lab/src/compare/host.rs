//! A host of many disks: the costs of each, beside ten others and beside all of them.

use super::ferrite::Ferrite;
use super::result::{Measurement, Target};
use crate::run::many::Figure;
use anyhow::{Context as _, Result};
use ferrite_xenhost::steps;
use std::process::Command;

const PART: &str = "host";

/// Measures a host of so many disks, once.
pub(super) fn run(disks: u32) -> Result<Vec<Measurement>> {
    let ferrite = Ferrite::build(1.0)?;
    let mut command = Command::new(ferrite.bench_program());
    command.args(["host", "--disks", &disks.to_string()]);
    let text = steps::output(&mut command)?;
    let figures: Vec<Figure> = serde_json::from_str(&text)
        .with_context(|| format!("ferrite-bench printed no figures but {text:.300}"))?;
    Ok(figures.into_iter().map(measurement).collect())
}

fn measurement(figure: Figure) -> Measurement {
    // The units are few: they live as long as the program.
    let row = Measurement::new(PART, figure.name, figure.value, figure.unit.leak());
    match figure.at_most {
        Some(bound) => row.target(Target::AtMost(bound)),
        None => row,
    }
}
