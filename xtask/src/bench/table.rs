//! Measurements as a Markdown table.

use super::result::{Measurement, Target};

/// A table with one row a measurement.
pub(crate) fn markdown(measurements: &[Measurement]) -> String {
    let mut text = String::from(
        "| what | ferrite | peer | ratio | target | runs |\n|---|---|---|---|---|---|\n",
    );
    for row in measurements {
        let peer = match (&row.peer, row.peer_value) {
            (Some(name), Some(value)) => format!("{name} {}", figure(value)),
            _ => String::new(),
        };
        let ratio = row.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        text += &format!(
            "| {} | {} {} | {peer} | {ratio} | {} | {} |\n",
            row.name,
            figure(row.value),
            row.unit,
            target(row),
            row.runs
        );
    }
    text
}

fn target(row: &Measurement) -> String {
    let bound = match row.target {
        None => return String::new(),
        Some(Target::AtLeast(bound)) => format!("≥ {bound}"),
        Some(Target::AtMost(bound)) => format!("≤ {bound}"),
    };
    match row.met() {
        Some(false) => format!("{bound}, **missed**"),
        _ => bound,
    }
}

/// A number with three digits that count, and all those before the point.
pub(crate) fn figure(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_target_stands_out() {
        let row = Measurement::new("part", "randread", 90.0, "IOPS")
            .against("fio", 100.0)
            .target(Target::AtLeast(0.95));
        let text = markdown(&[row]);
        assert!(
            text.ends_with("| randread | 90.0 IOPS | fio 100 | 0.90 | ≥ 0.95, **missed** | 1 |\n")
        );
    }
}
