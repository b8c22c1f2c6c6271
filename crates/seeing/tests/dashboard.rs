//! Grafana's dashboard asks for nothing but what is exported.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ferrite_seeing::folder::Folder;
use ferrite_seeing::metrics::{Attached, Host, Job, text_of};
use ferrite_serve::counters::{Counters, FOLDER};
use ferrite_testkit::openmetrics::parse;
use serde_json::Value;

/// Labels that Prometheus adds, and that samples of a histogram have.
const ADDED: [&str; 2] = ["instance", "job"];
/// The version that Grafana 10.2 writes; later ones read it.
const SCHEMA: u64 = 39;

fn dashboard() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/grafana-ferrite.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The labels of each sample that is exported.
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let base = tempfile::tempdir().unwrap();
    Counters::default().keep_in(&base.path().join("vbd-3-51712"), "/a");
    let disks = Folder::new(base.path().join(FOLDER)).look().unwrap().disks;
    assert_eq!(disks.len(), 1);
    let keeper = Some(std::process::id());
    let disk = Attached { domid: 3, devid: 51712, phase: "served", keeper, ..Attached::default() };
    let (jobs, ended_jobs) = (vec![Job::default()], vec![("coalesce", "done", 1)]);
    let phases = &["served"];
    let host = Host { phases, disks: vec![disk], jobs, ended_jobs, ..Host::default() };
    let families = parse(&text_of(host, disks)).unwrap();
    let mut samples = BTreeMap::<String, BTreeSet<String>>::new();
    for sample in families.into_iter().flat_map(|family| family.samples) {
        samples.entry(sample.name).or_default().extend(sample.labels.into_keys());
    }
    samples
}

/// The metrics of an expression, each with the labels that its braces name.
fn metrics(expression: &str) -> Vec<(&str, BTreeSet<&str>)> {
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find("ferrite_") {
        rest = &rest[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        let braces = behind.strip_prefix('{').and_then(|inner| inner.split('}').next());
        let matchers = braces.into_iter().flat_map(|inner| inner.split(", "));
        found.push((name, matchers.map(|one| one.split(['=', '!']).next().unwrap()).collect()));
        rest = behind;
    }
    found
}

/// The labels that an expression sums by.
fn grouped(expression: &str) -> BTreeSet<&str> {
    let groups = expression.split("by (").skip(1).map(|rest| rest.split(')').next().unwrap());
    groups.flat_map(|group| group.split(", ")).collect()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} of {value}"))
}

fn check(expression: &str, exported: &BTreeMap<String, BTreeSet<String>>) {
    let used = metrics(expression);
    assert!(!used.is_empty(), "{expression}");
    for (name, labels) in used {
        let has = exported.get(name).unwrap_or_else(|| panic!("{name} is not exported"));
        for label in labels.union(&grouped(expression)) {
            assert!(has.contains(*label) || ADDED.contains(label), "{label} of {expression}");
        }
    }
    for (open, close) in [('(', ')'), ('{', '}'), ('[', ']')] {
        assert_eq!(expression.matches(open).count(), expression.matches(close).count());
    }
}

#[test]
fn each_panel_asks_for_what_is_exported() {
    let (dashboard, exported) = (dashboard(), exported());
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{}", panel["id"]);
        assert_eq!(text(&panel["datasource"], "uid"), "${datasource}");
        assert!(["stat", "timeseries"].contains(&text(panel, "type")));
        assert!(!text(panel, "title").is_empty());
        let targets = panel["targets"].as_array().unwrap();
        let refs: BTreeSet<&str> = targets.iter().map(|target| text(target, "refId")).collect();
        assert!(!targets.is_empty() && refs.len() == targets.len(), "{panel}");
        targets.iter().for_each(|target| check(text(target, "expr"), &exported));
    }
    for title in [
        "IOPS",
        "Data",
        "Latency of reads",
        "Latency of writes",
        "Depth",
        "Metadata misses",
        "Poll hits",
        "Processor a disk",
        "Failed disks",
        "Jobs",
        "Jobs that ended",
    ] {
        assert!(panels.iter().any(|panel| text(panel, "title") == title), "{title}");
    }
}

#[test]
fn the_dashboard_has_what_grafana_wants_of_one() {
    let (dashboard, exported) = (dashboard(), exported());
    assert_eq!(dashboard["schemaVersion"], SCHEMA);
    assert!(dashboard.get("id").is_none(), "the one who loads it gives it a number");
    assert!(!text(&dashboard, "title").is_empty() && text(&dashboard, "uid").len() <= 40);
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let names: BTreeSet<&str> = variables.iter().map(|one| text(one, "name")).collect();
    assert_eq!(names, BTreeSet::from(["datasource", "disk", "instance"]));
    for variable in variables.iter().filter(|one| one["type"] == "query") {
        check(text(variable, "definition"), &exported);
        assert_eq!(variable["query"]["query"], variable["definition"]);
    }
    // No panel lies on another, or beyond the screen.
    let mut taken = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24);
        for x in at("x")..at("x") + at("w") {
            for y in at("y")..at("y") + at("h") {
                assert!(taken.insert((x, y)), "{}", panel["title"]);
            }
        }
    }
}
