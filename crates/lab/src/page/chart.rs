//! A chart as SVG: lines with the intervals of their points, the values on hover.

use std::fmt::Write as _;

use super::escape;
use crate::compare::table::figure;
use crate::experiments::findings::{Chart, Point, Series};

/// The size of the picture, in its own units.
pub(super) const WIDTH: f64 = 640.0;
pub(super) const HEIGHT: f64 = 320.0;
/// Room for the axes' labels.
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 46.0;
const TOP: f64 = 12.0;
const RIGHT: f64 = 16.0;
/// The number of line colours in the style sheet.
pub(super) const COLOURS: usize = 6;
/// Horizontal lines, besides the axis.
const GRID: u32 = 4;
/// From this ratio of places on, the axis is logarithmic.
const WIDE: f64 = 16.0;

/// Converts places to coordinates.
struct Scale {
    from: f64,
    to: f64,
    logarithmic: bool,
    top: f64,
}

impl Scale {
    fn of(chart: &Chart) -> Scale {
        let points = || chart.series.iter().flat_map(|series| &series.points);
        let low = points().map(|p| p.x).fold(f64::INFINITY, f64::min);
        let high = points().map(|p| p.x).fold(f64::NEG_INFINITY, f64::max);
        let top = points().map(|p| p.y + p.ci95).fold(0.0, f64::max);
        let logarithmic = low > 0.0 && high / low >= WIDE;
        let place = |x: f64| if logarithmic { x.log2() } else { x };
        Scale { from: place(low), to: place(high), logarithmic, top: round_up(top) }
    }

    fn x(&self, x: f64) -> f64 {
        let x = if self.logarithmic { x.log2() } else { x };
        let part = if self.to > self.from { (x - self.from) / (self.to - self.from) } else { 0.5 };
        LEFT + part * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - y.max(0.0) / self.top * (HEIGHT - BOTTOM - TOP)
    }
}

/// The next of 1, 2, 2.5, 5 times a power of ten; 1 for 0.
pub(super) fn round_up(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    steps.iter().map(|step| step * power).find(|step| *step >= value).unwrap_or(10.0 * power)
}

/// The lines, with their axes.
pub(super) fn svg(chart: &Chart) -> String {
    let scale = Scale::of(chart);
    let mut text = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}: {} by {}\">",
        escape(&chart.title),
        escape(&chart.y),
        escape(&chart.x)
    );
    axes(&mut text, chart, &scale);
    for (i, series) in chart.series.iter().enumerate() {
        let colour = i % COLOURS;
        let mut path = String::new();
        for (n, point) in series.points.iter().enumerate() {
            let letter = if n == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{letter}{:.1} {:.1}", scale.x(point.x), scale.y(point.y));
        }
        let _ = write!(text, "<path class=\"line c{colour}\" d=\"{path}\"/>");
        series.points.iter().for_each(|p| mark(&mut text, chart, &series.name, p, &scale, colour));
    }
    text + "</svg>"
}

/// The names of the lines in their colours.
pub(super) fn key(chart: &Chart) -> String {
    let name = |(i, series): (usize, &Series)| {
        format!("<li class=\"c{}\">{}</li>", i % COLOURS, escape(&series.name))
    };
    let names: String = chart.series.iter().enumerate().map(name).collect();
    format!("<ul class=\"key\">{names}</ul>")
}

fn axes(text: &mut String, chart: &Chart, scale: &Scale) {
    for i in 0..=GRID {
        let value = scale.top * f64::from(i) / f64::from(GRID);
        let y = scale.y(value);
        let _ = write!(
            text,
            "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{:.1}\"/><text class=\"side\" x=\"{:.1}\" \
             y=\"{:.1}\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0,
            figure(value)
        );
    }
    let mut places: Vec<f64> =
        chart.series.iter().flat_map(|series| &series.points).map(|p| p.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let mut free = f64::NEG_INFINITY;
    for place in places {
        let x = scale.x(place);
        if x >= free {
            let y = HEIGHT - BOTTOM + 16.0;
            let _ = write!(text, "<text x=\"{x:.1}\" y=\"{y}\">{}</text>", short(place));
            free = x + 34.0;
        }
    }
    let (x, y) = (f64::midpoint(LEFT, WIDTH - RIGHT), HEIGHT - 8.0);
    let _ = write!(text, "<text x=\"{x}\" y=\"{y}\">{}</text>", escape(&chart.x));
    let y = f64::midpoint(TOP, HEIGHT - BOTTOM);
    let _ = write!(
        text,
        "<text transform=\"translate(14 {y}) rotate(-90)\">{}</text>",
        escape(&chart.y)
    );
}

/// The label of a place on the axis.
pub(super) fn short(place: f64) -> String {
    match place {
        p if p >= 1_048_576.0 => format!("{}M", p / 1_048_576.0),
        p if p >= 1024.0 => format!("{:.0}K", p / 1024.0),
        p => format!("{p}"),
    }
}

fn mark(text: &mut String, chart: &Chart, name: &str, point: &Point, scale: &Scale, colour: usize) {
    let (x, y) = (scale.x(point.x), scale.y(point.y));
    let (low, high) = (scale.y(point.y - point.ci95), scale.y(point.y + point.ci95));
    let _ = write!(
        text,
        "<g class=\"c{colour}\"><title>{}, {} {}: {} ± {} {}</title><path class=\"bar\" \
         d=\"M{x:.1} {low:.1}V{high:.1}\"/><circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/></g>",
        escape(name),
        short(point.x),
        escape(&chart.x),
        figure(point.y),
        figure(point.ci95),
        escape(&chart.y)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::findings::Row;

    fn chart(points: &[(f64, f64)]) -> Chart {
        let rows: Vec<(f64, Row)> =
            points.iter().map(|(x, y)| (*x, Row::new("r", "us", &[*y]))).collect();
        Chart::new("T", "KiB", "us").line("<a>", rows.iter().map(|(x, row)| (*x, row)))
    }

    #[test]
    fn a_line_goes_from_the_first_point_to_the_last_within_the_picture() {
        let text = svg(&chart(&[(4.0, 100.0), (1024.0, 50.0)]));
        // 100 is the top of its axis; the second point is half as high.
        assert!(text.contains(&format!("d=\"M{LEFT:.1} {TOP:.1}L624.0 143.0\"")), "{text}");
        assert!(text.contains("&lt;a&gt;, 4 KiB: 100 ± 0.00 us"), "{text}");
    }

    #[test]
    fn a_chart_of_nothing_or_of_one_point_is_a_picture() {
        for points in [&[][..], &[(0.0, 0.0)]] {
            let text = svg(&chart(points));
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        }
    }

    #[test]
    fn an_axis_ends_at_a_round_number() {
        let ends = [0.0, 0.03, 1.0, 1.7, 230.0, 260.0, 99_000.0].map(round_up);
        assert_eq!(ends, [1.0, 0.05, 1.0, 2.0, 250.0, 500.0, 100_000.0]);
    }
}
