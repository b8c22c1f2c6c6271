//! All results as one page without scripts or references to other files.

mod alone;
mod chart;
pub(crate) mod claims;
mod lanes;
mod surface;

use std::fmt::Write as _;

use crate::compare::result::Target;
use crate::compare::table::figure;
use crate::experiments::findings::{Chart, Kind, Outcome, Row};

const STYLE: &str = include_str!("style.css");

/// The page.
pub(crate) fn html(outcomes: &[Outcome]) -> String {
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>Ferrite's lab</title><style>\n{STYLE}</style></head><body>\n\
         <h1>Ferrite's lab</h1>\n<p class=\"dim\">The published experiments, run on one machine. \
         Figures are means with their 95 % intervals (Student). Each experiment says where it ran. On the \
         loopback, guests are processes of this machine; Xen runs in an emulator that counts instructions.</p>\n<nav><ul>"
    );
    for outcome in outcomes {
        let name = escape(&outcome.experiment);
        let _ = write!(text, "<li><a href=\"#{name}\">{name}</a>{}</li>", verdict(outcome));
    }
    text += "</ul></nav>\n";
    outcomes.iter().for_each(|outcome| section(&mut text, outcome));
    text + "</body></html>\n"
}

/// The number of targets that an experiment has met.
fn verdict(outcome: &Outcome) -> String {
    let met = outcome.rows.iter().filter(|row| row.met == Some(true)).count();
    let all = outcome.rows.iter().filter(|row| row.met.is_some()).count();
    match all {
        0 => String::new(),
        _ => format!(" <span class=\"dim\">{met} of {all} targets</span>"),
    }
}

fn section(text: &mut String, outcome: &Outcome) {
    let Outcome { experiment, place, shows, source, differs, machine, version, .. } = outcome;
    let _ = write!(
        text,
        "<section id=\"{0}\"><h2>{0}</h2>\n<p>{1}</p>\n<p class=\"dim\"><b>Where.</b> {3}.</p>\n<p class=\"dim\"><b>Published.</b> {2}</p>\n",
        escape(experiment),
        escape(shows),
        escape(source),
        escape(place)
    );
    if outcome.quick {
        *text += "<p class=\"quick\">A quick run: it shows that the experiment works, and its figures say nothing.</p>\n";
    }
    if !outcome.charts.is_empty() {
        let charts: String = outcome.charts.iter().map(picture).collect();
        let _ = writeln!(text, "<div class=\"charts\">{charts}</div>");
    }
    *text += "<div class=\"table\"><table><thead><tr><th>what</th><th>mean</th><th>±</th><th>deviation</th>\
              <th>runs</th><th>published</th><th>target</th></tr></thead><tbody>\n";
    outcome.rows.iter().for_each(|row| table_row(text, row));
    *text += "</tbody></table></div>\n";
    for missing in &outcome.missing {
        let _ = writeln!(text, "<p class=\"dim\"><b>Not measured.</b> {}</p>", escape(missing));
    }
    let _ = writeln!(
        text,
        "<p><b>Why they differ.</b> {}</p>\n<p class=\"machine\">Ferrite {}; {}</p></section>",
        escape(differs),
        escape(version),
        escape(machine)
    );
}

/// The charts that other documents show: an experiment, and the index of its chart.
const PICTURES: [(&str, usize); 2] = [("aggregate", 2), ("polling", 0)];

/// These charts as files: name and contents.
pub(crate) fn pictures(outcomes: &[Outcome]) -> Vec<(String, String)> {
    let picture = |(name, place): &(&str, usize)| {
        let outcome = outcomes.iter().find(|outcome| outcome.experiment == *name)?;
        Some((format!("{name}.svg"), alone::svg(outcome.charts.get(*place)?)))
    };
    PICTURES.iter().filter_map(picture).collect()
}

fn picture(chart: &Chart) -> String {
    let (svg, key) = match chart.kind {
        Kind::Lines => (chart::svg(chart), chart::key(chart)),
        Kind::Surface => (surface::svg(chart), String::new()),
        Kind::Lanes => (lanes::svg(chart), lanes::key(chart)),
    };
    format!("<figure><figcaption>{}</figcaption>{svg}{key}</figure>", escape(&chart.title))
}

fn table_row(text: &mut String, row: &Row) {
    let published = row.published.map_or_else(String::new, figure);
    let _ = writeln!(
        text,
        "<tr><td>{}</td><td>{} {}</td><td>{}</td><td>{}</td><td>{}</td><td>{published}</td><td>{}</td></tr>",
        escape(&row.name),
        figure(row.mean),
        escape(&row.unit),
        figure(row.ci95),
        figure(row.stddev),
        row.n,
        target(row)
    );
}

fn target(row: &Row) -> String {
    let bound = match row.target {
        None => return String::new(),
        Some(Target::AtLeast(bound)) => format!("≥ {bound}"),
        Some(Target::AtMost(bound)) => format!("≤ {bound}"),
    };
    match row.met {
        Some(true) => format!("{bound} <span class=\"met\">met</span>"),
        _ => format!("{bound} <span class=\"missed\">missed</span>"),
    }
}

/// Escapes text for HTML, attributes included.
fn escape(text: &str) -> String {
    text.chars().fold(String::new(), |mut safe, c| {
        match c {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            c => safe.push(c),
        }
        safe
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::HERE;
    use crate::experiments::findings::Findings;

    fn outcome() -> Outcome {
        let rows = vec![
            Row::new("gain", "times", &[4.0, 5.0, 6.0])
                .published(3.95)
                .target(Target::AtLeast(3.0)),
            Row::new("<misses>", "%", &[2.0]).target(Target::AtMost(1.0)),
        ];
        let charts = vec![Chart::new("Gains", "blocks", "times").line("gain", [(1.0, &rows[0])])];
        let findings = Findings { rows, charts, missing: vec!["nbdkit is not here".into()] };
        Outcome::new(&HERE[0], findings, "2 x \"486\"".into(), true)
    }

    #[test]
    fn a_figure_stands_beside_the_published_one_with_its_verdict() {
        let page = html(&[outcome()]);
        assert!(
            page.contains("<td>5.00 times</td><td>2.48</td><td>1.00</td><td>3</td><td>3.95</td>")
        );
        assert!(page.contains("≥ 3 <span class=\"met\">"));
        assert!(page.contains("≤ 1 <span class=\"missed\">"));
        for text in [
            HERE[0].differs,
            HERE[0].shows,
            "loopback, not Xen",
            "1 of 2 targets",
            "nbdkit is not here",
            "A quick run",
        ] {
            assert!(page.contains(&escape(text)), "{text} is missing");
        }
    }

    #[test]
    fn the_page_is_alone_and_what_was_measured_is_text() {
        let page = html(&[outcome()]);
        assert!(page.contains("&lt;misses&gt;") && page.contains("2 x &quot;486&quot;"));
        for outside in ["http:", "https:", "<script", "url(", "@import", "<link", "src="] {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}
