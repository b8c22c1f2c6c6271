//! A chart as a file: an SVG picture with its title, its key and its colours.

use super::chart::WIDTH;
use super::{STYLE, chart, escape, lanes, surface};
use crate::experiments::findings::{Chart, Kind};

/// Room for the title and for the key, in the picture's units.
const TITLE: f64 = 26.0;
const KEY: f64 = 22.0;

/// The picture, without references to other files.
pub(super) fn svg(chart: &Chart) -> String {
    let (inner, height) = match chart.kind {
        Kind::Lines => (chart::svg(chart), chart::HEIGHT),
        Kind::Surface => (surface::svg(chart), surface::height(chart)),
        Kind::Lanes => (lanes::svg(chart), lanes::height(chart)),
    };
    let place = format!("<svg y=\"{TITLE}\" width=\"{WIDTH}\" height=\"{height}\" ");
    let inner = inner.replacen("<svg ", &place, 1);
    let (key, all) = match chart.kind {
        Kind::Lines => (key(chart, TITLE + height + 14.0), TITLE + height + KEY),
        Kind::Surface | Kind::Lanes => (String::new(), TITLE + height),
    };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {all}\" \
         font-family=\"system-ui, sans-serif\"><style>\n{STYLE}tspan {{ stroke: none; }}\n</style>\
         <rect width=\"{WIDTH}\" height=\"{all}\" style=\"fill: var(--paper)\"/>\
         <text x=\"{}\" y=\"17\">{}; {}</text>{inner}{key}</svg>\n",
        WIDTH / 2.0,
        escape(&chart.title),
        escape(&chart.y)
    )
}

/// The names of the lines in their colours.
fn key(chart: &Chart, y: f64) -> String {
    let name = |(i, name): (usize, &str)| {
        format!("<tspan dx=\"12\" class=\"c{}\">● {}</tspan>", i % chart::COLOURS, escape(name))
    };
    let names = chart.series.iter().map(|series| series.name.as_str()).enumerate();
    format!("<text x=\"{}\" y=\"{y}\">{}</text>", WIDTH / 2.0, names.map(name).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::findings::Row;

    #[test]
    fn a_picture_is_alone_and_has_its_title_and_key() {
        let row = Row::new("r", "us", &[2.0]);
        let lines = Chart::new("Times", "KiB", "us").line("<reads>", [(1.0, &row)]);
        let text = svg(&lines);
        assert!(text.contains(">Times; us</text>") && text.contains("● &lt;reads&gt;</tspan>"));
        let moments = Chart::new("Way", "us", "who").lanes().moment("a: sends", 2.0, false);
        for chart in [lines.clone(), lines.surface(), moments] {
            let text = svg(&chart);
            assert!(text.starts_with("<svg xmlns=") && text.ends_with("</svg>\n"));
            assert_eq!(text.matches("<svg").count(), text.matches("</svg>").count());
            for outside in ["https:", "<script", "url(", "@import", "href"] {
                assert!(!text.contains(outside), "{outside}");
            }
        }
    }
}
