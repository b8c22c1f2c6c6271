//! A chart as a time line: a lane per party, and a line from moment to moment and from lane to lane.

use std::fmt::Write as _;

use super::chart::{WIDTH, round_up};
use super::escape;
use crate::compare::table::figure;
use crate::experiments::findings::{Chart, Point};

/// Room for the names of parties, in the picture's units.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 24.0;
const LANE: f64 = 84.0;
const BOTTOM: f64 = 44.0;
/// Vertical lines of the time axis.
const GRID: u32 = 5;

/// A moment, with its number in the key.
struct Moment<'a> {
    number: usize,
    party: &'a str,
    what: &'a str,
    point: Point,
}

impl Moment<'_> {
    fn back(&self) -> bool {
        self.point.y > 0.0
    }
}

fn moments(chart: &Chart) -> Vec<Moment<'_>> {
    let named = chart.series.iter().enumerate().filter_map(|(i, series)| {
        let (party, what) = series.name.split_once(": ").unwrap_or(("", &series.name));
        Some(Moment { number: i + 1, party, what, point: *series.points.first()? })
    });
    named.collect()
}

fn parties<'a>(moments: &[Moment<'a>]) -> Vec<&'a str> {
    let mut parties = Vec::new();
    for moment in moments {
        if !parties.contains(&moment.party) {
            parties.push(moment.party);
        }
    }
    parties
}

/// The height of the picture.
pub(super) fn height(chart: &Chart) -> f64 {
    TOP + parties(&moments(chart)).len() as f64 * LANE + BOTTOM
}

/// The lanes, the path to the receiver and the path back.
pub(super) fn svg(chart: &Chart) -> String {
    let moments = moments(chart);
    let parties = parties(&moments);
    let until = chart.until.filter(|until| until.is_finite()).unwrap_or(0.0);
    let last = round_up(moments.iter().map(|moment| moment.point.x).fold(until, f64::max));
    let height = height(chart);
    let x = |time: f64| LEFT + time / last * (WIDTH - LEFT - RIGHT);
    let lane = |party: &str| {
        let place = parties.iter().position(|one| *one == party).unwrap_or(0);
        TOP + (place as f64 + 0.5) * LANE
    };
    let mut text = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">",
        escape(&chart.title)
    );
    for i in 0..=GRID {
        let (time, foot) = (last * f64::from(i) / f64::from(GRID), height - BOTTOM);
        let (x, time) = (x(time), figure(time));
        let _ = write!(
            text,
            "<path class=\"grid\" d=\"M{x:.1} {TOP}V{foot}\"/><text x=\"{x:.1}\" y=\"{}\">{time}</text>",
            foot + 16.0
        );
    }
    for party in &parties {
        let y = lane(party);
        let _ = write!(
            text,
            "<path class=\"grid\" d=\"M{LEFT} {y}H{}\"/><text class=\"side\" x=\"{}\" y=\"{}\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0,
            escape(party)
        );
    }
    let _ = write!(
        text,
        "<text x=\"{}\" y=\"{}\">{}</text>",
        f64::midpoint(LEFT, WIDTH - RIGHT),
        height - 8.0,
        escape(&chart.x)
    );
    for (colour, back) in [(0, false), (1, true)] {
        let of_way = moments.iter().filter(|moment| moment.back() == back);
        let mut path = String::new();
        for (n, moment) in of_way.clone().enumerate() {
            let letter = if n == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{letter}{:.1} {:.1}", x(moment.point.x), lane(moment.party));
        }
        let _ = write!(text, "<path class=\"line c{colour}\" d=\"{path}\"/>");
        of_way.for_each(|moment| {
            mark(&mut text, chart, moment, colour, (x(moment.point.x), lane(moment.party)));
        });
    }
    text + "</svg>"
}

/// A moment as a point with its number. Adjacent numbers are at different heights.
fn mark(text: &mut String, chart: &Chart, moment: &Moment<'_>, colour: usize, (x, y): (f64, f64)) {
    let step = 11.0 * (moment.number % 3) as f64;
    let label = if moment.back() { y + 16.0 + step } else { y - 8.0 - step };
    let _ = write!(
        text,
        "<g class=\"c{colour}\"><title>{} {}: {} {}</title><circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/></g>\
         <text x=\"{x:.1}\" y=\"{label:.1}\">{}</text>",
        escape(moment.party),
        escape(moment.what),
        figure(moment.point.x),
        escape(&chart.x),
        moment.number
    );
}

/// The moments of the numbers.
pub(super) fn key(chart: &Chart) -> String {
    let item = |moment: &Moment<'_>| {
        format!(
            "<li><b>{}</b> {}: {} ({} {})</li>",
            moment.number,
            escape(moment.party),
            escape(moment.what),
            figure(moment.point.x),
            escape(&chart.x)
        )
    };
    format!("<ol class=\"moments\">{}</ol>", moments(chart).iter().map(item).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_from_party_to_party_and_another_one_back() {
        let chart = Chart::new("T", "us", "who").lanes();
        let chart = chart.moment("a: sends", 0.0, false).moment("<b>: has it", 50.0, false);
        let chart = chart.moment("<b>: answers", 60.0, true).moment("a: is done", 100.0, true);
        let text = svg(&chart);
        assert!(text.contains("<path class=\"line c0\" d=\"M84.0 66.0L354.0 150.0\"/>"), "{text}");
        assert!(text.contains("<path class=\"line c1\" d=\"M408.0 150.0L624.0 66.0\"/>"), "{text}");
        assert!(key(&chart).contains("<b>3</b> &lt;b&gt;: answers (60.0 us)"));
    }

    #[test]
    fn charts_beside_each_other_have_one_axis() {
        let chart = Chart::new("T", "us", "who").lanes().until(200.0);
        let text = svg(&chart.moment("a: sends", 0.0, false).moment("a: has it", 100.0, false));
        assert!(text.contains("M84.0 66.0L354.0 66.0"), "half of the width: {text}");
    }

    #[test]
    fn lanes_without_moments_are_a_picture() {
        let text = svg(&Chart::new("T", "us", "who").lanes());
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}
