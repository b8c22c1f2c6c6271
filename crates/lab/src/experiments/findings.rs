//! The results of an experiment, and their file.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::Experiment;
use crate::compare::result::Target;
use crate::statistics::Summary;
use crate::whole;

/// The version of the file's contents.
const SCHEMA: u32 = 1;
/// The place of experiments that do not run on the loopback.
pub(super) const ON_XEN: &str = "Xen in an emulator";

/// One figure, of several runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) unit: String,
    pub(crate) n: u32,
    pub(crate) mean: f64,
    pub(crate) stddev: f64,
    pub(crate) ci95: f64,
    /// The source's own figure.
    pub(crate) published: Option<f64>,
    pub(crate) target: Option<Target>,
    /// Whether the mean meets the target.
    pub(crate) met: Option<bool>,
}

impl Row {
    pub(crate) fn new(name: impl Into<String>, unit: &str, values: &[f64]) -> Row {
        let Summary { n, mean, stddev, ci95 } = Summary::of(values);
        let (name, unit) = (name.into(), unit.to_owned());
        Row { name, unit, n, mean, stddev, ci95, published: None, target: None, met: None }
    }

    pub(crate) fn published(self, figure: f64) -> Row {
        Row { published: Some(figure), ..self }
    }

    pub(crate) fn target(self, target: Target) -> Row {
        Row { target: Some(target), met: Some(target.met(self.mean)), ..self }
    }
}

/// A point in a chart, with the interval of its height.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) ci95: f64,
}

/// One line of a chart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<Point>,
}

/// A chart of rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x: String,
    pub(crate) y: String,
    pub(crate) series: Vec<Series>,
    pub(crate) kind: Kind,
    /// The least end of the axis of a chart of lanes: that of another chart beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) until: Option<f64>,
}

/// The form of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Lines,
    /// A field per point, by line and place.
    Surface,
    /// A lane per party, along a time axis. Each series is a moment, `party: what`, whose y gives the direction: 0 to
    /// the receiver, 1 back.
    Lanes,
}

impl Chart {
    pub(crate) fn new(title: &str, x: &str, y: &str) -> Chart {
        let (title, x, y) = (title.into(), x.into(), y.into());
        Chart { title, x, y, series: Vec::new(), kind: Kind::Lines, until: None }
    }

    /// Adds a line at one height from the first to the last of these places.
    pub(crate) fn level(
        mut self,
        name: &str,
        places: impl IntoIterator<Item = f64>,
        height: f64,
    ) -> Chart {
        let points = places.into_iter().map(|x| Point { x, y: height, ci95: 0.0 }).collect();
        self.series.push(Series { name: name.into(), points });
        self
    }

    pub(crate) fn surface(self) -> Chart {
        Chart { kind: Kind::Surface, ..self }
    }

    pub(crate) fn lanes(self) -> Chart {
        Chart { kind: Kind::Lanes, ..self }
    }

    /// The axis of a chart of lanes goes until this at least.
    pub(crate) fn until(self, until: f64) -> Chart {
        Chart { until: Some(until), ..self }
    }

    /// Adds a moment to a chart of lanes.
    pub(crate) fn moment(mut self, name: &str, at: f64, back: bool) -> Chart {
        let point = Point { x: at, y: f64::from(u8::from(back)), ci95: 0.0 };
        self.series.push(Series { name: name.into(), points: vec![point] });
        self
    }

    /// Adds a line: its places, and the row of each height.
    pub(crate) fn line<'a>(
        mut self,
        name: impl Into<String>,
        points: impl IntoIterator<Item = (f64, &'a Row)>,
    ) -> Chart {
        let point = |(x, row): (f64, &Row)| Point { x, y: row.mean, ci95: row.ci95 };
        let points = points.into_iter().map(point).collect();
        self.series.push(Series { name: name.into(), points });
        self
    }
}

/// The results of a run of an experiment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Findings {
    pub(crate) rows: Vec<Row>,
    pub(crate) charts: Vec<Chart>,
    /// The measurements that could not be made here, with the reason.
    pub(crate) missing: Vec<String>,
}

