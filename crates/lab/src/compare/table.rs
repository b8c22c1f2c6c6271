//! Measurements as a Markdown table.

use super::result::{Measurement, Target};

/// A table with one row per measurement.
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
        Some(true) => format!("{bound}, met"),
        Some(false) => format!("{bound}, **missed**"),
        None => bound,
    }
}

/// A number with three significant digits, in thousands or millions if it is large.
pub(crate) fn figure(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e6 => (value / 1e6, " M"),
        v if v >= 1e4 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let decimals = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        let figures = [0.0404, 9.5, 90.0, 437.4, 9847.2, 18324.7, 437_000.0, 3_915_280.0];
        let shown = ["0.04", "9.50", "90.0", "437", "9847", "18.3 k", "437 k", "3.92 M"];
        assert_eq!(figures.map(figure), shown);
    }

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
