//! A chart as a field of cells: a row per line, a column per place, with stronger colours for higher values.

use std::fmt::Write as _;

use super::chart::{WIDTH, short};
use super::escape;
use crate::compare::table::figure;
use crate::experiments::findings::Chart;

/// Room for the names of lines, in the picture's units.
const LEFT: f64 = 84.0;
const ROW: f64 = 34.0;
/// Room for the labels of the places and of their axis.
const BOTTOM: f64 = 40.0;
/// The opacity of the lowest cell.
const FAINT: f64 = 0.08;
const STRONG: f64 = 0.75;

/// The cells and their labels.
pub(super) fn svg(chart: &Chart) -> String {
    let columns = chart.series.iter().map(|series| series.points.len()).max().unwrap_or(0);
    let width = (WIDTH - LEFT) / columns.max(1) as f64;
    let height = height(chart);
    let strength = strength(chart);
    let mut text = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\"");
    let _ = write!(text, " aria-label=\"{}: {}\">", escape(&chart.title), escape(&chart.y));
    for (row, series) in chart.series.iter().enumerate() {
        let (y, name) = (row as f64 * ROW, escape(&series.name));
        let middle = y + ROW / 2.0 + 4.0;
        let _ =
            write!(text, "<text class=\"side\" x=\"{}\" y=\"{middle}\">{name}</text>", LEFT - 6.0);
        for (column, point) in series.points.iter().enumerate() {
            let x = LEFT + column as f64 * width;
            let (value, ci95) = (figure(point.y), figure(point.ci95));
            let (shade, place) = (strength(point.y), short(point.x));
            let _ = write!(
                text,
                "<g><title>{name}, {place}: {value} ± {ci95} {}</title><rect class=\"c0\" x=\"{x:.1}\" y=\"{y}\" \
                 width=\"{:.1}\" height=\"{}\" fill-opacity=\"{shade:.2}\" stroke=\"none\"/>\
                 <text class=\"cell\" x=\"{:.1}\" y=\"{middle}\">{value}</text></g>",
                escape(&chart.y),
                width - 2.0,
                ROW - 2.0,
                x + width / 2.0
            );
        }
    }
    let names = chart.series.first().map_or(&[][..], |series| &series.points);
    for (column, point) in names.iter().enumerate() {
        let (x, y) = (LEFT + (column as f64 + 0.5) * width, height - BOTTOM + 14.0);
        let _ = write!(text, "<text x=\"{x:.1}\" y=\"{y}\">{}</text>", short(point.x));
    }
    let (x, y) = (f64::midpoint(LEFT, WIDTH), height - 6.0);
    let _ = write!(text, "<text x=\"{x}\" y=\"{y}\">{}</text>", escape(&chart.x));
    text + "</svg>"
}

/// The height of the picture.
pub(super) fn height(chart: &Chart) -> f64 {
    chart.series.len() as f64 * ROW + BOTTOM
}

/// The opacity, from the lowest to the highest value of the chart.
fn strength(chart: &Chart) -> impl Fn(f64) -> f64 {
    let values = || chart.series.iter().flat_map(|series| &series.points).map(|point| point.y);
    let low = values().fold(f64::INFINITY, f64::min);
    let high = values().fold(f64::NEG_INFINITY, f64::max);
    move |value| match high > low {
        true => FAINT + (value - low) / (high - low) * (STRONG - FAINT),
        false => STRONG,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::findings::Row;

    #[test]
    fn the_highest_cell_is_the_strongest_and_each_says_its_value() {
        let row = |value: f64| Row::new("r", "times", &[value]);
        let (a, b, c) = (row(1.0), row(2.0), row(3.0));
        let chart = Chart::new("T", "bytes", "times").surface();
        let chart =
            chart.line("1 guest", [(4096.0, &a), (65536.0, &b)]).line("<ten>", [(4096.0, &c)]);
        let text = svg(&chart);
        assert_eq!(text.matches("<rect").count(), 3);
        assert!(text.contains("fill-opacity=\"0.08\"") && text.contains("fill-opacity=\"0.75\""));
        assert!(text.contains("&lt;ten&gt;, 4K: 3.00 ± 0.00 times"), "{text}");
    }

    #[test]
    fn a_field_without_cells_or_with_equal_ones_is_a_picture() {
        let same = Row::new("r", "times", &[2.0]);
        let chart = || Chart::new("T", "bytes", "times").surface();
        for chart in [chart(), chart().line("a", [(1.0, &same), (2.0, &same)])] {
            let text = svg(&chart);
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        }
    }
}