/// The file of an experiment, with everything that the report needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    schema: u32,
    pub(crate) experiment: String,
    /// Loopback or Xen.
    #[serde(rename = "where")]
    pub(crate) place: String,
    pub(crate) shows: String,
    pub(crate) source: String,
    pub(crate) differs: String,
    /// Processors, kernel, load.
    pub(crate) machine: String,
    /// Ferrite's version.
    pub(crate) version: String,
    /// A quick run, whose figures are meaningless.
    pub(crate) quick: bool,
    pub(crate) rows: Vec<Row>,
    pub(crate) charts: Vec<Chart>,
    pub(crate) missing: Vec<String>,
}

/// The name of an experiment, and the sentences of the report.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct About {
    pub(crate) experiment: String,
    pub(crate) shows: String,
    pub(crate) source: String,
    pub(crate) differs: String,
}

impl Outcome {
    pub(crate) fn new(
        of: &Experiment,
        findings: Findings,
        machine: String,
        quick: bool,
    ) -> Outcome {
        let about = About {
            experiment: of.name.into(),
            shows: of.shows.into(),
            source: of.source.into(),
            differs: of.differs.into(),
        };
        let outcome = Self::about(about, findings, machine, quick);
        Outcome { place: of.how.place().into(), ..outcome }
    }

    /// The outcome of an experiment on Xen.
    pub(crate) fn about(about: About, findings: Findings, machine: String, quick: bool) -> Outcome {
        let About { experiment, shows, source, differs } = about;
        let Findings { rows, charts, missing } = findings;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Outcome {
            schema: SCHEMA,
            experiment,
            place: ON_XEN.into(),
            shows,
            source,
            differs,
            machine,
            version,
            quick,
            rows,
            charts,
            missing,
        }
    }

    /// Writes the file, atomically.
    ///
    /// # Errors
    /// A figure is not a number, or the folder cannot be written to.
    pub(crate) fn write(&self, folder: &Path) -> Result<PathBuf> {
        for row in &self.rows {
            let sound = [row.mean, row.stddev, row.ci95].iter().all(|value| value.is_finite());
            ensure!(sound, "{}, {}: not measured: {row:?}", self.experiment, row.name);
        }
        let path = folder.join(format!("{}.json", self.experiment));
        let text = serde_json::to_string_pretty(self)? + "\n";
        let cannot = || format!("cannot write {}", path.display());
        whole::write(&path, &text).with_context(cannot)?;
        Ok(path)
    }

    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or is of another version.
    pub(crate) fn read(path: &Path) -> Result<Outcome> {
        let text = fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let made = || format!("{} is no result of an experiment", path.display());
        let outcome: Outcome = serde_json::from_str(&text).with_context(made)?;
        let schema = outcome.schema;
        ensure!(schema == SCHEMA, "{} has version {schema}, not {SCHEMA}", path.display());
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(values: &[f64]) -> Outcome {
        let row = Row::new("merged", "times", values).published(3.95).target(Target::AtLeast(3.0));
        let charts = vec![Chart::new("Rates", "blocks", "times").line("merged", [(4.0, &row)])];
        let findings = Findings { rows: vec![row], charts, missing: vec!["nbdkit".into()] };
        Outcome::new(&super::super::HERE[0], findings, "2 x 486".into(), false)
    }

    #[test]
    fn a_file_has_what_was_found() {
        let folder = tempfile::tempdir().unwrap();
        let written = outcome(&[4.0, 5.0, 6.0]);
        let path = written.write(folder.path()).unwrap();
        assert_eq!(Outcome::read(&path).unwrap(), written);
        let text = fs::read_to_string(&path).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&json["schema"], &json["rows"][0]["n"]), (&1.into(), &3.into()));
        assert_eq!(json["rows"][0]["target"]["at_least"], 3.0);
        assert_eq!(json["rows"][0]["met"], true);
        assert_eq!(json["where"], "loopback, not Xen");
        fs::write(&path, text.replace("\"schema\": 1", "\"schema\": 2")).unwrap();
        assert!(Outcome::read(&path).is_err_and(|e| e.to_string().contains("version 2")));
    }

    #[test]
    fn what_was_not_measured_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        assert!(outcome(&[4.0, f64::NAN]).write(folder.path()).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
