//! Polling for work, compared with waiting for events.

use anyhow::Result;

use super::findings::{Chart, Findings, Row};
use super::lab::{Lab, Medium};
use super::{Experiment, How};
use crate::compare::burners::Burners;
use crate::compare::result::Target;
use crate::compare::rounds::{Plan, Rounds};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "polling",
    shows: "Latency and processor time by the time that the backend polls before it sleeps, with and without idle processors.",
    source: "Keeping up with the hardware (XenServer, 2015): poll instead of waiting for events while the control domain has \
             processors to spare; its pictures, and so its figures, are lost.",
    differs: "There is no published figure to compare with; a wake-up on this machine costs what its hypervisor makes of it, \
              and that is most of what polling saves.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 512;
/// Polling windows in microseconds.
const WINDOWS: [&str; 7] = ["0", "5", "20", "50", "100", "300", "auto"];
/// The longest window: within it no events are waited for.
const LONGEST: &str = "300";

fn run(lab: &Lab) -> Result<Findings> {
    let image = lab.image(Medium::Memory, IMAGE_MIB)?;
    let windows = lab.some(&WINDOWS);
    let measure = |title: &str| {
        let mut plan = Plan::new(title);
        for window in &windows {
            let options = format!("--depth 1 --guest-poll 0 --poll-us {window}");
            plan = plan.add(*window, lab.bench(image.path(), options));
        }
        lab.measure(plan)
    };
    let with = measure("polling, idle processors")?;
    let without = {
        let _burners = Burners::start();
        measure("polling, no idle processor")?
    };
    Ok(findings(&windows, &[("idle processors", with), ("no idle processor", without)]))
}

fn findings(windows: &[&'static str], measured: &[(&str, Rounds)]) -> Findings {
    let mut rows = Vec::new();
    let mut times = Chart::new("Time of a request, one in flight", "window, us", "us");
    let mut costs = Chart::new("Processor time of the backend", "window, us", "us a request");
    for (name, rounds) in measured {
        let row = |window: &str, what: &str, of: fn(crate::compare::rounds::Sample) -> f64| {
            let each = rounds.each(|r| of(r.of(window)));
            Row::new(format!("{name}, {window} us: {what}").replace("auto us", "auto"), "us", &each)
        };
        let time: Vec<Row> = windows.iter().map(|w| row(w, "time", |s| s.lat_us)).collect();
        let cost: Vec<Row> =
            windows.iter().map(|w| row(w, "processor a request", |s| s.cpu_us)).collect();
        // A window has a place on the axis; auto has none.
        let at = || windows.iter().map(|window| window.parse::<f64>());
        let placed = |rows: &'_ [Row]| -> Vec<(f64, Row)> {
            at().zip(rows).filter_map(|(x, row)| Some((x.ok()?, row.clone()))).collect()
        };
        times = times.line(*name, placed(&time).iter().map(|(x, row)| (*x, row)));
        costs = costs.line(*name, placed(&cost).iter().map(|(x, row)| (*x, row)));
        rows.extend(time);
        rows.extend(cost);
        let peer = if *name == "idle processors" { LONGEST } else { "0" };
        let peer = windows.iter().find(|window| **window == peer).copied().unwrap_or("0");
        let rate = rounds.each(|r| r.of("auto").iops / r.of(peer).iops);
        let least = if *name == "idle processors" { 0.97 } else { 0.98 };
        let row = Row::new(format!("{name}: rate with auto over {peer} us"), "times", &rate);
        rows.push(row.target(Target::AtLeast(least)));
    }
    Findings { rows, charts: vec![times, costs], missing: vec![] }
}
